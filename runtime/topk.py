"""`topk_attention`: every query attends to the blocks of keys that it scores highest on. And its two stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from tilewright.runtime import ops  # noqa: F401  registers the operators
from tilewright.runtime.attention import attention
from tilewright.runtime.call import check_tensors, needs_operator, scale_of, wants_gradient
from tilewright.runtime.topk_call import query_group_of, settle
from tilewright.runtime.topk_lists import clean_lists, lists_selection
from tilewright.runtime.topk_ops import attend, choose
from tilewright.runtime.topk_ranking import every_block
from tilewright.runtime.topk_stages import attend_chosen

Heads = Literal["query", "kv"]


@overload
def topk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = ...,
    top_k: int | Sequence[int] | float = ...,
    causal: bool = ...,
    select: Literal["query"] | int = ...,
    select_heads: Heads = ...,
    sink_blocks: int = ...,
    window_blocks: int = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    return_indices: Literal[False] = ...,
) -> Tensor: ...


@overload
def topk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = ...,
    top_k: int | Sequence[int] | float = ...,
    causal: bool = ...,
    select: Literal["query"] | int = ...,
    select_heads: Heads = ...,
    sink_blocks: int = ...,
    window_blocks: int = ...,
    scale: float | None = ...,
    return_lse: bool = ...,
    return_indices: bool = ...,
) -> Any: ...


def topk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = 64,
    top_k: int | Sequence[int] | float = 16,
    causal: bool = False,
    select: Literal["query"] | int = "query",
    select_heads: Heads = "query",
    sink_blocks: int = 0,
    window_blocks: int = 0,
    scale: float | None = None,
    return_lse: bool = False,
    return_indices: bool = False,
) -> Any:
    """Attention of each query over the `top_k` blocks of keys whose mean key it scores highest on.

    query: [B, Hq, Nq, D]; key, value: [B, Hkv, Nkv, D], as `attention` takes them; query i is at position
    i + Nkv - Nq. Blocks are `block_size` consecutive keys, any size; the last may be shorter.
    top_k: blocks for each query; or a sequence of them, one for each head that chooses; or a float between 0 and 1:
    as few blocks as hold that share of softmax(scale * score) over the allowed blocks. The last is computed in PyTorch,
    and its lists are as wide as the largest count, which waits for the device.
    select: "query", or how many consecutive queries share a choice, by their mean. select_heads: "query", or "kv" where
    the query heads of a key head share a choice.
    sink_blocks: the first blocks, always in. window_blocks: always in are the blocks of a query's own position and the
    window_blocks - 1 before it, without `causal` as many after it too. With `causal` a query's own block always is, and
    keys after it are not seen. What is always in counts against `top_k`.
    scale: D ** -0.5 unless given; choosing by `top_k` blocks does not depend on it.

    Returns out [B, Hq, Nq, D] in query's dtype; with `return_lse` also lse [B, Hq, Nq] float32, natural log; with
    `return_indices` also what `select_blocks` returns, in this order. A query without a key gives output 0, lse -inf.
    Where `top_k` is no less than the number of blocks this is dense attention, and `attention` answers; lists then hold
    every allowed block. Values must be finite, those at keys that nobody chose too.
    Gradients go through the chosen keys and values, the choice being constant; they are computed in PyTorch.
    Raises `InvalidInput` for arguments that do not fit together. See `docs/topk.md` for the definitions.
    """
    call = settle(
        query,
        key,
        value,
        block_size=block_size,
        top_k=top_k,
        causal=causal,
        select=select,
        select_heads=select_heads,
        sink_blocks=sink_blocks,
        window_blocks=window_blocks,
    )
    softmax_scale = scale_of(scale, query.shape[3])
    if call.covers and not wants_gradient(query, key, value):
        out, lse = attention(query, key, value, causal=causal, scale=scale, return_lse=True)
        lists = every_block(query, key, call.selection) if return_indices else ()
    else:
        lists = choose(query, key, call, softmax_scale)
        out, lse = attend(query, key, value, *lists, call, softmax_scale)
    results = (out, *((lse,) if return_lse else ()), *(lists if return_indices else ()))
    return results if len(results) > 1 else out


def select_blocks(
    query: Tensor,
    key: Tensor,
    *,
    block_size: int = 64,
    top_k: int | Sequence[int] | float = 16,
    causal: bool = False,
    select: Literal["query"] | int = "query",
    select_heads: Heads = "query",
    sink_blocks: int = 0,
    window_blocks: int = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Stage 1 of `topk_attention`, with its arguments: which blocks each query, or group of queries, attends to.

    Returns `indices` [B, choosers, groups, K] int32, ascending, -1 past the count, and `counts` [B, choosers, groups]
    int32. choosers: Hq, or Hkv with select_heads="kv". groups: ceil(Nq / select). K: the largest budget, at most the
    number of blocks. Blocks that score -inf or NaN, for instance because a key is NaN, are left out by any budget.
    scale: only matters where `top_k` is a float. Raises `InvalidInput`.
    """
    call = settle(
        query,
        key,
        key,
        block_size=block_size,
        top_k=top_k,
        causal=causal,
        select=select,
        select_heads=select_heads,
        sink_blocks=sink_blocks,
        window_blocks=window_blocks,
    )
    softmax_scale = scale_of(scale, query.shape[3])
    return choose(query, key, call, softmax_scale)


def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    counts: Tensor,
    *,
    block_size: int = 64,
    causal: bool = False,
    select: Literal["query"] | int = "query",
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Stage 2 of `topk_attention`: attention of each query over the tokens of the blocks that are listed for it.

    indices: [B, choosers, groups, K], counts: [B, choosers, groups], as `select_blocks` returns them or made by the
    caller: integers, choosers Hq or Hkv, groups ceil(Nq / select). Counts are clamped to [0, K]; entries past them may
    be anything; before them, what is no block is dropped, and what repeats is taken once. This is done on the device,
    without waiting for it.
    causal: keys after a query's position are not seen, whatever is listed.

    Returns out [B, Hq, Nq, D] and with `return_lse` lse [B, Hq, Nq] float32, as `topk_attention` does.
    Raises `InvalidInput`.
    """
    check_tensors(query, key, value)
    softmax_scale = scale_of(scale, query.shape[3])
    selection = lists_selection(query, key, indices, counts, block_size=block_size, causal=causal, select=select)
    lists = clean_lists(indices, counts, selection.num_blocks(key.shape[2]))
    if needs_operator(query, key, value):
        numbers = (selection.block_size, query_group_of(select), selection.causal, softmax_scale)
        out, lse = torch.ops.tilewright.selected_attention(query, key, value, *lists, *numbers, ())
    else:
        out, lse = attend_chosen(query, key, value, *lists, selection, softmax_scale)
    return (out, lse) if return_lse else out
