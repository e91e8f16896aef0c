"""Lists of chosen blocks that a caller made, checked and put in order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.generator.errors import InvalidInput
from tilewright.runtime.mask_terms import ceil_div, kind_of
from tilewright.runtime.selection import Selection
from tilewright.runtime.topk_call import flag, query_group_of, whole_number
from tilewright.runtime.topk_ranking import real_entries

LIST_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
"""What lists of blocks and their counts may come in."""


def lists_selection(
    query: Tensor, key: Tensor, indices: Any, counts: Any, *, block_size: Any, causal: Any, select: Any
) -> Selection:
    """What lists of chosen blocks are for tensors that were checked; `InvalidInput` where they do not fit.

    indices: [B, choosers, groups, K]. counts: [B, choosers, groups]. Integers of any of `LIST_DTYPES`.
    """
    batch, num_heads, seqlen_q, _ = query.shape
    num_kv_heads = key.shape[1]
    size, group = whole_number("block_size", block_size, 1), query_group_of(select)
    for name, tensor, rank in (("indices", indices, 4), ("counts", counts, 3)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in LIST_DTYPES or tensor.dim() != rank:
            raise InvalidInput(
                f"{name} must be an integer tensor [batch, choosers, groups{', K' if rank == 4 else ''}], as "
                f"select_blocks returns it; got {kind_of(tensor)}"
            )
        if tensor.device != query.device:
            raise InvalidInput(f"{name} must be on {query.device}, where query is; got {tensor.device}; move it")
    if indices.shape[:3] != counts.shape:
        raise InvalidInput(
            f"counts must have the shape of indices without the last dimension, {list(indices.shape[:3])}; "
            f"got {list(counts.shape)}"
        )
    if indices.shape[0] != batch:
        raise InvalidInput(f"indices must have query's batch size, {batch}; got {indices.shape[0]}")
    if indices.shape[1] not in (num_heads, num_kv_heads):
        raise InvalidInput(
            f"indices must have a list for each of the {num_heads} query heads or of the {num_kv_heads} key heads; "
            f"got {indices.shape[1]} in dimension 1"
        )
    groups = ceil_div(seqlen_q, group)
    if indices.shape[2] != groups:
        raise InvalidInput(
            f"indices must have a list for each of the {groups} groups that select={select!r} makes of {seqlen_q} "
            f"queries; got {indices.shape[2]} in dimension 2; pass the select that the lists were chosen with"
        )
    return Selection(
        block_size=size,
        list_width=indices.shape[3],
        num_choosers=indices.shape[1],
        query_group=min(group, max(seqlen_q, 1)),
        causal=flag("causal", causal),
    )


def clean_lists(indices: Tensor, counts: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Lists as kernels may read them, made on the device without waiting for it.

    Counts are clamped to [0, K]; entries before them that are no block, or are one again, are dropped; what is left is
    ascending, then -1; contiguous int32.
    """
    wide = indices if indices.dtype in (torch.int32, torch.int64) else indices.int()
    real = real_entries(wide, counts, num_blocks)
    ordered = torch.where(real, wide, num_blocks).int().sort(dim=3).values
    again = torch.zeros_like(real)
    again[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    ordered = ordered.masked_fill(again, num_blocks).sort(dim=3).values
    kept = ordered < num_blocks
    return torch.where(kept, ordered, -1).contiguous(), kept.sum(3, dtype=torch.int32)
