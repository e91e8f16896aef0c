"""The normal form of masks: which terms each becomes, that nothing changes meaning, and what it says of a problem."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tilewright.generator.abi import UNBOUNDED
from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import MASK_TERMS, MaskClass
from tilewright.runtime import canonical as canonical_module
from tilewright.runtime import masks
from tilewright.runtime.canonical import CanonicalMask, canonical, mask_class
from tilewright.runtime.mask_bits import pack_bits, unpack_bits

NQ, NKV = 24, 40


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


BAND = masks.sliding_window(4, 4)
STRIDE = masks.global_stride(8)
TOKENS = masks.global_tokens([1, 9])
BLOCKS = masks.block_mask(torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) < 0.5, 8)
COARSE = masks.block_mask(torch.rand(2, 2, generator=torch.Generator().manual_seed(2)) < 0.5, (16, 32))
FINE = masks.block_mask(torch.rand(8, 14, generator=torch.Generator().manual_seed(3)) < 0.5, 3)
PAIRS = masks.token_mask(torch.rand(NQ, NKV, generator=torch.Generator().manual_seed(4)) < 0.5)
DOCUMENTS = masks.document(torch.tensor([0, 7, 24]), torch.tensor([0, 30, 40]))
CAUSAL = masks.causal()
FULL = masks.full()


def recombined(form: CanonicalMask) -> torch.Tensor:
    """The canonical terms put together again, as `MASK_TERMS` says."""
    q = torch.arange(form.seqlen_q)[:, None]
    k = torch.arange(form.seqlen_kv)[None]
    position = q + form.seqlen_kv - form.seqlen_q
    active = torch.ones(1, 1, form.seqlen_q, form.seqlen_kv, dtype=torch.bool)
    if form.bound:
        active = active & (k >= position - form.bound[0]) & (k <= position + form.bound[1])
    if form.row_begin is not None and form.row_end is not None:
        active = active & (k >= form.row_begin[0][:, None]) & (k < form.row_end[0][:, None])
    bracket = []
    if form.window:
        bracket.append(((k >= position - form.window[0]) & (k <= position + form.window[1]))[None, None])
    if form.stride:
        bracket.append((k % form.stride == 0)[None, None])
    if form.tokens is not None:
        bracket.append(torch.isin(k, form.tokens.indices)[None, None])
    for blocks in (form.or_blocks, form.and_blocks):
        if blocks is None:
            continue
        flags = blocks.active[(None,) * (4 - blocks.active.dim())]
        flags = flags[:, :, q[:, 0] // blocks.sparse_block_q][..., k[0] // blocks.sparse_block_kv]
        if blocks is form.or_blocks:
            bracket.append(flags)
        else:
            active = active & flags
    if bracket:
        together = bracket[0]
        for term in bracket[1:]:
            together = together | term
        active = active & together
    if form.residual is not None:
        active = active & unpack_bits(form.and_bits(torch.device("cpu")), form.seqlen_kv)
    return active


@pytest.mark.parametrize(
    ("mask", "terms"),
    [
        (None, ()),
        (FULL, ()),
        (masks.sliding_window(-1, -1), ()),
        (masks.global_stride(1), ()),
        (BAND | FULL, ()),
        (STRIDE | masks.global_stride(1), ()),
        (CAUSAL, ("bound",)),
        (CAUSAL & BAND & FULL, ("bound",)),
        (CAUSAL | BAND, ("bound",)),
        (CAUSAL & masks.global_stride(1), ("bound",)),
        (STRIDE, ("stride",)),
        (STRIDE | masks.global_stride(4), ("stride",)),
        (STRIDE & masks.global_stride(6), ("stride",)),
        (TOKENS, ("tokens",)),
        (TOKENS | masks.global_tokens([3]), ("tokens",)),
        (BAND | STRIDE, ("window", "stride")),
        (BAND | STRIDE | CAUSAL, ("window", "stride")),
        (CAUSAL & (BAND | STRIDE), ("bound", "window", "stride")),
        (CAUSAL & BAND | CAUSAL & STRIDE, ("bound", "window", "stride")),
        (CAUSAL & BAND & STRIDE, ("bound", "stride")),
        (BAND | STRIDE | TOKENS | BLOCKS, ("window", "stride", "tokens", "or_blocks")),
        ((BAND | STRIDE) | (masks.sliding_window(9, 0) | TOKENS), ("window", "stride", "tokens")),
        (BLOCKS, ("and_blocks",)),
        (BLOCKS & COARSE, ("and_blocks",)),
        (BLOCKS | COARSE, ("and_blocks",)),
        (BLOCKS & FINE, ("and_blocks", "and_bits")),
        (BLOCKS | FINE, ("and_bits",)),
        (BLOCKS & (BAND | COARSE), ("or_blocks", "window", "and_bits")),
        (DOCUMENTS, ("document",)),
        (DOCUMENTS & DOCUMENTS & CAUSAL, ("document", "bound")),
        (DOCUMENTS | BAND, ("and_bits",)),
        (PAIRS, ("and_bits",)),
        (PAIRS & PAIRS & BAND, ("and_bits", "bound")),
        (PAIRS | BAND, ("and_bits",)),
        ((BAND | STRIDE) & (BAND | TOKENS), ("window", "stride", "and_bits")),
        (STRIDE & TOKENS, ("tokens",)),
        (TOKENS & masks.global_tokens([9, 2]) & BAND, ("tokens", "bound")),
        (STRIDE & DOCUMENTS | BAND, ("and_bits",)),
        (STRIDE | masks.global_stride(6), ("stride", "tokens")),
        (STRIDE | masks.global_stride(6) | TOKENS | masks.global_stride(2), ("stride", "tokens")),
        (TOKENS & CAUSAL, ("tokens", "bound")),
    ],
    ids=str,
)
def test_which_terms_a_mask_becomes(mask: masks.Mask | None, terms: tuple[str, ...]) -> None:
    form = canonical(mask, NQ, NKV)
    assert form.terms == tuple(t for t in MASK_TERMS if t in terms)
    dense = (FULL if mask is None else mask).dense(1, 1, NQ, NKV)
    assert torch.equal(recombined(form), dense)


def random_mask(rng: random.Random, depth: int) -> masks.Mask:
    if depth == 0 or rng.random() < 0.15:
        leaves = [CAUSAL, BAND, STRIDE, TOKENS, BLOCKS, COARSE, FINE, PAIRS, DOCUMENTS, masks.sliding_window(-1, 3)]
        leaves += [masks.global_stride(4), masks.global_tokens([30, 2]), FULL, masks.sliding_window(12, 0)]
        return rng.choice(leaves)
    one, two = random_mask(rng, depth - 1), random_mask(rng, depth - 1)
    return one & two if rng.random() < 0.5 else one | two


@pytest.mark.parametrize("seed", range(300))
def test_any_expression_keeps_its_meaning(seed: int) -> None:
    mask = random_mask(random.Random(seed), 1 + seed % 4)
    assert torch.equal(recombined(canonical(mask, NQ, NKV)), mask.dense(1, 1, NQ, NKV)), mask.spec


def test_all_pairs_of_leaves_keep_their_meaning() -> None:
    leaves = [CAUSAL, BAND, STRIDE, TOKENS, BLOCKS, COARSE, FINE, PAIRS, DOCUMENTS, FULL]
    for one, two in itertools.product(leaves, leaves):
        for mask in (one & two, one | two):
            assert torch.equal(recombined(canonical(mask, NQ, NKV)), mask.dense(1, 1, NQ, NKV)), mask.spec


def test_bands_intersect_and_join() -> None:
    both = masks.sliding_window(5, 1) & masks.sliding_window(2, 3)
    either = masks.sliding_window(5, 1) | masks.sliding_window(2, 3)
    assert canonical(both, NQ, NKV).bound == (2, 1)
    assert canonical(either, NQ, NKV).bound == (5, 3)
    assert canonical(CAUSAL, NQ, NKV).bound == (UNBOUNDED, 0)


def test_strides_join_where_one_covers_the_other() -> None:
    assert canonical(STRIDE | masks.global_stride(4), NQ, NKV).stride == 4
    assert canonical(masks.global_stride(4) | STRIDE, NQ, NKV).stride == 4
    assert canonical(masks.global_stride(6) & masks.global_stride(4), NQ, NKV).stride == 12
    assert canonical(masks.global_stride(2**20) & masks.global_stride(2**20 - 1), NQ, NKV).stride == UNBOUNDED


def test_blocks_of_two_granularities_meet_at_their_common_one() -> None:
    blocks = canonical(
        masks.block_mask(ones(1, 2), (48, 32)) & masks.block_mask(ones(2, 5), (32, 8)), 48, 40
    ).and_blocks
    assert blocks is not None
    assert (blocks.sparse_block_q, blocks.sparse_block_kv) == (16, 8)


def test_documents_become_ranges_of_keys() -> None:
    form = canonical(masks.document(torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 4, 4])), 3, 4)
    assert form.row_begin is not None
    assert form.row_end is not None
    assert form.row_begin.tolist() == [[0, 0, 4]]
    assert form.row_end.tolist() == [[1, 1, 4]]
    assert form.row_begin.dtype == form.row_end.dtype == torch.int32


def test_documents_that_end_early_never_point_past_the_keys() -> None:
    """On a GPU the values are not checked, so ranges must stay inside the keys whatever they are."""
    form = canonical(masks.document(torch.tensor([0, 2, 3]), torch.tensor([0, 90, 99])), 5, 4)
    assert form.row_begin is not None
    assert form.row_end is not None
    assert form.row_begin.tolist() == [[0, 0, 4, 0, 0]]
    assert form.row_end.tolist() == [[4, 4, 4, 0, 0]]


def test_materialised_bytes_are_those_of_the_bits() -> None:
    per_head = masks.token_mask(ones(3, NQ, NKV)) | BAND
    form = canonical(per_head, NQ, NKV)
    assert form.materialised_bytes == 3 * NQ * 2 * 4
    assert form.and_bits(torch.device("cpu")).nbytes == form.materialised_bytes
    assert canonical(BAND | STRIDE, NQ, NKV).materialised_bytes == 0


def test_bits_are_evaluated_once_and_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = canonical_module.pack_rows
    monkeypatch.setattr(canonical_module, "pack_rows", lambda *a: calls.append(a) or real(*a))
    form = canonical(PAIRS, NQ, NKV)
    assert not calls
    assert form.and_bits(torch.device("cpu")) is form.and_bits(torch.device("cpu"))
    assert len(calls) == 1


@pytest.mark.parametrize("length", [1, 7, 8, 31, 32, 33, 64, 100])
def test_bits_and_bools_are_the_same(length: int) -> None:
    active = torch.rand(2, 3, length, generator=torch.Generator().manual_seed(length)) < 0.5
    words = pack_bits(active)
    assert words.dtype == torch.int32
    for index in range(length):
        bit = (words[..., index // 32].long() >> (index % 32)) & 1
        assert torch.equal(bit.bool(), active[..., index])
    assert torch.equal(unpack_bits(words, length), active)
    assert torch.equal(unpack_bits(words, words.shape[-1] * 32).sum(-1), active.sum(-1))


def test_tokens_traced_unsorted_are_sorted_and_checked() -> None:
    form = canonical(masks.from_spec("global_tokens(#0, unsorted)", (torch.tensor([9, 3, 9]),)), NQ, NKV)
    assert form.tokens is not None
    assert form.tokens.indices.tolist() == [3, 9]
    with pytest.raises(InvalidInput, match="got 99"):
        canonical(masks.from_spec("global_tokens(#0, unsorted)", (torch.tensor([99]),)), NQ, NKV)


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL,
        BAND,
        masks.sliding_window(1000, 1000),
        BAND | STRIDE,
        CAUSAL & (BAND | STRIDE | TOKENS),
        STRIDE,
        masks.sliding_window(0, -1) & STRIDE,
        TOKENS,
        TOKENS | masks.global_tokens([8, 16]) | STRIDE,
        DOCUMENTS,
        DOCUMENTS & CAUSAL & (BAND | STRIDE),
        BLOCKS,
        COARSE,
        BLOCKS & COARSE,
        masks.block_mask(torch.rand(2, 3, 5, 2) < 0.3, (5, 32)),
        PAIRS,
        PAIRS & CAUSAL | BAND,
    ],
    ids=str,
)
def test_density_is_the_share_of_active_pairs(mask: masks.Mask) -> None:
    got = mask_class(mask, 2, 3, NQ, NKV).density
    dense = mask.dense(2, 3, NQ, NKV).expand(-1, -1, NQ, NKV)
    assert got == float(f"{float(dense.double().mean()):.2g}")


def test_density_with_more_queries_than_keys() -> None:
    mask = CAUSAL & (masks.sliding_window(3, 0) | masks.global_stride(4))
    assert mask_class(mask, 1, 1, 50, 20).density == float(f"{float(mask.dense(1, 1, 50, 20).double().mean()):.2g}")


def test_density_of_a_large_structured_mask_is_counted_without_n_by_n() -> None:
    n = 96_000
    mask = masks.sliding_window(32, 32) | masks.global_stride(512)
    strided, seen_twice = -(-n // 512), 65 * -(-n // 512)
    pairs = 65 * n - 32 * 33 + n * strided - seen_twice
    assert mask_class(mask, 1, 8, n, n).density == float(f"{pairs / n**2:.2g}")


def test_classes_say_what_a_kernel_depends_on() -> None:
    assert mask_class(None, 1, 1, 8, 8) == MaskClass()
    assert mask_class(BAND | STRIDE, 1, 1, NQ, NKV) == MaskClass(
        ("window", "stride"), "sliding_window(4, 4) | global_stride(8)", False, False, 0.32
    )
    per_head = mask_class(masks.block_mask(ones(3, 3, 5), 8), 2, 3, NQ, NKV)
    per_batch = mask_class(masks.block_mask(ones(2, 1, 3, 5), 8), 2, 3, NQ, NKV)
    assert (per_head.per_head, per_head.per_batch, per_head.structure) == (True, False, "block_mask(8, 8)")
    assert (per_batch.per_head, per_batch.per_batch, per_batch.density) == (False, True, 1.0)


def test_the_class_of_a_mask_with_data_elsewhere_reads_nothing() -> None:
    """A meta tensor has no data at all, so any read would raise."""
    mask = masks.block_mask(torch.ones(3, 5, dtype=torch.bool, device="meta"), 8) & CAUSAL
    assert mask_class(mask, 1, 1, NQ, NKV) == MaskClass(
        ("bound", "and_blocks"), "causal() & block_mask(8, 8)", False, False, None
    )


@pytest.mark.gpu
def test_classes_and_normal_forms_of_gpu_masks_never_wait_for_the_host() -> None:
    example = (BAND | STRIDE | BLOCKS) & DOCUMENTS & PAIRS
    mask = example.to("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        kind = mask_class(mask, 1, 1, NQ, NKV)
        form = canonical(mask, NQ, NKV)
        form.and_bits(torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert kind.density is None
    assert form.terms == canonical(example, NQ, NKV).terms


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (masks.causal() & masks.sliding_window(256, 0), "sliding_window(256, 0)"),
        (masks.sliding_window(256, 8) & masks.causal(), "sliding_window(256, 0)"),
        (masks.global_stride(512) | masks.sliding_window(32, 32), "sliding_window(32, 32) | global_stride(512)"),
        (
            (masks.sliding_window(8, 8) | masks.global_stride(4)) & masks.causal(),
            "causal() & (sliding_window(8, 8) | global_stride(4))",
        ),
        (masks.full(), "dense"),
    ],
    ids=str,
)
def test_one_structure_for_every_way_of_writing_a_mask(mask: masks.Mask, text: str) -> None:
    # The structure is part of a problem's key: the same call must find its winner however its mask was written.
    assert mask_class(mask, 1, 1, 64, 64).structure == text
