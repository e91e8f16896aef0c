"""Attention over chosen blocks as one writes it in PyTorch: pool, score, `torch.topk`, gather, softmax, by chunks.

Each query and each head chooses alone, from as many keys as there are queries; no sinks, no windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.runtime.selection import Selection


def pooled(key: Tensor, block_size: int) -> Tensor:
    """[B, Hkv, blocks, D]: the mean of each block's keys, summed in float32, in their dtype."""
    batch, heads, seqlen_kv, head_dim = key.shape
    whole = seqlen_kv // block_size * block_size
    split = key[:, :, :whole].reshape(batch, heads, -1, block_size, head_dim)
    means = split.mean(3, dtype=torch.float32)
    if whole < seqlen_kv:
        means = torch.cat([means, key[:, :, whole:].mean(2, keepdim=True, dtype=torch.float32)], 2)
    return means.to(key.dtype)


def chosen_in_chunks(
    query: Tensor, keys: Tensor, selection: Selection, budgets: Sequence[int], chunk: int
) -> Iterator[tuple[int, int, Tensor]]:
    """(start, stop, blocks [B, H, stop - start, K] int64) of `chunk` queries at a time; -1 stands for no block.

    keys: `pooled`. Scores are products in the tensors' dtype. causal: a query's own block is always in.
    """
    batch, num_heads, seqlen_q, _ = query.shape
    kv_heads, num_blocks = keys.shape[1], keys.shape[2]
    uneven = len(set(budgets)) > 1
    places = torch.arange(selection.list_width, device=query.device)
    budget = torch.tensor(budgets, device=query.device).view(1, -1, 1, 1) if uneven else None
    for start in range(0, seqlen_q, chunk):
        stop = min(start + chunk, seqlen_q)
        rows = query[:, :, start:stop].reshape(batch, kv_heads, -1, query.shape[3])
        scores = (rows @ keys.mT).view(batch, num_heads, stop - start, num_blocks)
        if selection.causal:
            scores = _causal_scores(scores, start, seqlen_q, selection)
        best = scores.topk(selection.list_width, dim=3, sorted=uneven)
        blocks = best.indices
        if selection.causal:
            blocks = blocks.masked_fill(best.values == -torch.inf, -1)
        if budget is not None:
            blocks = blocks.masked_fill(places >= budget, -1)
        yield start, stop, blocks


def _causal_scores(scores: Tensor, start: int, seqlen_q: int, selection: Selection) -> Tensor:
    own = torch.arange(start, start + scores.shape[2], device=scores.device).unsqueeze(1) // selection.block_size
    blocks = torch.arange(scores.shape[3], device=scores.device)
    return scores.masked_fill(blocks > own, -torch.inf).masked_fill(blocks == own, torch.inf)


def attend_gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    selection: Selection,
    scale: float,
    *,
    first: int,
    has_gaps: bool,
) -> Tensor:
    """softmax(scale * q . k) v of query [B, H, n, D] over its blocks [B, H, n, K], gathered.

    first: the position of the first of these queries. has_gaps: whether blocks may be -1, for none.
    """
    batch, num_heads, count, head_dim = query.shape
    kv_heads, seqlen_kv, size = key.shape[1], key.shape[2], selection.block_size
    num_blocks = selection.num_blocks(seqlen_kv)
    heads = torch.arange(batch * num_heads, device=query.device).view(batch, num_heads, 1, 1)
    lists = heads // (num_heads // kv_heads) * num_blocks + blocks.clamp_min(0)
    keys, values = (_blocks_of(t, num_blocks, size).index_select(0, lists.flatten()) for t in (key, value))
    keys, values = (t.view(batch * num_heads * count, -1, head_dim) for t in (keys, values))
    logits = (query.reshape(-1, 1, head_dim) @ keys.mT).squeeze(1).float() * scale
    if has_gaps or selection.causal or seqlen_kv % size:
        tokens = (blocks.unsqueeze(4) * size + torch.arange(size, device=query.device)).flatten(3)
        inside = (tokens >= 0) & (tokens < seqlen_kv)
        if selection.causal:
            inside &= tokens <= torch.arange(first, first + count, device=query.device).unsqueeze(1)
        logits = logits.masked_fill(~inside.view_as(logits), -torch.inf)
    weights = torch.softmax(logits, dim=-1).to(value.dtype)
    return (weights.unsqueeze(1) @ values).view(query.shape)


def _blocks_of(tensor: Tensor, num_blocks: int, size: int) -> Tensor:
    """[B * Hkv * blocks, size * D]; a view unless the last block is short."""
    short = num_blocks * size - tensor.shape[2]
    whole = F.pad(tensor, (0, 0, 0, short)) if short else tensor
    return whole.reshape(-1, size * tensor.shape[3])


def dense_mask(blocks: Tensor, seqlen_kv: int, selection: Selection) -> Tensor:
    """Lists [B, H, N, K], -1 for none, as bool [B, H, N, seqlen_kv]."""
    num_blocks, size = selection.num_blocks(seqlen_kv), selection.block_size
    flags = torch.zeros((*blocks.shape[:3], num_blocks + 1), dtype=torch.bool, device=blocks.device)
    flags.scatter_(3, torch.where(blocks < 0, num_blocks, blocks).long(), True)
    mask = flags[..., :num_blocks].repeat_interleave(size, dim=3)[..., :seqlen_kv]
    if selection.causal:
        tokens = torch.arange(seqlen_kv, device=blocks.device)
        mask &= tokens <= tokens[-blocks.shape[2] :].unsqueeze(1)
    return mask
