"""PyTorch's ways to choose blocks and to attend to chosen ones: what the times of winners are shown beside."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.runtime.selection import Selection
from tilewright.tuner.baselines import MASK_SHARE_OF_FREE_MEMORY, baseline_runs, free_bytes
from tilewright.tuner.topk_oracle import ListedPairs, allowed_blocks, chunks
from tilewright.tuner.topk_unfused import attend_gathered, pooled

GATHERED_QUERIES = {"cpu": 16, "cuda": 1024}
"""Queries whose keys are gathered at a time: on a CPU what caches hold, on a GPU what keeps it busy."""


def choose_by_pytorch(query: Tensor, key: Tensor, budgets: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
    """Lists as `run_select` gives them, by mean, product and `torch.topk`, with any order of equal scores."""
    askers, keys = _asked_with(query, selection), pooled(key, selection.block_size)
    batch, kv_heads, num_blocks, _ = keys.shape
    groups, choosers = askers.shape[2], selection.num_choosers
    free = not (selection.causal or selection.sink_blocks or selection.window_blocks)
    places = torch.arange(selection.list_width, device=query.device)
    parts = []
    for start, stop in chunks(range(groups), batch * choosers * num_blocks, query.device):
        rows = askers[:, :, start:stop].reshape(batch, kv_heads, -1, query.shape[3])
        scores = (rows @ keys.mT).view(batch, choosers, stop - start, num_blocks).float()
        scores = scores.nan_to_num(-torch.inf, torch.finfo(torch.float32).max, -torch.inf)
        if not free:
            numbers = torch.arange(start, stop, device=query.device)
            allowed, always = allowed_blocks(selection, query.shape[2], key.shape[2], numbers)
            scores = scores.masked_fill(~allowed, -torch.inf).masked_fill(always, torch.inf)
        best = scores.topk(selection.list_width, dim=3)
        taken = (best.values > -torch.inf) & (places < budgets.view(1, -1, 1, 1))
        lists = torch.where(taken, best.indices, num_blocks).sort(dim=3).values
        parts.append((torch.where(lists == num_blocks, -1, lists).to(torch.int32), taken.sum(3, dtype=torch.int32)))
    indices, counts = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    return indices, counts


def _asked_with(query: Tensor, selection: Selection) -> Tensor:
    """[B, choosers, groups, D]: means over a group's queries and the heads that share their choice."""
    heads = query.shape[1] // selection.num_choosers
    if heads == selection.query_group == 1:
        return query
    means = pooled(query.float(), selection.query_group)
    batch, _, groups, head_dim = means.shape
    return means.view(batch, selection.num_choosers, heads, groups, head_dim).mean(2).to(query.dtype)


def attend_runs(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, counts: Tensor, selection: Selection, scale: float
) -> dict[str, Callable[[], Tensor]]:
    """PyTorch's ways to attend to these lists, by name; each runs it once.

    `sdpa_masked`: with the lists as a dense boolean mask, where that fits. `gathered`: the listed keys and values
    gathered for some queries at a time; on a CPU only without the other, which takes a tenth of its time at 8192
    tokens. `sdpa_dense`: without any mask, another function.
    """
    batch, num_heads, seqlen_q, _ = query.shape
    seqlen_kv = key.shape[2]
    step = GATHERED_QUERIES["cuda" if query.is_cuda else "cpu"]
    places = torch.arange(selection.list_width, device=query.device)
    lists = torch.where(places < counts.unsqueeze(3), indices, -1).repeat_interleave(
        num_heads // selection.num_choosers, 1
    )
    has_gaps = bool((lists < 0).any())

    def gathered() -> Tensor:
        out = torch.empty_like(query)
        for start in range(0, seqlen_q, step):
            stop = min(start + step, seqlen_q)
            groups = torch.arange(start, stop, device=query.device) // selection.query_group
            out[:, :, start:stop] = attend_gathered(
                query[:, :, start:stop],
                key,
                value,
                lists[:, :, groups],
                selection,
                scale,
                first=start + seqlen_kv - seqlen_q,
                has_gaps=has_gaps,
            )
        return out

    runs = baseline_runs(query, key, value, None, scale)
    entries = batch * num_heads * seqlen_q * seqlen_kv
    if entries * (1 + max(4, query.dtype.itemsize)) <= MASK_SHARE_OF_FREE_MEMORY * free_bytes(query.device):
        dense = ListedPairs(indices, counts, selection).dense_rows(
            batch, num_heads, seqlen_q, seqlen_kv, query.device, 0, seqlen_q
        )
        group = num_heads // key.shape[1]
        keys, values = (tensor.repeat_interleave(group, 1) if group > 1 else tensor for tensor in (key, value))
        runs["sdpa_masked"] = lambda: F.scaled_dot_product_attention(query, keys, values, attn_mask=dense, scale=scale)
    if query.is_cuda or "sdpa_masked" not in runs:
        runs["gathered"] = gathered
    return runs
