"""The normal form of a mask: the few terms kernels are compiled for, exact for every mask the algebra can write.

    bound & document & (window | stride | tokens | or_blocks) & and_blocks & and_bits

Bands intersect into `bound`; an `|` of bands, strides, token lists and block masks stays a bracket;
block masks under `&` become `and_blocks`. Whatever has no native term (a document inside `|`, a second bracket, an
`&` nested in `|`, token masks) is evaluated pair by pair into `and_bits`, in chunks, when a plan first needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import MaskClass
from tilewright.runtime.mask_algebra import (
    Conjunction,
    Disjunction,
    as_mask,
    conjunction,
    intersection_of_keys,
    merged_blocks,
)
from tilewright.runtime.mask_bits import pack_rows
from tilewright.runtime.mask_density import density_of
from tilewright.runtime.mask_terms import (
    And,
    Band,
    BlockMask,
    Document,
    GlobalStride,
    GlobalTokens,
    Mask,
    ceil_div,
)


@dataclass(frozen=True, eq=False)
class CanonicalMask:
    """A mask taken apart into the terms of `problem.MASK_TERMS`, for lengths seqlen_q x seqlen_kv.

    mask: the mask itself; None is dense attention.
    bound, window: (left, right), `UNBOUNDED` where a side is open; None where absent.
    row_begin, row_end: [1, seqlen_q] int32, the keys of each query's document; None where absent.
    stride: keys that are multiples of it; 0 where absent. tokens: unique ascending keys.
    or_blocks, and_blocks: at most one of them, because they share the kernel's arguments.
    residual: what has no native term; its bits are the term `and_bits`.
    """

    mask: Mask | None
    seqlen_q: int
    seqlen_kv: int
    bound: tuple[int, int] | None = None
    row_begin: Tensor | None = None
    row_end: Tensor | None = None
    window: tuple[int, int] | None = None
    stride: int = 0
    tokens: GlobalTokens | None = None
    or_blocks: BlockMask | None = None
    and_blocks: BlockMask | None = None
    residual: Mask | None = None
    _bits: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @property
    def terms(self) -> tuple[str, ...]:
        """The terms present, in the order of `MASK_TERMS`."""
        present = {
            "bound": self.bound is not None,
            "document": self.row_begin is not None,
            "window": self.window is not None,
            "stride": self.stride > 0,
            "tokens": self.tokens is not None,
            "or_blocks": self.or_blocks is not None,
            "and_blocks": self.and_blocks is not None,
            "and_bits": self.residual is not None,
        }
        return tuple(name for name, is_there in present.items() if is_there)

    @property
    def structure(self) -> str:
        """The mask in words, its data left out: one text for every way of writing the same mask."""
        bracket = [
            *([Band(*self.window).structure] if self.window is not None else []),
            *([GlobalStride(self.stride).structure] if self.stride else []),
            *(part.structure for part in (self.tokens, self.or_blocks) if part is not None),
        ]
        factors = [
            *([Band(*self.bound).structure] if self.bound is not None else []),
            *(["document()"] if self.row_begin is not None else []),
            *([" | ".join(bracket)] if bracket else []),
            *(part.structure for part in (self.and_blocks, self.residual) if part is not None),
        ]
        if len(factors) > 1:
            factors = [f"({factor})" if " | " in factor or " & " in factor else factor for factor in factors]
        return " & ".join(factors) or "dense"

    @property
    def blocks(self) -> BlockMask | None:
        """`or_blocks` or `and_blocks`, whichever there is."""
        return self.and_blocks if self.or_blocks is None else self.or_blocks

    @property
    def materialised_bytes(self) -> int:
        """Device memory that `and_bits` takes: the only part of a canonical mask that grows with N x N."""
        if self.residual is None:
            return 0
        batch, num_heads = self.residual.lead
        return batch * num_heads * self.seqlen_q * ceil_div(self.seqlen_kv, 32) * 4

    def and_bits(self, device: torch.device) -> Tensor:
        """The residual as int32 [B|1, H|1, seqlen_q, ceil(seqlen_kv / 32)] on `device`, evaluated once."""
        assert self.residual is not None
        if device not in self._bits:
            self._bits[device] = pack_rows(self.residual, self.seqlen_q, self.seqlen_kv, device)
        return self._bits[device]


def canonical(mask: Mask | None, seqlen_q: int, seqlen_kv: int) -> CanonicalMask:
    """The normal form of `mask`, which must have passed `check` for these lengths.

    Makes no host sync (except for `global_tokens` written inside a compiled function, which are sorted here) and
    nothing of size N x N; `and_bits` are evaluated later, where a plan asks for them.
    """
    if mask is None:
        return CanonicalMask(None, seqlen_q, seqlen_kv)
    whole = conjunction(mask, seqlen_kv)
    documents = [f for f in whole.factors if isinstance(f, Document)]
    key_sets = [f for f in whole.factors if isinstance(f, (GlobalStride, GlobalTokens))]
    brackets = [b for f in whole.factors if (b := _bracket(f)) is not None]
    blocks = [f for f in whole.factors if isinstance(f, BlockMask)]
    if key_sets:
        brackets.insert(0, Disjunction([Conjunction(factors=[intersection_of_keys(key_sets)])]))
    left_over: list[Mask] = [as_mask(b) for b in brackets[1:]]
    left_over += [as_mask(f) for f in whole.factors if _has_no_term(f)]
    bracket = _Bracket.of(brackets[0]) if brackets else _Bracket()
    and_blocks: BlockMask | None = None
    for block in blocks:
        merged = None
        if bracket.blocks is None:
            merged = block if and_blocks is None else merged_blocks(and_blocks, block, intersect=True)
        if merged is None:
            left_over.append(block)
        else:
            and_blocks = merged
    row_begin, row_end = _row_ranges(documents, seqlen_q, seqlen_kv) if documents else (None, None)
    _check_tokens(bracket.tokens, seqlen_kv)
    return CanonicalMask(
        mask,
        seqlen_q,
        seqlen_kv,
        bound=whole.band,
        row_begin=row_begin,
        row_end=row_end,
        window=bracket.window,
        stride=bracket.stride,
        tokens=bracket.tokens,
        or_blocks=bracket.blocks,
        and_blocks=and_blocks,
        residual=reduce(And, left_over) if left_over else None,
    )


def mask_class(mask: Mask | None, batch: int, num_heads: int, seqlen_q: int, seqlen_kv: int) -> MaskClass:
    """What kind of mask this is, for the look-up of a kernel; no host sync, nothing N x N for structured masks.

    density: to two significant digits, so that another draw of the same kind is the same problem; exact where counting
    takes O(N), estimated from rows otherwise, None for a mask whose data is not on the CPU.
    """
    if mask is None:
        return MaskClass()
    form = canonical(mask, seqlen_q, seqlen_kv)
    mask_batch, mask_heads = mask.lead
    return MaskClass(
        terms=form.terms,
        structure=form.structure,
        per_head=mask_heads > 1,
        per_batch=mask_batch > 1,
        density=density_of(form),
    )


@dataclass
class _Bracket:
    """(window | stride | tokens | or_blocks), each at most once."""

    window: tuple[int, int] | None = None
    stride: int = 0
    tokens: GlobalTokens | None = None
    blocks: BlockMask | None = None

    @classmethod
    def of(cls, group: Disjunction) -> _Bracket:
        found = cls()
        for term in group.terms:
            match term.only_factor:
                case None:
                    found.window = term.band
                case GlobalStride(stride=stride):
                    found.stride = stride
                case GlobalTokens() as tokens:
                    found.tokens = tokens
                case BlockMask() as blocks:
                    found.blocks = blocks
        return found


def _bracket(factor: Mask | Disjunction) -> Disjunction | None:
    """`factor` as a group that the native bracket can hold, or None; single key sets are joined elsewhere."""
    if not isinstance(factor, Disjunction):
        return None
    kinds = [_bracket_kind(t) for t in factor.terms]
    return factor if None not in kinds and len(set(kinds)) == len(kinds) else None


def _bracket_kind(term: Conjunction) -> type[Mask] | None:
    """Which slot of the bracket a term takes; None where there is none for it."""
    if not term.factors:
        return Band
    match term.only_factor:
        case GlobalStride() | GlobalTokens() | BlockMask() as factor:
            return type(factor)
    return None


def _has_no_term(factor: Mask | Disjunction) -> bool:
    return _bracket(factor) is None and not isinstance(factor, (Document, GlobalStride, GlobalTokens, BlockMask))


def _row_ranges(documents: list[Document], seqlen_q: int, seqlen_kv: int) -> tuple[Tensor, Tensor]:
    """First and one-past-last key of each query: two int32 [1, seqlen_q]; equal where it has none."""
    begins, ends = [], []
    for document in documents:
        q = torch.arange(seqlen_q, device=document.cu_seqlens_q.device)
        segment = torch.searchsorted(document.cu_seqlens_q.long(), q, right=True)
        last = document.cu_seqlens_q.shape[0] - 1
        inside = (segment > 0) & (segment <= last)
        segment = segment.clamp(1, last)
        begins.append(document.cu_seqlens_kv[segment - 1] * inside)
        ends.append(document.cu_seqlens_kv[segment] * inside)
    begin = reduce(torch.maximum, begins).clamp(0, seqlen_kv)
    # Queries past the last document keep an empty range instead of reading past the keys.
    end = torch.maximum(reduce(torch.minimum, ends).clamp(max=seqlen_kv), begin)
    return begin.to(torch.int32)[None], end.to(torch.int32)[None]


def _check_tokens(tokens: GlobalTokens | None, seqlen_kv: int) -> None:
    """Indices that could only be read on the host after sorting are checked here, before a kernel gathers them."""
    if tokens is None or tokens.host is None or not tokens.host.numel():
        return
    lowest, highest = int(tokens.host[0]), int(tokens.host[-1])
    if lowest < 0 or highest >= seqlen_kv:
        wrong = lowest if lowest < 0 else highest
        raise InvalidInput(f"global_tokens must lie in 0 .. {seqlen_kv - 1} (seqlen_kv - 1), got {wrong}")
