"""The family that visits the union of what neighbouring rows chose: what it is for, its defaults, what it computes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from topk_problems import UNION_SHAPES, check_harm_stays
from topk_problems import union_problem as problem

from tilewright.generator.arch import all_archs, arch_named
from tilewright.generator.family import family_named
from tilewright.generator.host_build import MODULE_NAME, build_host
from tilewright.generator.legality import derived_values, legality
from tilewright.generator.problem import Problem
from tilewright.generator.render import render
from tilewright.generator.resources import compile_report
from tilewright.generator.space import (
    default_variant,
    family_default,
    legal_variants,
    problem_reason,
    unable_reason,
)
from tilewright.generator.variant import Kernel, VariantSpec
from tilewright.runtime.selection import SELECTED_ATTENTION
from tilewright.tuner.case_book import CaseBook
from tilewright.tuner.host_kernel import HostKernel, check_cases

FAMILY = family_named("selected_union")
ARCHS = [name for name, arch in all_archs().items() if "mma" in arch.instructions]


def variant(
    block_m: int = 64,
    block_n: int = 64,
    num_warps: int = 4,
    num_stages: int = 2,
    held: bool = True,
    resident: int = 1,
    small: bool = False,
) -> VariantSpec:
    values = {"mask_form": "selected", "block_m": block_m, "block_n": block_n, "num_warps": num_warps}
    rest = {"num_stages": num_stages, "q_in_registers": held, "blocks_per_sm": resident, "small_blocks": small}
    return VariantSpec.from_values(FAMILY.name, {**values, **rest})


def kernel(arch: str, dtype: str, head_dim: int, spec: VariantSpec, *, causal: bool = True) -> Kernel:
    return Kernel(SELECTED_ATTENTION, dtype, head_dim, ("bound",) if causal else (), spec, arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_head_dim_and_block_size_has_a_default(arch: str) -> None:
    for head_dim, block_size in itertools.product(range(16, 257, 16), (16, 64, 256)):
        asked = problem(arch=arch, head_dim=head_dim, block_size=block_size)
        assert family_default(asked, FAMILY) is not None, (head_dim, block_size)


def test_sm_75_and_float32_have_none() -> None:
    assert family_default(problem(arch="sm_75"), FAMILY) is None
    assert family_default(problem(dtype="float32"), FAMILY) is None


def test_each_entry_is_the_default_of_some_call() -> None:
    calls = itertools.product((2048, 4096), ARCHS, (64, 128, 224, 240, 256), (16, 64))
    used = [family_default(problem(n, arch, head_dim=dim, block_size=size), FAMILY) for n, arch, dim, size in calls]
    values = [spec.values() for spec in used if spec is not None]
    for entry in FAMILY.defaults:
        assert any({**found, **entry} == found for found in values), entry


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_enough_variants_are_legal_to_measure_them_all(head_dim: int) -> None:
    for seqlen, block_size in itertools.product((2048, 4096), (16, 64)):
        assert 0 < len(legal_variants(problem(seqlen, head_dim=head_dim, block_size=block_size), [FAMILY])) < 40


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_short_calls_whose_rows_choose_alone_are_its_own(arch: str) -> None:
    for seqlen, block_size in ((2048, 64), (4096, 64), (2048, 16), (6144, 256)):
        asked = problem(seqlen, arch, block_size=block_size)
        assert family_default(asked, FAMILY) in legal_variants(asked)


@pytest.mark.parametrize(
    ("changes", "reason", "family"),
    [
        ({"seqlen": 8192}, "may choose all of 8192 keys between them, more than 6 times the 16 blocks", "selected_key"),
        ({"block_size": 80}, "got blocks of 80", "selected_key"),
        (
            {"query_group": 16, "heads": 4},
            "its rows fill a tile of 64, and there is nothing to unite",
            "selected_query",
        ),
        ({"seqlen_q": 31}, "31 queries of 1 heads leave a tile of 64 rows half empty", "selected_query"),
    ],
)
def test_other_calls_are_left_to_other_families(changes: dict[str, int], reason: str, family: str) -> None:
    asked = problem(arch="sm_80", **changes)  # type: ignore[arg-type]
    assert reason in (problem_reason(asked, variant()) or "")
    assert default_variant(asked).family == family


def test_a_gpu_is_filled_before_tiles_grow() -> None:
    for seqlen, fits in ((2048, False), (4096, True)):
        for spec in (variant(128), variant(resident=4)):
            answer = problem_reason(problem(seqlen), spec)
            assert (answer is None) == fits
            assert fits or "8 x 2048 rows are too few for tiles of more than 64" in (answer or "")


@pytest.mark.parametrize(
    ("head_dim", "spec", "reason"),
    [
        (64, variant(128, num_warps=2), "a warp owns 16 or 32 rows; block_m 128 over 2 warps gives 64"),
        (64, variant(128, 32), "do not fit a stage of 32 keys and values"),
        (64, variant(num_warps=2, resident=4), "fit by their registers anyway"),
        (80, variant(resident=4), "128 are left with 4 blocks of 128 threads"),
        (32, variant(64, 128, num_warps=2), "scores of 32 rows and 128 keys take 128 registers a thread"),
        (64, variant(128, num_warps=8), "with 16 query rows a fragment of K or V serves one product"),
        (64, variant(held=False), "the queries fit the registers"),
        (256, variant(128, 64, 8, 2, held=False), "bytes of shared memory a block; sm_89 allows 101376"),
    ],
)
def test_the_reason_is_given(head_dim: int, spec: VariantSpec, reason: str) -> None:
    answer = legality(kernel("sm_89" if head_dim == 256 else "sm_90a", "float16", head_dim, spec))
    assert reason in (answer or "")


@pytest.mark.parametrize(
    ("asked", "spec", "reason"),
    [
        (problem(32832), variant(), "32832 keys in blocks of 64 are more than the 512 blocks"),
        (problem(8208, block_size=16), variant(small=True), "8208 keys in blocks of 16 are more than"),
        (problem(block_size=96), variant(), "tiles of 64 keys are a part of a block, or whole blocks"),
        (problem(block_size=48), variant(small=True), "got blocks of 48"),
        (problem(block_size=8), variant(small=True), "whole blocks of a multiple of 16 keys"),
        (problem(), variant(small=True), "with blocks of 64 keys and tiles of 64, small_blocks is the other"),
    ],
)
def test_what_a_kernel_cannot_run_is_told(asked: Problem, spec: VariantSpec, reason: str) -> None:
    assert legality(kernel("sm_90a", "bfloat16", 64, spec)) is None
    assert reason in (unable_reason(asked, spec) or "")


# Every value of every axis, both dtypes, with and without the causal mask: executed on the host.
SAMPLE = {
    "parts of blocks": kernel("sm_90a", "bfloat16", 64, variant(resident=4)),
    "small blocks": kernel("sm_80", "float16", 32, variant(128, 64, 4, 1, small=True), causal=False),
    "queries in shared memory": kernel("sm_89", "bfloat16", 64, variant(128, 32, 8, held=False, small=True)),
    "large tiles": kernel("sm_80", "float16", 16, variant(64, 128, num_stages=1), causal=False),
}


def test_the_sample_has_every_value_of_every_axis() -> None:
    for axis, values in FAMILY.axes.items():
        sampled = {derived_values(sample)[axis] for sample in SAMPLE.values()}
        assert set(values) <= sampled | ({2} if axis == "num_warps" else set()), axis


@pytest.mark.parametrize("name", list(SAMPLE))
def test_a_kernel_attends_to_what_each_row_chose(name: str) -> None:
    sample = SAMPLE[name]
    book = CaseBook(torch.device("cpu"), UNION_SHAPES)
    found = check_cases(HostKernel(build_host(render(sample)), sample, MODULE_NAME, 0), book)
    assert found.report.ok, found.report.message
    assert found.report.cases >= 3


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.3])
def test_a_key_harms_only_rows_that_chose_its_block(scale: float) -> None:
    """Whatever it is, and whatever multiplies the scores."""
    sample = SAMPLE["parts of blocks"]
    check_harm_stays(HostKernel(build_host(render(sample)), sample, MODULE_NAME, 0), scale)


@pytest.mark.nvcc
@pytest.mark.parametrize("name", ["parts of blocks"])
def test_a_kernel_compiles_and_spills_nothing(name: str, tmp_path: Path) -> None:
    # That shared memory is what space.toml counts is asserted in the source.
    report = compile_report(SAMPLE[name], tmp_path)
    assert report.registers <= min(255, arch_named(SAMPLE[name].arch).max_registers_per_thread)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)
