"""Legality, the space of legal variants, and the default that runs everywhere."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tilewright.generator.arch import all_archs, arch_named
from tilewright.generator.errors import IllegalVariant
from tilewright.generator.expression import evaluate
from tilewright.generator.family import all_families
from tilewright.generator.legality import derived_values, legality
from tilewright.generator.problem import MASK_TERMS, MaskClass, Problem
from tilewright.generator.space import default_variant, families_for, family_default, legal_variants, problem_reason
from tilewright.generator.variant import VariantSpec, kernel_of
from tilewright.runtime.selection import Selection

TERM_SETS = [(), *((term,) for term in MASK_TERMS), ("window", "stride"), ("bound", "document"), MASK_TERMS]
CHOICE = Selection(block_size=64, list_width=16, num_choosers=8, query_group=16, causal=True).mask_class(8, 4096)


def problem(**changes: object) -> Problem:
    base = Problem("float32", 64, 1, 8, 8, 1024, 1024, "cpu", MaskClass(("window", "stride"), "w"))
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def cpu_variant(**changes: object) -> VariantSpec:
    values = {"mask_form": "gather", "block_m": 32, "block_n": 64, "row_unroll": 4, "panel": 16, "cached_panels": 64}
    return VariantSpec.from_values("forward_cpu", {**values, "schedule": "static", **changes})  # type: ignore[dict-item]


@pytest.mark.parametrize("arch", list(all_archs()))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_there_is_a_default_on_every_architecture(arch: str, dtype: str, head_dim: int) -> None:
    for terms in TERM_SETS:
        asked = problem(target=arch, dtype=dtype, head_dim=head_dim, mask=MaskClass(terms, "m"))
        spec = default_variant(asked)
        assert problem_reason(asked, spec) is None


@pytest.mark.parametrize("family", list(all_families()))
def test_resource_names_are_there_for_gpu_families(family: str) -> None:
    data = all_families()[family]
    for arch in all_archs().values():
        if data.instructions not in arch.instructions or arch.is_cpu:
            continue
        mask = MaskClass(("window",), "w") if data.operation == "attention_forward" else CHOICE
        asked = problem(operation=data.operation, target=arch.name, dtype=data.dtypes[0], mask=mask)
        longer = dataclasses.replace(asked, seqlen_q=32768, seqlen_kv=32768)
        fewer = dataclasses.replace(asked, seqlen_q=1)
        spec = next(filter(None, (family_default(one, data) for one in (asked, longer, fewer))), None)
        assert spec is not None, f"{family} has no default on {arch.name}"
        names = derived_values(kernel_of(asked, spec))
        assert 32 <= names["threads"] <= 1024
        assert 0 < names["smem_bytes"] <= arch.smem_limit_bytes
        assert 0 < names["registers"] <= arch.max_registers_per_thread


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"row_unroll": 6}, "block_m 32 must be a multiple of row_unroll 6"),
        ({"block_m": 33}, "block_m must be one of 8, 16, 32, 48, 64, 96, 128; got 33"),
        ({"mask_form": "analytic", "block_n": 16, "panel": 32}, "block_n 16 must be a multiple of panel 32"),
        ({"warps": 4}, "family forward_cpu has the axes"),
    ],
    ids=["divisibility", "value", "panel", "axis"],
)
def test_illegal_variants_say_why(change: dict[str, object], reason: str) -> None:
    answer = legality(kernel_of(problem(), cpu_variant(**change)))
    assert answer is not None
    assert answer.startswith(reason)


@pytest.mark.parametrize(
    ("form", "terms", "reason"),
    [
        ("analytic", ("tokens",), "mask form analytic has no closed form for tokens"),
        ("gather", ("window",), "mask form gather needs scattered keys"),
        ("gather", ("stride", "and_bits"), "mask form gather cannot evaluate and_bits"),
        ("list", (), "mask form list lists active tiles, and without a mask all are"),
        ("scan", (), "mask form scan reads a mask, and this problem has none"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_mask_forms_are_legal_where_they_make_sense(form: str, terms: tuple[str, ...], reason: str) -> None:
    answer = problem_reason(problem(mask=MaskClass(terms, "m")), cpu_variant(mask_form=form))
    assert answer is not None
    assert answer.startswith(reason)


def test_a_mask_too_large_to_scan_is_not_offered() -> None:
    asked = problem(seqlen_q=131072, seqlen_kv=131072)
    assert problem_reason(asked, cpu_variant(mask_form="scan")) is not None
    assert "scan" not in {spec.mask_form for spec in legal_variants(asked)}


def test_instructions_and_dtypes_are_checked() -> None:
    on_gpu = problem(target="sm_80")
    assert "sm_80 has no cpu instructions" in (legality(kernel_of(on_gpu, cpu_variant())) or "")


@pytest.mark.parametrize(
    ("target", "dtype", "head_dim", "terms"),
    [
        ("cpu", "float32", 32, ("window", "stride")),
        ("sm_75", "float16", 64, ("bound",)),
        ("sm_90a", "bfloat16", 208, ("window", "stride")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_legal_variants_are_all_points_without_a_reason_cheapest_first(
    target: str, dtype: str, head_dim: int, terms: tuple[str, ...]
) -> None:
    asked = problem(target=target, dtype=dtype, head_dim=head_dim, mask=MaskClass(terms, "m"))
    legal = legal_variants(asked)
    expected = []
    for family in families_for(asked.operation, arch_named(target)):
        names = ("mask_form", *family.axes)
        for point in itertools.product(family.mask_forms, *family.axes.values()):
            spec = VariantSpec.from_values(family.name, dict(zip(names, point, strict=True)))
            if problem_reason(asked, spec) is None:
                cost = float(evaluate(family.cost, derived_values(kernel_of(asked, spec))))
                expected.append((cost, spec.name, spec))
    assert legal == [spec for _, _, spec in sorted(expected, key=lambda entry: entry[:2])]
    assert default_variant(asked) in legal


def test_no_family_is_an_error_with_reasons() -> None:
    with pytest.raises(IllegalVariant, match="no kernel family can run"):
        default_variant(problem(operation="attention_backward"))
