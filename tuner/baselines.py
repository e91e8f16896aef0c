"""What PyTorch itself takes for a call: the times that a winner is shown beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.runtime.masks import Mask
from tilewright.tuner.timing import Stopwatch, time_kernel

MASK_SHARE_OF_FREE_MEMORY = 0.25
"""A dense mask, as bool and as PyTorch's float copy of it, may take this much of what is free."""


def baseline_runs(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float
) -> dict[str, Callable[[], Tensor]]:
    """PyTorch's ways to answer the call, by name; each runs it once.

    `sdpa_masked`: `scaled_dot_product_attention` with the dense boolean mask, where there is a mask and its dense form
    fits. `sdpa_causal`: its own causal flag, where that is the whole mask. `sdpa_dense`: without any mask; beside a
    mask it computes another function, and whoever shows its time must say so.
    """
    grouped = query.shape[1] != key.shape[1]
    runs: dict[str, Callable[[], Tensor]] = {
        "sdpa_dense": lambda: F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=grouped)
    }
    if mask is None:
        return runs
    if mask.spec == "causal()" and query.shape[2] == key.shape[2]:
        runs["sdpa_causal"] = lambda: F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
    batch, num_heads, seqlen_q, _ = query.shape
    seqlen_kv = key.shape[2]
    entries = mask.lead[0] * mask.lead[1] * seqlen_q * seqlen_kv
    if entries * (1 + max(4, query.dtype.itemsize)) <= MASK_SHARE_OF_FREE_MEMORY * free_bytes(query.device):
        dense = mask.dense(batch, num_heads, seqlen_q, seqlen_kv, query.device)
        # Heads are repeated here, outside the timing: with a mask and grouped heads together PyTorch has no fast path.
        group = num_heads // key.shape[1]
        keys = key.repeat_interleave(group, 1) if grouped else key
        values = value.repeat_interleave(group, 1) if grouped else value
        runs["sdpa_masked"] = lambda: F.scaled_dot_product_attention(query, keys, values, attn_mask=dense, scale=scale)
    return runs


def time_baselines(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float, stopwatch: Stopwatch
) -> dict[str, float]:
    """Median microseconds of each of `baseline_runs`; one that runs out of memory is left out."""
    return time_runs(baseline_runs(query, key, value, mask, scale), stopwatch)


def time_runs(runs: Mapping[str, Callable[[], object]], stopwatch: Stopwatch) -> dict[str, float]:
    """Median microseconds of each, by name; one that runs out of memory is left out."""
    times: dict[str, float] = {}
    with torch.no_grad():
        for name, run in runs.items():
            try:
                timing = time_kernel(run, stopwatch.device, min_rounds=2, max_rounds=30, stopwatch=stopwatch)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                continue
            times[name] = timing.median_us
    return times


def free_bytes(device: torch.device) -> int:
    """Memory that could be allocated now: the GPU's free memory, or what Linux calls available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
