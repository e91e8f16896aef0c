"""The key-major family of chosen blocks on wgmma: defaults, what it refuses, kernels that spill nothing."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from topk_problems import attending_problem as problem

from tilewright.generator.family import family_named
from tilewright.generator.legality import legality
from tilewright.generator.resources import compile_report
from tilewright.generator.space import family_default, legal_variants, unable_reason
from tilewright.generator.variant import Kernel, VariantSpec, kernel_of
from tilewright.runtime.selection import SELECTED_ATTENTION

FAMILY = family_named("selected_wgmma")


def variant(block_n: int = 64, warpgroups: int = 1, num_stages: int = 2, resident: int = 2) -> VariantSpec:
    values = {"mask_form": "selected", "block_m": 128, "block_n": block_n, "num_stages": num_stages}
    rest = {"warpgroups": warpgroups, "blocks_per_sm": resident, "merge_warps": 5, "rows_a_block": 112}
    return VariantSpec.from_values(FAMILY.name, {**values, **rest})


def test_head_dims_of_whole_boxes_and_blocks_of_a_tile_have_a_default() -> None:
    for dtype, head_dim, block_size in itertools.product(FAMILY.dtypes, (64, 96, 128, 192, 256), (1, 16, 64, 128)):
        found = family_default(problem("sm_90a", dtype, head_dim, block_size=block_size), FAMILY)
        # Wide heads and wide blocks together leave no room for two stages.
        fits = block_size < 128 or head_dim <= 128
        assert (found is not None) == fits, (dtype, head_dim, block_size)


def test_each_entry_is_the_default_of_some_call() -> None:
    calls = itertools.product(FAMILY.dtypes, range(64, 257, 16), (1, 64, 128))
    used = [family_default(problem("sm_90a", *call, block_size=size), FAMILY) for *call, size in calls]
    values = [spec.values() for spec in used if spec is not None]
    for entry in FAMILY.defaults:
        assert any({**found, **entry} == found for found in values), entry


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_other_architectures_have_none(arch: str) -> None:
    assert family_default(problem(arch), FAMILY) is None


@pytest.mark.parametrize("head_dim", [64, 128])
def test_few_enough_variants_are_legal_to_measure_them_all(head_dim: int) -> None:
    assert 0 < len(legal_variants(problem(head_dim=head_dim), [FAMILY])) < 100


def test_blocks_larger_than_a_tile_are_refused() -> None:
    assert "holds a whole block; blocks have 100" in (unable_reason(problem(block_size=100), variant()) or "")
    assert family_default(problem(block_size=256), FAMILY) is None


@pytest.mark.parametrize("name", ["selected_key", "selected_wgmma"])
def test_lists_of_more_entries_than_16_bits_count_are_refused(name: str) -> None:
    family = family_named(name)
    assert family_default(problem(top=2**16 - 1), family) is not None
    assert family_default(problem(top=2**16), family) is None


@pytest.mark.parametrize(
    ("head_dim", "spec", "reason"),
    [
        (32, variant(), "a box of the copy engine is 64 columns"),
        (256, variant(), "do not fit a multiprocessor"),
        (64, variant(warpgroups=2), "registers a thread"),
    ],
)
def test_the_reason_is_given(head_dim: int, spec: VariantSpec, reason: str) -> None:
    kernel = Kernel(SELECTED_ATTENTION, "float16", head_dim, (), spec, "sm_90a")
    assert reason in (legality(kernel) or "")


@pytest.mark.nvcc
def test_a_default_spills_nothing(tmp_path: Path) -> None:
    asked = problem("sm_90a", "float16", 128, causal=True)
    spec = family_default(asked, FAMILY)
    assert spec is not None
    report = compile_report(kernel_of(asked, spec), tmp_path)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)
