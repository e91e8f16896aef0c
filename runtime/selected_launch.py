"""From tensors to launches of the kernels of the two stages: choosing blocks, and attending to chosen ones."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tilewright.runtime.launch import current_stream, make_workspace
from tilewright.runtime.selection import Selection


class Launchable(Protocol):
    """What is launched: a `LoadedKernel`, or what stands before one."""

    def launch(self, values: Sequence[int | float], touched: Mapping[str, tuple[Tensor, bool]]) -> None:
        """As `LoadedKernel.launch`."""
        ...

    def workspace_bytes(self, values: Sequence[int | float]) -> int:
        """As `LoadedKernel.workspace_bytes`."""
        ...


def run_select(
    loaded: Launchable,
    query: Tensor,
    key: Tensor,
    budgets: Tensor,
    selection: Selection,
    indices: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose blocks for [B, Hq, Nq, D] queries from [B, Hkv, Nkv, D] keys, any strides with the last one 1.

    budgets: [num_choosers] int32 on the same device, from 1 to list_width.
    Returns `indices` [B, num_choosers, groups, list_width] int32, ascending, -1 past the count, and `counts`
    [B, num_choosers, groups] int32, which may be given. Raises `LaunchFailed`, `OutOfMemory` or `IllegalAccess`.
    """
    batch, _, seqlen_q, _ = query.shape
    lists = (batch, selection.num_choosers, selection.num_groups(seqlen_q))
    if indices is None:
        indices = torch.empty((*lists, selection.list_width), dtype=torch.int32, device=query.device)
    if counts is None:
        counts = torch.empty(lists, dtype=torch.int32, device=query.device)
    if counts.numel() == 0:
        return indices, counts

    def values(workspace: int) -> tuple[int | float, ...]:
        return (
            *(query.data_ptr(), key.data_ptr(), budgets.data_ptr(), indices.data_ptr(), counts.data_ptr(), workspace),
            *_choice(query, key, selection),
            *(selection.sink_blocks, selection.window_blocks),
            *query.stride()[:3],
            *key.stride()[:3],
            *_where(query),
        )

    workspace = _workspace(loaded, values(0), query.device)
    touched = {
        "query": (query, False),
        "key": (key, False),
        "budgets": (budgets, False),
        "indices": (indices, True),
        "counts": (counts, True),
        "workspace": (workspace, True),
    }
    loaded.launch(values(workspace.data_ptr()), touched)
    return indices, counts


def run_selected(
    loaded: Launchable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    counts: Tensor,
    selection: Selection,
    scale: float,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    budgets: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Attention of [B, Hq, Nq, D] over the chosen blocks of [B, Hkv, Nkv, D], any strides with the last one 1.

    indices, counts: contiguous int32 as `run_select` returns them; before the count each entry is a different block,
    past it anything. budgets: of each chooser, which no count of it exceeds, where they are known and differ: kernels
    then cut up the work more evenly. Returns `out` [B, Hq, Nq, D] in query's dtype and `lse` [B, Hq, Nq] float32, which
    may be given. Raises `LaunchFailed`, `OutOfMemory` or `IllegalAccess`.
    """
    batch, num_heads, seqlen_q, _ = query.shape
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if lse is None:
        lse = torch.empty((batch, num_heads, seqlen_q), dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out, lse
    written, natural = out, lse
    most = (ctypes.c_int32 * len(budgets))(*budgets)  # lives until the launch is done, which alone reads it

    def values(workspace: int) -> tuple[int | float, ...]:
        return (
            *(query.data_ptr(), key.data_ptr(), value.data_ptr(), written.data_ptr(), natural.data_ptr()),
            *(indices.data_ptr(), counts.data_ptr(), ctypes.addressof(most) if budgets else 0, workspace),
            *_choice(query, key, selection),
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *written.stride()[:3],
            float(scale),
            *_where(query),
        )

    workspace = _workspace(loaded, values(0), query.device)
    touched = {
        "query": (query, False),
        "key": (key, False),
        "value": (value, False),
        "indices": (indices, False),
        "counts": (counts, False),
        "out": (out, True),
        "lse": (lse, True),
        "workspace": (workspace, True),
    }
    loaded.launch(values(workspace.data_ptr()), touched)
    return out, lse


def _choice(query: Tensor, key: Tensor, selection: Selection) -> tuple[int, ...]:
    batch, num_heads, seqlen_q, _ = query.shape
    num_kv_heads, seqlen_kv = key.shape[1], key.shape[2]
    return (
        *(batch, num_heads, num_kv_heads, seqlen_q, seqlen_kv),
        *(selection.num_choosers, selection.block_size, selection.num_blocks(seqlen_kv), selection.list_width),
        *(selection.query_group, selection.num_groups(seqlen_q)),
    )


def _where(query: Tensor) -> tuple[int, int, int]:
    if query.is_cuda:
        index = query.device.index
        return index, 0, current_stream(index)
    return 0, torch.get_num_threads(), 0


def _workspace(loaded: Launchable, values: tuple[int | float, ...], device: torch.device) -> Tensor:
    """As much scratch as the kernel asks for."""
    return make_workspace(loaded.workspace_bytes(values), device)
