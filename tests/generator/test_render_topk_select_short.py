"""The family that chooses among few blocks on Hopper's tensor cores: defaults, reasons, results, no spills."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from topk_problems import choosing_problem as problem

from tilewright.generator.arch import arch_named
from tilewright.generator.family import family_named
from tilewright.generator.host_build import MODULE_NAME, build_host
from tilewright.generator.legality import legality
from tilewright.generator.render import render
from tilewright.generator.resources import compile_report
from tilewright.generator.space import default_variant, family_default, legal_variants, problem_reason, unable_reason
from tilewright.generator.variant import Kernel, VariantSpec, kernel_of
from tilewright.runtime.selected_launch import run_select
from tilewright.runtime.selection import SELECT_BLOCKS, Selection
from tilewright.tuner.case_book import CaseBook
from tilewright.tuner.host_kernel import HostKernel, check_cases
from tilewright.tuner.topk_cases import SELECT_HOST_SHAPES
from tilewright.tuner.verified import kernels_to_verify

FAMILY = family_named("select_short_wgmma")
HEAD_DIMS = range(64, 257, 16)


def variant(block_m: int = 64, block_n: int = 64) -> VariantSpec:
    return VariantSpec.from_values(FAMILY.name, {"mask_form": "selected", "block_m": block_m, "block_n": block_n})


def kernel(dtype: str, head_dim: int, spec: VariantSpec, *, causal: bool = True, arch: str = "sm_90a") -> Kernel:
    return Kernel(SELECT_BLOCKS, dtype, head_dim, ("bound",) if causal else (), spec, arch)


def test_every_head_dim_from_64_on_has_a_default_for_few_blocks_and_dispatch_prefers_it() -> None:
    for head_dim, dtype, top in itertools.product(HEAD_DIMS, FAMILY.dtypes, (1, 16, 64)):
        asked = problem(head_dim=head_dim, dtype=dtype, top=top, block_size=512)
        assert default_variant(asked).family == FAMILY.name
    assert any(needed.spec.family == FAMILY.name for needed in kernels_to_verify(arch_named("sm_90a")))


def test_each_entry_is_the_default_of_some_call() -> None:
    used = [family_default(problem(block_size=size, causal=True), FAMILY) for size in (512, 256)]
    assert [spec is not None and spec.block_n for spec in used] == [entry["block_n"] for entry in FAMILY.defaults]


@pytest.mark.parametrize("block_size", [256, 512])
def test_few_variants_are_legal(block_size: int) -> None:
    assert len(legal_variants(problem(block_size=block_size, causal=True), [FAMILY])) == 2


def test_what_cannot_be_says_why() -> None:
    assert "would fill it with zeros" in (legality(kernel("float16", 48, variant())) or "")
    assert "no wgmma instructions" in (legality(kernel("float16", 64, variant(), arch="sm_80")) or "")
    assert "more than the 64 blocks" in (unable_reason(problem(block_size=511), variant()) or "")
    assert unable_reason(problem(block_size=512), variant()) is None
    assert unable_reason(problem(block_size=512), variant(block_n=128)) is None
    assert "faster in two passes" in (problem_reason(problem(block_size=256), variant(block_n=128)) or "")
    assert problem_reason(problem(block_size=256, causal=True), variant(block_n=128)) is None
    assert "half of 128 columns empty" in (problem_reason(problem(block_size=512), variant(block_n=128)) or "")


# Every value of every axis, both dtypes, with and without the causal mask, rows that do not fill a box, the widest.
SAMPLE = [
    kernel("bfloat16", 64, variant()),
    kernel("float16", 80, variant(128), causal=False),
    kernel("bfloat16", 64, variant(64, 128), causal=False),
    kernel("float16", 128, variant(128, 128)),
    kernel("float16", 256, variant(64, 128)),
]


def loaded(sample: Kernel) -> HostKernel:
    return HostKernel(build_host(render(sample)), sample, MODULE_NAME, 0)


@pytest.mark.parametrize("sample", SAMPLE, ids=lambda k: f"D{k.head_dim}-{k.spec.name}")
def test_choices_are_the_references(sample: Kernel) -> None:
    shapes = tuple(shape for shape in SELECT_HOST_SHAPES if shape.seqlen_kv <= 64 * shape.block_size)
    found = check_cases(loaded(sample), CaseBook(torch.device("cpu"), shapes))
    assert found.report.ok, found.report.message
    assert found.report.cases >= 10


@pytest.mark.parametrize("spread", [1.0, 2.0**-12, 2.0**-20, 0.0])
@pytest.mark.parametrize("top", [1, 3, 16, 40])
def test_scores_that_halves_do_not_tell_apart(top: int, spread: float) -> None:
    """One key a block: told apart by keys, by finer keys, as floats, not at all; one is far above the others."""
    selection = Selection(1, top, 1, 1, causal=False)
    generator = torch.Generator().manual_seed(top)
    query = torch.ones(1, 1, 64, 64, dtype=torch.bfloat16)
    key = torch.zeros(1, 1, 61, 64, dtype=torch.bfloat16)
    key[..., 0] = torch.randn(1, 1, 61, generator=generator).bfloat16() * spread
    key[..., 1] = 1.0
    key[..., 5, 1] = 1000.0
    indices, counts = run_select(loaded(SAMPLE[2]), query, key, torch.tensor([top], dtype=torch.int32), selection)
    scores = (key[0, 0, :, 0].float() + key[0, 0, :, 1].float()).tolist()
    best = sorted(sorted(range(61), key=lambda block: (-scores[block], block))[:top])
    assert torch.equal(counts, torch.full_like(counts, top))
    assert torch.equal(indices, torch.tensor(best, dtype=torch.int32).expand_as(indices))


@pytest.mark.nvcc
@pytest.mark.parametrize("sample", SAMPLE, ids=lambda k: f"D{k.head_dim}-{k.spec.name}")
def test_a_covering_sample_spills_nothing(sample: Kernel, tmp_path: Path) -> None:
    # That shared memory is what space.toml counts is asserted in the source.
    report = compile_report(sample, tmp_path)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)


@pytest.mark.nvcc
@pytest.mark.parametrize(("head_dim", "block_size"), [(128, 512), (256, 512), (256, 256)])
def test_defaults_spill_nothing(head_dim: int, block_size: int, tmp_path: Path) -> None:
    asked = problem(head_dim=head_dim, block_size=block_size, causal=True)
    spec = family_default(asked, FAMILY)
    assert spec is not None
    report = compile_report(kernel_of(asked, spec), tmp_path)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)
