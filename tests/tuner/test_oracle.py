"""The fp64 reference against attention written out pair by pair, and against itself in chunks."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tilewright.runtime import masks
from tilewright.runtime.masks import Mask
from tilewright.tuner import oracle as oracle_module
from tilewright.tuner.oracle import oracle, oracle_rows, row_runs

SHAPE = {"batch": 2, "num_heads": 4, "kv_heads": 2, "seqlen_q": 7, "seqlen_kv": 5, "head_dim": 16}


def inputs(dtype: torch.dtype = torch.float32, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    s = {**SHAPE, **sizes}
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(s["batch"], s["num_heads"], s["seqlen_q"], s["head_dim"], generator=generator)
    key, value = (
        torch.randn(s["batch"], s["kv_heads"], s["seqlen_kv"], s["head_dim"], generator=generator) for _ in range(2)
    )
    return query.to(dtype), key.to(dtype), value.to(dtype)


def by_hand(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float) -> tuple[Tensor, Tensor]:
    """Python floats, one pair at a time."""
    batch, num_heads, seqlen_q, head_dim = query.shape
    kv_heads, seqlen_kv = key.shape[1], key.shape[2]
    dense = None if mask is None else mask.dense(batch, num_heads, seqlen_q, seqlen_kv).expand(batch, num_heads, -1, -1)
    out = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full(query.shape[:3], -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(num_heads):
            g = h // (num_heads // kv_heads)
            for i in range(seqlen_q):
                active = [j for j in range(seqlen_kv) if dense is None or bool(dense[b, h, i, j])]
                logits = [math.fsum((query[b, h, i].double() * key[b, g, j].double()).tolist()) for j in active]
                weights = [math.exp(scale * logit) for logit in logits]
                if active:
                    lse[b, h, i] = math.log(math.fsum(weights))
                    for d in range(head_dim):
                        column = value[b, g, :, d].tolist()
                        terms = (w * column[j] for w, j in zip(weights, active, strict=True))
                        out[b, h, i, d] = math.fsum(terms) / math.fsum(weights)
    return out, lse


MASKS = {
    "none": None,
    "causal, first rows empty": masks.causal(),
    "window or stride": masks.sliding_window(1, 0) | masks.global_stride(3),
    "per head and batch": masks.token_mask(torch.rand(2, 4, 7, 5, generator=torch.Generator().manual_seed(1)) < 0.5),
    "nothing": masks.token_mask(torch.zeros(7, 5, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", MASKS)
def test_equals_attention_pair_by_pair(name: str) -> None:
    query, key, value = inputs()
    out, lse = oracle(query, key, value, MASKS[name], 0.3)
    want_out, want_lse = by_hand(query, key, value, MASKS[name], 0.3)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_rows_without_a_key_are_zero_and_minus_infinity() -> None:
    out, lse = oracle(*inputs(), masks.causal(), 0.3)
    assert (out[:, :, :2] == 0).all()
    assert (lse[:, :, :2] == -torch.inf).all()
    assert lse[:, :, 2:].isfinite().all()


def test_no_keys_at_all() -> None:
    out, lse = oracle(*inputs(seqlen_kv=0), None, 0.3)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_sixteen_bit_inputs_are_taken_as_they_are() -> None:
    tensors = inputs(torch.bfloat16)
    out, lse = oracle(*tensors, None, 0.3)
    query, key, value = (t.double() for t in tensors)
    want_out, want_lse = oracle(query, key, value, None, 0.3)
    assert torch.equal(out, want_out)
    assert torch.equal(lse, want_lse)


def test_logits_in_the_thousands_stay_finite() -> None:
    query, key, value = inputs()
    out, lse = oracle(query * 100, key * 100, value, None, 1.0)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(seqlen_q=23, seqlen_kv=19)
    mask = masks.causal() & masks.block_mask(torch.rand(4, 6, 5, generator=torch.Generator().manual_seed(0)) < 0.5, 4)
    whole = oracle(*tensors, mask, 0.3)
    monkeypatch.setitem(oracle_module.SCORE_BYTES_LIMIT, "cpu", 8 * 2 * 4 * 19 * 5)
    assert len(oracle_module.row_pieces(tensors[0], tensors[1], None)) == 5
    for one, other in zip(whole, oracle(*tensors, mask, 0.3), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("rows", [[0], [22], [0, 1, 2, 9, 11, 12, 22], list(range(23))], ids=str)
def test_a_sample_of_rows_equals_those_rows(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(seqlen_q=23, seqlen_kv=19)
    mask = masks.sliding_window(4, 1)
    out, lse = oracle(*tensors, mask, 0.3)
    monkeypatch.setitem(oracle_module.SCORE_BYTES_LIMIT, "cpu", 8 * 2 * 4 * 19 * 2)
    some_out, some_lse = oracle_rows(*tensors, mask, 0.3, rows)
    torch.testing.assert_close(some_out, out[:, :, rows], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(some_lse, lse[:, :, rows], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("rows", "runs"), [([], []), ([4], [(4, 5)]), ([0, 1, 2, 7, 8, 10], [(0, 3), (7, 9), (10, 11)])], ids=str
)
def test_neighbouring_rows_form_runs(rows: list[int], runs: list[tuple[int, int]]) -> None:
    assert row_runs(rows) == runs


def test_the_reference_imports_no_kernel_and_no_plan() -> None:
    tree = ast.parse(Path(oracle_module.__file__).read_text("utf-8"))
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    assert "torch" in imported
    assert not any("tilewright" in module for module in imported)
