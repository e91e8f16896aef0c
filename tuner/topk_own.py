"""tilewright's attention over chosen blocks as something to be benchmarked: whole, and by stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from torch import Tensor

from tilewright.runtime import masks, topk_stages
from tilewright.runtime.dispatch import DISPATCHER, Choice
from tilewright.runtime.selection import SELECT_BLOCKS, Selection
from tilewright.runtime.topk import topk_attention
from tilewright.tuner.baselines import MASK_SHARE_OF_FREE_MEMORY, free_bytes
from tilewright.tuner.peers import ANOTHER, Call, Ready, Setting

Lists = tuple[Tensor, Tensor]

Computes = Literal["topk", "choice", "attention", "dense", "window"]
"""What an implementation gives: the whole; the lists; attention over given lists; dense attention; that of a window."""


@dataclass(frozen=True, eq=False)
class TopkCall:
    """One call of attention over chosen blocks.

    query [B, H, N, D], key and value [B, Hkv, N, D]. budgets: blocks for each head, at most as many as there are.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    selection: Selection
    budgets: tuple[int, ...]
    scale: float

    @property
    def num_blocks(self) -> int:
        return self.selection.num_blocks(self.key.shape[2])

    @property
    def is_dense(self) -> bool:
        """Whether every head takes every block, so that dense attention is the function."""
        return min(self.budgets) >= self.num_blocks

    @property
    def dense(self) -> Call:
        """Dense attention of the same tensors."""
        mask = masks.causal() if self.selection.causal else None
        return Call(self.query, self.key, self.value, mask, self.scale)

    @property
    def window(self) -> Call:
        """A sliding window of as many keys as a list of the mean budget has."""
        width = max(1, sum(self.budgets) * self.selection.block_size // len(self.budgets))
        left, right = (width - 1, 0) if self.selection.causal else (width // 2, (width - 1) // 2)
        return replace(self.dense, mask=masks.sliding_window(left, right))

    def choose(self) -> Lists:
        """The lists that tilewright chooses."""
        return topk_stages.choose_blocks(self.query, self.key, self.budgets, self.selection)


@dataclass(frozen=True, eq=False)
class TopkReady(Ready):
    """A prepared call. lists: the choice that `run` makes or was given; None where it makes none."""

    lists: Callable[[], Lists] | None = None


@dataclass(frozen=True, eq=False)
class TopkPeer:
    """An implementation. unfit: why it cannot answer a call, or None. settings: as `Peer.settings`, of `TopkReady`.

    is_rounded: it ranks scores that are rounded to the tensors' dtype, and may choose otherwise where they are close.
    """

    name: str
    computes: Computes
    unfit: Callable[[TopkCall], str | None]
    settings: Callable[[TopkCall], Iterator[Setting]]
    is_rounded: bool = field(default=False)


def own_parts() -> dict[str, TopkPeer]:
    """tilewright whole, and its two stages alone."""
    parts = [
        TopkPeer("tilewright", "topk", lambda call: None, _whole_settings),
        TopkPeer("tilewright_stage1", "choice", nothing_to_choose, _stage1_settings),
        TopkPeer("tilewright_stage2", "attention", nothing_to_choose, _stage2_settings),
    ]
    return {part.name: part for part in parts}


def nothing_to_choose(call: TopkCall) -> str | None:
    return "the budgets take every block, so nothing is chosen" if call.is_dense else None


def _said(choice: Choice) -> str:
    return f"{'PyTorch' if choice.spec is None else choice.spec.name} ({choice.reason})"


def _stage1_choice(call: TopkCall) -> str:
    return _said(DISPATCHER.stage(SELECT_BLOCKS, call.query, call.key, call.selection).choice)


def _stage2_choice(call: TopkCall, lists: Lists) -> str:
    return _said(topk_stages.attention_choice(call.query, call.key, *lists, call.selection))


def _topk_attention(call: TopkCall) -> Tensor:
    out = topk_attention(
        call.query,
        call.key,
        call.value,
        block_size=call.selection.block_size,
        top_k=call.budgets,
        causal=call.selection.causal,
        scale=call.scale,
    )
    assert isinstance(out, Tensor)
    return out


def _whole_settings(call: TopkCall) -> Iterator[Setting]:
    if call.is_dense:
        choice = DISPATCHER.prepare(call.query, call.key, call.value, call.dense.mask).choice
        yield Setting(f"every block: {_said(choice)}", lambda: TopkReady(partial(_topk_attention, call)))
        return
    name = f"{_stage1_choice(call)}; {_stage2_choice(call, call.choose())}"
    yield Setting(name, lambda: TopkReady(partial(_topk_attention, call), 0, call.choose))


def _stage1_settings(call: TopkCall) -> Iterator[Setting]:
    name = f"stage 1 alone: {ANOTHER}, {_stage1_choice(call)}"
    yield Setting(name, lambda: TopkReady(lambda: call.choose()[1], 0, call.choose))


def _stage2_settings(call: TopkCall) -> Iterator[Setting]:
    lists = call.choose()

    def run() -> Tensor:
        query, key, value = call.query, call.key, call.value
        budgets = topk_stages.different(call.budgets)
        return topk_stages.attend_chosen(query, key, value, *lists, call.selection, call.scale, budgets)[0]

    name = f"stage 2 alone: {ANOTHER}, {_stage2_choice(call, lists)}"
    yield Setting(name, lambda: TopkReady(run, 0, lambda: lists))


def too_large(call: TopkCall, what: str, needed: int) -> str | None:
    room = MASK_SHARE_OF_FREE_MEMORY * free_bytes(call.query.device)
    if needed <= room:
        return None
    return f"{what} would take {needed / 2**30:.1f} GiB; at most {room / 2**30:.1f} GiB of what is free are given to it"
