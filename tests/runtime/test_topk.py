"""Attention over chosen blocks against the fp64 oracle: what is chosen, and what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.runtime import topk_fallback, topk_ranking, topk_stages
from tilewright.runtime.dispatch import DISPATCHER
from tilewright.runtime.selection import Selection
from tilewright.tuner.topk_oracle import Choice, select_blocks_oracle, selected_attention_oracle

BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error of an output of standard normal values; the oracle sees the same rounded inputs."""


def inputs(
    seqlen_q: int = 130,
    seqlen_kv: int = 257,
    *,
    heads: tuple[int, int] = (4, 2),
    batch: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    integers: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value. integers: small ones, with exact sums and many equal scores."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads[0], seqlen_q, head_dim), *[(batch, heads[1], seqlen_kv, head_dim)] * 2]
    if integers:
        query, key, value = (torch.randint(-1, 2, shape, generator=generator).to(dtype) for shape in shapes)
    else:
        query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, key, value


def selection_of(
    query: Tensor,
    key: Tensor,
    *,
    block_size: int,
    top_k: Any,
    causal: bool = False,
    select: Any = "query",
    select_heads: str = "query",
    sink_blocks: int = 0,
    window_blocks: int = 0,
) -> tuple[Selection, Tensor]:
    """What the arguments of the API mean, written down apart from the API's own code."""
    choosers = query.shape[1] if select_heads == "query" else key.shape[1]
    blocks = -(-key.shape[2] // block_size)
    budgets = torch.tensor([min(b, blocks) for b in ([top_k] * choosers if isinstance(top_k, int) else top_k)])
    group = 1 if select == "query" else select
    return Selection(
        block_size, int(budgets.max()), choosers, group, causal, sink_blocks=sink_blocks, window_blocks=window_blocks
    ), budgets.int()


def oracle_choice(query: Tensor, key: Tensor, **options: Any) -> Choice:
    selection, budgets = selection_of(query, key, **options)
    return select_blocks_oracle(query, key, budgets, selection)


def assert_same_choice(indices: Tensor, counts: Tensor, want: Choice, query: Tensor, key: Tensor) -> None:
    """Equal, but for few blocks whose scores are too close for float32 to tell them apart."""
    assert indices.dtype == counts.dtype == torch.int32
    assert torch.equal(counts, want.counts)
    if torch.equal(indices, want.indices):
        return
    largest = query.double().norm(dim=-1).max() * key.double().norm(dim=-1).max()
    close = 4 * query.shape[3] * 2.0**-24 * largest * indices.shape[3]
    mine, best = (
        want.scores.gather(3, lists.clamp(min=0).long()).masked_fill(lists < 0, 0.0).sum(-1)
        for lists in (indices, want.indices)
    )
    assert (mine - best).abs().max() <= close
    assert (indices != want.indices).float().mean() < 0.01


def assert_right(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
    """`topk_attention` chooses as the oracle does, and its out and lse are those of what it chose."""
    out, lse, indices, counts = tw.topk_attention(query, key, value, return_lse=True, return_indices=True, **options)
    assert_same_choice(indices, counts, oracle_choice(query, key, **options), query, key)
    selection, _ = selection_of(query, key, **options)
    want = selected_attention_oracle(query, key, value, indices, counts, selection, query.shape[3] ** -0.5)
    assert_attends((out, lse), want, query.dtype)


def assert_attends(result: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    out, lse = result
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert (out.double() - want[0]).abs().max() < BOUNDS[dtype]
    assert torch.equal(lse == -torch.inf, want[1] == -torch.inf)
    seen = lse > -torch.inf
    assert seen.any()
    assert (lse.double() - want[1])[seen].abs().max() < 1e-4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("select", ["query", 3, 64, 1000])
@pytest.mark.parametrize("select_heads", ["query", "kv"])
def test_every_kind_of_chooser(causal: bool, select: Any, select_heads: str) -> None:
    top_k = 14 if select == 1000 and causal else 9
    assert_right(*inputs(), block_size=16, top_k=top_k, causal=causal, select=select, select_heads=select_heads)


@pytest.mark.parametrize("block_size", [1, 3, 16, 48, 100, 256])
@pytest.mark.parametrize("lengths", [(1, 1), (17, 17), (127, 129), (129, 127), (5, 1025), (1025, 127)])
def test_ragged_lengths(lengths: tuple[int, int], block_size: int) -> None:
    query, key, value = inputs(*lengths, heads=(2, 1), batch=1)
    for causal in (False, True):
        assert_right(query, key, value, block_size=block_size, top_k=2, causal=causal)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("causal", [False, True])
def test_equal_scores_go_to_the_lower_block_in_every_dtype(dtype: torch.dtype, causal: bool) -> None:
    query, key, value = inputs(dtype=dtype, integers=True)
    value = torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    options: dict[str, Any] = {"block_size": 16, "top_k": 5, "causal": causal}
    want = oracle_choice(query, key, **options)
    indices, counts = tw.select_blocks(query, key, **options)
    assert torch.equal(indices, want.indices)
    assert torch.equal(counts, want.counts)
    assert_right(query, key, value, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("select", ["query", 20])
def test_what_is_always_in(causal: bool, select: Any) -> None:
    query, key, value = inputs()
    options: dict[str, Any] = {"block_size": 16, "top_k": 9, "causal": causal, "select": select}
    assert_right(query, key, value, **options, sink_blocks=2, window_blocks=2)
    indices, _ = tw.select_blocks(query, key, **options, sink_blocks=2, window_blocks=2)
    positions = torch.arange(query.shape[2])[:: 1 if select == "query" else select] + key.shape[2] - query.shape[2]
    for kept in (0, 1, positions // 16, positions // 16 - 1):
        expected = torch.as_tensor(kept).expand(len(positions)).view(1, 1, -1, 1)
        assert (indices == expected).any(3).all()


def test_a_budget_for_each_head() -> None:
    query, key, value = inputs()
    assert_right(query, key, value, block_size=16, top_k=[1, 9, 4, 100])
    assert_right(query, key, value, block_size=16, top_k=(3, 12), causal=True, select_heads="kv", select=16)
    _, counts = tw.select_blocks(query, key, block_size=16, top_k=[1, 9, 4, 100])
    assert [counts[:, head].unique().tolist() for head in range(4)] == [[1], [9], [4], [17]]


@pytest.mark.parametrize("causal", [False, True])
def test_strided_inputs(causal: bool) -> None:
    query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs())
    assert not query.is_contiguous()
    assert_right(query, key, value, block_size=48, top_k=3, causal=causal)


def test_a_key_that_is_nan_keeps_its_block_out() -> None:
    query, key, value = inputs()
    key[:, :, 70] = torch.nan
    out, indices, counts = tw.topk_attention(query, key, value, block_size=16, top_k=16, return_indices=True)
    assert out.isfinite().all()
    assert (counts == 16).all()
    assert not (indices == 70 // 16).any()
    always, _ = tw.select_blocks(query, key, block_size=16, top_k=16, sink_blocks=5)
    assert (always == 70 // 16).any(3).all()


def test_infinite_keys_do_not_break_the_order() -> None:
    query, key, _ = inputs(heads=(1, 1), batch=1, head_dim=16)
    query.abs_()
    key[:, :, 40], key[:, :, 90] = torch.inf, -torch.inf
    indices, counts = tw.select_blocks(query, key, block_size=16, top_k=17)
    want = oracle_choice(query, key, block_size=16, top_k=17)
    assert torch.equal(indices, want.indices)
    assert (counts == 16).all()
    first, _ = tw.select_blocks(query, key, block_size=16, top_k=1)
    assert (first == 40 // 16).all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_budget_that_covers_everything_is_dense_attention(causal: bool) -> None:
    query, key, value = inputs(257, 130)
    out, lse, indices, counts = tw.topk_attention(
        query, key, value, block_size=16, top_k=9, causal=causal, return_lse=True, return_indices=True
    )
    want = tw.attention(query, key, value, causal=causal, return_lse=True)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    expected = oracle_choice(query, key, block_size=16, top_k=9, causal=causal)
    assert torch.equal(indices, expected.indices)
    assert torch.equal(counts, expected.counts)
    assert tw.explain_topk(query, key, value, block_size=16, top_k=9).select_blocks is None


@pytest.mark.parametrize("shape", [(0, 4, 2, 8, 8), (1, 4, 2, 0, 8), (1, 4, 2, 8, 0), (1, 0, 0, 8, 8)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    batch, heads, kv_heads, seqlen_q, seqlen_kv = shape
    query, key, value = inputs(seqlen_q, seqlen_kv, heads=(heads, kv_heads), batch=batch)
    for top_k in (1, 0.5):
        out, lse, indices, counts = tw.topk_attention(
            query, key, value, block_size=4, top_k=top_k, return_lse=True, return_indices=True
        )
        assert out.shape == query.shape
        assert not out.any()
        assert (lse == -torch.inf).all()
        assert indices.shape[:3] == counts.shape == (batch, heads, seqlen_q)
        again = tw.selected_attention(query, key, value, indices, counts, block_size=4)
        assert isinstance(again, Tensor)
        assert torch.equal(again, out)


# ---- a share to cover ----


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("coverage", [0.05, 0.5, 0.9, 0.999999])
def test_coverage_takes_the_fewest_best_blocks(causal: bool, coverage: float) -> None:
    query, key, _ = inputs()
    scale, sinks = 1.5, 1
    indices, counts = tw.select_blocks(
        query, key, block_size=16, top_k=coverage, causal=causal, sink_blocks=sinks, scale=scale
    )
    assert indices.shape[3] == counts.max()
    scores = oracle_choice(query, key, block_size=16, top_k=17, causal=causal).scores
    positions = torch.arange(130) + 127
    for row in (0, 64, 129):
        allowed = positions[row] // 16 + 1 if causal else 17
        weights = torch.softmax(scale * scores[:, :, row, :allowed], dim=-1)
        for b in range(2):
            for h in range(4):
                always = {0, int(positions[row]) // 16} if causal else {0}
                order = sorted(range(int(allowed)), key=lambda j: (j not in always, -weights[b, h, j].item(), j))
                total, taken = 0.0, 0
                while taken < len(order) and (total < coverage - 1e-9 or taken < len(always)):
                    total += weights[b, h, order[taken]].item()
                    taken += 1
                count = int(counts[b, h, row])
                assert count == taken
                assert indices[b, h, row, :count].tolist() == sorted(order[:taken])
                assert (indices[b, h, row, count:] == -1).all()


def test_coverage_attends_to_what_it_chose() -> None:
    query, key, value = inputs()
    out, lse, indices, counts = tw.topk_attention(
        query, key, value, block_size=16, top_k=0.6, select=8, causal=True, return_lse=True, return_indices=True
    )
    assert counts.unique().numel() > 2
    selection = Selection(16, indices.shape[3], 4, 8, True)
    want = selected_attention_oracle(query, key, value, indices, counts, selection, 32**-0.5)
    assert_attends((out, lse), want, torch.float32)


# ---- lists of one's own ----


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_lists_of_any_integer_dtype(dtype: torch.dtype) -> None:
    query, key, value = inputs()
    indices, counts = tw.select_blocks(query, key, block_size=16, top_k=5)
    want = tw.selected_attention(query, key, value, indices, counts, block_size=16, return_lse=True)
    wide = torch.stack([indices, indices.flip(3)], dim=4).to(dtype)[..., 1]
    assert not wide.is_contiguous()
    got = tw.selected_attention(query, key, value, wide, counts.to(dtype), block_size=16, return_lse=True)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("select", ["query", 7])
@pytest.mark.parametrize("choosers", [4, 2])
def test_garbage_repetitions_and_counts_that_cannot_be(causal: bool, select: Any, choosers: int) -> None:
    query, key, value = inputs()
    groups = 130 if select == "query" else 19
    generator = torch.Generator().manual_seed(5)
    indices = torch.randint(-4, 22, (2, choosers, groups, 6), generator=generator)
    indices[0, 0, 0] = 2**40
    indices[0, 0, 1] = 3
    counts = torch.randint(-2, 9, (2, choosers, groups), generator=generator)
    before = indices.clone(), counts.clone()
    got = tw.selected_attention(
        query, key, value, indices, counts, block_size=16, causal=causal, select=select, return_lse=True
    )
    assert torch.equal(indices, before[0])
    assert torch.equal(counts, before[1])
    selection = Selection(16, 6, choosers, 1 if select == "query" else 7, causal)
    clamped = counts.clamp(0, 6)
    want = selected_attention_oracle(query, key, value, indices, clamped, selection, 32**-0.5)
    assert_attends((got[0], got[1]), want, torch.float32)
    assert (want[1] == -torch.inf).any()


# ---- the ways in which it is answered ----


def lists_and_selection(
    query: Tensor, key: Tensor, select: int, select_heads: Any, causal: bool
) -> tuple[Tensor, Tensor, Selection]:
    indices, counts = tw.select_blocks(
        query, key, block_size=16, top_k=14, causal=causal, select=select, select_heads=select_heads
    )
    counts = counts.clone()
    counts[:, :, 1::5] = 0
    indices = torch.where(torch.arange(14) < counts.unsqueeze(3), indices, 12345)
    return indices, counts, Selection(16, 14, indices.shape[1], select, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("select", "select_heads"), [(1, "query"), (1, "kv"), (20, "query"), (20, "kv"), (200, "kv")])
def test_a_mask_over_blocks_is_the_same_attention(causal: bool, select: int, select_heads: str) -> None:
    query, key, value = inputs(200, 257)
    indices, counts, selection = lists_and_selection(query, key, select, select_heads, causal)
    prepared = topk_stages.prepare_masked(query, key, indices, counts, selection)
    assert prepared is not None
    want = selected_attention_oracle(query, key, value, indices, counts, selection, 0.3)
    assert_attends(DISPATCHER.run(prepared, query, key, value, 0.3), want, torch.float32)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 2**20, 2**28])
@pytest.mark.parametrize("causal", [False, True])
def test_pytorch_answers_the_same_in_any_chunks(
    gather: bool, chunk_bytes: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topk_fallback, "GATHER_FROM", 0 if gather else 2**40)
    monkeypatch.setattr(topk_fallback, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(topk_ranking, "CHUNK_BYTES", chunk_bytes)
    query, key, value = inputs(33, 70)
    for select, heads in ((1, "query"), (5, "kv"), (40, "query")):
        options: dict[str, Any] = {"block_size": 8, "top_k": 8, "causal": causal, "select": select}
        selection, budgets = selection_of(query, key, **options, select_heads=heads)
        indices, counts = topk_ranking.choose(query, key, budgets, selection)
        assert_same_choice(indices, counts, oracle_choice(query, key, **options, select_heads=heads), query, key)
        indices = torch.where(torch.arange(8) < counts.unsqueeze(3), indices, -7)
        want = selected_attention_oracle(query, key, value, indices, counts, selection, 0.3)
        got = topk_fallback.attend(query, key, value, indices, counts, selection, 0.3)
        assert_attends(got, want, torch.float32)


def test_gathering_reads_no_key_that_nobody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_fallback, "GATHER_FROM", 0)
    query, key, value = inputs(30, 64)
    indices = torch.tensor([0, 3, 99, 2]).int().expand(2, 4, 30, 4).contiguous()
    counts = torch.full((2, 4, 30), 3, dtype=torch.int32)
    selection = Selection(16, 4, 4)
    want = selected_attention_oracle(query, key, value, indices, counts, selection, 0.3)
    key[:, :, 16:48], value[:, :, 16:48] = torch.nan, torch.nan
    assert_attends(topk_fallback.attend(query, key, value, indices, counts, selection, 0.3), want, torch.float32)


def test_budgets_are_copied_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = topk_stages.budgets_on(torch.device("cpu"), (3, 4))
    assert first.tolist() == [3, 4]
    assert topk_stages.budgets_on(torch.device("cpu"), (3, 4)) is first
    monkeypatch.setattr(topk_stages, "MAX_BUDGETS", 2)
    for budget in range(5, 9):
        topk_stages.budgets_on(torch.device("cpu"), (budget,))
    assert len(topk_stages._budgets) <= 2
