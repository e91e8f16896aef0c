"""The family whose blocks of threads keep the results of a region of rows: what it is for, and what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from topk_problems import check_a_block_again, check_harm_stays
from topk_problems import sharing_problem as problem

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
    families_for,
    family_default,
    legal_variants,
    problem_reason,
)
from tilewright.generator.variant import Kernel, VariantSpec
from tilewright.runtime.selected_launch import run_selected
from tilewright.runtime.selection import SELECTED_ATTENTION, Selection
from tilewright.tuner.case_book import CaseBook
from tilewright.tuner.host_kernel import HostKernel, check_cases
from tilewright.tuner.topk_cases import ChoiceShape
from tilewright.tuner.topk_oracle import selected_attention_oracle
from tilewright.tuner.verified import kernels_to_verify

FAMILY = family_named("selected_region")

SHAPES = (
    ChoiceShape("several units of a block", 1, 1, 1, 600, 320, 64, 3),
    ChoiceShape("two heads, chosen", 1, 2, 1, 530, 640, 64, 6, lists="chosen"),
    ChoiceShape("every block listed", 1, 1, 1, 300, 190, 64, 3, lists="all"),
    ChoiceShape("every query lists the same block", 1, 1, 1, 530, 400, 64, 3, lists="same"),
    ChoiceShape("entries outside, amid NaNs", 1, 2, 2, 300, 700, 64, 9, lists="outside", layout="padded"),
    ChoiceShape("shuffled, at odd elements", 1, 1, 1, 200, 900, 64, 13, lists="shuffled", layout="unaligned"),
    ChoiceShape("heads share, groups of 3", 1, 6, 2, 150, 900, 64, 7, query_group=3, shared=True),
    ChoiceShape("lists of 16", 1, 1, 1, 700, 1600, 64, 16),
    ChoiceShape("lists of 16, blocks of 32", 1, 1, 1, 270, 800, 32, 16),
    ChoiceShape("blocks of 24, a short last one", 1, 2, 1, 150, 290, 24, 5),
    ChoiceShape("blocks of 32, heads share, transposed", 1, 4, 2, 70, 400, 32, 9, shared=True, layout="transposed"),
    ChoiceShape("large logits", 1, 1, 1, 65, 320, 64, 2, numbers="large"),
    ChoiceShape("nothing listed", 1, 1, 1, 9, 65, 64, 2, lists="none"),
)
"""Blocks with several units of rows, blocks that nobody chose, regions with few rows."""


def variant(block_m: int = 1024, block_n: int = 64, warps: int = 16, num_stages: int = 5) -> VariantSpec:
    values = {"mask_form": "selected", "block_m": block_m, "block_n": block_n, "warps": warps}
    return VariantSpec.from_values(FAMILY.name, {**values, "num_stages": num_stages})


def kernel(dtype: str, head_dim: int, spec: VariantSpec, *, causal: bool = True) -> Kernel:
    return Kernel(SELECTED_ATTENTION, dtype, head_dim, ("bound",) if causal else (), spec, "sm_90a")


def test_each_entry_is_the_default_of_some_call() -> None:
    used = [family_default(problem(seqlen), FAMILY) for seqlen in (4096, 8192, 16384, 32768)]
    values = [spec.values() for spec in used if spec is not None]
    for entry in FAMILY.defaults:
        assert any({**found, **entry} == found for found in values), entry


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_other_architectures_have_none(arch: str) -> None:
    assert family_default(problem(arch=arch), FAMILY) is None


@pytest.mark.parametrize("seqlen", [4096, 8192, 16384, 32768])
def test_few_enough_variants_are_legal_to_measure_them_all(seqlen: int) -> None:
    assert 0 < len(legal_variants(problem(seqlen), [FAMILY])) < 40


def test_it_comes_first_where_regions_have_enough_rows() -> None:
    assert FAMILY in families_for(SELECTED_ATTENTION, arch_named("sm_90a"))
    assert family_default(problem(), FAMILY) == variant()
    for seqlen in (4096, 8192, 32768):
        assert default_variant(problem(seqlen)).family == FAMILY.name
    for seqlen in (1024, 131072):
        assert default_variant(problem(seqlen)).family != FAMILY.name
    for asked in (problem(8192, head_dim=128), problem(8192, block_size=32)):
        assert legal_variants(asked, [FAMILY])
        assert default_variant(asked).family != FAMILY.name
    assert any(needed.spec.family == FAMILY.name for needed in kernels_to_verify(arch_named("sm_90a")))


@pytest.mark.parametrize(
    ("asked", "spec", "reason"),
    [
        (problem(block_size=128, top=8), variant(), "a tile of 64 keys holds a whole block; blocks have 128"),
        (
            problem(top=17),
            variant(),
            "lists have 16 blocks at most, each of which rounds a row's result once more; one has 17",
        ),
        (problem(32832), variant(), "32832 keys in blocks of 64 are more than the 512 blocks"),
        (problem(8192, block_size=32), variant(512), "would be half empty with blocks of 32"),
        (problem(), variant(warps=8), "8 warps are for results of more than 64 columns"),
        (problem(query_group=3, heads=8), variant(), "3 queries of 8 heads share a list, and need no gathering"),
        (problem(), variant(256), "fewer than 12 of a region's 256 rows choose a block"),
        (problem(8192), variant(), "1 x 8 x 8192 rows are regions of 1024 for less than half of 132"),
    ],
)
def test_other_calls_are_left_to_other_families(asked: Problem, spec: VariantSpec, reason: str) -> None:
    assert legality(kernel("bfloat16", 64, spec)) is None
    assert reason in (problem_reason(asked, spec) or "")


@pytest.mark.parametrize(
    ("head_dim", "spec", "reason"),
    [
        (96, variant(), "the lanes of a row share out its results in chunks of 16 bytes"),
        (64, variant(num_stages=8), "1024 rows take 279552 bytes of shared memory"),
        (128, variant(256, num_stages=4), "about 184 registers a thread; 128 are left with 512 threads"),
    ],
)
def test_the_reason_is_given(head_dim: int, spec: VariantSpec, reason: str) -> None:
    assert reason in (legality(kernel("float16", head_dim, spec)) or "")


# Every value of every axis, both dtypes, with and without the causal mask: executed on the host, and compiled.
SAMPLE = {
    "large": kernel("bfloat16", 64, variant(), causal=False),
    "small": kernel("bfloat16", 64, variant(256, num_stages=8)),
    "between": kernel("bfloat16", 64, variant(768, num_stages=4)),
    "small blocks": kernel("bfloat16", 64, variant(512, 32, num_stages=8)),
    "float16": kernel("float16", 64, variant(256, num_stages=4)),
    "wide": kernel("bfloat16", 128, variant(256, warps=8, num_stages=4), causal=False),
}


def test_the_sample_has_every_value_of_every_axis() -> None:
    for axis, values in FAMILY.axes.items():
        assert set(values) <= {derived_values(sample)[axis] for sample in SAMPLE.values()}, axis


@pytest.mark.parametrize("name", list(SAMPLE))
def test_a_kernel_attends_to_what_each_row_chose(name: str) -> None:
    sample = SAMPLE[name]
    book = CaseBook(torch.device("cpu"), SHAPES)
    found = check_cases(HostKernel(build_host(render(sample)), sample, MODULE_NAME, 0), book)
    assert found.report.ok, found.report.message
    assert found.report.cases >= 3


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.3])
def test_a_key_harms_only_rows_that_chose_its_block(scale: float) -> None:
    """Whatever it is, and whatever multiplies the scores."""
    sample = SAMPLE["small"]
    check_harm_stays(HostKernel(build_host(render(sample)), sample, MODULE_NAME, 0), scale)


def test_a_list_may_name_a_block_again() -> None:
    sample = SAMPLE["small"]
    check_a_block_again(HostKernel(build_host(render(sample)), sample, MODULE_NAME, 0))


@pytest.mark.parametrize("name", ["small", "float16"])
def test_values_may_have_any_size(name: str) -> None:
    """Halves have less range than bfloat16, and a row's blocks may differ by all of it."""
    sample = SAMPLE[name]
    loaded = HostKernel(build_host(render(sample)), sample, MODULE_NAME, 0)
    selection = Selection(64, 4, 1, 1, causal=True)
    generator = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if name == "small" else torch.float16
    query, key, value = (torch.randn(1, 1, 512, 64, generator=generator) for _ in range(3))
    largest = 30.0 if name == "small" else 4.0  # powers of ten
    exponents = torch.linspace(-largest, largest, 8)[torch.randperm(8, generator=generator)]
    value *= (10.0 ** exponents.repeat_interleave(64))[:, None]
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    indices = torch.stack([torch.randperm(8, generator=generator)[:4].sort().values for _ in range(512)]).int()
    counts = torch.full((1, 1, 512), 4, dtype=torch.int32)
    out, _ = run_selected(loaded, query, key, value, indices.view(1, 1, 512, 4), counts, selection, 0.125)
    want, _ = selected_attention_oracle(query, key, value, indices.view(1, 1, 512, 4), counts, selection, 0.125)
    sizes = want.double().abs().amax(-1, keepdim=True)
    seen = sizes > (0.0 if name == "small" else 1e-3)  # below, float16 itself rounds to subnormals
    errors = (out.double() - want.double()).abs() / sizes
    assert out.isfinite().all()
    assert errors[seen.expand_as(errors)].max() < 1e-2


@pytest.mark.parametrize("name", ["large", "float16"])
def test_the_same_call_gives_the_same_bits(name: str) -> None:
    """In whatever order threads run: a row's results are merged in the order of its list."""
    sample = SAMPLE[name]
    selection = Selection(64, 5, 1, 1, causal="bound" in sample.mask_terms)
    generator = torch.Generator().manual_seed(4)
    dtype = torch.bfloat16 if sample.dtype == "bfloat16" else torch.float16
    query, key, value = (torch.randn(1, 1, 700, 64, generator=generator).to(dtype) for _ in range(3))
    value[:, :, ::3] *= 40.0
    indices = torch.stack([torch.randperm(11, generator=generator)[:5].sort().values for _ in range(700)]).int()
    counts = torch.randint(0, 6, (1, 1, 700), generator=generator, dtype=torch.int32)
    found = []
    for seed in range(4):
        loaded = HostKernel(build_host(render(sample)), sample, MODULE_NAME, seed)
        found.append(run_selected(loaded, query, key, value, indices.view(1, 1, 700, 5), counts, selection, 0.125))
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(lse, found[0][1])


@pytest.mark.nvcc
@pytest.mark.parametrize("name", list(SAMPLE))
def test_a_kernel_compiles_without_spills(name: str, tmp_path: Path) -> None:
    # That shared memory is what space.toml counts is asserted in the source.
    for file, text in render(SAMPLE[name]).sources.items():
        (tmp_path / file).write_text(text)
    command = [str(toolchain.cuda_toolkit().path), "-c", "-Xptxas=-v", *toolchain.host_compiler_flags()]
    command += [*toolchain.build_flags(arch_named("sm_90a"), "cuda"), "kernel.cu", "-o", "kernel.o"]
    code, log = run_compiler(command, 600.0, tmp_path)
    assert code == 0, log
    assert parse_ptxas(log)[1:3] == (0, 0), log
