"""Attention over chosen blocks with a budget for each head, on a CUDA device. Run with `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.runtime.selection import Selection
from tilewright.tuner.topk_expected import expect_choice, judge_lists, verdict_on_lists

HAVE_CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAVE_CUDA, reason="needs a CUDA device")]

BUDGETS = (2, 64, 16, 25, 24, 3, 40, 8)


def inputs(seqlen: int = 8192) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    size = (1, len(BUDGETS), seqlen, 64)
    query, key, value = (torch.randn(size, generator=generator, device="cuda").bfloat16() for _ in range(3))
    return query, key, value


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    options = {"block_size": 64, "top_k": BUDGETS, "causal": causal, "return_indices": True}
    out, indices, counts = tw.topk_attention(query, key, value, **options)  # type: ignore[arg-type]
    return out, indices, counts


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_heads_with_budgets_of_their_own_choose_right(causal: bool) -> None:
    query, key, value = inputs()
    _, indices, counts = attend(query, key, value, causal)
    selection = Selection(64, max(BUDGETS), len(BUDGETS), causal=causal)
    budgets = torch.tensor(BUDGETS, dtype=torch.int32, device="cuda")
    expected = expect_choice(query, key, budgets, selection)
    assert verdict_on_lists(judge_lists(indices, counts, expected).tolist()).reason is None


def test_a_graph_replays_all_kernels_of_the_choice() -> None:
    query, key, value = inputs()
    attend(query, key, value)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(query, key, value)
    query.copy_(torch.randn_like(query))
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    for one, other in zip(captured, attend(query, key, value), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("seqlen", [4096, 16384])
def test_a_thousand_calls_give_the_same_bits(seqlen: int) -> None:
    """What tiles in flight do to each other shows in few calls, or in few rows of them."""
    query, key, value = inputs(seqlen)
    first = tw.topk_attention(query, key, value, block_size=64, top_k=16)
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        same &= (tw.topk_attention(query, key, value, block_size=64, top_k=16) == first).all()
    assert same.item()
