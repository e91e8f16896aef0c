"""The torch operators of attention over chosen blocks, which `ops` registers, and which calls go through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewright.runtime.call import needs_operator
from tilewright.runtime.mask_terms import ceil_div
from tilewright.runtime.selection import Selection
from tilewright.runtime.topk_call import Choosing, Settled
from tilewright.runtime.topk_fallback import attend_backward
from tilewright.runtime.topk_ranking import choose_covering
from tilewright.runtime.topk_stages import attend_chosen, choose_blocks, different

_torch_library: Any = torch.library  # its functions carry no types


def choose(query: Tensor, key: Tensor, call: Settled, scale: float) -> tuple[Tensor, Tensor]:
    """Stage 1: `indices` and `counts`. A choice has no gradient."""
    if query.requires_grad or key.requires_grad:
        query, key = query.detach(), key.detach()
    if needs_operator(query, key, key):
        indices, counts = torch.ops.tilewright.select_blocks(query, key, *call.choosing, scale)
        return indices, counts
    if call.choosing.budgets:
        return choose_blocks(query, key, call.budgets, call.selection)
    return choose_covering(query, key, call.choosing.coverage, scale, call.selection, trim=True)


def attend(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, counts: Tensor, call: Settled, scale: float
) -> tuple[Tensor, Tensor]:
    """Stage 2 over what `choose` returned: `out` and `lse`."""
    if needs_operator(query, key, value):
        numbers = (call.choosing.block_size, call.choosing.query_group, call.choosing.causal, scale)
        lists = (indices, counts, *numbers, different(call.budgets))
        out, lse = torch.ops.tilewright.selected_attention(query, key, value, *lists)
        return out, lse
    budgets = different(call.budgets)
    return attend_chosen(query, key, value, indices, counts, listed(call, indices), scale, budgets)


def listed(call: Settled, indices: Tensor) -> Selection:
    """The call's selection with lists as wide as they came out; by coverage the data says how wide."""
    if call.choosing.budgets:
        return call.selection
    return replace(call.selection, list_width=indices.shape[3])


_LISTS = "Tensor indices, Tensor counts, int block_size, int query_group, bool causal, float scale"


def _select_blocks(
    query: Tensor,
    key: Tensor,
    block_size: int,
    budgets: list[int],
    coverage: float,
    num_choosers: int,
    query_group: int,
    causal: bool,
    sink_blocks: int,
    window_blocks: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The fields of `Choosing`; lists by coverage are as wide as there are blocks, whatever the data."""
    choosing = Choosing(
        block_size, tuple(budgets), coverage, num_choosers, query_group, causal, sink_blocks, window_blocks
    )
    seqlen_kv = key.shape[2]
    selection = choosing.selection(query.shape[2], seqlen_kv)
    if not choosing.budgets:
        return choose_covering(query, key, coverage, scale, selection, trim=False)
    return choose_blocks(query, key, choosing.cut_budgets(seqlen_kv), selection)


def _select_blocks_fake(
    query: Tensor,
    key: Tensor,
    block_size: int,
    budgets: list[int],
    coverage: float,
    num_choosers: int,
    query_group: int,
    causal: bool,
    sink_blocks: int,
    window_blocks: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    width = ceil_div(key.shape[2], block_size)
    if budgets:
        width = torch.sym_min(max(budgets), width)  # type: ignore[no-untyped-call]
    lists = (query.shape[0], num_choosers, ceil_div(query.shape[2], query_group))
    return query.new_empty((*lists, width), dtype=torch.int32), query.new_empty(lists, dtype=torch.int32)


def _selection(query: Tensor, indices: Tensor, block_size: int, query_group: int, causal: bool) -> Selection:
    group = min(query_group, max(query.shape[2], 1))
    return Selection(block_size, indices.shape[3], indices.shape[1], group, causal)


def _selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    counts: Tensor,
    block_size: int,
    query_group: int,
    causal: bool,
    scale: float,
    budgets: Sequence[int],
) -> tuple[Tensor, Tensor]:
    selection = _selection(query, indices, block_size, query_group, causal)
    return attend_chosen(query, key, value, indices.contiguous(), counts.contiguous(), selection, scale, budgets)


def _selected_attention_fake(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def _selected_attention_backward(
    out_gradient: Tensor,
    lse_gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    counts: Tensor,
    block_size: int,
    query_group: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    selection = _selection(query, indices, block_size, query_group, causal)
    return attend_backward(out_gradient, lse_gradient, query, key, value, indices, counts, selection, scale)


def _selected_attention_backward_fake(
    out_gradient: Tensor, lse_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.numbers = inputs[5:-1]  # budgets say nothing that the lists do not


def _gradients(ctx: Any, out_gradient: Tensor, lse_gradient: Tensor) -> tuple[Tensor | None, ...]:
    """By PyTorch, for any kernel's result: the choice is constant, so lists and numbers have none."""
    gradients = torch.ops.tilewright.selected_attention_backward(
        out_gradient, lse_gradient, *ctx.saved_tensors, *ctx.numbers
    )
    return (*gradients, *(None,) * (3 + len(ctx.numbers)))


def define_topk_operators(library: Any) -> None:
    """Define `select_blocks`, `selected_attention` and its backward in tilewright's library."""
    choosing = (
        "int block_size, int[] budgets, float coverage, int num_choosers, int query_group, bool causal, "
        "int sink_blocks, int window_blocks, float scale"
    )
    operators = (
        (
            f"select_blocks(Tensor query, Tensor key, {choosing}) -> (Tensor indices, Tensor counts)",
            _select_blocks,
            _select_blocks_fake,
        ),
        (
            f"selected_attention(Tensor query, Tensor key, Tensor value, {_LISTS}, int[] budgets) -> "
            "(Tensor out, Tensor lse)",
            _selected_attention,
            _selected_attention_fake,
        ),
        (
            "selected_attention_backward(Tensor out_gradient, Tensor lse_gradient, Tensor query, Tensor key, "
            f"Tensor value, {_LISTS}) -> (Tensor query_gradient, Tensor key_gradient, Tensor value_gradient)",
            _selected_attention_backward,
            _selected_attention_backward_fake,
        ),
    )
    for schema, run, fake in operators:
        name = schema.partition("(")[0]
        library.define(schema)
        for backend in ("CPU", "CUDA"):
            library.impl(name, run, backend)
        _torch_library.register_fake(f"tilewright::{name}", fake, lib=library)
    _torch_library.register_autograd(
        "tilewright::selected_attention", _gradients, setup_context=_keep_for_backward, lib=library
    )
