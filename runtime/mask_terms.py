"""The terms masks are made of, each with its definition; `tilewright.runtime.masks` holds their constructors."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewright.generator.abi import UNBOUNDED
from tilewright.generator.errors import InvalidInput


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Base of all masks; compared by identity, because tensors have no cheap equality.

    spec: text that names the mask, tensors by index: `(sliding_window(32, 32) | block_mask(#0, 64, 64))`.
    tensors: what `#0`, `#1`, ... in `spec` stand for.
    """

    spec: str = field(init=False)
    tensors: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", self._tensors())
        object.__setattr__(self, "spec", self._text(0))

    def __and__(self, other: Mask) -> Mask:
        return And(self, _as_mask(other))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _as_mask(other))

    def __rand__(self, other: Any) -> Mask:
        return And(_as_mask(other), self)

    def __ror__(self, other: Any) -> Mask:
        return Or(_as_mask(other), self)

    def __repr__(self) -> str:
        return self.spec

    @property
    def lead(self) -> tuple[int, int]:
        """How many (batch entries, heads) the mask tells apart: 1 where they share it."""
        return (1, 1)

    def dense(
        self, batch: int, num_heads: int, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu"
    ) -> Tensor:
        """The mask as bool [B|1, H|1, seqlen_q, seqlen_kv], True where active; raises what `check` raises."""
        return self.dense_rows(batch, num_heads, seqlen_q, seqlen_kv, device, 0, seqlen_q)

    def dense_rows(
        self,
        batch: int,
        num_heads: int,
        seqlen_q: int,
        seqlen_kv: int,
        device: torch.device | str,
        q_start: int,
        q_stop: int,
    ) -> Tensor:
        """Query rows q_start to q_stop - 1 of `dense`: bool [B|1, H|1, q_stop - q_start, seqlen_kv]."""
        self.check(batch, num_heads, seqlen_q, seqlen_kv, device)
        return self.rows(seqlen_q, seqlen_kv, torch.device(device), q_start, q_stop)

    def rows(self, seqlen_q: int, seqlen_kv: int, device: torch.device, q_start: int, q_stop: int) -> Tensor:
        """`dense_rows` of a mask that was checked before; makes no host sync."""
        q = torch.arange(q_start, q_stop, device=device).unsqueeze(1)
        k = torch.arange(seqlen_kv, device=device).unsqueeze(0)
        active = self.pairs(q, k, seqlen_q, seqlen_kv)
        return active.expand(*active.shape[:-2], q_stop - q_start, seqlen_kv)

    def check(
        self, batch: int, num_heads: int, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu"
    ) -> None:
        """Raise `InvalidInput` unless the mask fits a call of this shape on this device.

        Values are read only where that needs no host sync, so not those of `document` on a GPU, nor while tracing.
        """

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on `device`."""
        from tilewright.runtime.masks import from_spec

        return from_spec(self.spec, tuple(t.to(device) for t in self.tensors))

    def _tensors(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def structure(self) -> str:
        """`spec` without its data: `block_mask(64, 64)`, `global_tokens(16)` for sixteen tokens, `document()`."""

        def count(found: re.Match[str]) -> str:
            return f"global_tokens({self.tensors[int(found[1])].shape[0]})"

        text = re.sub(r"#\d+(, )?", "", re.sub(r"global_tokens\(#(\d+)(?:, unsorted)?\)", count, self.spec))
        return text[1:-1] if text.startswith("(") else text

    def _text(self, first: int) -> str:
        """`spec` with tensors numbered from `first`."""
        raise NotImplementedError

    def pairs(self, q: Tensor, k: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
        """bool [B|1, H|1, rows|1, keys] for query rows q [rows, 1] and all keys k [1, keys]."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class Full(Mask):
    """Every pair."""

    def _text(self, first: int) -> str:
        return "full()"

    def pairs(self, q: Tensor, k: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
        return torch.ones_like(k, dtype=torch.bool)[None, None]


@dataclass(frozen=True, eq=False, repr=False)
class Band(Mask):
    """Keys from position - left to position + right, inclusive; a side of `UNBOUNDED` does not restrict."""

    left: int
    right: int

    def _text(self, first: int) -> str:
        if self.left == UNBOUNDED and self.right == 0:
            return "causal()"
        return f"sliding_window({_side_text(self.left)}, {_side_text(self.right)})"

    def pairs(self, q: Tensor, k: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
        position = q + (seqlen_kv - seqlen_q)
        active = torch.ones_like(k, dtype=torch.bool)
        if self.left != UNBOUNDED:
            active = active & (k >= position - self.left)
        if self.right != UNBOUNDED:
            active = active & (k <= position + self.right)
        return active[None, None]


@dataclass(frozen=True, eq=False, repr=False)
class GlobalStride(Mask):
    """Keys k with k % stride == 0, for every query."""

    stride: int

    def _text(self, first: int) -> str:
        return f"global_stride({self.stride})"

    def pairs(self, q: Tensor, k: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
        return (k % self.stride == 0)[None, None]


@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(Mask):
    """The listed keys, for every query.

    indices: 1-D int32, ascending and unique when `is_sorted`.
    host: the same on the CPU where known, so that counts and limits need no host sync.
    """

    indices: Tensor
    is_sorted: bool = True
    host: Tensor | None = None

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.indices,)

    def _text(self, first: int) -> str:
        return f"global_tokens(#{first})" if self.is_sorted else f"global_tokens(#{first}, unsorted)"

    def sorted(self) -> GlobalTokens:
        """The same mask with unique ascending indices; a host sync if they are not so already."""
        return self if self.is_sorted else sorted_tokens(self.indices)

    def on_host(self) -> Tensor:
        """The indices on the CPU; a host sync only for a mask that came from a spec."""
        if self.host is None:
            object.__setattr__(self, "host", self.indices.cpu())
        assert self.host is not None
        return self.host

    def to(self, device: torch.device | str) -> Mask:
        return GlobalTokens(self.indices.to(device), self.is_sorted, self.host)

    def key_flags(self, seqlen_kv: int, device: torch.device) -> Tensor:
        """bool [seqlen_kv], True for the listed keys."""
        flags = torch.zeros(seqlen_kv, dtype=torch.bool, device=device)
        return flags.index_fill_(0, self.indices.to(device, torch.int64, non_blocking=True), True)

    def check(
        self, batch: int, num_heads: int, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu"
    ) -> None:
        if self.indices.device.type != "cpu":
            _check_device("global_tokens", self.indices, device)
        known = self.indices if self.host is None and self.indices.device.type == "cpu" else self.host
        if known is not None and known.numel() and not torch.compiler.is_compiling():
            lowest, highest = int(known.min()), int(known.max())
            if lowest < 0 or highest >= seqlen_kv:
                wrong = lowest if lowest < 0 else highest
                raise InvalidInput(f"global_tokens must lie in 0 .. {seqlen_kv - 1} (seqlen_kv - 1), got {wrong}")

    def pairs(self, q: Tensor, k: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
        return self.key_flags(seqlen_kv, k.device)[None, None, None]


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask(Mask):
    """Pairs whose block is True; a block is sparse_block_q query rows by sparse_block_kv keys.

    active: bool [..., blocks_q, blocks_kv] with up to [batch, heads] in front, each 1 or full.
    """

    active: Tensor
    sparse_block_q: int
    sparse_block_kv: int

    @property
    def lead(self) -> tuple[int, int]:
        return _lead(self.active)

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.active,)

    def _text(self, first: int) -> str:
        return f"block_mask(#{first}, {self.sparse_block_q}, {self.sparse_block_kv})"

    def check(
        self, batch: int, num_heads: int, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu"
    ) -> None:
        _check_device("block_mask", self.active, device)
        _check_lead("block_mask", self.active, batch, num_heads)
        needed = (ceil_div(seqlen_q, self.sparse_block_q), ceil_div(seqlen_kv, self.sparse_block_kv))
        if tuple(self.active.shape[-2:]) != needed:
            raise InvalidInput(
                f"block_mask with blocks of {self.sparse_block_q}x{self.sparse_block_kv} for lengths "
                f"{seqlen_q}x{seqlen_kv} must end in [{needed[0]}, {needed[1]}] blocks, "
                f"got {list(self.active.shape)}"
            )

    def pairs(self, q: Tensor, k: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
        rows = as_4d(self.active).index_select(2, q[:, 0] // self.sparse_block_q)
        return rows.index_select(3, k[0] // self.sparse_block_kv)


@dataclass(frozen=True, eq=False, repr=False)
class Document(Mask):
    """Pairs in the same segment; segment j holds queries cu_seqlens_q[j] to cu_seqlens_q[j + 1] - 1, keys likewise."""

    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor

    def _tensors(self) -> tuple[Tensor, ...]:
        if self.cu_seqlens_kv is self.cu_seqlens_q:
            return (self.cu_seqlens_q,)
        return (self.cu_seqlens_q, self.cu_seqlens_kv)

    def _text(self, first: int) -> str:
        same = self.cu_seqlens_kv is self.cu_seqlens_q
        return f"document(#{first})" if same else f"document(#{first}, #{first + 1})"

    def check(
        self, batch: int, num_heads: int, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu"
    ) -> None:
        for name, cu_seqlens, length in (
            ("cu_seqlens", self.cu_seqlens_q, seqlen_q),
            ("cu_seqlens_kv", self.cu_seqlens_kv, seqlen_kv),
        ):
            _check_device(f"document's {name}", cu_seqlens, device)
            if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
                continue
            first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
            if first != 0 or last != length or bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
                advice = "" if name == "cu_seqlens_kv" or seqlen_q == seqlen_kv else "; pass cu_seqlens_kv for the keys"
                raise InvalidInput(f"document's {name} must ascend from 0 to {length}, got {_some(cu_seqlens)}{advice}")

    def pairs(self, q: Tensor, k: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
        q_segment = torch.searchsorted(self.cu_seqlens_q.to(q.dtype), q, right=True)
        k_segment = torch.searchsorted(self.cu_seqlens_kv.to(k.dtype), k, right=True)
        inside = (q_segment > 0) & (q_segment < self.cu_seqlens_q.shape[0])
        return ((q_segment == k_segment) & inside)[None, None]


@dataclass(frozen=True, eq=False, repr=False)
class TokenMask(Mask):
    """Pairs that are True in `active`: bool [..., seqlen_q, seqlen_kv], up to [batch, heads] in front."""

    active: Tensor

    @property
    def lead(self) -> tuple[int, int]:
        return _lead(self.active)

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.active,)

    def _text(self, first: int) -> str:
        return f"token_mask(#{first})"

    def check(
        self, batch: int, num_heads: int, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu"
    ) -> None:
        _check_device("token_mask", self.active, device)
        _check_lead("token_mask", self.active, batch, num_heads)
        if tuple(self.active.shape[-2:]) != (seqlen_q, seqlen_kv):
            raise InvalidInput(
                f"token_mask must end in [seqlen_q, seqlen_kv] = [{seqlen_q}, {seqlen_kv}], "
                f"got {list(self.active.shape)}"
            )

    def pairs(self, q: Tensor, k: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
        return as_4d(self.active).index_select(2, q[:, 0])


@dataclass(frozen=True, eq=False, repr=False)
class PackedMask(Mask):
    """A token mask in bits: int32 [..., seqlen_q, ceil(seqlen_kv / 32)], bit k % 32 of word k / 32 for key k."""

    words: Tensor
    seqlen_kv: int

    @property
    def lead(self) -> tuple[int, int]:
        return _lead(self.words)

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.words,)

    def _text(self, first: int) -> str:
        return f"packed_mask(#{first}, {self.seqlen_kv})"

    def check(
        self, batch: int, num_heads: int, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu"
    ) -> None:
        _check_device("packed_mask", self.words, device)
        _check_lead("packed_mask", self.words, batch, num_heads)
        if self.words.shape[-2] != seqlen_q or self.seqlen_kv != seqlen_kv:
            raise InvalidInput(
                f"the mask was made for lengths {self.words.shape[-2]}x{self.seqlen_kv}, "
                f"got seqlen_q x seqlen_kv = {seqlen_q}x{seqlen_kv}; build it again for these lengths"
            )

    def pairs(self, q: Tensor, k: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
        words = as_4d(self.words).index_select(2, q[:, 0]).index_select(3, k[0] // 32)
        return ((words >> (k % 32).to(torch.int32)) & 1) != 0


@dataclass(frozen=True, eq=False, repr=False)
class _Pair(Mask):
    """Two masks under one operator."""

    first: Mask
    second: Mask

    @property
    def lead(self) -> tuple[int, int]:
        (batch_1, heads_1), (batch_2, heads_2) = self.first.lead, self.second.lead
        return max(batch_1, batch_2), max(heads_1, heads_2)

    def to(self, device: torch.device | str) -> Mask:
        return type(self)(self.first.to(device), self.second.to(device))

    def check(
        self, batch: int, num_heads: int, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu"
    ) -> None:
        self.first.check(batch, num_heads, seqlen_q, seqlen_kv, device)
        self.second.check(batch, num_heads, seqlen_q, seqlen_kv, device)

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.first.tensors + self.second.tensors


@dataclass(frozen=True, eq=False, repr=False)
class And(_Pair):
    """Pairs active in both masks."""

    def _text(self, first: int) -> str:
        return f"({self.first._text(first)} & {self.second._text(first + len(self.first.tensors))})"

    def pairs(self, q: Tensor, k: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
        return self.first.pairs(q, k, seqlen_q, seqlen_kv) & self.second.pairs(q, k, seqlen_q, seqlen_kv)


@dataclass(frozen=True, eq=False, repr=False)
class Or(_Pair):
    """Pairs active in either mask."""

    def _text(self, first: int) -> str:
        return f"({self.first._text(first)} | {self.second._text(first + len(self.first.tensors))})"

    def pairs(self, q: Tensor, k: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor:
        return self.first.pairs(q, k, seqlen_q, seqlen_kv) | self.second.pairs(q, k, seqlen_q, seqlen_kv)


def ceil_div(value: int, divisor: int) -> int:
    """value / divisor rounded up."""
    return -(-value // divisor)


def as_4d(tensor: Tensor) -> Tensor:
    """`tensor` with leading dimensions of 1 up to [batch, heads, ...]."""
    return tensor[(None,) * (4 - tensor.dim())]


def _lead(tensor: Tensor) -> tuple[int, int]:
    shape = (1, 1, *tensor.shape)
    return int(shape[-4]), int(shape[-3])


def _as_mask(value: Any) -> Mask:
    if isinstance(value, Mask):
        return value
    if type(value).__name__ == "BlockMask":
        from tilewright.runtime.masks import from_block_mask

        return from_block_mask(value)
    raise InvalidInput(f"& and | combine masks, got {kind_of(value)}; wrap a bool tensor in token_mask or block_mask")


def _side_text(side: int) -> str:
    return "-1" if side == UNBOUNDED else str(side)


def _some(tensor: Tensor) -> str:
    values = tensor.tolist()
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"


def _check_lead(name: str, tensor: Tensor, batch: int, num_heads: int) -> None:
    got_batch, got_heads = _lead(tensor)
    if got_batch not in (1, batch) or got_heads not in (1, num_heads):
        raise InvalidInput(
            f"{name} must have leading dimensions [batch, heads] = [{batch}, {num_heads}], each that or 1, "
            f"got {list(tensor.shape)}"
        )


def _check_device(name: str, tensor: Tensor, device: torch.device | str) -> None:
    wanted = torch.device(device)
    if tensor.device.type != wanted.type or (wanted.index is not None and tensor.device.index != wanted.index):
        raise InvalidInput(
            f"{name} must be on {wanted} like the query, got {tensor.device}; use mask.to({str(wanted)!r})"
        )


def sorted_tokens(indices: Tensor) -> GlobalTokens:
    """`GlobalTokens` of indices in any order, read once on the host."""
    host = torch.unique(indices.detach().cpu()).to(torch.int32)
    return GlobalTokens(host.to(indices.device, non_blocking=True), True, host)


def kind_of(value: Any) -> str:
    """A value as an error message names it: dtype and shape, or its type."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
