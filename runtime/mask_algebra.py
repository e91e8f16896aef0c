"""Mask expressions reduced: `&` flattened, bands merged, common factors drawn out of `|`, without touching any pair."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from tilewright.generator.abi import UNBOUNDED
from tilewright.runtime.mask_terms import And, Band, BlockMask, Full, GlobalStride, GlobalTokens, Mask, Or, as_4d

REFINE_LIMIT = 64
"""Block masks of two granularities are refined to a common one of at least this many pairs a block; below it the
refined bools would cost more than the bits of `and_bits` that replace them."""


@dataclass
class Conjunction:
    """A band and factors under `&`; without any, every pair."""

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    factors: list[Mask | Disjunction] = field(default_factory=list)

    @property
    def band(self) -> tuple[int, int] | None:
        return None if self.left == self.right == UNBOUNDED else (self.left, self.right)

    @property
    def only_factor(self) -> Mask | Disjunction | None:
        """The factor, where there is one and nothing else."""
        return self.factors[0] if self.band is None and len(self.factors) == 1 else None

    @property
    def is_full(self) -> bool:
        return self.band is None and not self.factors


@dataclass
class Disjunction:
    """Conjunctions under `|`."""

    terms: list[Conjunction]


def conjunction(mask: Mask, seqlen_kv: int) -> Conjunction:
    """`mask` with `&` flattened, bands merged, and `|` reduced as far as it goes."""
    if isinstance(mask, Full):
        return Conjunction()
    if isinstance(mask, Band):
        return Conjunction(mask.left, mask.right)
    if isinstance(mask, GlobalStride):
        return Conjunction(factors=[] if mask.stride == 1 else [mask])
    if isinstance(mask, GlobalTokens):
        return Conjunction(factors=[mask.sorted()])
    if isinstance(mask, And):
        one, two = conjunction(mask.first, seqlen_kv), conjunction(mask.second, seqlen_kv)
        return Conjunction(min(one.left, two.left), min(one.right, two.right), one.factors + two.factors)
    if isinstance(mask, Or):
        return _disjunction([conjunction(mask.first, seqlen_kv), conjunction(mask.second, seqlen_kv)], seqlen_kv)
    return Conjunction(factors=[mask])


def _disjunction(operands: list[Conjunction], seqlen_kv: int) -> Conjunction:
    """`|` of the operands, as a conjunction that may hold one bracket."""
    terms: list[Conjunction] = []
    for operand in operands:
        inner = operand.only_factor
        terms += inner.terms if isinstance(inner, Disjunction) else [operand]
    bands = [t for t in terms if not t.factors]
    if bands:
        # Every band holds its query's own position, so their union is again a band.
        widest = Conjunction(max(t.left for t in bands), max(t.right for t in bands))
        terms = [widest, *(t for t in terms if t.factors)]
    # What bounds every operand bounds the whole: (band & a) | (band & b) is band & (a | b).
    left, right = max(t.left for t in terms), max(t.right for t in terms)
    terms = [
        Conjunction(
            UNBOUNDED if t.left == left else t.left, UNBOUNDED if t.right == right else t.right, list(t.factors)
        )
        for t in terms
    ]
    if any(t.is_full for t in terms):
        return Conjunction(left, right)
    terms = _merged_terms(terms, seqlen_kv)
    if len(terms) == 1:
        only = terms[0]
        return Conjunction(min(left, only.left), min(right, only.right), only.factors)
    return Conjunction(left, right, [Disjunction(terms)])


def _merged_terms(terms: list[Conjunction], seqlen_kv: int) -> list[Conjunction]:
    """The terms of an `|` with strides that cover each other, token lists and block masks joined."""
    strides: list[int] = []
    tokens: list[GlobalTokens] = []
    blocks: list[BlockMask] = []
    others: list[Conjunction] = []
    for term in terms:
        match term.only_factor:
            case GlobalStride(stride=stride):
                if not any(stride % s == 0 for s in strides):
                    strides = [s for s in strides if s % stride] + [stride]
            case GlobalTokens() as listed:
                tokens.append(listed)
            case BlockMask() as block:
                for i, other in enumerate(blocks):
                    if (merged := merged_blocks(other, block, intersect=False)) is not None:
                        blocks[i] = merged
                        break
                else:
                    blocks.append(block)
            case _:
                others.append(term)
    # One stride is native; the multiples of others are listed, which is O(N).
    strides.sort()
    tokens += [_listed(torch.arange(0, seqlen_kv, s, dtype=torch.int32)) for s in strides[1:]]
    del strides[1:]
    if len(tokens) > 1:
        tokens = [_listed(torch.unique(torch.cat([t.on_host() for t in tokens])))]
    factors: list[Mask] = [*(GlobalStride(s) for s in strides), *tokens, *blocks]
    return others + [Conjunction(factors=[f]) for f in factors]


def intersection_of_keys(key_sets: list[GlobalStride | GlobalTokens]) -> GlobalStride | GlobalTokens:
    """The keys in all of the sets: a stride if all are strides, else a list."""
    strides = [s.stride for s in key_sets if isinstance(s, GlobalStride)]
    listed = [s for s in key_sets if isinstance(s, GlobalTokens)]
    if not listed:
        # A key that is a multiple of each stride is a multiple of their lcm; past the last key only key 0 is left.
        return GlobalStride(min(math.lcm(*strides), UNBOUNDED))
    if len(key_sets) == 1:
        return listed[0]
    keys = listed[0].on_host()
    for other in listed[1:]:
        keys = keys[torch.isin(keys, other.on_host())]
    for stride in strides:
        keys = keys[keys % stride == 0]
    return _listed(keys)


def _listed(keys: Tensor) -> GlobalTokens:
    """Unique ascending keys on the host; a plan copies them to where it runs."""
    return GlobalTokens(keys, True, keys)


def as_mask(part: Mask | Disjunction | Conjunction) -> Mask:
    """A part of the normal form as a mask again."""
    if isinstance(part, Disjunction):
        return reduce(Or, [as_mask(t) for t in part.terms])
    if isinstance(part, Conjunction):
        band: list[Mask] = [] if part.band is None else [Band(*part.band)]
        return reduce(And, [*band, *(as_mask(f) for f in part.factors)])
    return part


def merged_blocks(one: BlockMask, two: BlockMask, *, intersect: bool) -> BlockMask | None:
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
