"""The family that chooses blocks on Hopper's tensor cores: defaults, reasons, what is compiled in, no spills."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from topk_problems import choosing_problem as problem

from tilewright.generator.family import family_named
from tilewright.generator.legality import legality
from tilewright.generator.problem import Problem
from tilewright.generator.render import render
from tilewright.generator.resources import compile_report
from tilewright.generator.space import family_default, legal_variants, problem_reason, unable_reason
from tilewright.generator.variant import Kernel, VariantSpec, kernel_of
from tilewright.runtime.selection import SELECT_BLOCKS

FAMILY = family_named("select_wgmma")
HEAD_DIMS = range(64, 257, 16)


def variant(block_m: int = 128, capacity: int = 56, num_stages: int = 3, groups: int = 64) -> VariantSpec:
    values = {"block_m": block_m, "groups": groups, "capacity": capacity, "block_n": 64, "num_stages": num_stages}
    return VariantSpec.from_values(FAMILY.name, {"mask_form": "selected", **values})


def kernel(dtype: str, head_dim: int, spec: VariantSpec, *, causal: bool = True, arch: str = "sm_90a") -> Kernel:
    return Kernel(SELECT_BLOCKS, dtype, head_dim, ("bound",) if causal else (), spec, arch)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_head_dim_from_64_on_has_a_default_for_lists_of_up_to_24(dtype: str) -> None:
    for head_dim, top in itertools.product(HEAD_DIMS, (1, 8, 16, 24)):
        assert family_default(problem(head_dim=head_dim, top=top, dtype=dtype), FAMILY) is not None, (head_dim, top)


@pytest.mark.parametrize("top", range(25, 65))
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128])
def test_lists_of_up_to_64_have_one_where_heads_are_not_wide(head_dim: int, top: int) -> None:
    assert family_default(problem(head_dim=head_dim, top=top), FAMILY) is not None


@pytest.mark.parametrize(
    "asked", [problem(head_dim=48), problem(top=80), problem(arch="sm_80"), problem(dtype="float32")], ids=str
)
def test_others_have_none(asked: Problem) -> None:
    assert family_default(asked, FAMILY) is None


def test_each_default_is_that_of_some_call() -> None:
    used = []
    for head_dim, top, block_size in itertools.product(HEAD_DIMS, (8, 16, 25, 32, 40, 48, 64), (16, 64)):
        spec = family_default(problem(head_dim=head_dim, top=top, block_size=block_size), FAMILY)
        used.append(spec.values() if spec is not None else {})
    for entry in FAMILY.defaults:
        assert {"mask_form": "selected", **entry} in used, entry


@pytest.mark.parametrize(
    ("head_dim", "top"), [*itertools.product((64, 128, 256), (8, 16, 24)), *itertools.product((64, 128), (32, 48, 64))]
)
def test_few_enough_variants_are_legal_to_measure_them_all(head_dim: int, top: int) -> None:
    assert 1 <= len(legal_variants(problem(head_dim=head_dim, top=top), [FAMILY])) <= 16


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (kernel("float16", 48, variant()), "would fill it with zeros"),
        (kernel("float16", 64, variant(), arch="sm_80"), "no wgmma instructions"),
        (kernel("float16", 64, variant(capacity=40, groups=128)), "let little enough through"),
        (kernel("float16", 64, variant(64, 88)), "those let too much through"),
        (kernel("float16", 64, variant(192)), "too large for two blocks"),
        (kernel("float16", 128, variant(192, 76, 2, groups=256)), "registers for each of 384 threads"),
    ],
)
def test_the_reason_is_given(made: Kernel, reason: str) -> None:
    assert reason in (legality(made) or "")


@pytest.mark.parametrize(
    ("asked", "spec", "able", "reason"),
    [
        (problem(top=25), variant(), False, "cannot hold the best 25"),
        (problem(top=64), variant(64, 88, groups=128), False, "cannot hold the best 64"),
        (problem(top=65), variant(64, 88, groups=128), False, "more than half of 128 groups"),
        (problem(top=16), variant(groups=128), True, "nearly as well with fewer than 128"),
        (problem(top=32), variant(64, 76, groups=256), True, "nearly as well with fewer than 256"),
        (problem(top=24), variant(64, 76, groups=128), True, "need less"),
        (problem(top=48), variant(64, 88, groups=128), True, "half as many scores again"),
        (problem(top=64), variant(128, 88, groups=256), True, "leaves most of its cycles unused"),
        (problem(top=32), variant(64, 64, 4, groups=128), True, "little room for 4 stages"),
        (problem(top=64, block_size=32), variant(192, 88, groups=256), True, "come near the best 64"),
        (problem(top=64), variant(64, 104, groups=256), True, ""),
        (problem(top=12), variant(capacity=40), True, "often run full"),
        (problem(top=11), variant(), True, "need less"),
        (problem(head_dim=128), variant(), True, "leaves most of its cycles unused"),
        (problem(block_size=2048), variant(), True, "few tiles are left to overlap"),
        (problem(), variant(), True, ""),
    ],
)
def test_what_cannot_be_is_told_from_what_does_not_pay(
    asked: Problem, spec: VariantSpec, able: bool, reason: str
) -> None:
    assert (unable_reason(asked, spec) is None) == able
    given = problem_reason(asked, spec)
    assert reason in given if given else not reason


def test_causal_is_compiled_in() -> None:
    for causal in (False, True):
        source = render(kernel("float16", 64, variant(), causal=causal)).sources["kernel.cu"]
        assert f"constexpr bool CAUSAL = {str(causal).lower()};" in source


# As many threads as registers allow, rows of more than one box that do not fill the last, the widest; more groups.
SAMPLE = [
    kernel("float16", 64, variant()),
    kernel("bfloat16", 80, variant(64, 40)),
    kernel("float16", 256, variant(64, num_stages=2)),
    kernel("float16", 64, variant(groups=128)),
    kernel("bfloat16", 64, variant(192, 88, groups=256)),
    kernel("bfloat16", 128, variant(192, 76, groups=128)),
    kernel("float16", 128, variant(64, 104, 2, groups=256)),
]


@pytest.mark.nvcc
@pytest.mark.parametrize("sample", SAMPLE, ids=lambda k: f"D{k.head_dim}-{k.spec.name}")
def test_a_covering_sample_spills_nothing(sample: Kernel, tmp_path: Path) -> None:
    # That shared memory is what space.toml counts is asserted in the source.
    report = compile_report(sample, tmp_path)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)


@pytest.mark.nvcc
@pytest.mark.parametrize(("head_dim", "top"), [(64, 16), (64, 32), (64, 40), (64, 64), (128, 48), (256, 16)])
def test_defaults_spill_nothing(head_dim: int, top: int, tmp_path: Path) -> None:
    asked = problem(head_dim=head_dim, top=top)
    spec = family_default(asked, FAMILY)
    assert spec is not None
    report = compile_report(kernel_of(asked, spec), tmp_path)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)
