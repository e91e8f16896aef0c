"""The arguments of attention over chosen blocks, checked: what every path (kernel, fallback, operator) starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.generator.errors import InvalidInput
from tilewright.runtime.call import check_strides, check_tensors
from tilewright.runtime.call_problem import tensors_key
from tilewright.runtime.launch import MAX_SEQLEN
from tilewright.runtime.mask_terms import ceil_div
from tilewright.runtime.selection import Selection


class Choosing(NamedTuple):
    """How blocks are chosen, checked for one call. Plain numbers, which also travel through a torch operator.

    budgets: blocks for every chooser alike, or for each of them; empty where `coverage` says how many. coverage: a
    share of softmax(scale * score), else 0. The rest is what `Selection` says.
    """

    block_size: int
    budgets: tuple[int, ...]
    coverage: float
    num_choosers: int
    query_group: int
    causal: bool
    sink_blocks: int
    window_blocks: int

    def cut_budgets(self, seqlen_kv: int) -> tuple[int, ...]:
        """Blocks that each chooser takes at most, of those that there are."""
        num_blocks = ceil_div(seqlen_kv, self.block_size)
        each = tuple(min(budget, num_blocks) for budget in self.budgets)
        return each * self.num_choosers if len(each) == 1 else each

    def covers(self, seqlen_kv: int) -> bool:
        """Whether every chooser takes all that it is allowed."""
        num_blocks = ceil_div(seqlen_kv, self.block_size)
        return bool(self.budgets) and min(self.budgets) >= num_blocks

    def selection(self, seqlen_q: int, seqlen_kv: int) -> Selection:
        """The same for kernels: no number larger than the call gives it a meaning."""
        num_blocks = ceil_div(seqlen_kv, self.block_size)
        return Selection(
            block_size=self.block_size,
            list_width=min(max(self.budgets), num_blocks) if self.budgets else num_blocks,
            num_choosers=self.num_choosers,
            query_group=min(self.query_group, max(seqlen_q, 1)),
            causal=self.causal,
            sink_blocks=min(self.sink_blocks, num_blocks),
            window_blocks=min(self.window_blocks, num_blocks),
        )


class Settled(NamedTuple):
    """What one call comes to: its selection, its budgets cut to the blocks there are, and whether those are all."""

    choosing: Choosing
    selection: Selection
    budgets: tuple[int, ...]
    covers: bool


def choosing_of(
    query: Tensor,
    key: Tensor,
    *,
    block_size: Any,
    top_k: Any,
    causal: Any,
    select: Any,
    select_heads: Any,
    sink_blocks: Any,
    window_blocks: Any,
) -> Choosing:
    """The arguments of `topk_attention`, of tensors that were checked; `InvalidInput` where they do not fit."""
    num_heads, seqlen_q = query.shape[1], query.shape[2]
    num_kv_heads, seqlen_kv = key.shape[1], key.shape[2]
    if select_heads not in ("query", "kv"):
        raise InvalidInput(
            f"select_heads must be 'query' (each query head chooses) or 'kv' (the query heads of a key head share a "
            f"choice), got {select_heads!r}"
        )
    num_choosers = num_heads if select_heads == "query" else num_kv_heads
    budgets, coverage = _budgets(top_k, num_choosers, select_heads)
    choosing = Choosing(
        block_size=whole_number("block_size", block_size, 1),
        budgets=budgets,
        coverage=coverage,
        num_choosers=num_choosers,
        query_group=query_group_of(select),
        causal=flag("causal", causal),
        sink_blocks=whole_number("sink_blocks", sink_blocks, 0),
        window_blocks=whole_number("window_blocks", window_blocks, 0),
    )
    if budgets:
        _check_room(choosing, seqlen_q, seqlen_kv)
    return choosing


MAX_SETTLED = 1024
"""Calls whose check is remembered; the oldest goes first."""

_settled: dict[tuple[object, ...], Settled] = {}


def settle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: Any,
    top_k: Any,
    causal: Any,
    select: Any,
    select_heads: Any,
    sink_blocks: Any,
    window_blocks: Any,
) -> Settled:
    """The arguments of `topk_attention`, checked; a repeated call costs one probe. Raises `InvalidInput`."""
    look_up = None
    if not torch.compiler.is_compiling():
        numbers = tuple(top_k) if isinstance(top_k, list | tuple) else (top_k,)
        options = (*numbers, block_size, causal, select, select_heads, sink_blocks, window_blocks)
        try:
            # True == 1 == 1.0, and they are not the same argument.
            look_up = (*tensors_key(query, key, value), type(top_k), options, tuple(map(type, options)))
            found = _settled.get(look_up)
        except (AttributeError, TypeError):  # the check says in words what it is
            look_up = found = None
        if found is not None:
            check_strides(query, key, value)
            return found
    check_tensors(query, key, value)
    choosing = choosing_of(
        query,
        key,
        block_size=block_size,
        top_k=top_k,
        causal=causal,
        select=select,
        select_heads=select_heads,
        sink_blocks=sink_blocks,
        window_blocks=window_blocks,
    )
    seqlen_q, seqlen_kv = query.shape[2], key.shape[2]
    settled = Settled(
        choosing,
        choosing.selection(seqlen_q, seqlen_kv),
        choosing.cut_budgets(seqlen_kv),
        choosing.covers(seqlen_kv),
    )
    if look_up is not None:
        _settled[look_up] = settled
        while len(_settled) > MAX_SETTLED:
            _settled.pop(next(iter(_settled)), None)
    return settled


def query_group_of(select: Any) -> int:
    """Consecutive queries that share a choice: 1 for "query"."""
    if isinstance(select, str) and select == "query":
        return 1
    if isinstance(select, str):
        raise InvalidInput(f"select must be 'query' or how many consecutive queries share a choice, got {select!r}")
    return whole_number("select", select, 1)


def whole_number(name: str, value: Any, least: int) -> int:
    """`value` as an int from `least` to `MAX_SEQLEN`; a bool is none."""
    number = _integer(value)
    if number is None:
        raise InvalidInput(f"{name} must be an integer of {least} or more, got {value!r} of {type(value).__name__}")
    if not least <= number <= MAX_SEQLEN:
        raise InvalidInput(f"{name} must be {least} or more, at most {MAX_SEQLEN}; got {number}")
    return number


def flag(name: str, value: Any) -> bool:
    """`value`, which must be a bool."""
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} must be True or False, got {value!r} of {type(value).__name__}")
    return value


def _integer(value: Any) -> int | None:
    if isinstance(value, bool | Tensor):  # a tensor on a GPU would be waited for
        return None
    if isinstance(value, int):
        return value
    try:
        return int(value.__index__())
    except (AttributeError, TypeError):
        return None


def _budgets(top_k: Any, num_choosers: int, select_heads: str) -> tuple[tuple[int, ...], float]:
    """Budgets and coverage, one of which is empty or 0."""
    if isinstance(top_k, float):
        if not 0.0 < top_k < 1.0:
            raise InvalidInput(
                f"top_k as a float is the share of the softmax to cover, above 0 and below 1; got {top_k}"
                "; pass an int for so many blocks"
            )
        return (), float(top_k)
    if isinstance(top_k, Sequence) and not isinstance(top_k, str | bytes):
        if len(top_k) != num_choosers:
            raise InvalidInput(
                f"top_k as a sequence must have an entry for each of the {num_choosers} "
                f"{'query' if select_heads == 'query' else 'key'} heads that choose, got {len(top_k)}"
                "; select_heads says which heads choose"
            )
        return tuple(whole_number(f"top_k[{place}]", budget, 1) for place, budget in enumerate(top_k)), 0.0
    if _integer(top_k) is None:
        raise InvalidInput(
            "top_k must be an integer (blocks), a list of one integer for each head that chooses, or a float between 0 "
            f"and 1 (the share of the softmax to cover); got {top_k!r} of {type(top_k).__name__}"
        )
    return (whole_number("top_k", top_k, 1),), 0.0


def _check_room(choosing: Choosing, seqlen_q: int, seqlen_kv: int) -> None:
    """`InvalidInput` for a budget that what is always in may overflow."""
    span = _window_span(choosing, seqlen_q, seqlen_kv)
    needed = min(choosing.sink_blocks + span, ceil_div(seqlen_kv, choosing.block_size))
    smallest = min(choosing.budgets)
    if smallest < needed:
        raise InvalidInput(
            f"top_k must be at least {needed}, the blocks that are always in: {choosing.sink_blocks} sinks and "
            f"{span} about the own blocks of a group of {choosing.query_group} queries (with causal at least those)"
            f"; got {smallest}; raise top_k, or lower sink_blocks, window_blocks or select"
        )


def _window_span(choosing: Choosing, seqlen_q: int, seqlen_kv: int) -> int:
    """The most blocks that a group's window can have: those of its own positions, and those before and after."""
    window = max(choosing.window_blocks, 1 if choosing.causal else 0)
    if window == 0 or seqlen_q == 0:
        return 0
    own = _own_blocks(choosing.block_size, choosing.query_group, seqlen_q, seqlen_kv - seqlen_q)
    return own + (window - 1) * (1 if choosing.causal else 2)


def _own_blocks(block_size: int, group: int, seqlen_q: int, offset: int) -> int:
    """The most blocks that the positions of one group lie in."""
    if group == 1:
        return 1
    if group >= seqlen_q:
        return (seqlen_q - 1 + offset) // block_size - max(offset, 0) // block_size + 1
    # Groups begin at every place in a block that is `offset` modulo this.
    step, rest = block_size, group
    while rest:  # math.gcd does not trace
        step, rest = rest, step % rest
    return (block_size - step + offset % step + group - 1) // block_size + 1
