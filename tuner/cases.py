"""Adversarial cases: calls whose shape, mask, memory layout or numbers have broken attention kernels before."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tilewright.generator.errors import InvalidInput
from tilewright.runtime import masks
from tilewright.runtime.canonical import canonical
from tilewright.runtime.masks import Mask
from tilewright.tuner.layouts import Layout

Style = Literal["random", "full", "empty_rows", "few_blocks"]
Numbers = Literal["normal", "uniform_weights", "large", "very_negative"]


@dataclass(frozen=True, slots=True)
class CaseShape:
    """One case before its mask is known. Sizes in tokens and heads.

    style: `random` masks, `full` ones (every pair active, as far as the terms allow it), `empty_rows`, with rows that
    have no active key, or `few_blocks`, where query tiles side by side seldom visit the same blocks: for masks of
    blocks alone. numbers: standard normal; `uniform_weights` (query 0, so that lse is the log of the number of active
    keys and one key too many or too few shows); `large` (logits of either sign in the hundreds and beyond);
    `very_negative` (all logits far below 0, so that a row's maximum may not start at 0 nor tails be padded with 0).
    """

    name: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_kv: int
    layout: Layout = "packed"
    style: Style = "random"
    numbers: Numbers = "normal"


SHAPES: tuple[CaseShape, ...] = (
    CaseShape("one token", 1, 1, 1, 1, 1),
    CaseShape("17 tokens, masks per head", 2, 3, 3, 17, 17),
    CaseShape("127 tokens, GQA, transposed", 1, 4, 2, 127, 127, layout="transposed"),
    CaseShape("129 tokens, amid NaNs", 1, 2, 2, 129, 129, layout="padded"),
    CaseShape("1025 tokens", 1, 2, 1, 1025, 1025),
    CaseShape("1 query, 257 keys", 2, 2, 1, 1, 257, layout="padded"),
    CaseShape("more keys than queries", 1, 2, 2, 65, 321),
    CaseShape("more queries than keys", 1, 2, 2, 321, 65, layout="padded"),
    CaseShape("empty rows", 1, 2, 2, 193, 129, style="empty_rows", layout="padded"),
    CaseShape("all rows full", 1, 2, 2, 256, 256, style="full"),
    CaseShape("all rows full, ragged", 2, 1, 1, 131, 131, style="full", layout="padded"),
    CaseShape("counting keys", 1, 3, 1, 200, 333, numbers="uniform_weights"),
    CaseShape("large logits", 1, 2, 2, 129, 193, numbers="large"),
    CaseShape("very negative logits, ragged", 1, 2, 2, 77, 131, numbers="very_negative", layout="padded"),
    CaseShape("3 queries, GQA of 8, 4099 keys", 1, 16, 2, 3, 4099),
    CaseShape("token offsets past 2^31", 1, 1, 1, 130, 130, layout="far_tokens"),
    CaseShape("head offsets past 2^31", 1, 2, 2, 70, 90, layout="far_heads"),
)
"""Every case; far layouts last, because they are the only ones that can be refused memory."""

HOST_SHAPES: tuple[CaseShape, ...] = (
    CaseShape("one token", 1, 1, 1, 1, 1),
    CaseShape("17 tokens, masks per head", 2, 2, 2, 17, 17),
    CaseShape("GQA, transposed", 1, 4, 2, 33, 63, layout="transposed"),
    CaseShape("65 queries, 129 keys, amid NaNs", 1, 1, 1, 65, 129, layout="padded"),
    CaseShape("5 queries, 1025 keys", 1, 2, 1, 5, 1025),
    CaseShape("few blocks of 897 keys", 1, 1, 1, 130, 897, style="few_blocks"),
    CaseShape("1 query, 257 keys", 2, 2, 1, 1, 257, layout="padded"),
    CaseShape("more keys than queries, masks per head", 1, 2, 2, 19, 161),
    CaseShape("more queries than keys", 1, 1, 1, 259, 33, layout="padded"),
    CaseShape("empty rows", 1, 1, 1, 97, 65, style="empty_rows", layout="padded"),
    CaseShape("all rows full", 1, 1, 1, 64, 128, style="full"),
    CaseShape("all rows full, ragged", 2, 1, 1, 35, 83, style="full", layout="padded"),
    CaseShape("counting keys", 1, 3, 1, 20, 203, numbers="uniform_weights"),
    CaseShape("large logits", 1, 1, 1, 65, 97, numbers="large"),
    CaseShape("very negative logits, ragged", 1, 1, 1, 37, 131, numbers="very_negative", layout="padded"),
    CaseShape("rows at odd elements", 1, 2, 1, 21, 77, layout="unaligned"),
    CaseShape("3 queries, GQA of 8, 515 keys", 1, 8, 1, 3, 515),
    CaseShape("token offsets past 2^31", 1, 1, 1, 130, 130, layout="far_tokens"),
    CaseShape("head offsets past 2^31", 1, 2, 2, 17, 45, layout="far_heads"),
)
"""The same ideas for a machine that executes a GPU's threads one after the other: fewer pairs, and still lengths that
no tile divides, several tiles each way, and more tiles than a kernel has in flight. And rows that cannot be copied 16
bytes at a time, which every kernel has a second way for."""

BLOCK_SIZES = ((64, 64), (3, 5), (128, 32), (16, 48), (1, 7))
"""Granularities of block masks: ones that match no tile, that match some, and that are not square."""

BLOCK_TERMS = frozenset({"and_blocks", "or_blocks"})

SCAN_TERMS: tuple[tuple[str, ...], ...] = (
    ("bound", "window", "stride"),
    ("and_bits",),
    ("tokens",),
    ("bound", "document", "and_blocks"),
    ("bound",),
)
"""What a `scan` kernel is given, in turn: it reads any mask from memory, so its own terms are none."""


@dataclass(frozen=True, slots=True)
class Case:
    """A call with right inputs: compact query [B, H, Nq, D], key and value [B, Hkv, Nkv, D] in the kernel's dtype."""

    shape: CaseShape
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    scale: float

    @property
    def name(self) -> str:
        """The shape's name."""
        return self.shape.name


def make_cases(
    dtype: str,
    head_dim: int,
    terms: tuple[str, ...],
    mask_form: str,
    device: torch.device,
    shapes: Sequence[CaseShape] = SHAPES,
) -> Iterator[Case]:
    """A kernel's case for each of the shapes; each mask canonicalises to exactly these terms (any for `scan`).

    A shape of few blocks is left out where the terms have none: it would show nothing that costs so much.
    The same inputs on every run. Raises `InvalidInput` when no mask has exactly these terms.
    """
    for index, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(zlib.crc32(shape.name.encode()))
        case_terms = SCAN_TERMS[index % len(SCAN_TERMS)] if mask_form == "scan" else terms
        if shape.style == "few_blocks" and not BLOCK_TERMS & set(case_terms):
            continue
        mask = mask_with_terms(case_terms, shape, generator, device)
        if mask_form != "scan":
            got = canonical(mask, shape.seqlen_q, shape.seqlen_kv).terms
            if got != terms:
                raise InvalidInput(
                    f"no mask has exactly the terms {', '.join(terms) or 'none'}: {mask.spec if mask else 'no mask'} "
                    f"comes out as {', '.join(got) or 'none'}; verify the kernel of those terms instead"
                )
        query, key, value = _numbers(shape, head_dim, generator)
        kind = getattr(torch, dtype)
        tensors = [t.to(kind).to(device) for t in (query, key, value)]
        yield Case(shape, tensors[0], tensors[1], tensors[2], mask, head_dim**-0.5)


def mask_with_terms(
    terms: tuple[str, ...], shape: CaseShape, generator: torch.Generator, device: torch.device
) -> Mask | None:
    """A mask made of one part for each term, in the shape's style; None for no terms."""
    group = [
        _group_part(t, shape, generator, device) for t in ("window", "stride", "tokens", "or_blocks") if t in terms
    ]
    parts = [_and_part(t, shape, generator, device) for t in ("bound", "document") if t in terms]
    if group:
        united = group[0]
        for part in group[1:]:
            united = united | part
        parts.append(united)
    parts += [_and_part(t, shape, generator, device) for t in ("and_blocks", "and_bits") if t in terms]
    if not parts:
        return None
    mask = parts[0]
    for part in parts[1:]:
        mask = mask & part
    return mask


def _group_part(term: str, shape: CaseShape, generator: torch.Generator, device: torch.device) -> Mask:
    full = shape.style == "full"
    if term == "window":
        # Wider than anything here and still bounded, so that the term does not vanish.
        wide = shape.seqlen_q + shape.seqlen_kv
        return masks.sliding_window(wide, wide) if full else masks.sliding_window(_pick(generator, 0, 40), 3)
    if term == "stride":
        return masks.global_stride((2, 7, 16, 100)[_pick(generator, 0, 3)])
    if term == "tokens":
        count = shape.seqlen_kv if full else max(1, shape.seqlen_kv // 9)
        index = torch.randperm(shape.seqlen_kv, generator=generator)[:count]
        return masks.global_tokens(index.to(device))
    return _blocks(shape, generator, device, density=0.2)


def _and_part(term: str, shape: CaseShape, generator: torch.Generator, device: torch.device) -> Mask:
    full = shape.style == "full"
    if term == "bound":
        wide = shape.seqlen_q + shape.seqlen_kv
        if full:
            return masks.sliding_window(wide, wide)
        # Bottom-right alignment: with more queries than keys, causal leaves the first rows empty.
        causal = shape.style == "empty_rows" or _pick(generator, 0, 1) == 0
        return masks.causal() if causal else masks.sliding_window(shape.seqlen_kv // 2, _pick(generator, 0, 9))
    if term == "document":
        cuts = 0 if full else 3
        return masks.document(
            _cumulative(shape.seqlen_q, cuts, generator, device), _cumulative(shape.seqlen_kv, cuts, generator, device)
        )
    if term == "and_blocks":
        return _blocks(shape, generator, device, density=0.6)
    size = (shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_kv)
    active = torch.rand(size, generator=generator) < 0.7
    if full:
        active.fill_(True)
    if shape.style == "empty_rows":
        active[:, :, ::5] = False
    return masks.token_mask(active.to(device))


def _blocks(shape: CaseShape, generator: torch.Generator, device: torch.device, density: float) -> Mask:
    # At least two blocks each way where the lengths allow it, so that heads can differ.
    sizes = [(q, kv) for q, kv in BLOCK_SIZES if 2 * q <= max(shape.seqlen_q, 2) and 2 * kv <= max(shape.seqlen_kv, 2)]
    sizes = sizes or [(2, 1)]
    block_q, block_kv = sizes[_pick(generator, 0, len(sizes) - 1)]
    if shape.style == "few_blocks":
        (block_q, block_kv), density = (64, 128), 0.4  # neighbouring query tiles seldom visit the same KV tiles
    grid = (shape.batch, shape.num_heads, -(-shape.seqlen_q // block_q), -(-shape.seqlen_kv // block_kv))
    active = torch.rand(grid, generator=generator) < density
    if shape.style == "full":
        active.fill_(True)
    if shape.style == "empty_rows":
        active[:, :, ::2] = False
    return masks.block_mask(active.to(device), (block_q, block_kv))


def _cumulative(length: int, cuts: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Segment bounds from 0 to `length` with `cuts` cuts anywhere; a segment may come out empty."""
    inner = torch.randint(0, length + 1, (cuts,), generator=generator)
    ends = torch.cat([torch.tensor([0, length]), inner]).sort().values
    return ends.to(torch.int32).to(device)


def _numbers(shape: CaseShape, head_dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    q_size = (shape.batch, shape.num_heads, shape.seqlen_q, head_dim)
    kv_size = (shape.batch, shape.num_kv_heads, shape.seqlen_kv, head_dim)
    value = torch.randn(kv_size, generator=generator)
    if shape.numbers in ("large", "very_negative"):
        # Positive queries against keys of one sign a token: logits of +-64 sqrt(head_dim) and more.
        query = 8 + 8 * torch.rand(q_size, generator=generator)
        key = 8 + 8 * torch.rand(kv_size, generator=generator)
        signs = torch.randint(0, 2, (*kv_size[:3], 1), generator=generator) * 2.0 - 1.0
        return query, key * (signs if shape.numbers == "large" else -1.0), value
    query, key = torch.randn(q_size, generator=generator), torch.randn(kv_size, generator=generator)
    return (torch.zeros(q_size) if shape.numbers == "uniform_weights" else query), key, value


def _pick(generator: torch.Generator, low: int, high: int) -> int:
    """A whole number from low to high, inclusive."""
    return int(torch.randint(low, high + 1, (1,), generator=generator))
