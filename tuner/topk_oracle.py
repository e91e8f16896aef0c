"""The fp64 reference of the two stages of attention that chooses its own blocks: the specification of their kernels.

Plain PyTorch over dense scores and dense masks, by chunks of query rows, so that some rows of a long sequence can be
asked for alone. It knows nothing of kernels, plans or workspaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.runtime.selection import Selection
from tilewright.tuner.oracle import oracle, oracle_rows, row_runs

LARGEST = torch.finfo(torch.float32).max
"""What a score of +inf counts as."""

CHUNK_SCORES = {"cpu": 2**23, "cuda": 2**27}
"""Scores at a time; a chunk holds about six temporaries of 8 bytes for each."""


class Choice(NamedTuple):
    """What choosers take, of every group of queries or of some.

    indices: [B, choosers, groups, list_width] int32, ascending, then -1. counts: [B, choosers, groups] int32.
    scores: [B, choosers, groups, num_blocks] fp64, NaN as -inf and +inf as the largest float; blocks that a group may
    not choose have theirs all the same.
    """

    indices: Tensor
    counts: Tensor
    scores: Tensor


def select_blocks_oracle(
    query: Tensor, key: Tensor, budgets: Tensor, selection: Selection, groups: Sequence[int] | None = None
) -> Choice:
    """Which blocks of keys each chooser takes for each group of queries.

    query [B, Hq, Nq, D], key [B, Hkv, Nkv, D] with Hq a multiple of Hkv; budgets [num_choosers] int32, the blocks that
    each of them takes at most. groups: ascending, to ask for these alone.

    A block is represented by the mean of its keys, a group by the mean of its queries, both rounded to the tensors'
    dtype; a score is the product of the two. A chooser takes what is always in, then the highest scores, of equal ones
    the lower index; never a score of -inf that is not always in.
    """
    blocks = block_means(key, selection.block_size).double()
    blocks = blocks.repeat_interleave(selection.num_choosers // key.shape[1], 1)
    askers = group_means(query, selection).double()
    wanted = range(askers.shape[2]) if groups is None else groups
    parts = []
    for start, stop in chunks(wanted, askers.shape[0] * askers.shape[1] * blocks.shape[2], query.device):
        scores = clean(askers[:, :, start:stop] @ blocks.mT)
        numbers = torch.arange(start, stop, device=query.device)
        allowed, always = allowed_blocks(selection, query.shape[2], key.shape[2], numbers)
        parts.append(Choice(*take(scores, allowed, always, budgets, selection.list_width), scores))
    return Choice(*(torch.cat(of_all, dim=2) for of_all in zip(*parts, strict=True)))


def block_means(key: Tensor, block_size: int) -> Tensor:
    """[B, Hkv, num_blocks, D] in the keys' dtype: the sum of a block's keys in float32, times 1 / count, rounded.

    Here the sum is exact before it is rounded to float32; a kernel sums in float32.
    """
    batch, heads, seqlen_kv, head_dim = key.shape
    num_blocks = -(-seqlen_kv // block_size)
    padded = F.pad(key.double(), (0, 0, 0, num_blocks * block_size - seqlen_kv))
    sums = padded.view(batch, heads, num_blocks, block_size, head_dim).sum(3)
    return _mean(sums, block_counts(seqlen_kv, block_size, key.device), key.dtype)


def group_means(query: Tensor, selection: Selection) -> Tensor:
    """[B, num_choosers, num_groups, D] in the queries' dtype: what each chooser asks with for each group.

    The query itself where a group is one query of one head; else the mean over the group's queries and, where heads
    share their choice, over them.
    """
    batch, num_heads, seqlen_q, head_dim = query.shape
    heads = num_heads // selection.num_choosers
    if selection.query_group == heads == 1:
        return query
    groups = selection.num_groups(seqlen_q)
    padded = F.pad(query.double(), (0, 0, 0, groups * selection.query_group - seqlen_q))
    split = padded.view(batch, selection.num_choosers, heads, groups, selection.query_group, head_dim)
    counts = heads * block_counts(seqlen_q, selection.query_group, query.device)
    return _mean(split.sum((2, 4)), counts, query.dtype)


def block_counts(tokens: int, block_size: int, device: torch.device) -> Tensor:
    """Tokens of each block: int64 [num_blocks]; the last one may have fewer."""
    starts = torch.arange(0, tokens, block_size, device=device)
    return (tokens - starts).clamp(max=block_size)


def _mean(sums: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    return (sums.float() * (1.0 / counts.float()).unsqueeze(-1)).to(dtype)


def clean(scores: Tensor) -> Tensor:
    """NaN becomes -inf, +inf the largest float."""
    return torch.where(scores.isnan(), -torch.inf, scores).clamp(max=LARGEST)


def allowed_blocks(selection: Selection, seqlen_q: int, seqlen_kv: int, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Which blocks these groups (int64 [n]) may take, and which of those are always in: two of bool [n, num_blocks].

    Query i is at position i + seqlen_kv - seqlen_q. Causal ones may take the blocks that start at or before the
    position of the group's last query.
    """
    size = selection.block_size
    block = torch.arange(selection.num_blocks(seqlen_kv), device=groups.device)
    group = groups.unsqueeze(1)
    first = group * selection.query_group + seqlen_kv - seqlen_q
    last = (group * selection.query_group + selection.query_group).clamp(max=seqlen_q) - 1 + seqlen_kv - seqlen_q
    allowed = (block * size <= last) if selection.causal else (block >= 0).expand(len(group), -1)
    always = (block < selection.sink_blocks).expand(len(group), -1)
    window = max(selection.window_blocks, 1 if selection.causal else 0)
    if window > 0:
        lowest = first.clamp(min=0).div(size, rounding_mode="floor") - (window - 1)
        highest = last.div(size, rounding_mode="floor") + (0 if selection.causal else window - 1)
        always = always | ((lowest <= block) & (block <= highest))
    return allowed, allowed & always


def take(scores: Tensor, allowed: Tensor, always: Tensor, budgets: Tensor, list_width: int) -> tuple[Tensor, Tensor]:
    """Indices and counts of a `Choice`, of scores [B, choosers, groups, num_blocks] and flags [groups, num_blocks]."""
    num_blocks = scores.shape[3]
    ranked = torch.where(always, torch.inf, torch.where(allowed, scores, -torch.inf))
    counts = torch.minimum((ranked > -torch.inf).sum(-1), budgets.view(1, -1, 1))
    order = ranked.argsort(dim=-1, descending=True, stable=True)[..., :list_width]
    order = F.pad(order, (0, list_width - order.shape[3]), value=num_blocks)
    places = torch.arange(list_width, device=scores.device)
    taken = torch.where(places < counts.unsqueeze(-1), order, num_blocks).sort(dim=-1).values
    return torch.where(taken == num_blocks, -1, taken).to(torch.int32), counts.to(torch.int32)


def chunks(rows: Sequence[int], scores_a_row: int, device: torch.device) -> list[tuple[int, int]]:
    """Ranges [start, stop) that cover these ascending groups of queries, each small enough for its scores."""
    longest = max(1, CHUNK_SCORES.get(device.type, CHUNK_SCORES["cpu"]) // max(scores_a_row, 1))
    runs = [(rows.start, rows.stop)] if isinstance(rows, range) else row_runs(rows)
    return [(begin, min(begin + longest, stop)) for start, stop in runs for begin in range(start, stop, longest)]


def listed(indices: Tensor, counts: Tensor, num_blocks: int) -> Tensor:
    """Which blocks lists hold: bool [..., num_blocks] of indices [..., list_width] and counts [...].

    Entries past a count and outside [0, num_blocks) are nothing.
    """
    places = torch.arange(indices.shape[-1], device=indices.device)
    valid = (places < counts.unsqueeze(-1)) & (indices >= 0) & (indices < num_blocks)
    flags = torch.zeros((*indices.shape[:-1], num_blocks + 1), dtype=torch.bool, device=indices.device)
    return flags.scatter_(-1, torch.where(valid, indices, num_blocks).long(), True)[..., :num_blocks]


@dataclass(frozen=True, slots=True)
class ListedPairs:
    """The pairs of queries and keys that lists of blocks leave, read as a mask is: `tuner.oracle.DenseRows`."""

    indices: Tensor
    counts: Tensor
    selection: Selection

    spec = "the listed blocks"

    @property
    def lead(self) -> tuple[int, int]:
        """How many (batch entries, heads) it tells apart."""
        return self.indices.shape[0], self.indices.shape[1]

    def dense_rows(
        self,
        batch: int,
        num_heads: int,
        seqlen_q: int,
        seqlen_kv: int,
        device: torch.device | str,
        q_start: int,
        q_stop: int,
    ) -> Tensor:
        """Which pairs of the query rows q_start to q_stop - 1 count: bool [B, H, q_stop - q_start, seqlen_kv]."""
        rows, tokens = torch.arange(q_start, q_stop, device=device), torch.arange(seqlen_kv, device=device)
        first, last = q_start // self.selection.query_group, -(-q_stop // self.selection.query_group)
        flags = listed(
            self.indices[:, :, first:last], self.counts[:, :, first:last], self.selection.num_blocks(seqlen_kv)
        )
        pairs = flags[:, :, rows // self.selection.query_group - first][..., tokens // self.selection.block_size]
        if self.selection.causal:
            pairs &= tokens <= rows.unsqueeze(1) + seqlen_kv - seqlen_q
        return pairs.repeat_interleave(num_heads // self.selection.num_choosers, 1)

    def dense(
        self, batch: int, num_heads: int, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu"
    ) -> Tensor:
        """`dense_rows` of all rows."""
        return self.dense_rows(batch, num_heads, seqlen_q, seqlen_kv, device, 0, seqlen_q)


def selected_attention_oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    counts: Tensor,
    selection: Selection,
    scale: float,
    rows: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over exactly the tokens of the listed blocks, causal inside them if the selection is, in fp64.

    query [B, Hq, Nq, D], key and value [B, Hkv, Nkv, D]; indices [B, choosers, groups, list_width] and counts
    [B, choosers, groups], entries past a count or outside [0, num_blocks) being nothing. rows: ascending query rows, to
    ask for these alone. Returns out [B, Hq, rows, D] and lse [B, Hq, rows] (natural log), both fp64. A row without a
    key gives out 0 and lse -inf.
    """
    pairs = ListedPairs(indices, counts, selection)
    if rows is None:
        return oracle(query, key, value, pairs, scale)
    return oracle_rows(query, key, value, pairs, scale, rows)
