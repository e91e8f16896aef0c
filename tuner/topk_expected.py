"""What choosing blocks must give, and how far a choice may be off where scores are rounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.runtime.selection import Selection
from tilewright.tuner.attention_outputs import differing
from tilewright.tuner.expected import FLOAT32_ROUNDING
from tilewright.tuner.layouts import Placed, poison, still_poisoned
from tilewright.tuner.topk_oracle import (
    CHUNK_SCORES,
    allowed_blocks,
    block_counts,
    block_means,
    clean,
    group_means,
    listed,
    take,
)
from tilewright.tuner.verdicts import Verdict

SUMMING_ROUNDINGS = 4.0
"""A mean of n numbers, summed in float32 in any order, is off by about sqrt(n) roundings of their size, and hardly by
this many times that; where that decides how it is rounded to 16 bits, either neighbour is right."""


@dataclass(frozen=True, slots=True)
class Representatives:
    """Means as they are rounded, [B, n, count, D] in the tensors' dtype, and how far another order of summing may move
    each of them: fp64 of the same size, or None where it moves none.
    """

    means: Tensor
    doubt: Tensor | None

    def pick(self, rows: Tensor | slice) -> tuple[Tensor, Tensor | None]:
        """Some of them in fp64, with their doubt."""
        return self.means[:, :, rows].double(), None if self.doubt is None else self.doubt[:, :, rows]


@dataclass(frozen=True, slots=True)
class ExpectedChoice:
    """What is needed to judge a choice.

    groups: int64 [n], those to judge, or None for all. exact: whether scores are exact in float32, so that the choice
    is the reference's bit for bit.
    """

    selection: Selection
    seqlen_q: int
    seqlen_kv: int
    askers: Representatives
    blocks: Representatives
    budgets: Tensor
    groups: Tensor | None
    exact: bool


def expect_choice(
    query: Tensor,
    key: Tensor,
    budgets: Tensor,
    selection: Selection,
    *,
    exact: bool = False,
    groups: Sequence[int] | None = None,
) -> ExpectedChoice:
    """The answer of one call, of every group of queries or of these ascending ones; arguments as the oracle's."""
    heads = query.shape[1] // selection.num_choosers
    askers = Representatives(group_means(query, selection), None)
    if selection.query_group * heads > 1 and not exact:
        sizes = query.abs().double().view(query.shape[0], selection.num_choosers, heads, *query.shape[2:]).sum(2)
        counts = heads * block_counts(query.shape[2], selection.query_group, query.device)
        askers = _doubted(askers.means, query, sizes, counts, selection.query_group)
    blocks = Representatives(block_means(key, selection.block_size), None)
    if not exact:
        counts = block_counts(key.shape[2], selection.block_size, key.device)
        blocks = _doubted(blocks.means, key, key.abs().double(), counts, selection.block_size)
    return ExpectedChoice(
        selection,
        query.shape[2],
        key.shape[2],
        askers,
        blocks,
        budgets,
        None if groups is None else torch.tensor(list(groups), device=query.device),
        exact,
    )


def _doubted(means: Tensor, tensor: Tensor, sizes: Tensor, counts: Tensor, length: int) -> Representatives:
    """sizes: [B, n, tokens, D], what the means are taken over, absolute."""
    padded = F.pad(sizes, (0, 0, 0, len(counts) * length - sizes.shape[2]))
    sums = padded.view(*sizes.shape[:2], len(counts), length, sizes.shape[3]).sum(3)
    roundings = (SUMMING_ROUNDINGS * counts.double().sqrt() / counts).unsqueeze(-1)
    error = sums * roundings * FLOAT32_ROUNDING
    if tensor.dtype != torch.float32:
        # The rounded mean says within half a step where the mean is; a mean near the middle of two steps is either.
        exact = _unrounded(tensor, means, counts, length)
        error = (exact + error).to(tensor.dtype).double() - (exact - error).to(tensor.dtype).double()
    error = error.nan_to_num(0.0, 0.0, 0.0)
    return Representatives(means, error if bool(error.any()) else None)


def _unrounded(tensor: Tensor, means: Tensor, counts: Tensor, length: int) -> Tensor:
    """The means in fp64, of the size of `means`."""
    batch, choosers, number, head_dim = means.shape
    padded = F.pad(tensor.double(), (0, 0, 0, number * length - tensor.shape[2]))
    split = padded.view(batch, choosers, -1, number, length, head_dim)
    return split.sum((2, 4)) / counts.double().unsqueeze(-1)


(
    CHANGED,
    OUTSIDE,
    _UNWRITTEN,
    _ENTRIES,
    _TAIL,
    _COUNTS,
    _FORBIDDEN,
    _MISSING,
    _INEXACT,
    _GAP,
    _RATIO,
    _REPEAT,
) = range(12)
"""Places in the statistics; `CHANGED`, of the inputs, is for the caller to fill, and `OUTSIDE` to add to."""

Call = Callable[[Tensor, Tensor], object]
"""Runs the kernel into indices [B, choosers, groups, list_width] and counts [B, choosers, groups]."""


def examine_lists(call: Call, indices: Placed, counts: Placed, expected: ExpectedChoice) -> Tensor:
    """Poison, run, keep, poison, run; the statistics as one fp64 tensor on the device."""
    kept = []
    for _ in range(2):
        poison(indices.view)
        poison(counts.view)
        call(indices.view, counts.view)
        kept.append((indices.view.clone(), counts.view.clone()))
    (first, first_counts), (second, second_counts) = kept
    stats = judge_lists(first, first_counts, expected)
    stats[_UNWRITTEN] = still_poisoned(first).count_nonzero() + still_poisoned(first_counts).count_nonzero()
    stats[_REPEAT] = differing(first, second) + differing(first_counts, second_counts)
    stats[OUTSIDE] = indices.outside() + counts.outside()
    return stats


def judge_lists(indices: Tensor, counts: Tensor, expected: ExpectedChoice) -> Tensor:
    """What is wrong with lists as they are, whoever made them: the statistics, fp64, on the device."""
    stats = torch.zeros(12, dtype=torch.float64, device=indices.device)
    whole = torch.arange(indices.shape[2], device=indices.device)
    groups = whole if expected.groups is None else expected.groups
    a_group = indices.shape[0] * indices.shape[1] * expected.blocks.means.shape[2]
    step = max(1, CHUNK_SCORES.get(indices.device.type, CHUNK_SCORES["cpu"]) // max(1, a_group))
    blocks, block_doubt = expected.blocks.pick(slice(None))
    per_head = indices.shape[1] // blocks.shape[1]
    blocks = blocks.repeat_interleave(per_head, 1)
    block_doubt = None if block_doubt is None else block_doubt.repeat_interleave(per_head, 1)
    for start in range(0, len(groups), step):
        rows = groups[start : start + step]
        asker, doubt = expected.askers.pick(rows)
        scores = clean(asker @ blocks.mT)
        allowed, always = allowed_blocks(expected.selection, expected.seqlen_q, expected.seqlen_kv, rows)
        got, got_counts = indices[:, :, rows], counts[:, :, rows]
        _count_faults(stats, got, got_counts, scores, allowed, always, expected)
        if expected.exact:
            want, want_counts = take(scores, allowed, always, expected.budgets, expected.selection.list_width)
            stats[_INEXACT] += (got != want).count_nonzero() + (got_counts != want_counts).count_nonzero()
            continue
        lengths = asker.norm(dim=-1).unsqueeze(-1) * blocks.norm(dim=-1).unsqueeze(-2)
        slack = 2 * asker.shape[3] * FLOAT32_ROUNDING * lengths
        if block_doubt is not None:
            slack += asker.abs() @ block_doubt.mT
        if doubt is not None:
            slack += doubt @ blocks.abs().mT
        _measure_gap(stats, listed(got, got_counts, scores.shape[3]), scores, slack, lengths, allowed, always)
    return stats


def _count_faults(
    stats: Tensor,
    indices: Tensor,
    counts: Tensor,
    scores: Tensor,
    allowed: Tensor,
    always: Tensor,
    expected: ExpectedChoice,
) -> None:
    """What is wrong whatever the scores' rounding."""
    num_blocks = scores.shape[3]
    free = always | (allowed & (scores > -torch.inf))
    want_counts = torch.minimum(free.sum(-1), expected.budgets.view(1, -1, 1))
    chosen = listed(indices, counts, num_blocks)
    filled = torch.arange(indices.shape[3], device=indices.device) < counts.unsqueeze(-1)
    strange = (indices < 0) | (indices >= num_blocks)
    strange[..., 1:] |= indices[..., 1:] <= indices[..., :-1]
    stats[_ENTRIES] += (filled & strange).count_nonzero()
    stats[_TAIL] += (~filled & (indices != -1)).count_nonzero()
    stats[_COUNTS] += (counts != want_counts).count_nonzero()
    stats[_FORBIDDEN] += (chosen & ~free).count_nonzero()
    stats[_MISSING] += (always & ~chosen).count_nonzero()


def _measure_gap(
    stats: Tensor, chosen: Tensor, scores: Tensor, slack: Tensor, lengths: Tensor, allowed: Tensor, always: Tensor
) -> None:
    """By how much the best block that was left out beats the worst that was taken, beside what rounding explains."""
    slack = slack.nan_to_num(0.0, 0.0, 0.0)  # of infinite numbers, whose scores have no rounding
    left = torch.where(allowed & ~always & ~chosen, scores - slack, -torch.inf)
    taken = torch.where(chosen & ~always, scores + slack, torch.inf)
    best, worst = left.argmax(-1, keepdim=True), taken.argmin(-1, keepdim=True)
    there = (left.gather(-1, best) > -torch.inf) & (taken.gather(-1, worst) < torch.inf)
    gap = torch.where(there, scores.gather(-1, best) - scores.gather(-1, worst), 0.0).clamp(min=0.0)
    if not gap.numel():
        return
    room = slack.gather(-1, best) + slack.gather(-1, worst)
    size = torch.maximum(lengths.gather(-1, best), lengths.gather(-1, worst))
    stats[_GAP] = torch.maximum(stats[_GAP], (gap / size.clamp(min=1e-300)).nan_to_num(0.0, 0.0).amax())
    stats[_RATIO] = torch.maximum(stats[_RATIO], (gap / room.clamp(min=1e-300)).amax())


def verdict_on_lists(stats: Sequence[float]) -> Verdict:
    """What the statistics mean."""
    return Verdict(stats[_GAP], 0.0, stats[_RATIO], _reason(stats))


def _reason(stats: Sequence[float]) -> str | None:
    """Why these statistics fail, the most telling reason first; None when they pass."""
    told = (
        (CHANGED, "elements of the inputs were changed"),
        (OUTSIDE, "elements beside the outputs or the workspace were written"),
        (_UNWRITTEN, "output elements were never written"),
        (_ENTRIES, "entries before a count are no block, or not greater than the entry before"),
        (_TAIL, "entries past a count are not -1"),
        (_FORBIDDEN, "blocks are chosen that may not be: after the query, or of a score of NaN or -inf"),
        (_MISSING, "blocks that are always in are left out"),
        (_COUNTS, "counts are wrong"),
        (_INEXACT, "entries and counts are not the reference's, of scores that are exact"),
    )
    for place, text in told:
        if stats[place]:
            return f"{stats[place]:.0f} {text}"
    if not stats[_RATIO] <= 1:
        return (
            f"a block is chosen over one whose score is higher by {stats[_GAP]:.3g} of the vectors' lengths,"
            f" {stats[_RATIO]:.3g} times what rounding explains"
        )
    if stats[_REPEAT]:
        return f"a second identical call gave other bits in {stats[_REPEAT]:.0f} elements"
    return None
