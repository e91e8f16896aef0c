"""The family that chooses blocks in two passes: defaults, reasons, what is compiled in, no spills."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from topk_problems import choosing_problem as problem

from tilewright.generator.arch import all_archs
from tilewright.generator.family import family_named
from tilewright.generator.legality import legality
from tilewright.generator.problem import Problem
from tilewright.generator.render import render
from tilewright.generator.resources import compile_report
from tilewright.generator.space import family_default, legal_variants, problem_reason, unable_reason
from tilewright.generator.variant import Kernel, VariantSpec, kernel_of
from tilewright.runtime.selection import SELECT_BLOCKS

FAMILY = family_named("select_mma")
ARCHS = [name for name, arch in all_archs().items() if "mma" in arch.instructions]
HEAD_DIMS = range(16, 257, 16)
LONG, SHORT = 32768, 64


def variant(block_m: int = 64, num_warps: int = 4, capacity: int = 56, **changes: int) -> VariantSpec:
    values = {
        "block_m": block_m,
        "num_warps": num_warps,
        "capacity": capacity,
        "block_n": 64,
        "num_stages": 2,
    }
    return VariantSpec.from_values(FAMILY.name, {"mask_form": "selected", **values, **changes})


def kernel(arch: str, dtype: str, head_dim: int, spec: VariantSpec, *, causal: bool = True) -> Kernel:
    return Kernel(SELECT_BLOCKS, dtype, head_dim, ("bound",) if causal else (), spec, arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_head_dim_has_a_default_for_lists_of_any_common_length(arch: str) -> None:
    for head_dim, top, seqlen in itertools.product(
        HEAD_DIMS, (1, 8, 16, 20, 25, 32, 48, 64, 100, 128, 200), (SHORT, LONG)
    ):
        assert family_default(problem(arch, head_dim, top=top, seqlen=seqlen), FAMILY) is not None, (
            head_dim,
            top,
            seqlen,
        )


def test_sm_75_has_none() -> None:
    assert family_default(problem("sm_75"), FAMILY) is None


def test_each_default_is_that_of_some_call() -> None:
    used = []
    for arch, head_dim, top, seqlen in itertools.product(
        ("sm_80", "sm_89", "sm_90a"), HEAD_DIMS, (8, 16, 20, 32, 64, 100, 128, 160, 256, 400), (SHORT, 8192, LONG)
    ):
        spec = family_default(problem(arch, head_dim, top=top, seqlen=seqlen), FAMILY)
        used.append(spec.values() if spec is not None else {})
    for entry in FAMILY.defaults:
        assert {"mask_form": "selected", **entry} in used, entry


@pytest.mark.parametrize("top", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_enough_variants_are_legal_to_measure_them_all(head_dim: int, top: int) -> None:
    assert 2 < len(legal_variants(problem(head_dim=head_dim, top=top), [FAMILY])) <= 60


@pytest.mark.parametrize(
    ("arch", "head_dim", "spec", "reason"),
    [
        ("sm_90a", 64, variant(128, 1), "a warp owns 16 or 32 rows"),
        ("sm_90a", 64, variant(num_stages=3), "a third pays for tiles of 32 at most"),
        ("sm_89", 64, variant(128, 8, 128), "bytes of shared memory a block"),
        ("sm_90a", 256, variant(), "pass through its buffers"),
        ("sm_75", 64, variant(), "no mma instructions"),
    ],
)
def test_the_reason_is_given(arch: str, head_dim: int, spec: VariantSpec, reason: str) -> None:
    assert reason in (legality(kernel(arch, "float16", head_dim, spec)) or "")


@pytest.mark.parametrize(
    ("asked", "spec", "able", "reason"),
    [
        (problem(top=17), variant(), False, "cannot hold the best 17 and a step's 32"),
        (problem(top=73), variant(128), False, "cannot hold the best 73 and a step's 32"),
        (problem(top=72), variant(128), True, ""),
        (problem(), variant(32, 2), True, "leave room for 4 warps"),
        (problem(top=5), variant(capacity=128), True, "need less"),
        (problem(), variant(), True, ""),
    ],
)
def test_what_cannot_be_is_told_from_what_does_not_pay(
    asked: Problem, spec: VariantSpec, able: bool, reason: str
) -> None:
    assert (unable_reason(asked, spec) is None) == able
    assert reason in (problem_reason(asked, spec) or "")


def test_causal_is_compiled_in() -> None:
    for causal in (False, True):
        source = render(kernel("sm_90a", "float16", 64, variant(), causal=causal)).sources["kernel.cu"]
        assert f"constexpr bool CAUSAL = {str(causal).lower()};" in source


# The oldest architecture, 16 and 32 rows a warp, buffers that registers cannot hold.
SAMPLE = [
    kernel("sm_80", "float16", 48, variant(128, 4, block_n=32, num_stages=3)),
    kernel("sm_90a", "float16", 64, variant(16, 1, 512, block_n=32)),
]


@pytest.mark.nvcc
@pytest.mark.parametrize("sample", SAMPLE, ids=lambda k: f"{k.arch}-{k.dtype}-D{k.head_dim}-{k.spec.block_m}")
def test_a_covering_sample_spills_nothing(sample: Kernel, tmp_path: Path) -> None:
    # That shared memory is what space.toml counts is asserted in the source.
    report = compile_report(sample, tmp_path)
    assert report.registers <= 255
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)


@pytest.mark.nvcc
@pytest.mark.parametrize(("arch", "head_dim"), [("sm_90a", 160)])
def test_defaults_spill_nothing(arch: str, head_dim: int, tmp_path: Path) -> None:
    asked = problem(arch, head_dim, causal=True)
    spec = family_default(asked, FAMILY)
    assert spec is not None
    report = compile_report(kernel_of(asked, spec), tmp_path)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)
