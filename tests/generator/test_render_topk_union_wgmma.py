"""The family that visits the union of what neighbouring rows chose on wgmma: what it is for, and what it computes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from topk_problems import UNION_SHAPES, check_a_block_again, check_harm_stays
from topk_problems import attending_problem as long_problem
from topk_problems import union_problem as problem

from tilewright.generator import toolchain
from tilewright.generator.arch import arch_named
from tilewright.generator.family import family_named
from tilewright.generator.host_build import MODULE_NAME, build_host
from tilewright.generator.legality import derived_values, legality
from tilewright.generator.problem import Problem
from tilewright.generator.render import render
from tilewright.generator.resources import parse_ptxas, run_compiler
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
from tilewright.tuner.verified import kernels_to_verify

FAMILY = family_named("selected_union_wgmma")


def variant(
    block_m: int = 128,
    block_n: int = 64,
    num_stages: int = 2,
    resident: int = 1,
    overlap: str = "softmax",
    small: bool = False,
) -> VariantSpec:
    values = {"mask_form": "selected", "block_m": block_m, "block_n": block_n, "num_stages": num_stages}
    rest = {"blocks_per_sm": resident, "overlap": overlap, "small_blocks": small}
    return VariantSpec.from_values(FAMILY.name, {**values, **rest})


def kernel(dtype: str, head_dim: int, spec: VariantSpec, *, causal: bool = True) -> Kernel:
    return Kernel(SELECTED_ATTENTION, dtype, head_dim, ("bound",) if causal else (), spec, "sm_90a")


def test_every_head_dim_of_whole_boxes_and_block_size_has_a_default() -> None:
    for dtype, head_dim, block_size in itertools.product(FAMILY.dtypes, range(64, 257, 16), (16, 32, 64, 128, 256)):
        asked = problem(dtype=dtype, head_dim=head_dim, block_size=block_size)
        assert family_default(asked, FAMILY) is not None, (dtype, head_dim, block_size)


def test_each_entry_is_the_default_of_some_call() -> None:
    calls = itertools.product((2048, 4096), (64, 128, 256), (16, 64))
    used = [family_default(problem(n, head_dim=dim, block_size=size), FAMILY) for n, dim, size in calls]
    values = [spec.values() for spec in used if spec is not None]
    for entry in FAMILY.defaults:
        assert any({**found, **entry} == found for found in values), entry


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_other_architectures_have_none(arch: str) -> None:
    assert family_default(problem(arch=arch), FAMILY) is None


@pytest.mark.parametrize("head_dim", [64, 128])
def test_few_enough_variants_are_legal_to_measure_them_all(head_dim: int) -> None:
    for seqlen, block_size in itertools.product((2048, 4096), (16, 64, 256)):
        assert 0 < len(legal_variants(problem(seqlen, head_dim=head_dim, block_size=block_size), [FAMILY])) < 40


def test_dispatch_prefers_it_for_short_sequences() -> None:
    for seqlen, head_dim, block_size in itertools.product((2048, 4096), (64, 128), (64, 256)):
        first = "selected_region" if (seqlen, head_dim, block_size) == (4096, 64, 64) else FAMILY.name
        assert default_variant(problem(seqlen, head_dim=head_dim, block_size=block_size)).family == first
    assert default_variant(problem(1024, block_size=16)).family == FAMILY.name
    assert default_variant(problem(4160)).family != FAMILY.name
    assert any(needed.spec.family == FAMILY.name for needed in kernels_to_verify(arch_named("sm_90a")))


@pytest.mark.parametrize(
    ("asked", "spec", "reason"),
    [
        (long_problem(), variant(), "may choose all of 32768 keys between them, more than 4 times the 16 blocks"),
        (problem(query_group=32, heads=4), variant(), "its rows fill a tile of 128, and there is nothing to unite"),
        (problem(seqlen_q=31), variant(), "31 queries of 1 heads leave a tile of 128 rows half empty"),
        (problem(2048), variant(resident=2, overlap="none"), "do not give more than two warpgroups to each of 132"),
        (problem(32832), variant(), "32832 keys in blocks of 64 are more than the 512 blocks"),
        (problem(block_size=96), variant(), "tiles of 64 keys are a part of a block, or whole blocks"),
        (problem(block_size=8), variant(small=True), "whole blocks of a multiple of 16 keys"),
        (problem(), variant(small=True), "with blocks of 64 keys and tiles of 64, small_blocks is the other"),
    ],
)
def test_other_calls_are_left_to_other_families(asked: Problem, spec: VariantSpec, reason: str) -> None:
    assert legality(kernel("bfloat16", 64, spec)) is None
    assert reason in (problem_reason(asked, spec) or "")


def test_what_a_kernel_cannot_run_is_told_apart_from_what_does_not_pay() -> None:
    assert unable_reason(long_problem(), variant()) is None
    assert unable_reason(problem(32832), variant()) is not None


@pytest.mark.parametrize(
    ("head_dim", "spec", "reason"),
    [
        (48, variant(), "a box of the copy engine is 64 columns; head_dim 48"),
        (64, variant(64), "runs two to four computing warpgroups at once: 1 in each of 1 blocks are too few"),
        (64, variant(64, resident=2, overlap="ping_pong"), "turns are for the warpgroups of a multiprocessor's one"),
        (64, variant(overlap="products"), "with 1 blocks a multiprocessor the softmax too"),
        (64, variant(overlap="none"), "224 registers a thread are enough for products beside the softmax"),
        (64, variant(block_n=128, small=True), "tiles of 128 keys would have more small blocks"),
        (64, variant(64, resident=4, overlap="none", small=True), "24 registers are too few to find tiles"),
        (64, variant(block_n=128, num_stages=4), "4 stages are for tiles of 64 keys"),
        (64, variant(resident=2), "about 120 registers a thread; 104 are left with 2 blocks of 384 threads"),
        (256, variant(num_stages=3), "1 blocks of 273920 bytes of shared memory do not fit a multiprocessor"),
    ],
)
def test_the_reason_is_given(head_dim: int, spec: VariantSpec, reason: str) -> None:
    assert reason in (legality(kernel("float16", head_dim, spec)) or "")


# Every value of every axis, both dtypes, with and without the causal mask: executed on the host, and compiled.
SAMPLE = {
    "two blocks": kernel("bfloat16", 64, variant(resident=2, overlap="none")),
    "one block": kernel("float16", 80, variant(num_stages=3), causal=False),
    "in turns": kernel("bfloat16", 64, variant(192, num_stages=4, overlap="ping_pong")),
    "four warpgroups": kernel("bfloat16", 64, variant(256, num_stages=3, overlap="none"), causal=False),
    "small blocks": kernel("float16", 64, variant(64, resident=3, overlap="products", small=True)),
    "four blocks": kernel("bfloat16", 64, variant(64, resident=4, overlap="none")),
    "large tiles": kernel("bfloat16", 64, variant(64, 128, resident=2)),
}


def test_the_sample_has_every_value_of_every_axis() -> None:
    for axis, values in FAMILY.axes.items():
        assert set(values) <= {derived_values(sample)[axis] for sample in SAMPLE.values()}, axis


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
    sample = SAMPLE["two blocks"]
    check_harm_stays(HostKernel(build_host(render(sample)), sample, MODULE_NAME, 0), scale)


def test_a_list_may_name_a_block_again() -> None:
    sample = SAMPLE["two blocks"]
    check_a_block_again(HostKernel(build_host(render(sample)), sample, MODULE_NAME, 0))


@pytest.mark.nvcc
@pytest.mark.parametrize("name", list(SAMPLE))
def test_a_kernel_compiles_without_spills_or_products_in_turn(name: str, tmp_path: Path) -> None:
    # That shared memory is what space.toml counts is asserted in the source.
    for file, text in render(SAMPLE[name]).sources.items():
        (tmp_path / file).write_text(text)
    command = [str(toolchain.cuda_toolkit().path), "-c", "-Xptxas=-v", *toolchain.host_compiler_flags()]
    command += [*toolchain.build_flags(arch_named("sm_90a"), "cuda"), "kernel.cu", "-o", "kernel.o"]
    code, log = run_compiler(command, 600.0, tmp_path)
    assert code == 0, log
    assert parse_ptxas(log)[1:3] == (0, 0), log
    assert "serialized" not in log  # ptxas's word where it waits for each product before the next
