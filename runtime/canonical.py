"""The normal form of a mask: the few terms kernels are compiled for, exact for every mask the algebra can write.

    bound & document & (window | stride | tokens | or_blocks) & and_blocks & and_bits

Bands intersect into `bound`; an `|` of at most one band, one stride, one token list and one block mask stays a bracket;
block masks under `&` become `and_blocks`. Whatever has no native term (a document inside `|`, a second bracket, an
`&` nested in `|`, token masks) is evaluated pair by pair into `and_bits`, in chunks, when a plan first needs it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from tilewright.generator.abi import UNBOUNDED
from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import MaskClass
from tilewright.runtime.mask_bits import pack_rows
from tilewright.runtime.mask_density import density_of
from tilewright.runtime.mask_terms import (
    And,
    Band,
    BlockMask,
    Document,
    Full,
    GlobalStride,
    GlobalTokens,
    Mask,
    Or,
    as_4d,
    ceil_div,
)

REFINE_LIMIT = 64
"""Block masks of two granularities are refined to a common one of at least this many pairs a block; below it the
refined bools would cost more than the bits of `and_bits` that replace them."""


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
    whole = _conjunction(mask)
    documents = [f for f in whole.factors if isinstance(f, Document)]
    strides = [f.stride for f in whole.factors if isinstance(f, GlobalStride)]
    brackets = [b for f in whole.factors if (b := _bracket(f)) is not None]
    blocks = [f for f in whole.factors if isinstance(f, BlockMask)]
    if strides:
        # A key that is a multiple of each stride is a multiple of their lcm; past the last key only key 0 is left.
        common = min(math.lcm(*strides), UNBOUNDED)
        brackets.insert(0, _Disjunction([_Conjunction(factors=[GlobalStride(common)])]))
    left_over: list[Mask] = [_as_mask(b) for b in brackets[1:]]
    left_over += [_as_mask(f) for f in whole.factors if _has_no_term(f)]
    bracket = _Bracket.of(brackets[0]) if brackets else _Bracket()
    and_blocks: BlockMask | None = None
    for block in blocks:
        merged = None
        if bracket.blocks is None:
            merged = block if and_blocks is None else _merged(and_blocks, block, intersect=True)
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
        structure=mask.structure,
        per_head=mask_heads > 1,
        per_batch=mask_batch > 1,
        density=density_of(form),
    )


@dataclass
class _Conjunction:
    """A band and factors under `&`; without any, every pair."""

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    factors: list[Mask | _Disjunction] = field(default_factory=list)

    @property
    def band(self) -> tuple[int, int] | None:
        return None if self.left == self.right == UNBOUNDED else (self.left, self.right)

    @property
    def only_factor(self) -> Mask | _Disjunction | None:
        """The factor, where there is one and nothing else."""
        return self.factors[0] if self.band is None and len(self.factors) == 1 else None

    @property
    def is_full(self) -> bool:
        return self.band is None and not self.factors


@dataclass
class _Disjunction:
    """Conjunctions under `|`."""

    terms: list[_Conjunction]


def _conjunction(mask: Mask) -> _Conjunction:
    """`mask` with `&` flattened, bands merged, and `|` reduced as far as it goes."""
    if isinstance(mask, Full):
        return _Conjunction()
    if isinstance(mask, Band):
        return _Conjunction(mask.left, mask.right)
    if isinstance(mask, GlobalStride):
        return _Conjunction(factors=[] if mask.stride == 1 else [mask])
    if isinstance(mask, GlobalTokens):
        return _Conjunction(factors=[mask.sorted()])
    if isinstance(mask, And):
        one, two = _conjunction(mask.first), _conjunction(mask.second)
        return _Conjunction(min(one.left, two.left), min(one.right, two.right), one.factors + two.factors)
    if isinstance(mask, Or):
        return _disjunction([_conjunction(mask.first), _conjunction(mask.second)])
    return _Conjunction(factors=[mask])


def _disjunction(operands: list[_Conjunction]) -> _Conjunction:
    """`|` of the operands, as a conjunction that may hold one bracket."""
    terms: list[_Conjunction] = []
    for operand in operands:
        inner = operand.only_factor
        terms += inner.terms if isinstance(inner, _Disjunction) else [operand]
    bands = [t for t in terms if not t.factors]
    if bands:
        # Every band holds its query's own position, so their union is again a band.
        widest = _Conjunction(max(t.left for t in bands), max(t.right for t in bands))
        terms = [widest, *(t for t in terms if t.factors)]
    # What bounds every operand bounds the whole: (band & a) | (band & b) is band & (a | b).
    left, right = max(t.left for t in terms), max(t.right for t in terms)
    terms = [
        _Conjunction(
            UNBOUNDED if t.left == left else t.left, UNBOUNDED if t.right == right else t.right, list(t.factors)
        )
        for t in terms
    ]
    if any(t.is_full for t in terms):
        return _Conjunction(left, right)
    terms = _merged_terms(terms)
    if len(terms) == 1:
        only = terms[0]
        return _Conjunction(min(left, only.left), min(right, only.right), only.factors)
    return _Conjunction(left, right, [_Disjunction(terms)])


def _merged_terms(terms: list[_Conjunction]) -> list[_Conjunction]:
    """The terms of an `|` with strides that cover each other, token lists and block masks joined."""
    strides: list[int] = []
    tokens: list[GlobalTokens] = []
    blocks: list[BlockMask] = []
    others: list[_Conjunction] = []
    for term in terms:
        match term.only_factor:
            case GlobalStride(stride=stride):
                if not any(stride % s == 0 for s in strides):
                    strides = [s for s in strides if s % stride] + [stride]
            case GlobalTokens() as listed:
                tokens.append(listed)
            case BlockMask() as block:
                for i, other in enumerate(blocks):
                    if (merged := _merged(other, block, intersect=False)) is not None:
                        blocks[i] = merged
                        break
                else:
                    blocks.append(block)
            case _:
                others.append(term)
    if len(tokens) > 1:
        tokens = [_union_of_tokens(tokens)]
    factors: list[Mask] = [*(GlobalStride(s) for s in strides), *tokens, *blocks]
    return others + [_Conjunction(factors=[f]) for f in factors]


def _union_of_tokens(tokens: list[GlobalTokens]) -> GlobalTokens:
    host = torch.unique(torch.cat([t.on_host() for t in tokens]))
    return GlobalTokens(host.to(tokens[0].indices.device, non_blocking=True), True, host)


@dataclass
class _Bracket:
    """(window | stride | tokens | or_blocks), each at most once."""

    window: tuple[int, int] | None = None
    stride: int = 0
    tokens: GlobalTokens | None = None
    blocks: BlockMask | None = None

    @classmethod
    def of(cls, group: _Disjunction) -> _Bracket:
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


def _bracket(factor: Mask | _Disjunction) -> _Disjunction | None:
    """`factor` as a group that the native bracket can hold, or None; single strides are joined elsewhere."""
    if isinstance(factor, GlobalTokens):
        return _Disjunction([_Conjunction(factors=[factor])])
    if not isinstance(factor, _Disjunction):
        return None
    kinds = [_bracket_kind(t) for t in factor.terms]
    return factor if None not in kinds and len(set(kinds)) == len(kinds) else None


def _bracket_kind(term: _Conjunction) -> type[Mask] | None:
    """Which slot of the bracket a term takes; None where there is none for it."""
    if not term.factors:
        return Band
    match term.only_factor:
        case GlobalStride() | GlobalTokens() | BlockMask() as factor:
            return type(factor)
    return None


def _has_no_term(factor: Mask | _Disjunction) -> bool:
    return _bracket(factor) is None and not isinstance(factor, (Document, GlobalStride, BlockMask))


def _as_mask(part: Mask | _Disjunction | _Conjunction) -> Mask:
    """A part of the normal form as a mask again."""
    if isinstance(part, _Disjunction):
        return reduce(Or, [_as_mask(t) for t in part.terms])
    if isinstance(part, _Conjunction):
        band: list[Mask] = [] if part.band is None else [Band(*part.band)]
        return reduce(And, [*band, *(_as_mask(f) for f in part.factors)])
    return part


def _merged(one: BlockMask, two: BlockMask, *, intersect: bool) -> BlockMask | None:
    """`one & two` or `one | two` as one block mask; None where their common granularity is too fine for that."""
    size_q = math.gcd(one.sparse_block_q, two.sparse_block_q)
    size_kv = math.gcd(one.sparse_block_kv, two.sparse_block_kv)
    same = (one.sparse_block_q, one.sparse_block_kv) == (two.sparse_block_q, two.sparse_block_kv)
    if not same and size_q * size_kv < REFINE_LIMIT:
        return None
    first, second = _refined(one, size_q, size_kv), _refined(two, size_q, size_kv)
    # The coarser of the two may have been cut past the last token, so the shorter grid is the whole one.
    rows, columns = min(first.shape[2], second.shape[2]), min(first.shape[3], second.shape[3])
    first, second = first[:, :, :rows, :columns], second[:, :, :rows, :columns]
    return BlockMask(first & second if intersect else first | second, size_q, size_kv)


def _refined(mask: BlockMask, size_q: int, size_kv: int) -> Tensor:
    """`mask` on a grid of smaller blocks that divide its own: bool [B|1, H|1, rows, columns]."""
    return (
        as_4d(mask.active)
        .repeat_interleave(mask.sparse_block_q // size_q, 2)
        .repeat_interleave(mask.sparse_block_kv // size_kv, 3)
    )


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
