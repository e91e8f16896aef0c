"""Attention over chosen blocks as torch operators: under `torch.compile`, autograd, and torch's own checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.runtime import topk_fallback

torch_ops: Any = torch.ops.tilewright


def inputs(seqlen_q: int = 40, seqlen_kv: int = 100, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 4, seqlen_q, 16), *[(2, 2, seqlen_kv, 16)] * 2]
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


OPTIONS: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_k": [1, 2, 3, 9], "causal": True},
    {"top_k": 6, "select": 16, "select_heads": "kv", "sink_blocks": 1, "window_blocks": 2},
    {"top_k": 0.7, "causal": True},
    {"top_k": 100},
]


def dense_of_lists(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, counts: Tensor, causal: bool, select: int
) -> tuple[Tensor, Tensor]:
    """The same in one expression that autograd goes through, from the definition."""
    rows, tokens = torch.arange(query.shape[2]), torch.arange(key.shape[2])
    listed = (indices.unsqueeze(4) == tokens // 16) & (torch.arange(indices.shape[3]) < counts.unsqueeze(3)).unsqueeze(
        4
    )
    active = listed.any(3)[:, :, rows // select].repeat_interleave(query.shape[1] // indices.shape[1], dim=1)
    if causal:
        active &= tokens <= (rows + key.shape[2] - query.shape[2]).unsqueeze(1)
    shared = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(shared, 1).mT * query.shape[3] ** -0.5
    scores = scores.masked_fill(~active, -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ value.repeat_interleave(shared, 1), lse


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_under_torch_compile(options: dict[str, Any], dynamic: bool) -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return tw.topk_attention(q, k, v, block_size=16, return_lse=True, return_indices=True, **options)

    for lengths in ((40, 100), (41, 131)):
        query, key, value = inputs(*lengths)
        got = attend(query, key, value)
        want = tw.topk_attention(query, key, value, block_size=16, return_lse=True, return_indices=True, **options)
        assert torch.equal(got[3], want[3])
        width = want[2].shape[3]
        assert torch.equal(got[2][..., :width], want[2])
        assert (got[2][..., width:] == -1).all()  # by coverage the data says how wide lists are, and a graph cannot ask
        assert (got[0] - want[0]).abs().max() < 1e-6
        assert (got[1] - want[1]).abs().max() < 1e-6


def test_lists_of_ones_own_under_torch_compile() -> None:
    query, key, value = inputs()
    generator = torch.Generator().manual_seed(4)
    indices = torch.randint(-2, 9, (2, 2, 5, 6), generator=generator)
    counts = torch.randint(1, 9, (2, 2, 5), generator=generator)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, c: Tensor) -> Tensor:
        return tw.selected_attention(q, k, v, i, c, block_size=16, select=8) * 2

    want = tw.selected_attention(query, key, value, indices, counts, block_size=16, select=8)
    assert torch.equal(attend(query, key, value, indices, counts), want * 2)


def test_training_under_torch_compile() -> None:
    tensors = [t.requires_grad_() for t in inputs()]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.topk_attention(q, k, v, block_size=16, top_k=3, causal=True).square().sum()

    loss(*tensors).backward()
    want = [t.grad for t in tensors]
    for tensor in tensors:
        tensor.grad = None
    torch.compile(loss, fullgraph=True, backend="aot_eager")(*tensors).backward()
    for tensor, gradient in zip(tensors, want, strict=True):
        assert tensor.grad is not None
        assert gradient is not None
        assert (tensor.grad - gradient).abs().max() < 1e-6


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("select", "select_heads"), [(1, "query"), (7, "kv")])
def test_gradients_are_those_of_attention_to_what_was_chosen(
    gather: bool, causal: bool, select: int, select_heads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topk_fallback, "GATHER_FROM", 0 if gather else 2**40)
    monkeypatch.setattr(topk_fallback, "CHUNK_BYTES", 2**16)
    tensors = [t.requires_grad_() for t in inputs()]
    out, lse, indices, counts = tw.topk_attention(
        *tensors,
        block_size=16,
        top_k=4,
        causal=causal,
        select=select,
        select_heads=select_heads,
        return_lse=True,
        return_indices=True,
    )
    given = torch.randn(out.shape), torch.randn(lse.shape)
    got = torch.autograd.grad((out, lse), tensors, given)
    want = torch.autograd.grad(dense_of_lists(*tensors, indices, counts, causal, select), tensors, given)
    for mine, right in zip(got, want, strict=True):
        assert (mine - right).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_have_the_dtype_of_their_tensors(dtype: torch.dtype) -> None:
    tensors = [t.requires_grad_() for t in inputs(dtype=dtype)]
    out = tw.topk_attention(*tensors, block_size=16, top_k=3)
    assert isinstance(out, Tensor)
    out.sum().backward()
    for tensor in tensors:
        assert tensor.grad is not None
        assert tensor.grad.dtype == dtype
        assert tensor.grad.isfinite().all()


def test_a_row_without_a_key_has_no_gradient_and_breaks_none() -> None:
    query, key, value = (t.requires_grad_() for t in inputs(40, 10))  # the first 30 queries come before the first key
    out, lse = tw.topk_attention(query, key, value, block_size=4, top_k=2, causal=True, return_lse=True)
    assert (lse[:, :, :30] == -torch.inf).all()
    (out.sum() + lse[:, :, 30:].sum()).backward()
    for tensor in (query, key, value):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert tensor.grad.any()
    assert query.grad is not None
    assert not query.grad[:, :, :30].any()


def test_a_budget_of_every_block_can_be_trained_with() -> None:
    tensors = [t.requires_grad_() for t in inputs()]
    out, indices, counts = tw.topk_attention(*tensors, block_size=16, top_k=7, return_indices=True)
    got = torch.autograd.grad(out.sum(), tensors)
    want = torch.autograd.grad(dense_of_lists(*tensors, indices, counts, False, 1)[0].sum(), tensors)
    assert all((g - w).abs().max() < 1e-4 for g, w in zip(got, want, strict=True))


def test_the_operators_pass_torchs_own_checks() -> None:
    query, key, value = inputs()
    choosing = (16, [3], 0.0, 4, 1, True, 0, 0, 0.25)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch_ops.select_blocks.default, (query, key, *choosing), test_utils=tests)
    indices, counts = torch_ops.select_blocks(query, key, *choosing)
    lists = (indices, counts, 16, 1, True, 0.25)
    torch.library.opcheck(torch_ops.selected_attention.default, (query, key, value, *lists, [3] * 4), test_utils=tests)
    gradients = (torch.randn_like(query), torch.randn(query.shape[:3]))
    torch.library.opcheck(
        torch_ops.selected_attention_backward.default, (*gradients, query, key, value, *lists), test_utils=tests
    )


def test_tensor_subclasses_go_through_the_operators() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        query, key, value = (torch.empty(2, h, n, 16) for h, n in ((4, 40), (2, 100), (2, 100)))
        out, lse, indices, counts = tw.topk_attention(
            query, key, value, block_size=16, top_k=3, select=8, return_lse=True, return_indices=True
        )
    assert (out.shape, lse.shape) == ((2, 4, 40, 16), (2, 4, 40))
    assert (indices.shape, counts.shape) == ((2, 4, 5, 3), (2, 4, 5))
    assert indices.dtype == counts.dtype == torch.int32
