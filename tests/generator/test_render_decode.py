"""The decode family: the default of few queries from sm_80 on, one block for the heads of a KV head, no spills."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tilewright.generator.abi import FORWARD_ARGUMENTS, arguments_of
from tilewright.generator.arch import all_archs
from tilewright.generator.family import family_named
from tilewright.generator.legality import derived_values
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.render import render
from tilewright.generator.resources import compile_report
from tilewright.generator.space import default_variant, family_default, legal_variants, problem_reason
from tilewright.generator.variant import VariantSpec, kernel_of

FAMILY = family_named("forward_decode")
ARCHS = [name for name, arch in all_archs().items() if "mma" in arch.instructions]
MASKS: tuple[tuple[str, ...], ...] = ((), ("bound",), ("window", "tokens"), ("window", "stride"), ("and_blocks",))


def problem(
    arch: str = "sm_90a",
    *,
    dtype: str = "bfloat16",
    head_dim: int = 128,
    heads: tuple[int, int] = (32, 8),
    seqlen_q: int = 1,
    terms: tuple[str, ...] = (),
) -> Problem:
    mask = MaskClass(terms, " & ".join(terms) or "dense")
    return Problem(dtype, head_dim, 4, *heads, seqlen_q, 8192, arch, mask)


def default(asked: Problem) -> VariantSpec:
    spec = family_default(asked, FAMILY)
    assert spec is not None, asked.name
    return spec


@pytest.mark.parametrize("arch", ARCHS)
def test_few_queries_get_it_whatever_the_head_dim_and_mask(arch: str) -> None:
    for dtype, head_dim, terms in itertools.product(FAMILY.dtypes, range(16, 257, 16), MASKS):
        assert default_variant(problem(arch, dtype=dtype, head_dim=head_dim, terms=terms)).family == FAMILY.name


@pytest.mark.parametrize(
    ("heads", "seqlen_q", "few"),
    [
        ((32, 8), 1, True),
        ((32, 8), 16, True),
        ((32, 8), 17, False),
        ((64, 1), 1, True),
        ((65, 1), 1, False),
        ((8, 8), 65, False),
    ],
)
def test_few_are_64_rows_a_kv_head(heads: tuple[int, int], seqlen_q: int, few: bool) -> None:
    asked = problem(heads=heads, seqlen_q=seqlen_q)
    assert (family_default(asked, FAMILY) is not None) is few
    assert (default_variant(asked).family == FAMILY.name) is few
    if not few:
        spec = default(problem())
        assert "more than 64 rows a KV head" in str(problem_reason(asked, spec))


def test_half_empty_blocks_are_not_tried() -> None:
    assert {spec.block_m for spec in legal_variants(problem(heads=(16, 1)), [FAMILY])} == {16}
    assert {spec.block_m for spec in legal_variants(problem(heads=(32, 1)), [FAMILY])} == {16, 32}
    assert default(problem(heads=(32, 1))).block_m == 32


def test_scattered_keys_are_gathered_and_blocks_listed() -> None:
    assert default(problem(terms=("window", "stride"))).mask_form == "gather"
    assert default(problem(terms=("bound", "and_blocks"))).mask_form == "list"
    assert default(problem(terms=("bound",))).mask_form == "analytic"


def test_few_enough_variants_are_legal_to_measure_them_all() -> None:
    for head_dim, heads in itertools.product((64, 128), ((32, 8), (32, 1))):
        assert 8 <= len(legal_variants(problem(head_dim=head_dim, heads=heads), [FAMILY])) <= 100


def test_it_alone_of_its_operation_asks_for_scratch() -> None:
    few = render(kernel_of(problem(), default(problem())))
    many = problem(seqlen_q=4096)
    others = render(kernel_of(many, default_variant(many)))
    assert "workspace_bytes" in few.sources["binding.cpp"]
    assert "workspace" not in others.sources["binding.cpp"]
    assert [argument.name for argument in arguments_of("attention_forward", workspace=True)] == [
        *(argument.name for argument in FORWARD_ARGUMENTS),
        "workspace",
    ]


def test_queries_are_kept_in_registers_where_they_fit() -> None:
    kept = {
        (head_dim, heads): derived_values(kernel_of(asked, default(asked)))["q_in_registers"]
        for head_dim, heads in itertools.product((64, 128, 256), ((32, 8), (32, 1)))
        for asked in (problem(head_dim=head_dim, heads=heads),)
    }
    assert [key for key, in_registers in kept.items() if not in_registers] == [
        (128, (32, 1)),
        (256, (32, 8)),
        (256, (32, 1)),
    ]


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("arch", "head_dim", "heads", "terms"),
    [
        ("sm_90a", 128, (32, 1), ("window", "stride")),
        ("sm_90a", 256, (32, 8), ("and_bits",)),
        ("sm_80", 64, (32, 8), ("bound", "and_blocks")),
        ("sm_89", 192, (32, 8), ()),
    ],
    ids=lambda value: (" ".join(map(str, value)) or "dense") if isinstance(value, tuple) else str(value),
)
def test_defaults_spill_nothing(
    arch: str, head_dim: int, heads: tuple[int, int], terms: tuple[str, ...], tmp_path: Path
) -> None:
    asked = problem(arch, head_dim=head_dim, heads=heads, terms=terms)
    report = compile_report(kernel_of(asked, default(asked)), tmp_path)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)
