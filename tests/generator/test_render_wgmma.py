"""The wgmma family: sm_90a alone, a default for every head_dim from 64 on, kernels that spill nothing."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tilewright.generator import toolchain
from tilewright.generator.arch import all_archs, arch_named
from tilewright.generator.family import family_named
from tilewright.generator.legality import derived_values, legality
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.render import render
from tilewright.generator.resources import parse_ptxas, run_compiler
from tilewright.generator.space import default_variant, family_default, form_defaults, legal_variants
from tilewright.generator.variant import Kernel, VariantSpec, kernel_of

FAMILY = family_named("forward_wgmma")
ARCHS = [name for name, arch in all_archs().items() if "wgmma" in arch.instructions]
HEAD_DIMS = range(64, 257, 16)


def problem(
    dtype: str = "bfloat16",
    head_dim: int = 64,
    terms: tuple[str, ...] = ("bound",),
    arch: str = "sm_90a",
    queries: int = 4096,
) -> Problem:
    return Problem(dtype, head_dim, 1, 8, 8, queries, queries, arch, MaskClass(terms, " & ".join(terms)))


def kernel(dtype: str, head_dim: int, terms: tuple[str, ...], form: str, *tile: int, **changes: object) -> Kernel:
    block_n, warpgroups, num_stages = tile
    values = {
        "mask_form": form,
        "block_m": 64,
        "block_n": block_n,
        "warpgroups": warpgroups,
        "num_stages": num_stages,
        "blocks_per_sm": 1,
        "overlap": "softmax",
        "persistent": False,
        "tile_order": "forward",
        **changes,
    }
    return Kernel("attention_forward", dtype, head_dim, terms, VariantSpec.from_values(FAMILY.name, values), "sm_90a")


def test_only_sm_90a_has_it() -> None:
    assert ARCHS == ["sm_90a"]
    for arch in set(all_archs()) - set(ARCHS):
        assert family_default(problem(head_dim=128, arch=arch), FAMILY) is None
        assert legal_variants(problem(head_dim=128, arch=arch), [FAMILY]) == []


@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 64), ("float32", 128), ("float16", 16), ("bfloat16", 48)])
def test_what_the_copy_engine_or_the_products_do_not_take_is_another_familys(dtype: str, head_dim: int) -> None:
    asked = problem(dtype, head_dim)
    assert family_default(asked, FAMILY) is None
    assert legal_variants(asked, [FAMILY]) == []
    assert default_variant(asked).family != FAMILY.name


def test_every_head_dim_has_a_default_in_each_mask_form_and_dispatch_prefers_it() -> None:
    used = []
    for dtype, head_dim, form, queries in itertools.product(FAMILY.dtypes, HEAD_DIMS, FAMILY.mask_forms, (1024, 16384)):
        asked = problem(dtype, head_dim, ("window", "stride"), queries=queries)
        used.append(next(form_defaults(asked, FAMILY, form)).values())
        assert default_variant(asked).family == FAMILY.name
    for entry in FAMILY.defaults:
        assert any({**values, **entry} == values for values in used), entry


def test_three_warpgroups_are_for_many_rows() -> None:
    most = {queries: family_default(problem(head_dim=128, queries=queries), FAMILY) for queries in (4080, 4096)}
    assert [dict(spec.axes)["warpgroups"] for spec in most.values() if spec is not None] == [2, 3]


@pytest.mark.parametrize(("head_dim", "most"), [(64, 360), (128, 200), (256, 30)])
def test_few_enough_variants_are_legal_to_measure_them_all(head_dim: int, most: int) -> None:
    legal = legal_variants(problem(head_dim=head_dim, terms=("window", "stride")), [FAMILY])
    assert most / 3 <= len(legal) <= most
    assert {spec.mask_form for spec in legal} == set(FAMILY.mask_forms)


TWO: dict[str, object] = {"blocks_per_sm": 2}
THREE: dict[str, object] = {"blocks_per_sm": 3}


@pytest.mark.parametrize(
    "measured",
    [
        kernel("bfloat16", 128, ("bound",), "analytic", 128, 2, 2, tile_order="reversed", overlap="ping_pong"),
        kernel("bfloat16", 128, ("bound",), "analytic", 128, 2, 2),
        kernel("bfloat16", 128, ("and_blocks",), "list", 128, 2, 2),
        kernel("bfloat16", 128, ("and_blocks",), "list", 64, 1, 3, **TWO),
        kernel("bfloat16", 64, ("and_blocks",), "list", 64, 1, 4, overlap="none", **THREE),
        kernel("bfloat16", 64, ("and_blocks",), "list", 128, 1, 2, **TWO),
        kernel("bfloat16", 64, ("window", "stride"), "gather", 64, 1, 3, overlap="none", persistent=True, **THREE),
    ],
    ids=lambda k: f"D{k.head_dim}-{k.spec.name}",
)
def test_what_a_gpu_ran_fastest_is_legal(measured: Kernel) -> None:
    assert legality(measured) is None


@pytest.mark.parametrize(
    ("head_dim", "form", "tile", "changes", "reason"),
    [
        (48, "analytic", (64, 2, 2), {}, "would fill it with zeros"),
        (64, "analytic", (64, 1, 2), {}, "1 in each of 1 blocks are too few"),
        (64, "analytic", (64, 2, 2), {"overlap": "none"}, "2 warpgroups of one block move together"),
        (64, "analytic", (64, 1, 2), {"overlap": "ping_pong", **TWO}, "nobody to take turns with"),
        (64, "list", (96, 2, 2), {}, "96 keys and 3 warpgroups are for runs of tiles"),
        (64, "analytic", (128, 2, 4), {}, "4 stages are for tiles of 64 keys"),
        (64, "analytic", (64, 2, 2), {"tile_order": "longest"}, "longest needs the plan's counts"),
        (64, "list", (64, 2, 2), {"tile_order": "reversed"}, "reversed is for causal masks"),
        (64, "bitmap", (64, 2, 3), {}, "a bitmap is for few blocks"),
        (128, "analytic", (128, 1, 2), TWO, "do not fit a multiprocessor"),
        (256, "analytic", (96, 2, 2), {}, "bytes of shared memory"),
        (128, "analytic", (96, 3, 2), {}, "registers a thread; 152 are left with 1 blocks of 512 threads"),
    ],
)
def test_the_reason_is_given(
    head_dim: int, form: str, tile: tuple[int, ...], changes: dict[str, object], reason: str
) -> None:
    answer = legality(kernel("float16", head_dim, ("bound",), form, *tile, **changes))
    assert answer is not None
    assert reason in answer


def test_the_source_asks_for_the_shared_memory_and_registers_that_are_counted() -> None:
    for head_dim in (144, 256):
        for spec in legal_variants(problem(head_dim=head_dim, terms=("window", "stride")), [FAMILY]):
            counted = kernel_of(problem(head_dim=head_dim, terms=("window", "stride")), spec)
            source, names = render(counted).sources["kernel.cu"], derived_values(counted)
            assert re.findall(r"SMEM_BYTES = (\d+);", source) == [str(names["smem_bytes"])]
            assert (
                f"LOAD_REGISTERS = {names['load_registers']}, COMPUTE_REGISTERS = {names['compute_registers']};"
                in source
            )
            registers = names["load_registers"] + names["warpgroups"] * names["compute_registers"]
            assert 128 * registers * names["blocks_per_sm"] <= 65536


# Both dtypes, each mask form, the largest and an odd head_dim, rings of 2 to 4 stages, all counts of warpgroups, each
# overlap: what the source asserts of its shared memory holds for all.
SAMPLE = [
    *(
        kernel_of(asked, next(form_defaults(asked, FAMILY, form)))
        for form, asked in [
            ("analytic", problem("bfloat16", 128, ("bound",))),
            ("gather", problem("bfloat16", 64, ("bound", "document", "window", "stride", "tokens"))),
            ("list", problem("float16", 64, ("and_blocks",))),
            ("bitmap", problem("float16", 256, ("and_bits",))),
        ]
    ),
    kernel("bfloat16", 80, ("window", "stride"), "analytic", 64, 3, 4, overlap="ping_pong", tile_order="reversed"),
]


@pytest.mark.nvcc
@pytest.mark.parametrize("sample", SAMPLE, ids=lambda k: f"{k.dtype}-D{k.head_dim}-{k.spec.mask_form}")
def test_a_sample_compiles_without_spills_or_products_in_turn(sample: Kernel, tmp_path: Path) -> None:
    for name, text in render(sample).sources.items():
        (tmp_path / name).write_text(text)
    command = [str(toolchain.cuda_toolkit().path), "-c", "-Xptxas=-v", *toolchain.host_compiler_flags()]
    command += [*toolchain.build_flags(arch_named("sm_90a"), "cuda"), "kernel.cu", "-o", "kernel.o"]
    code, log = run_compiler(command, 600.0, tmp_path)
    assert code == 0, log
    assert parse_ptxas(log)[1:3] == (0, 0), log
    # ptxas's word where it waits for each product before the next: four blocks leave too few registers to avoid it.
    assert ("serialized" in log) == (sample.spec.values()["blocks_per_sm"] == 4)


def test_only_persistent_blocks_have_a_workspace() -> None:
    for persistent in (False, True):
        made = kernel("bfloat16", 64, ("window", "stride"), "gather", 64, 1, 2, blocks_per_sm=2, persistent=persistent)
        sources = render(made).sources
        assert ("workspace_bytes" in sources["kernel.cu"]) is persistent
        assert ("workspace" in sources["binding.cpp"]) is persistent
