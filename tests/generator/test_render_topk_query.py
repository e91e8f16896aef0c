"""The query-major family of attention over chosen blocks: what it is for, its defaults, kernels that spill nothing."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tilewright.generator.arch import all_archs, arch_named
from tilewright.generator.family import family_named
from tilewright.generator.legality import derived_values, legality
from tilewright.generator.problem import Problem
from tilewright.generator.render import render
from tilewright.generator.resources import compile_report
from tilewright.generator.space import family_default, legal_variants, problem_reason, unable_reason
from tilewright.generator.variant import Kernel, VariantSpec, kernel_of
from tilewright.runtime.selection import SELECTED_ATTENTION, Selection

FAMILY = family_named("selected_query")
ARCHS = [name for name, arch in all_archs().items() if "mma" in arch.instructions]
HEAD_DIMS = range(16, 257, 16)

# Calls by what decides the tile: query heads, KV heads, queries, queries that share a list.
CALLS = {
    "decode": (8, 8, 1, 1),
    "decode of shared heads": (64, 8, 1, 1),
    "decode of one KV head": (128, 1, 1, 1),
    "shared heads": (64, 4, 32768, 1),
    "pairs of shared heads": (64, 4, 32768, 2),
    "groups": (8, 8, 32768, 64),
    "groups of shared heads": (32, 8, 32768, 64),
}


def problem(
    call: str = "groups", arch: str = "sm_90a", dtype: str = "bfloat16", head_dim: int = 64, *, causal: bool = True
) -> Problem:
    num_heads, num_kv_heads, seqlen_q, query_group = CALLS[call]
    return Selection(64, 16, num_kv_heads, query_group, causal).problem(
        SELECTED_ATTENTION,
        dtype=dtype,
        head_dim=head_dim,
        batch=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        seqlen_q=seqlen_q,
        seqlen_kv=32768,
        target=arch,
    )


def variant(block_m: int, block_n: int, num_warps: int, num_stages: int, split: int, held: bool = True) -> VariantSpec:
    values = {"mask_form": "selected", "block_m": block_m, "block_n": block_n, "num_warps": num_warps}
    return VariantSpec.from_values(
        FAMILY.name, {**values, "num_stages": num_stages, "split": split, "q_in_registers": held}
    )


def kernel(arch: str, dtype: str, head_dim: int, spec: VariantSpec, *, causal: bool = True) -> Kernel:
    return Kernel(SELECTED_ATTENTION, dtype, head_dim, ("bound",) if causal else (), spec, arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_head_dim_has_a_default_for_every_call(arch: str) -> None:
    for call, dtype, head_dim in itertools.product(CALLS, FAMILY.dtypes, HEAD_DIMS):
        assert family_default(problem(call, arch, dtype, head_dim), FAMILY) is not None, (call, dtype, head_dim)


def test_sm_75_has_none() -> None:
    assert "sm_75" not in ARCHS
    assert family_default(problem(arch="sm_75"), FAMILY) is None


def test_each_entry_is_the_default_of_some_call() -> None:
    calls = itertools.product(CALLS, ARCHS, HEAD_DIMS)
    used = [family_default(problem(call, arch, head_dim=head_dim), FAMILY) for call, arch, head_dim in calls]
    values = [spec.values() for spec in used if spec is not None]
    for entry in FAMILY.defaults:
        assert any({**found, **entry} == found for found in values), entry


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_few_enough_variants_are_legal_to_measure_them_all(arch: str) -> None:
    for call, head_dim in itertools.product(CALLS, (64, 128, 256)):
        assert 0 < len(legal_variants(problem(call, arch, head_dim=head_dim), [FAMILY])) < 60


def test_defaults_fill_their_tiles_and_split_where_lists_are_few() -> None:
    tiles = {call: family_default(problem(call), FAMILY) for call in CALLS}
    assert {call: (spec.block_m, spec.values()["split"]) for call, spec in tiles.items() if spec is not None} == {
        "decode": (16, 8),
        "decode of shared heads": (16, 8),
        "decode of one KV head": (32, 8),
        "shared heads": (16, 1),
        "pairs of shared heads": (32, 1),
        "groups": (64, 1),
        "groups of shared heads": (64, 1),
    }


@pytest.mark.parametrize(
    ("head_dim", "spec", "reason"),
    [
        (64, variant(128, 64, 2, 2, 1), "a warp works on 16 or 32 rows; block_m 128 over 2 warps in 1 teams gives 64"),
        (64, variant(32, 64, 4, 2, 2), "got 2 teams of 4 warps"),
        (64, variant(128, 32, 4, 2, 1), "do not fit a stage of 32 keys and values"),
        (64, variant(64, 64, 4, 2, 1, held=False), "queries fit the registers"),
        (64, variant(32, 128, 1, 1, 1), "take 128 registers a thread"),
        (64, variant(16, 32, 4, 3, 4), "3 stages are for warps that share their tiles"),
        (64, variant(64, 64, 4, 1, 1), "need not wait at two barriers"),
        (128, variant(16, 128, 1, 2, 1), "less than one for each scheduler"),
        (256, variant(64, 64, 4, 2, 1), "registers a thread; sm_90a allows 255"),
        (256, variant(16, 32, 8, 1, 8, held=False), "bytes of shared memory a block; sm_90a allows 232448"),
    ],
)
def test_the_reason_is_given(head_dim: int, spec: VariantSpec, reason: str) -> None:
    answer = legality(kernel("sm_90a", "float16", head_dim, spec))
    assert answer is not None
    assert reason in answer


@pytest.mark.parametrize(
    ("call", "spec", "reason"),
    [
        (
            "decode",
            variant(32, 32, 2, 2, 2),
            "tiles of 32 rows are half empty: a list has 1 queries of 1 heads",
        ),
        ("groups of shared heads", variant(16, 32, 1, 2, 1), "a list's keys are read more than four times"),
        ("groups", variant(32, 32, 2, 2, 2), "enough for a GPU's warps without splitting"),
    ],
)
def test_what_does_not_pay_for_a_call_can_run_it(call: str, spec: VariantSpec, reason: str) -> None:
    asked = problem(call)
    assert unable_reason(asked, spec) is None
    assert reason in (problem_reason(asked, spec) or "")
    assert spec not in legal_variants(asked, [FAMILY])


@pytest.mark.parametrize(
    ("choosers", "query_group", "seqlen_q", "taken"),
    [(64, 1, 32768, False), (64, 1, 16, True), (64, 8, 32768, True), (4, 1, 32768, True)],
)
def test_single_rows_of_many_queries_are_left_to_key_major_kernels(
    choosers: int, query_group: int, seqlen_q: int, taken: bool
) -> None:
    asked = Selection(64, 16, choosers, query_group, causal=True).problem(
        SELECTED_ATTENTION,
        dtype="bfloat16",
        head_dim=64,
        batch=1,
        num_heads=64,
        num_kv_heads=4,
        seqlen_q=seqlen_q,
        seqlen_kv=32768,
        target="sm_90a",
    )
    assert (family_default(asked, FAMILY) is not None) == taken
    if not taken:
        assert "fewer than 8 rows" in (problem_reason(asked, variant(16, 32, 1, 2, 1)) or "")


def source(spec: VariantSpec, **changes: bool) -> str:
    return render(kernel("sm_90a", "bfloat16", 64, spec, **changes)).sources["kernel.cu"]


def test_a_team_of_one_warp_waits_for_no_other_while_it_walks_its_list() -> None:
    for spec, barrier, other in [
        (variant(16, 32, 4, 2, 4), "__syncwarp();", "__syncthreads();"),
        (variant(16, 32, 1, 2, 1), "__syncwarp();", "__syncthreads();"),
        (variant(64, 64, 4, 2, 1), "__syncthreads();  // the tile is there", "__syncwarp();  // the tile is there"),
    ]:
        text = source(spec)
        loop = text[text.index("while (ahead[0].stop > 0)") :].split("\n}\n")[0]
        assert barrier in loop
        assert other not in loop


def test_only_what_is_split_is_merged() -> None:
    assert "merge_teams" in source(variant(16, 32, 4, 2, 4))
    assert "merge_teams" not in source(variant(64, 64, 4, 2, 1))


def test_positions_are_compared_where_a_call_is_causal() -> None:
    assert "constexpr bool CAUSAL = true;" in source(variant(64, 64, 4, 2, 1))
    assert "constexpr bool CAUSAL = false;" in source(variant(64, 64, 4, 2, 1), causal=False)


# Each value of each axis, both dtypes, both loops, with and without the causal mask.
SAMPLE = [
    kernel("sm_80", "float16", 80, variant(128, 64, 8, 2, 1)),
    kernel("sm_80", "bfloat16", 256, variant(16, 32, 4, 1, 4, held=False)),
    kernel("sm_90a", "bfloat16", 64, variant(16, 128, 2, 1, 2), causal=False),
    kernel("sm_90a", "float16", 112, variant(64, 64, 4, 3, 1)),
    kernel("sm_120", "bfloat16", 32, variant(32, 32, 1, 2, 1), causal=False),
]


def test_the_sample_has_every_value_of_every_axis() -> None:
    assert all(legality(sample) is None for sample in SAMPLE)
    for axis, values in FAMILY.axes.items():
        compiled = {derived_values(sample)[axis] for sample in SAMPLE} | {8 if axis == "split" else None}
        assert set(values) <= compiled, axis


@pytest.mark.nvcc
@pytest.mark.parametrize("sample", SAMPLE[::2], ids=lambda k: f"{k.arch}-{k.dtype}-D{k.head_dim}-{k.spec.block_m}")
def test_a_sample_compiles_and_spills_nothing(sample: Kernel, tmp_path: Path) -> None:
    # That shared memory is what space.toml counts is asserted in the source.
    report = compile_report(sample, tmp_path)
    assert report.registers <= min(255, arch_named(sample.arch).max_registers_per_thread)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("arch", "head_dim", "call"),
    [
        ("sm_80", 192, "decode"),
    ],
)
def test_defaults_spill_nothing(arch: str, head_dim: int, call: str, tmp_path: Path) -> None:
    asked = problem(call, arch, head_dim=head_dim)
    spec = family_default(asked, FAMILY)
    assert spec is not None
    report = compile_report(kernel_of(asked, spec), tmp_path)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)
