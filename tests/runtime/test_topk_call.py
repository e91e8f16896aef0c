"""Arguments of attention over chosen blocks that cannot be: what the error says, and what is still allowed."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.runtime.selection import Selection
from tilewright.runtime.topk_call import choosing_of
from tilewright.tuner.topk_oracle import allowed_blocks

OPTIONS: dict[str, Any] = {
    "block_size": 16,
    "top_k": 4,
    "causal": False,
    "select": "query",
    "select_heads": "query",
    "sink_blocks": 0,
    "window_blocks": 0,
}


def inputs(seqlen_q: int = 40, seqlen_kv: int = 128, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, ...]:
    return torch.randn(1, heads, seqlen_q, 16), *(torch.randn(1, kv_heads, seqlen_kv, 16) for _ in range(2))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"block_size": 0}, "block_size must be 1 or more, .*got 0"),
        ({"block_size": 2.0}, "block_size must be an integer of 1 or more, got 2.0 of float"),
        ({"block_size": True}, "block_size must be an integer of 1 or more, got True of bool"),
        ({"block_size": 2**31}, "block_size must be 1 or more, at most 1073741823; got 2147483648"),
        ({"top_k": 0}, "top_k must be 1 or more.*got 0"),
        ({"top_k": -3}, "top_k must be 1 or more.*got -3"),
        ({"top_k": True}, "top_k must be an integer .*got True of bool"),
        ({"top_k": "all"}, "top_k must be an integer .*got 'all' of str"),
        ({"top_k": None}, "top_k must be an integer .*got None of NoneType"),
        ({"top_k": torch.tensor(4)}, "top_k must be an integer .*of Tensor"),
        ({"top_k": 1.0}, "above 0 and below 1; got 1.0; pass an int"),
        ({"top_k": 0.0}, "above 0 and below 1; got 0.0"),
        ({"top_k": float("nan")}, "above 0 and below 1; got nan"),
        ({"top_k": [4, 4]}, "each of the 4 query heads that choose, got 2"),
        ({"top_k": [4] * 4, "select_heads": "kv"}, "each of the 2 key heads that choose, got 4"),
        ({"top_k": [4, 4, 0, 4]}, r"top_k\[2\] must be 1 or more.*got 0"),
        ({"top_k": [4, 4, 4, 0.5]}, r"top_k\[3\] must be an integer"),
        ({"causal": 1}, "causal must be True or False, got 1 of int"),
        ({"select": "token"}, "select must be 'query' or how many .*got 'token'"),
        ({"select": 0}, "select must be 1 or more.*got 0"),
        ({"select": True}, "select must be an integer"),
        ({"select_heads": "all"}, "select_heads must be 'query' .*got 'all'"),
        ({"select_heads": 2}, "select_heads must be 'query' .*got 2"),
        ({"sink_blocks": -1}, "sink_blocks must be 0 or more.*got -1"),
        ({"window_blocks": 1.5}, "window_blocks must be an integer of 0 or more, got 1.5"),
        ({"sink_blocks": 5}, "top_k must be at least 5.*got 4"),
        ({"window_blocks": 3}, "top_k must be at least 5.*0 sinks and 5 .*got 4; raise top_k"),
        ({"window_blocks": 4, "causal": True, "sink_blocks": 1}, "top_k must be at least 5.*1 sinks and 4 .*got 4"),
        ({"top_k": [4, 4, 1, 4], "sink_blocks": 2}, "top_k must be at least 2.*got 1"),
        ({"top_k": 1, "select": 17, "causal": True}, "top_k must be at least 2.*a group of 17 queries.*got 1"),
    ],
    ids=lambda value: " ".join(map(str, value.items())) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("call", ["topk_attention", "select_blocks", "explain_topk"])
def test_what_cannot_be_is_said(call: str, options: dict[str, Any], text: str) -> None:
    tensors = inputs()[:2] if call == "select_blocks" else inputs()
    with pytest.raises(tw.InvalidInput, match=text):
        getattr(tw, call)(*tensors, **{**OPTIONS, **options})


def test_tensors_and_scale_are_checked_as_attention_checks_them() -> None:
    query, key, value = inputs()
    with pytest.raises(tw.InvalidInput, match="one head_dim"):
        tw.topk_attention(query, key[..., :8], value[..., :8])
    with pytest.raises(tw.InvalidInput, match=r"query must be a torch\.Tensor, got list"):
        tw.select_blocks([1], key)
    with pytest.raises(tw.InvalidInput, match="query's last dimension must be contiguous"):
        tw.topk_attention(torch.randn(1, 4, 16, 40).transpose(2, 3), key, value)
    with pytest.raises(tw.InvalidInput, match="scale must be finite"):
        tw.topk_attention(query, key, value, scale=float("inf"))


def test_integers_of_other_kinds_are_integers() -> None:
    numpy = pytest.importorskip("numpy")
    query, key, value = inputs()
    want = tw.topk_attention(query, key, value, block_size=16, top_k=4)
    got = tw.topk_attention(query, key, value, block_size=numpy.int64(16), top_k=numpy.int32(4))
    assert torch.equal(got, want)
    with pytest.raises(tw.InvalidInput, match="top_k must be an integer"):
        tw.topk_attention(query, key, value, top_k=numpy.bool_(True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_size", [1, 6, 16])
def test_the_least_budget_is_what_is_always_in(causal: bool, block_size: int) -> None:
    tight = 0
    points = list(product((1, 4, 6, 9, 16, 24, 100), (0, 1, 2), ((96, 96), (97, 90), (40, 129), (7, 96), (300, 301))))
    for group, window, lengths in points:
        selection = Selection(block_size, 1, 4, group, causal, sink_blocks=1, window_blocks=window)
        groups = torch.arange(selection.num_groups(lengths[0]))
        largest = int(allowed_blocks(selection, *lengths, groups)[1].sum(1).max())
        options = {**OPTIONS, "causal": causal, "block_size": block_size, "select": group}
        options |= {"sink_blocks": 1, "window_blocks": window}
        least = next(budget for budget in range(1, 400) if accepted(lengths, {**options, "top_k": budget}))
        assert least >= largest
        # More only by a sink inside a window, by windows cut at an end, and by a last group that is smaller.
        assert least <= largest + 1 + 2 * window + (group - 1) // block_size
        tight += least == largest
    assert tight >= len(points) // 3


def accepted(lengths: tuple[int, int], options: dict[str, Any]) -> bool:
    query, key, _ = inputs(*lengths)
    try:
        choosing_of(query, key, **options)
    except tw.InvalidInput:
        return False
    return True


def test_a_call_that_was_settled_is_still_checked() -> None:
    """`True`, `1` and `1.0` are equal and hash alike."""
    query, key, value = inputs()
    want = tw.topk_attention(query, key, value, block_size=16, top_k=1, causal=True)
    for changed in ({"top_k": True}, {"top_k": [1, 1, True, 1]}, {"top_k": 1.0}, {"causal": 1}, {"block_size": 16.0}):
        options: dict[str, Any] = {"block_size": 16, "top_k": 1, "causal": True, **changed}
        with pytest.raises(tw.InvalidInput):
            tw.topk_attention(query, key, value, **options)
    with pytest.raises(tw.InvalidInput, match="query's last dimension must be contiguous"):
        tw.topk_attention(torch.randn(1, 4, 16, 40).transpose(2, 3), key, value, block_size=16, top_k=1, causal=True)
    assert torch.equal(tw.topk_attention(query, key, value, block_size=16, top_k=[1] * 4, causal=True), want)
    _, counts = tw.select_blocks(query, key, block_size=16, top_k=[1, 2, 1, 1], causal=True)
    assert counts[0].amax(1).tolist() == [1, 2, 1, 1]


def test_a_budget_past_the_number_of_blocks_is_cut() -> None:
    query, key, _ = inputs()
    many = tw.select_blocks(query, key, block_size=16, top_k=1000)
    assert many[0].shape == (1, 4, 40, 8)
    assert torch.equal(many[0], tw.select_blocks(query, key, block_size=16, top_k=8)[0])
    assert tw.select_blocks(query, key, block_size=16, top_k=[1000, 1, 2, 3])[0].shape[3] == 8
    assert tw.select_blocks(query, key, block_size=10**6, top_k=3)[0].shape[3] == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"indices": "lists"}, "indices must be an integer tensor .*got str"),
        ({"indices": torch.zeros(1, 4, 40, 3)}, "indices must be an integer tensor .*got torch.float32"),
        ({"indices": torch.zeros(1, 4, 40, 3, dtype=torch.bool)}, "indices must be .*got torch.bool"),
        ({"indices": torch.zeros(4, 40, 3).int()}, r"indices must be .*got torch.int32 \[4, 40, 3\]"),
        ({"counts": torch.zeros(1, 4, 40)}, "counts must be an integer tensor .*got torch.float32"),
        ({"counts": torch.zeros(1, 4, 39).int()}, r"\[1, 4, 40\]; got \[1, 4, 39\]"),
        ({"indices": torch.zeros(1, 4, 40, 3, dtype=torch.int32, device="meta")}, "must be on cpu.*got meta; move it"),
        (
            {"indices": torch.zeros(1, 3, 40, 3).int(), "counts": torch.zeros(1, 3, 40).int()},
            "the 4 query heads or of the 2 key heads; got 3",
        ),
        (
            {"indices": torch.zeros(2, 4, 40, 3).int(), "counts": torch.zeros(2, 4, 40).int()},
            "query's batch size, 1; got 2",
        ),
        ({"select": 3}, "the 14 groups that select=3 makes of 40 queries; got 40"),
        ({"block_size": 0}, "block_size must be 1 or more"),
        ({"causal": None}, "causal must be True or False, got None"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_lists_that_cannot_be(change: dict[str, Any], text: str) -> None:
    query, key, value = inputs()
    indices, counts = tw.select_blocks(query, key, block_size=16, top_k=3)
    arguments = {"indices": indices, "counts": counts, "block_size": 16, **change}
    with pytest.raises(tw.InvalidInput, match=text):
        tw.selected_attention(query, key, value, **arguments)
