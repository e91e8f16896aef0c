"""The key-major family of attention over chosen blocks: defaults, what is compiled in, kernels that spill nothing."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from topk_problems import attending_problem as problem

from tilewright.generator.arch import all_archs
from tilewright.generator.family import family_named
from tilewright.generator.legality import legality
from tilewright.generator.render import render
from tilewright.generator.resources import compile_report
from tilewright.generator.space import family_default, legal_variants, problem_reason, unable_reason
from tilewright.generator.variant import Kernel, VariantSpec, kernel_of
from tilewright.runtime.selection import SELECTED_ATTENTION

FAMILY = family_named("selected_key")
ARCHS = [name for name, arch in all_archs().items() if "mma" in arch.instructions]


def variant(
    block_m: int = 64, block_n: int = 64, num_warps: int = 4, num_stages: int = 2, resident: int = 4
) -> VariantSpec:
    values = {"mask_form": "selected", "block_m": block_m, "block_n": block_n, "num_warps": num_warps}
    rest = {"num_stages": num_stages, "blocks_per_sm": resident, "rows_a_block": 112}
    return VariantSpec.from_values(FAMILY.name, {**values, **rest})


def kernel(arch: str, dtype: str, head_dim: int, spec: VariantSpec, *, causal: bool = True) -> Kernel:
    return Kernel(SELECTED_ATTENTION, dtype, head_dim, ("bound",) if causal else (), spec, arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_head_dim_and_block_size_has_a_default(arch: str) -> None:
    for dtype, head_dim, block_size in itertools.product(FAMILY.dtypes, range(16, 257, 16), (1, 16, 64, 256)):
        found = family_default(problem(arch, dtype, head_dim, block_size=block_size), FAMILY)
        assert found is not None, (dtype, head_dim, block_size)


def test_sm_75_has_none() -> None:
    assert family_default(problem("sm_75"), FAMILY) is None


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_enough_variants_are_legal_to_measure_them_all(head_dim: int) -> None:
    assert 0 < len(legal_variants(problem(head_dim=head_dim), [FAMILY])) < 100


@pytest.mark.parametrize(
    ("head_dim", "spec", "reason"),
    [
        (64, variant(128, num_warps=4, resident=3), "128 threads"),
        (256, variant(64, num_warps=4, resident=4), "do not fit a multiprocessor"),
        (64, variant(64, num_warps=8), "a warp owns 16 or 32 rows"),
        (64, variant(64, num_warps=4, resident=1), "leave a multiprocessor's tensor cores waiting"),
    ],
)
def test_the_reason_is_given(head_dim: int, spec: VariantSpec, reason: str) -> None:
    assert reason in (legality(kernel("sm_90a", "float16", head_dim, spec)) or "")


def test_half_empty_tiles_run_but_are_not_tried() -> None:
    asked, spec = problem(block_size=16), variant(block_n=128, resident=2)
    assert unable_reason(asked, spec) is None
    assert "half empty" in (problem_reason(asked, spec) or "")
    assert spec not in legal_variants(asked, [FAMILY])


def test_what_a_kernel_is_made_for_is_compiled_in() -> None:
    def source(dtype: str, *, causal: bool) -> str:
        return render(kernel("sm_90a", dtype, 64, variant(), causal=causal)).sources["kernel.cu"]

    assert "constexpr bool CAUSAL = true;" in source("bfloat16", causal=True)
    assert "constexpr bool CAUSAL = false;" in source("bfloat16", causal=False)
    # A sum of values over a block of keys may be too large for float16.
    assert "constexpr bool NORMALISED = true;" in source("float16", causal=True)
    assert "constexpr bool NORMALISED = false;" in source("bfloat16", causal=True)


@pytest.mark.nvcc
@pytest.mark.parametrize(("arch", "dtype", "head_dim"), [("sm_80", "float16", 128)])
def test_defaults_spill_nothing(arch: str, dtype: str, head_dim: int, tmp_path: Path) -> None:
    asked = problem(arch, dtype, head_dim, causal=True)
    spec = family_default(asked, FAMILY)
    assert spec is not None
    report = compile_report(kernel_of(asked, spec), tmp_path)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)
