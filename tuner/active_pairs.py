"""The exact number of active (query, key) pairs of a call: what floating-point rates are counted over."""

from __future__ import annotations

from functools import lru_cache

import torch

from tilewright.runtime.masks import Mask
from tilewright.tuner.workloads import WorkloadRow

CHUNK_PAIRS = 2**26
"""Pairs evaluated at once; with the temporaries of a mask's definition about 1 GiB."""


def active_pairs(mask: Mask | None, batch: int, num_heads: int, seqlen_q: int, seqlen_kv: int, device: str) -> int:
    """Active pairs over all batch entries and heads, counted from the mask's definition by chunks of query rows."""
    if mask is None:
        return batch * num_heads * seqlen_q * seqlen_kv
    lead = mask.lead
    step = max(1, CHUNK_PAIRS // max(1, lead[0] * lead[1] * seqlen_kv))
    counted = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, seqlen_q, step):
        stop = min(start + step, seqlen_q)
        active = mask.dense_rows(batch, num_heads, seqlen_q, seqlen_kv, device, start, stop)
        counted += active.expand(lead[0], lead[1], stop - start, seqlen_kv).sum()
    return int(counted) * (batch // lead[0]) * (num_heads // lead[1])


@lru_cache(maxsize=64)
def row_active_pairs(row: WorkloadRow, device: str) -> int:
    """`active_pairs` of a workload's row; counted once in a process."""
    mask = row.make_mask()
    mask = None if mask is None else mask.to(device)
    return active_pairs(mask, row.batch, row.num_heads, row.seqlen_q, row.seqlen_kv, device)
