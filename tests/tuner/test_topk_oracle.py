"""The reference of choosing blocks and attending to them, against the definition written out pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

from tilewright.runtime.selection import Selection
from tilewright.tuner.topk_oracle import (
    allowed_blocks,
    block_means,
    group_means,
    select_blocks_oracle,
    selected_attention_oracle,
)

INF = math.inf


def tensors(*heads_and_tokens: tuple[int, int], head_dim: int = 16, seed: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, tokens, head_dim, generator=generator) for heads, tokens in heads_and_tokens]


def budgets(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_a_mean_is_a_float32_sum_times_the_reciprocal_rounded_to_the_dtype() -> None:
    key = torch.tensor([1.0, 2.0, 4.0, 0.5, 3.0]).to(torch.bfloat16).view(1, 1, 5, 1)
    third = torch.tensor(7.0) * torch.tensor(1 / 3.0)
    assert block_means(key, 3).flatten().tolist() == [float(third.to(torch.bfloat16)), 1.75]


def test_a_group_is_represented_by_the_mean_over_its_queries_and_heads() -> None:
    (query,) = tensors((4, 7))
    means = group_means(query, Selection(16, 1, 2, query_group=3))
    assert means.shape == (1, 2, 3, 16)
    torch.testing.assert_close(means[0, 1, 0], query[0, 2:, :3].mean((0, 1)))
    torch.testing.assert_close(means[0, 0, 2], query[0, :2, 6:].mean((0, 1)))
    assert group_means(query, Selection(16, 1, 4)) is query


@pytest.mark.parametrize(
    ("selection", "lengths", "group", "allowed", "always"),
    [
        pytest.param(Selection(4, 2, 1), (10, 10), 3, [0, 1, 2], [], id="anything"),
        pytest.param(Selection(4, 2, 1, causal=True), (10, 10), 5, [0, 1], [1], id="causal, its own"),
        pytest.param(Selection(4, 2, 1, causal=True), (2, 10), 0, [0, 1, 2], [2], id="positions from the end"),
        pytest.param(Selection(4, 2, 1, causal=True), (10, 4), 5, [], [], id="before the first key"),
        pytest.param(Selection(4, 2, 1, 3, causal=True), (10, 10), 1, [0, 1], [0, 1], id="a group over two blocks"),
        pytest.param(Selection(4, 2, 1, 3, causal=True), (10, 4), 2, [0], [0], id="a group partly before"),
        pytest.param(Selection(2, 2, 1, causal=True, sink_blocks=1, window_blocks=2), (9, 9), 8, [0, 1, 2, 3, 4],
                     [0, 3, 4], id="a sink and a window"),
        pytest.param(Selection(2, 2, 1, window_blocks=2), (9, 9), 4, [0, 1, 2, 3, 4], [1, 2, 3], id="both ways"),
        pytest.param(Selection(2, 2, 1, causal=True, sink_blocks=3), (9, 9), 1, [0], [0], id="a sink after it"),
    ],
)  # fmt: skip
def test_which_blocks_may_be_and_are_taken(
    selection: Selection, lengths: tuple[int, int], group: int, allowed: list[int], always: list[int]
) -> None:
    found = allowed_blocks(selection, *lengths, torch.tensor([group]))
    assert [flags[0].nonzero().flatten().tolist() for flags in found] == [allowed, always]


def test_the_highest_scores_are_taken_and_of_equal_ones_the_first() -> None:
    query = torch.ones(1, 1, 1, 16)
    key = torch.tensor([1.0, 5.0, 2.0, 5.0, 5.0, -INF, torch.nan, INF]).view(1, 1, 8, 1).expand(-1, -1, -1, 16)

    def taken(budget: int, **rest: int) -> tuple[list[int], int]:
        choice = select_blocks_oracle(query, key, budgets(budget), Selection(1, 8, 1, **rest))
        assert choice.scores[0, 0, 0, 5:].tolist() == [-INF, -INF, torch.finfo(torch.float32).max]
        return choice.indices[0, 0, 0].tolist(), int(choice.counts)

    assert taken(3) == ([1, 3, 7, -1, -1, -1, -1, -1], 3)
    assert taken(8) == ([0, 1, 2, 3, 4, 7, -1, -1], 6)  # neither NaN nor -inf
    assert taken(2, sink_blocks=1) == ([0, 7, -1, -1, -1, -1, -1, -1], 2)
    query = -query  # and what is always in, whatever its score
    choice = select_blocks_oracle(query, key, budgets(2), Selection(1, 2, 1, window_blocks=1))
    assert choice.indices.flatten().tolist() == [5, 7]


def test_some_groups_alone_are_those_of_all() -> None:
    query, key = tensors((4, 90), (2, 70))
    selection = Selection(8, 3, 4, query_group=2, causal=True)
    whole = select_blocks_oracle(query, key, budgets(1, 2, 3, 3), selection)
    some = select_blocks_oracle(query, key, budgets(1, 2, 3, 3), selection, [0, 1, 20, 44])
    for one, every in zip(some, whole, strict=True):
        torch.testing.assert_close(one, every[:, :, [0, 1, 20, 44]])
    assert whole.counts[0, 3].tolist() == [0] * 10 + [1] * 4 + [2] * 4 + [3] * 27


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_over_the_tokens_of_the_listed_blocks(causal: bool) -> None:
    query, key, value = tensors((4, 11), (2, 21), (2, 21))
    selection = Selection(4, 4, 2, query_group=2, causal=causal)
    indices = torch.tensor([5, 2, 7, 1]).to(torch.int32).expand(1, 2, 6, 4).clone()  # 7 is no block
    counts = torch.tensor([3, 3, 3, 3, 2, 0], dtype=torch.int32).expand(1, 2, 6).clone()
    counts[0, 1] = 4
    out, lse = selected_attention_oracle(query, key, value, indices, counts, selection, 0.25)
    for head in range(4):
        for row in range(11):
            entries = indices[0, head // 2, row // 2, : counts[0, head // 2, row // 2]].tolist()
            tokens = [t for t in range(21) if t // 4 in entries and not (causal and t > row + 10)]
            if not tokens:
                assert lse[0, head, row] == -INF
                assert not out[0, head, row].any()
                continue
            logits = 0.25 * key[0, head // 2, tokens].double() @ query[0, head, row].double()
            torch.testing.assert_close(lse[0, head, row], logits.logsumexp(0))
            want = logits.softmax(0) @ value[0, head // 2, tokens].double()
            torch.testing.assert_close(out[0, head, row], want)
    some = selected_attention_oracle(query, key, value, indices, counts, selection, 0.25, [0, 3, 4, 10])
    torch.testing.assert_close(some[0], out[:, :, [0, 3, 4, 10]])
