"""The adversarial cases: that every set of terms gets them, and that each is as nasty as its name says."""

from __future__ import annotations

import itertools

import pytest
import torch

from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import MASK_TERMS
from tilewright.runtime.canonical import canonical
from tilewright.tuner.cases import SHAPES, Case, make_cases
from tilewright.tuner.layouts import FarBuffer, place, poison, still_poisoned
from tilewright.tuner.oracle import oracle

CPU = torch.device("cpu")
GROUP = {"window", "stride", "tokens", "or_blocks"}


def exists(terms: tuple[str, ...]) -> bool:
    """Whether a canonical mask can have these terms: a bracket of one band is a bound, one of one block mask an
    and_blocks, and the two kinds of blocks share their place.
    """
    alone = GROUP & set(terms) in ({"window"}, {"or_blocks"})
    return not alone and not {"or_blocks", "and_blocks"} <= set(terms)


ALL_TERMS = [c for n in range(len(MASK_TERMS) + 1) for c in itertools.combinations(MASK_TERMS, n)]
SOME_TERMS = [
    (),
    ("bound",),
    ("window", "stride"),
    ("bound", "document"),
    ("tokens", "and_blocks"),
    ("bound", "window", "or_blocks", "and_bits"),
]


def cases(terms: tuple[str, ...], form: str = "list", dtype: str = "float32") -> dict[str, Case]:
    return {case.name: case for case in make_cases(dtype, 32, terms, form, CPU)}


@pytest.mark.parametrize("size", range(len(MASK_TERMS) + 1))
def test_sets_of_terms_that_exist_get_every_case(size: int) -> None:
    sets = [t for t in ALL_TERMS if len(t) == size]
    for terms in sets if size in (0, 1, 2, 7, 8) else sets[::5]:
        if exists(terms):
            made = list(make_cases("float32", 16, terms, "list", CPU))
            assert [c.name for c in made] == [s.name for s in SHAPES]
            assert all(canonical(c.mask, c.shape.seqlen_q, c.shape.seqlen_kv).terms == terms for c in made)
        else:
            with pytest.raises(InvalidInput, match="no mask has exactly the terms"):
                list(make_cases("float32", 16, terms, "list", CPU))


def test_scan_kernels_get_masks_of_many_kinds() -> None:
    kinds = {canonical(c.mask, c.shape.seqlen_q, c.shape.seqlen_kv).terms for c in cases((), "scan").values()}
    assert len(kinds) >= 4
    assert () not in kinds


@pytest.mark.parametrize("terms", SOME_TERMS, ids="+".join)
def test_the_same_cases_every_time(terms: tuple[str, ...]) -> None:
    for one, other in zip(cases(terms).values(), cases(terms).values(), strict=True):
        assert torch.equal(one.query, other.query)
        assert torch.equal(one.value, other.value)
        pairs = zip(one.mask.tensors if one.mask else (), other.mask.tensors if other.mask else (), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("terms", [("bound",), ("and_blocks",), ("and_bits",), ("bound", "tokens")], ids="+".join)
def test_some_rows_are_empty_and_some_are_not(terms: tuple[str, ...]) -> None:
    case = cases(terms)["empty rows"]
    _, lse = oracle(case.query, case.key, case.value, case.mask, case.scale)
    assert (lse == -torch.inf).any()
    assert lse.isfinite().any()


@pytest.mark.parametrize("terms", SOME_TERMS, ids="+".join)
def test_full_rows_are_full(terms: tuple[str, ...]) -> None:
    for name in ("all rows full", "all rows full, ragged"):
        case = cases(terms)[name]
        shape = case.shape
        if case.mask is not None:
            assert case.mask.dense(shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_kv).all()


@pytest.mark.parametrize("terms", [("and_blocks",), ("and_bits",), ("window", "or_blocks")], ids="+".join)
def test_heads_have_different_masks(terms: tuple[str, ...]) -> None:
    case = cases(terms)["17 tokens, masks per head"]
    assert case.mask is not None
    dense = case.mask.dense(2, 3, 17, 17)
    assert dense.shape[:2] == (2, 3)
    assert not torch.equal(dense[0, 0], dense[0, 1])
    assert not torch.equal(dense[0, 0], dense[1, 0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numbers_are_what_the_case_says(dtype: str) -> None:
    made = cases((), dtype=dtype)
    equal = [c for c in made.values() if c.shape.num_heads == c.shape.num_kv_heads]
    logits = {c.name: c.query.double() @ c.key.double().mT * c.scale for c in equal}
    assert all(c.query.isfinite().all() and c.key.isfinite().all() for c in made.values())
    assert logits["very negative logits, ragged"].max() < -300
    assert logits["large logits"].max() > 300
    assert logits["large logits"].min() < -300
    assert (made["counting keys"].query == 0).all()


def test_the_lengths_of_the_field_failures_are_there() -> None:
    lengths = {n for s in SHAPES for n in (s.seqlen_q, s.seqlen_kv)}
    assert {1, 17, 127, 129, 1025} <= lengths
    assert any(s.seqlen_q > s.seqlen_kv for s in SHAPES)
    assert any(s.seqlen_q < s.seqlen_kv for s in SHAPES)
    assert any(s.num_heads > s.num_kv_heads for s in SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["packed", "transposed", "padded"])
def test_a_write_beside_the_view_is_counted(layout: str, dtype: torch.dtype) -> None:
    placed = place((2, 3, 5, 16), layout, dtype, CPU)  # type: ignore[arg-type]
    assert placed.view.data_ptr() % 32 == 0
    assert placed.view.stride(-1) == 1
    assert still_poisoned(placed.view).all()
    assert placed.view.isnan().all()
    placed.view.fill_(1.0)
    assert int(placed.outside()) == 0
    placed.buffer[-1] = 0.0
    placed.buffer[0] = 0.0
    assert int(placed.outside()) == 2


def test_nans_lie_just_outside_a_padded_view() -> None:
    placed = place((1, 2, 5, 16), "padded", torch.float32, CPU)
    placed.view.fill_(1.0)
    rows, columns = placed.view.stride(2), placed.view.shape[3]
    behind = placed.buffer.as_strided((1, 2, 6, columns + 1), placed.view.stride(), placed.view.storage_offset())
    assert behind[:, :, 5].isnan().all()
    assert behind[:, :, :, columns].isnan().all()
    assert rows > columns


def test_a_poisoned_nan_differs_from_a_computed_one() -> None:
    tensor = torch.full((4,), torch.nan)
    assert not still_poisoned(tensor).any()
    poison(tensor)
    assert still_poisoned(tensor).all()


def test_far_views_reach_past_two_to_the_31_and_do_not_overlap() -> None:
    buffer = FarBuffer(torch.float16, CPU)
    for layout, size in (("far_tokens", (1, 1, 130, 32)), ("far_heads", (1, 2, 70, 32))):
        views = [buffer.cut(size, layout) for _ in range(3)]  # type: ignore[arg-type]
        for number, view in enumerate(views):
            view.fill_(float(number))
        for number, view in enumerate(views):
            last = view.storage_offset() + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
            assert last >= 2**31
            assert (view == number).all()
