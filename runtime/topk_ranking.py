"""Choosing blocks in plain PyTorch: scores, ranks and lists, by chunks of groups so that memory stays bounded.

What answers where there is no kernel, and what chooses by coverage. Scores are sums in float32 as PyTorch's matrix
products make them: where TF32 is allowed for float32 tensors, it is used here too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tilewright.runtime.selection import Selection

CHUNK_BYTES = 256 * 2**20
"""What the intermediates of one chunk may take, about."""

_SCORE_BYTES = 48
"""A score, its rank and what is summed over ranks."""

_LARGEST = torch.finfo(torch.float32).max


def choose(query: Tensor, key: Tensor, budgets: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
    """`indices` [B, num_choosers, groups, list_width] and `counts` [B, num_choosers, groups], int32.

    budgets: [num_choosers] int32, blocks that each of them takes.
    """
    indices, counts = _empty_lists(query, selection, selection.list_width)
    width = selection.list_width
    for start, ranked, _, sizes in _ranked_chunks(query, key, selection):
        taken = torch.minimum(sizes, budgets.view(1, -1, 1))
        stop = start + taken.shape[2]
        indices[:, :, start:stop] = _ascending(ranked[..., :width], taken)
        counts[:, :, start:stop] = taken
    return indices, counts


def choose_covering(
    query: Tensor, key: Tensor, coverage: float, scale: float, selection: Selection, *, trim: bool
) -> tuple[Tensor, Tensor]:
    """The same, of as few blocks as hold `coverage` of softmax(scale * score) over the allowed ones.

    What is always in is in, and is summed first. trim: lists are as wide as the largest count, which waits for the
    device; else as wide as there are blocks. The sum is taken in float64.
    """
    num_blocks = selection.num_blocks(key.shape[2])
    parts = []
    for _, ranked, (scores, always), sizes in _ranked_chunks(query, key, selection):
        weights = torch.softmax((scores.double() * scale).masked_fill(scores == -torch.inf, -torch.inf), dim=-1)
        weights = weights.nan_to_num(0.0).gather(3, ranked)  # a row without an allowed block has no weights
        before = weights.cumsum(3) - weights
        taken = (before < coverage).sum(3, dtype=torch.int32)
        taken = torch.minimum(torch.maximum(taken, always.sum(1, dtype=torch.int32)), sizes)
        width = int(taken.max()) if trim and taken.numel() else num_blocks
        parts.append((_ascending(ranked[..., :width], taken), taken))
    if not parts:
        return _empty_lists(query, selection, 0 if trim else num_blocks)
    width = max(indices.shape[3] for indices, _ in parts)
    padded = [torch.nn.functional.pad(indices, (0, width - indices.shape[3]), value=-1) for indices, _ in parts]
    return torch.cat(padded, dim=2), torch.cat([counts for _, counts in parts], dim=2)


def every_block(query: Tensor, key: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
    """The lists of a budget that covers everything: each group's allowed blocks, `num_blocks` wide."""
    num_blocks = selection.num_blocks(key.shape[2])
    groups = torch.arange(selection.num_groups(query.shape[2]), device=query.device)
    allowed, _ = _allowed_and_always(groups, query.shape[2], key.shape[2], selection)
    blocks = torch.arange(num_blocks, dtype=torch.int32, device=query.device)
    lists = torch.where(allowed, blocks, -1)  # allowed blocks are the first ones
    indices, counts = _empty_lists(query, selection, num_blocks)
    return indices.copy_(lists), counts.copy_(allowed.sum(1))


def real_entries(indices: Tensor, counts: Tensor, num_blocks: int) -> Tensor:
    """Which places of lists hold a block: bool, of the shape of `indices`."""
    places = torch.arange(indices.shape[3], device=indices.device)
    return (places < counts.unsqueeze(3)) & (indices >= 0) & (indices < num_blocks)


def listed_blocks(indices: Tensor, counts: Tensor, num_blocks: int) -> Tensor:
    """Lists as flags: bool [B, choosers, groups, num_blocks]; see `real_entries`."""
    real = real_entries(indices, counts, num_blocks)
    flags = torch.zeros((*indices.shape[:3], num_blocks + 1), dtype=torch.bool, device=indices.device)
    flags.scatter_(3, torch.where(real, indices, num_blocks).long(), True)
    return flags[..., :num_blocks]


def _empty_lists(query: Tensor, selection: Selection, width: int) -> tuple[Tensor, Tensor]:
    lists = (query.shape[0], selection.num_choosers, selection.num_groups(query.shape[2]))
    indices = torch.full((*lists, width), -1, dtype=torch.int32, device=query.device)
    return indices, torch.zeros(lists, dtype=torch.int32, device=query.device)


def _ranked_chunks(
    query: Tensor, key: Tensor, selection: Selection
) -> Iterator[tuple[int, Tensor, tuple[Tensor, Tensor], Tensor]]:
    """By chunks of groups: the first group, its blocks from best to worst [B, choosers, n, num_blocks], the scores of
    blocks in their own order with the flags [n, num_blocks] of what is always in, and how many may be taken at all.
    """
    batch, num_kv_heads, seqlen_kv, _ = key.shape
    seqlen_q, choosers = query.shape[2], selection.num_choosers
    groups, num_blocks = selection.num_groups(seqlen_q), selection.num_blocks(seqlen_kv)
    if batch * choosers * groups * num_blocks == 0:
        return
    asking = _group_means(query, num_kv_heads, selection).float()
    asked = _block_means(key, selection.block_size).float().transpose(-1, -2).unsqueeze(2)
    rows = max(1, CHUNK_BYTES // (_SCORE_BYTES * batch * choosers * num_blocks))
    for start in range(0, groups, rows):
        chunk = asking[:, :, start : start + rows]
        count = chunk.shape[2]
        heads = chunk.reshape(batch, num_kv_heads, choosers // num_kv_heads, count, chunk.shape[3])
        scores = (heads @ asked).reshape(batch, choosers, count, num_blocks)
        scores = scores.nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
        numbers = torch.arange(start, start + count, device=query.device)
        allowed, always = _allowed_and_always(numbers, seqlen_q, seqlen_kv, selection)
        scores = scores.masked_fill(~allowed, -torch.inf)
        order = scores.masked_fill(always, torch.inf).sort(dim=3, descending=True, stable=True)
        yield start, order.indices, (scores, always), (order.values > -torch.inf).sum(3, dtype=torch.int32)


def _block_means(key: Tensor, block_size: int) -> Tensor:
    """[B, Hkv, num_blocks, D]: the mean of each block's keys, in their dtype."""
    seqlen_kv = key.shape[2]
    whole = seqlen_kv // block_size * block_size
    sums = [_split(key[:, :, :whole], block_size).sum(3, dtype=torch.float32) * (1.0 / block_size)]
    if whole < seqlen_kv:
        sums.append(key[:, :, whole:].sum(2, keepdim=True, dtype=torch.float32) * (1.0 / (seqlen_kv - whole)))
    return torch.cat(sums, dim=2).to(key.dtype)


def _split(tensor: Tensor, size: int) -> Tensor:
    """[B, H, N, D] as [B, H, N / size, size, D]; a view, whatever the strides."""
    batch, heads, tokens, head_dim = tensor.shape
    return tensor.view(batch, heads, tokens // size, size, head_dim)


def _group_means(query: Tensor, num_kv_heads: int, selection: Selection) -> Tensor:
    """[B, choosers, groups, D]: what each group asks with, in the queries' dtype."""
    num_heads, seqlen_q, size = query.shape[1], query.shape[2], selection.query_group
    shared = num_heads // selection.num_choosers
    if shared == 1 and size == 1:
        return query
    sums = query.view(query.shape[0], selection.num_choosers, shared, *query.shape[2:]).sum(2, dtype=torch.float32)
    whole = seqlen_q // size * size
    means = [_split(sums[:, :, :whole], size).sum(3) * (1.0 / (size * shared))]
    if whole < seqlen_q:
        means.append(sums[:, :, whole:].sum(2, keepdim=True) * (1.0 / ((seqlen_q - whole) * shared)))
    return torch.cat(means, dim=2).to(query.dtype)


def _allowed_and_always(groups: Tensor, seqlen_q: int, seqlen_kv: int, selection: Selection) -> tuple[Tensor, Tensor]:
    """Flags [groups, num_blocks]: blocks that these groups may take, and those of them that are always in."""
    size, causal, offset = selection.block_size, selection.causal, seqlen_kv - seqlen_q
    first = groups * selection.query_group + offset
    last = ((groups + 1) * selection.query_group).clamp(max=seqlen_q) - 1 + offset
    first, last = first.unsqueeze(1), last.unsqueeze(1)
    blocks = torch.arange(selection.num_blocks(seqlen_kv), device=groups.device)
    allowed = blocks * size <= last if causal else torch.ones_like(last, dtype=torch.bool) | (blocks >= 0)
    always = (blocks < selection.sink_blocks).expand_as(allowed)
    window = max(selection.window_blocks, 1 if causal else 0)
    if window:
        low = first.clamp(min=0) // size - (window - 1)
        high = last // size + (0 if causal else window - 1)
        always = always | ((blocks >= low) & (blocks <= high))
    return allowed, always & allowed


def _ascending(ranked: Tensor, taken: Tensor) -> Tensor:
    """The first `taken` of each list in ascending order, then -1; int32."""
    past = torch.arange(ranked.shape[3], device=ranked.device) >= taken.unsqueeze(3)
    beyond = torch.iinfo(torch.int32).max
    lists = ranked.int().masked_fill(past, beyond).sort(dim=3).values
    return lists.masked_fill(lists == beyond, -1)
