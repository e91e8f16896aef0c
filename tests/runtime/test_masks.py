"""The mask algebra: each definition against plain Python, the text form, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tilewright.generator.errors import InvalidInput
from tilewright.runtime import masks

LENGTHS = [(9, 9), (5, 12), (12, 5), (1, 7), (7, 1)]


def by_pairs(rule: Callable[[int, int], bool], seqlen_q: int, seqlen_kv: int) -> Tensor:
    """The mask a rule over (query, key) indices describes."""
    rows = [[bool(rule(q, k)) for k in range(seqlen_kv)] for q in range(seqlen_q)]
    return torch.tensor(rows).view(1, 1, seqlen_q, seqlen_kv)


def assert_same(mask: masks.Mask, rule: Callable[[int, int], bool], seqlen_q: int, seqlen_kv: int) -> None:
    assert torch.equal(mask.dense(1, 1, seqlen_q, seqlen_kv), by_pairs(rule, seqlen_q, seqlen_kv))


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda s: f"{s[0]}x{s[1]}")
def test_causal_aligns_the_last_query_with_the_last_key(lengths: tuple[int, int]) -> None:
    shift = lengths[1] - lengths[0]
    assert_same(masks.causal(), lambda q, k: k <= q + shift, *lengths)


def test_more_queries_than_keys_leave_the_first_rows_empty() -> None:
    dense = masks.causal().dense(1, 1, 5, 2)[0, 0]
    assert dense.tolist() == [[False] * 2] * 3 + [[True, False], [True, True]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("sides", [(0, 0), (2, 1), (0, 3), (3, 0), (-1, 1), (2, -1), (-1, -1), (100, 100), (2**40, 0)])
def test_windows_are_inclusive_and_do_not_count_the_token_itself(
    sides: tuple[int, int], lengths: tuple[int, int]
) -> None:
    left, right = sides
    shift = lengths[1] - lengths[0]

    def rule(q: int, k: int) -> bool:
        position = q + shift
        return (left == -1 or k >= position - left) and (right == -1 or k <= position + right)

    assert_same(masks.sliding_window(left, right), rule, *lengths)


def test_a_window_of_w_keeps_w_earlier_keys() -> None:
    dense = masks.sliding_window(4, 0).dense(1, 1, 32, 32)[0, 0]
    assert dense.sum(1).tolist() == [1, 2, 3, 4] + [5] * 28


@pytest.mark.parametrize("stride", [1, 2, 5, 100])
def test_strides_count_keys_from_the_first_one(stride: int) -> None:
    for lengths in LENGTHS:
        assert_same(masks.global_stride(stride), lambda q, k: k % stride == 0, *lengths)


@pytest.mark.parametrize(
    "given", [[3, 0, 3], torch.tensor([3, 0, 3]), torch.tensor([0, 3], dtype=torch.int32), (i for i in (3, 0))]
)
def test_global_tokens_are_a_set(given: Tensor | list[int]) -> None:
    mask = masks.global_tokens(given)
    assert mask.tensors[0].tolist() == [0, 3]
    assert_same(mask, lambda q, k: k in (0, 3), 6, 5)


@pytest.mark.parametrize("size", [1, 2, 3, (2, 5), (64, 64)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda s: f"{s[0]}x{s[1]}")
def test_block_masks_of_any_block_size(size: int | tuple[int, int], lengths: tuple[int, int]) -> None:
    size_q, size_kv = size if isinstance(size, tuple) else (size, size)
    active = torch.rand(-(-lengths[0] // size_q), -(-lengths[1] // size_kv)) < 0.5
    assert_same(masks.block_mask(active, size), lambda q, k: bool(active[q // size_q, k // size_kv]), *lengths)


def test_leading_dimensions_are_batch_and_heads() -> None:
    active = torch.rand(2, 3, 4, 5) < 0.5
    assert torch.equal(masks.token_mask(active).dense(2, 3, 4, 5), active)
    assert torch.equal(masks.token_mask(active[0]).dense(2, 3, 4, 5), active[:1])
    assert torch.equal(masks.token_mask(active[0, 0]).dense(2, 3, 4, 5), active[:1, :1])
    assert torch.equal(masks.token_mask(active[:, :1]).dense(2, 3, 4, 5), active[:, :1])
    assert masks.token_mask(active[:, :1]).lead == (2, 1)
    assert (masks.token_mask(active[:, :1]) | masks.block_mask(active[0], 1)).lead == (2, 3)


@pytest.mark.parametrize(
    ("cu_q", "cu_kv"),
    [([0, 9], [0, 12]), ([0, 3, 9], [0, 1, 12]), ([0, 0, 4, 4, 9], [0, 5, 5, 12, 12]), ([0, 0, 9], [0, 12, 12])],
    ids=str,
)
def test_documents_see_themselves(cu_q: list[int], cu_kv: list[int]) -> None:
    def segment(index: int, cuts: list[int]) -> int:
        return next(j for j in range(len(cuts) - 1) if cuts[j] <= index < cuts[j + 1])

    mask = masks.document(torch.tensor(cu_q), torch.tensor(cu_kv))
    assert_same(mask, lambda q, k: segment(q, cu_q) == segment(k, cu_kv), 9, 12)


def test_a_ragged_pack() -> None:
    cuts = torch.tensor([0, 781, 2048], dtype=torch.int32)
    dense = masks.document(cuts).dense(1, 1, 2048, 2048)
    assert int(dense.sum()) == 781**2 + (2048 - 781) ** 2


@pytest.mark.parametrize("seqlen_kv", [1, 31, 32, 33, 100])
def test_packed_masks_hold_a_bit_a_pair(seqlen_kv: int) -> None:
    active = torch.rand(2, 3, 4, seqlen_kv) < 0.5
    words = torch.zeros(2, 3, 4, -(-seqlen_kv // 32), dtype=torch.int64)
    for key in range(seqlen_kv):
        words[..., key // 32] |= active[..., key].long() << (key % 32)
    mask = masks.packed_mask(torch.where(words >= 2**31, words - 2**32, words).int(), seqlen_kv)
    assert torch.equal(mask.dense(2, 3, 4, seqlen_kv), active)


def test_masks_combine_pair_by_pair() -> None:
    one, two = masks.sliding_window(2, 0), masks.global_stride(4)
    a, b = one.dense(1, 1, 9, 12), two.dense(1, 1, 9, 12).expand(1, 1, 9, 12)
    assert torch.equal((one | two).dense(1, 1, 9, 12), a | b)
    assert torch.equal((one & two).dense(1, 1, 9, 12), a & b)
    assert torch.equal((one | two & masks.full()).dense(1, 1, 9, 12), a | b)


def example() -> masks.Mask:
    """Every kind of mask in one."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.rand(2, 1, 20, 30, generator=generator) < 0.5
    packs = masks.document(torch.tensor([0, 7, 20]), torch.tensor([0, 9, 30]))
    return (
        masks.causal() & masks.token_mask(pairs)
        | masks.block_mask(pairs[0, 0, :5, :3], (4, 10)) & packs
        | (masks.sliding_window(3, -1) | masks.global_stride(7)) & masks.global_tokens([3, 8, 20])
        | masks.packed_mask(torch.arange(20, dtype=torch.int32).view(20, 1), 30) & masks.full()
    )


def test_row_chunks_make_up_the_whole() -> None:
    whole = example().dense(2, 3, 20, 30)
    parts = [example().dense_rows(2, 3, 20, 30, "cpu", start, min(start + 7, 20)) for start in range(0, 20, 7)]
    assert whole.shape == (2, 1, 20, 30)
    assert torch.equal(torch.cat(parts, 2), whole)


def test_spec_and_tensors_hold_the_whole_mask() -> None:
    mask = example()
    again = masks.from_spec(mask.spec, mask.tensors)
    assert again.spec == mask.spec
    assert torch.equal(again.dense(2, 3, 20, 30), mask.dense(2, 3, 20, 30))
    assert torch.equal(mask.to("cpu").dense(2, 3, 20, 30), mask.dense(2, 3, 20, 30))


@pytest.mark.parametrize(
    ("mask", "spec"),
    [
        (masks.causal(), "causal()"),
        (masks.sliding_window(-1, 0), "causal()"),
        (masks.sliding_window(-1, 4), "sliding_window(-1, 4)"),
        (masks.sliding_window(32, 32) | masks.global_stride(512), "(sliding_window(32, 32) | global_stride(512))"),
        (
            masks.block_mask(torch.ones(1, 1, dtype=torch.bool), (2, 3)) & masks.global_tokens([1]) | masks.full(),
            "((block_mask(#0, 2, 3) & global_tokens(#1)) | full())",
        ),
        (masks.document(torch.tensor([0, 4])), "document(#0)"),
        (masks.document(torch.tensor([0, 4]), torch.tensor([0, 5])), "document(#0, #1)"),
    ],
    ids=str,
)
def test_specs_read_like_the_constructors(mask: masks.Mask, spec: str) -> None:
    assert mask.spec == spec
    assert repr(mask) == spec


def test_the_structure_leaves_data_out() -> None:
    mask = masks.causal() & masks.block_mask(torch.ones(1, 1, dtype=torch.bool), 64) | masks.global_tokens([1, 1, 5])
    assert mask.structure == "(causal() & block_mask(64, 64)) | global_tokens(2)"
    assert masks.document(torch.tensor([0, 4]), torch.tensor([0, 5])).structure == "document()"


def test_written_masks_bind_as_in_python() -> None:
    written = "causal() | sliding_window(2,3) & global_stride( 4 )|full()"
    assert masks.from_spec(written).spec == "((causal() | (sliding_window(2, 3) & global_stride(4))) | full())"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mask at column 0, got 'the end'"),
        ("causal", r"expected \( at column 6"),
        ("causal(", "expected a mask"),
        ("causal() causal()", "expected & or | or the end at column 8"),
        ("causal() & ", "expected a mask"),
        ("(causal()", r"expected \)"),
        ("causal() ^ full()", r"expected & or \| or the end"),
        ("causal(1)", r"causal cannot take 1: "),
        ("windo(1, 2)", "no mask is called 'windo'; masks are full, causal, sliding_window"),
        ("sliding_window(1, -3)", "right must be 0 or more, or -1"),
        ("sliding_window(a, 3)", "left must be an integer, got 'a'"),
        ("global_stride(0)", "stride must be 1 or more, got 0"),
        ("token_mask(#1)", "refers to tensor #1, got 1 tensors"),
        ("token_mask(3)", "must be a bool tensor"),
        ("document(3)", "must be a 1-D int32 or int64 tensor, got int"),
        ("packed_mask(3, 4)", "packed_mask cannot take 3, 4"),
        ("__import__('os')", "expected"),
    ],
)
def test_text_that_is_no_mask_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        masks.from_spec(text, (torch.ones(2),))


TRUE = torch.ones(4, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: masks.sliding_window(-2, 0), "left must be 0 or more, or -1 for no limit, got -2"),
        (lambda: masks.sliding_window(1.5, 0), "left must be an integer, got 1.5"),
        (lambda: masks.sliding_window(True, 0), "left must be an integer, got True"),
        (lambda: masks.global_stride(0), "must be 1 or more, got 0"),
        (lambda: masks.global_stride(-4), "must be 1 or more, got -4"),
        (lambda: masks.global_tokens(torch.tensor([0.5])), "must be 1-D int32 or int64, got .* torch.float32"),
        (lambda: masks.global_tokens(TRUE[0]), "pass mask.nonzero"),
        (lambda: masks.global_tokens([0.5]), "must be an integer, got 0.5"),
        (lambda: masks.block_mask(TRUE.float(), 64), "must be a bool tensor, True where active, got torch.float32"),
        (lambda: masks.block_mask(TRUE[0], 64), "must have 2 to 4 dimensions"),
        (lambda: masks.block_mask(TRUE[None, None, None], 64), "must have 2 to 4 dimensions"),
        (lambda: masks.block_mask(TRUE, 0), "block_size must be 1 or more, got 0"),
        (lambda: masks.block_mask(TRUE, (64, 64, 64)), "must be one integer or two"),
        (lambda: masks.token_mask(TRUE.int()), "must be a bool tensor"),
        (lambda: masks.document(torch.tensor([0.0, 4.0])), "must be a 1-D int32 or int64 tensor, got torch.float32"),
        (lambda: masks.document(torch.tensor([4])), "at least two entries"),
        (lambda: masks.document(torch.tensor([0, 4]), torch.tensor([0, 2, 4])), "same documents, got 1 and 2"),
        (lambda: masks.packed_mask(torch.zeros(4, 1, dtype=torch.int32), 33), r"int32 \[..., seqlen_q, 2\]"),
        (lambda: masks.causal() & TRUE, "wrap a bool tensor in token_mask or block_mask"),
        (lambda: masks.causal() | None, "combine masks, got NoneType"),
    ],
)
def test_what_makes_no_mask_is_refused(build: Callable[[], masks.Mask], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (masks.block_mask(TRUE, 16), r"lengths 64x96 must end in \[4, 6\] blocks, got \[4, 4\]"),
        (masks.block_mask(TRUE, 32), r"must end in \[2, 3\] blocks"),
        (masks.token_mask(TRUE), r"must end in \[seqlen_q, seqlen_kv\] = \[64, 96\], got \[4, 4\]"),
        (masks.block_mask(TRUE.new_ones(3, 4, 6), 16), r"\[batch, heads\] = \[2, 4\], each that or 1, got \[3, 4, 6\]"),
        (masks.block_mask(TRUE.new_ones(4, 1, 4, 6), 16), r"leading dimensions \[batch, heads\] = \[2, 4\]"),
        (masks.token_mask(TRUE.new_ones(3, 64, 96)), r"leading dimensions \[batch, heads\] = \[2, 4\]"),
        (masks.global_tokens([3, 96]), r"must lie in 0 \.\. 95 \(seqlen_kv - 1\), got 96"),
        (masks.global_tokens([-1]), "got -1"),
        (
            masks.document(torch.tensor([0, 96])),
            r"ascend from 0 to 64, got \[0, 96\]; pass cu_seqlens_kv",
        ),
        (masks.document(torch.tensor([0, 64])), "cu_seqlens_kv must ascend from 0 to 96"),
        (masks.document(torch.tensor([1, 64]), torch.tensor([0, 96])), "ascend from 0 to 64"),
        (masks.document(torch.tensor([0, 9, 5, 64]), torch.tensor([0, 1, 2, 96])), "ascend from 0 to 64"),
        (masks.packed_mask(torch.zeros(64, 2, dtype=torch.int32), 64), "made for lengths 64x64, got .* 64x96"),
        (masks.causal() & (masks.full() | masks.token_mask(TRUE)), "token_mask must end in"),
        (
            masks.token_mask(torch.ones(64, 96, dtype=torch.bool, device="meta")),
            "must be on cpu like the query, got meta",
        ),
        (masks.block_mask(torch.ones(4, 6, dtype=torch.bool, device="meta"), 16), r"use mask.to\('cpu'\)"),
    ],
    ids=str,
)
def test_a_mask_that_does_not_fit_the_call_is_refused(mask: masks.Mask, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        mask.check(2, 4, 64, 96, "cpu")
    with pytest.raises(InvalidInput, match=message):
        mask.dense(2, 4, 64, 96)


def test_what_fits_passes() -> None:
    for mask in (masks.causal(), masks.block_mask(TRUE.new_ones(2, 1, 4, 6), 16), masks.global_tokens([0, 95])):
        mask.check(2, 4, 64, 96, "cpu")


def compiled(build: Callable[..., masks.Mask], *tensors: Tensor) -> masks.Mask:
    """The mask that `build` makes while torch.compile traces it."""

    def traced(*given: Tensor) -> tuple[str, tuple[Tensor, ...], Tensor]:
        mask = build(*given)
        mask.check(1, 1, 16, 16, given[0].device)
        return mask.spec, mask.tensors, given[0] + 1

    torch._dynamo.reset()
    spec, held, _ = torch.compile(traced, backend="eager", fullgraph=True)(*tensors)
    return masks.from_spec(spec, held)


def test_structured_masks_trace_in_one_graph() -> None:
    mask = compiled(lambda x: masks.sliding_window(32, 32) | masks.global_stride(512), torch.zeros(3))
    assert mask.spec == "(sliding_window(32, 32) | global_stride(512))"


def test_masks_with_data_trace_in_one_graph() -> None:
    def build(blocks: Tensor, pairs: Tensor, tokens: Tensor, cuts: Tensor) -> masks.Mask:
        inner = masks.block_mask(blocks, (4, 8)) & masks.token_mask(pairs > 0) & masks.causal()
        return inner | masks.global_tokens(tokens) & masks.sliding_window(-1, 2) | masks.document(cuts)

    tensors = (torch.rand(4, 2) < 0.5, torch.randn(16, 16), torch.tensor([9, 3, 9]), torch.tensor([0, 5, 16]))
    assert torch.equal(compiled(build, *tensors).dense(1, 1, 16, 16), build(*tensors).dense(1, 1, 16, 16))


def test_masks_made_outside_enter_a_graph() -> None:
    outside = masks.global_tokens([5, 1]) | masks.sliding_window(1, 1)
    mask = compiled(lambda x: outside & masks.causal(), torch.zeros(3))
    assert mask.spec == "((global_tokens(#0) | sliding_window(1, 1)) & causal())"
    assert mask.tensors[0].tolist() == [1, 5]


def test_tokens_out_of_range_found_only_when_sorted_are_refused() -> None:
    mask = compiled(lambda x, tokens: masks.global_tokens(tokens), torch.zeros(3), torch.tensor([3, 99]))
    with pytest.raises(InvalidInput, match=r"0 \.\. 15 \(seqlen_kv - 1\), got 99"):
        mask.check(1, 1, 16, 16, "cpu")


def test_tokens_after_the_last_document_see_nothing() -> None:
    """`check` refuses such a mask on the CPU; on a GPU the values are not read, and no row may go wrong."""
    rows = masks.document(torch.tensor([1, 4, 6])).rows(8, 8, torch.device("cpu"), 0, 8)[0, 0]
    assert rows.sum(1).tolist() == [0, 3, 3, 3, 2, 2, 0, 0]
