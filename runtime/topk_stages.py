"""The two stages of attention over chosen blocks, run by the best kernel known for the call, else by PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.runtime import masks, topk_fallback, topk_ranking
from tilewright.runtime.call import check_strides
from tilewright.runtime.dispatch import DISPATCHER, Choice, Prepared
from tilewright.runtime.masks import Mask
from tilewright.runtime.selected_launch import run_select, run_selected
from tilewright.runtime.selection import SELECT_BLOCKS, SELECTED_ATTENTION, Selection

MASKED_SEQLEN = 4096
"""Up to so many keys a mask over blocks answers where no kernel for lists exists: it was 4 to 6 times as fast as
PyTorch (two cores, AVX2, fp32, 8 heads, head_dim 64, 16 of 32 and of 64 blocks of 64), and no longer one was tried."""

MAX_BUDGETS = 1024
"""Budgets kept on their devices; the oldest go first."""

_budgets: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
_captured: list[Tensor] = []


def budgets_on(device: torch.device, budgets: tuple[int, ...]) -> Tensor:
    """[num_choosers] int32 on the device, copied there once: a copy waits for the device and cannot be captured."""
    found = _budgets.get((budgets, device))
    if found is None:
        found = torch.tensor(budgets, dtype=torch.int32, device=device)
        _budgets[budgets, device] = found
        while len(_budgets) > MAX_BUDGETS:
            _budgets.pop(next(iter(_budgets)), None)
    if found.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured.append(found)  # replays read it long after it was forgotten here
    return found


def different(budgets: tuple[int, ...]) -> tuple[int, ...]:
    """What stage 2 is told of budgets: nothing where all are as wide as the lists."""
    return budgets if len(set(budgets)) > 1 else ()


def choose_blocks(query: Tensor, key: Tensor, budgets: tuple[int, ...], selection: Selection) -> tuple[Tensor, Tensor]:
    """Stage 1 of a checked call: `indices` and `counts` as `run_select` returns them."""
    check_strides(query, key, key)
    lists = (query.shape[0], selection.num_choosers, selection.num_groups(query.shape[2]))
    if 0 in lists or selection.list_width == 0:
        empty = torch.empty((*lists, selection.list_width), dtype=torch.int32, device=query.device)
        return empty, torch.zeros(lists, dtype=torch.int32, device=query.device)
    stage = DISPATCHER.stage(SELECT_BLOCKS, query, key, selection)
    on_device = budgets_on(query.device, budgets)
    if stage.loaded is not None:
        return run_select(stage.loaded, query, key, on_device, selection)
    DISPATCHER.say_fallback(stage.choice)
    return topk_ranking.choose(query, key, on_device, selection)


def attend_chosen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    counts: Tensor,
    selection: Selection,
    scale: float,
    budgets: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Stage 2 of a checked call, of lists that kernels may read: `out` and `lse` as `run_selected` returns them.

    budgets: of each chooser, where they are known and differ.
    """
    check_strides(query, key, value)
    if key.shape[2] == 0 or query.numel() == 0 or selection.list_width == 0:
        return topk_fallback.attend(query, key, value, indices, counts, selection, scale)
    stage = DISPATCHER.stage(SELECTED_ATTENTION, query, key, selection)
    if stage.loaded is not None:
        return run_selected(stage.loaded, query, key, value, indices, counts, selection, scale, budgets=budgets)
    masked = prepare_masked(query, key, indices, counts, selection)
    if masked is not None:
        return DISPATCHER.run(masked, query, key, value, scale)
    DISPATCHER.say_fallback(stage.choice)
    return topk_fallback.attend(query, key, value, indices, counts, selection, scale)


def attention_choice(query: Tensor, key: Tensor, indices: Tensor, counts: Tensor, selection: Selection) -> Choice:
    """What `attend_chosen` runs, and why."""
    stage = DISPATCHER.stage(SELECTED_ATTENTION, query, key, selection)
    masked = None if stage.loaded is not None else prepare_masked(query, key, indices, counts, selection)
    if masked is None:
        return stage.choice
    choice = masked.choice
    detail = f"the chosen blocks as a mask, because {stage.choice.detail}; {choice.detail}"
    return Choice(choice.problem, choice.spec, choice.reason, detail, choice.tuned_time_us)


def prepare_masked(
    query: Tensor, key: Tensor, indices: Tensor, counts: Tensor, selection: Selection
) -> Prepared | None:
    """The same attention by a kernel of `attention` under a mask; None with many keys, or where there is no kernel."""
    if key.shape[2] > MASKED_SEQLEN:
        return None
    prepared = DISPATCHER.prepare_once(query, key, mask_of_lists(query, key, indices, counts, selection))
    return None if prepared.loaded is None else prepared


def mask_of_lists(query: Tensor, key: Tensor, indices: Tensor, counts: Tensor, selection: Selection) -> Mask:
    """Lists of chosen blocks as a mask: one byte for each group and block of every head."""
    flags = topk_ranking.listed_blocks(indices, counts, selection.num_blocks(key.shape[2]))
    if selection.num_choosers != query.shape[1]:
        flags = flags.repeat_interleave(query.shape[1] // selection.num_choosers, dim=1)
    mask = masks.block_mask(flags.contiguous(), (selection.query_group, selection.block_size))
    return mask & masks.causal() if selection.causal else mask
