"""The mma family: a default from sm_80 on, rows that meet no bank twice, defaults that spill nothing."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from tilewright.generator.arch import all_archs
from tilewright.generator.family import family_named
from tilewright.generator.legality import legality
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.render import _environment, render
from tilewright.generator.resources import compile_report
from tilewright.generator.space import default_variant, family_default, form_defaults, legal_variants
from tilewright.generator.variant import Kernel, VariantSpec, kernel_of

FAMILY = family_named("forward_mma")
ARCHS = [name for name, arch in all_archs().items() if "mma" in arch.instructions]
HEAD_DIMS = range(16, 257, 16)


def problem(arch: str, dtype: str = "float16", head_dim: int = 64, terms: tuple[str, ...] = ("bound",)) -> Problem:
    return Problem(dtype, head_dim, 1, 8, 8, 4096, 4096, arch, MaskClass(terms, " & ".join(terms)))


def kernel(
    arch: str, dtype: str, head_dim: int, terms: tuple[str, ...], form: str, *tile: int, **changes: object
) -> Kernel:
    block_m, block_n, num_warps, num_stages = tile
    values = {
        "mask_form": form,
        "block_m": block_m,
        "block_n": block_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "q_in_registers": False,
        "tile_order": "forward",
        "blocks_per_sm": 1,
        **changes,
    }
    return Kernel("attention_forward", dtype, head_dim, terms, VariantSpec.from_values("forward_mma", values), arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_head_dim_has_a_default_that_dispatch_prefers(arch: str) -> None:
    for dtype, head_dim in itertools.product(FAMILY.dtypes, HEAD_DIMS):
        for terms in [(), ("bound",), ("window", "tokens"), ("and_blocks",)]:
            asked = problem(arch, dtype, head_dim, terms)
            assert family_default(asked, FAMILY) is not None
            assert default_variant(asked).family in ("forward_mma", "forward_wgmma")


def test_sm_75_has_none() -> None:
    assert "sm_75" not in ARCHS
    assert family_default(problem("sm_75"), FAMILY) is None


def test_each_mask_form_has_a_default_and_each_entry_is_one_of_them() -> None:
    used = []
    for arch, head_dim, form in itertools.product(ARCHS, HEAD_DIMS, FAMILY.mask_forms):
        asked = problem(arch, head_dim=head_dim, terms=("window", "stride"))
        used.append(next(form_defaults(asked, FAMILY, form)).values())
    for entry in FAMILY.defaults:
        assert any({**values, **entry} == values for values in used), entry


@pytest.mark.parametrize(("head_dim", "most"), [(64, 200), (128, 150)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_few_enough_variants_are_legal_to_measure_them_all(arch: str, head_dim: int, most: int) -> None:
    legal = legal_variants(problem(arch, head_dim=head_dim, terms=("window", "stride")), [FAMILY])
    assert most / 3 <= len(legal) <= most
    assert {spec.mask_form for spec in legal} == set(FAMILY.mask_forms)
    orders = {(spec.mask_form, spec.values()["tile_order"]) for spec in legal}
    others = {("analytic", "reversed"), ("list", "longest"), ("bitmap", "longest")}
    assert orders == {(form, "forward") for form in FAMILY.mask_forms} | others


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_older_families_add_few_variants_of_half_types(arch: str) -> None:
    for head_dim in (64, 128, 256):
        asked = problem(arch, head_dim=head_dim, terms=("window", "stride"))
        assert 0 < len(legal_variants(asked, [family_named("forward_simt")])) <= 10
        assert 10 <= len(legal_variants(asked, [family_named("forward_wmma")])) <= 90


@pytest.mark.parametrize("head_dim", [64, 128])
def test_runs_of_tiles_start_with_the_latest_rows(head_dim: int) -> None:
    for terms in [(), ("bound",), ("bound", "window")]:
        spec = family_default(problem("sm_90a", head_dim=head_dim, terms=terms), FAMILY)
        assert spec is not None
        assert (spec.mask_form, spec.values()["tile_order"]) == ("analytic", "reversed")


@pytest.mark.parametrize(
    ("arch", "head_dim", "tile", "changes", "reason"),
    [
        ("sm_90a", 64, (128, 64, 2, 2), {}, "a warp owns 16 or 32 query rows"),
        ("sm_90a", 64, (128, 32, 4, 2), {"q_in_registers": True}, "do not fit a stage of 32 keys and values"),
        ("sm_90a", 64, (128, 64, 4, 2), {"tile_order": "longest"}, "counts a plan's active tiles"),
        ("sm_90a", 64, (64, 64, 2, 2), {"q_in_registers": True}, "forward is for block_m 128 alone"),
        ("sm_90a", 64, (128, 64, 8, 2), {}, "128 query rows fit 4 warps of 32"),
        ("sm_90a", 64, (128, 64, 4, 2), {}, "queries fit the registers"),
        ("sm_89", 128, (128, 64, 4, 2), {}, "leave a multiprocessor 1 blocks of 4 warps"),
        ("sm_90a", 64, (64, 64, 2, 2), {"blocks_per_sm": 4}, "fit by their registers anyway"),
        ("sm_90a", 192, (128, 64, 4, 1), {}, "registers a thread; 255 are left"),
        ("sm_90a", 128, (64, 64, 4, 2), {"blocks_per_sm": 4, "q_in_registers": True}, "fit a multiprocessor"),
        ("sm_90a", 96, (64, 32, 4, 2), {"blocks_per_sm": 4, "q_in_registers": True}, "128 are left with 4 blocks"),
        ("sm_80", 256, (128, 64, 8, 2), {}, "leave a multiprocessor 0 blocks"),
    ],
)
def test_the_reason_is_given(
    arch: str, head_dim: int, tile: tuple[int, ...], changes: dict[str, object], reason: str
) -> None:
    answer = legality(kernel(arch, "float16", head_dim, ("bound",), "analytic", *tile, **changes))
    assert answer is not None
    assert reason in answer


SWIZZLE_CHECK = """
// Groups of 4 banks that 8 reads or writes of 16 bytes touch, at elements place[0] to place[7].
bool apart(const int (&place)[8]) {
    unsigned groups = 0;
    for (int at : place) groups |= 1u << at * 2 / 16 % 8;
    return groups == 0xffu;
}

bool right() {
    for (int chunk = 0; chunk < CHUNKS_A_ROW; ++chunk) {
        for (int row = 0; row < 32; row += 8) {  // a matrix of ldmatrix, and what 8 rows of accumulators write
            int place[8];
            for (int i = 0; i < 8; ++i) place[i] = swizzled(row + i, chunk);
            if (!apart(place)) return false;
        }
    }
    for (int first = 0; first < 32; first += 8) {  // 8 neighbouring lanes that copy rows
        for (int chunk = 0; chunk < CHUNKS_A_ROW; chunk += SWIZZLE) {
            int place[8];
            for (int i = 0; i < 8; ++i) {
                place[i] = swizzled((first + i) / SWIZZLE, (first + i) % SWIZZLE) + chunk * CHUNK;
                if (place[i] != swizzled((first + i) / SWIZZLE, (first + i) % SWIZZLE + chunk)) return false;
            }
            if (!apart(place)) return false;
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        for (int block = 0; block < HEAD_DIM / 16; ++block) {
            const Element* rows = nullptr;
            if (place_by_halves(lane)(rows, block) - rows != swizzled(lane % 16, 2 * block + lane / 16)) return false;
            const int row = lane % 8 + lane / 16 * 8;
            if (place_by_rows(lane)(rows, block) - rows != swizzled(row, 2 * block + lane / 8 % 2)) return false;
        }
    }
    bool taken[8 * HEAD_DIM] = {};
    for (int row = 0; row < 8; ++row) {
        for (int chunk = 0; chunk < CHUNKS_A_ROW; ++chunk) taken[swizzled(row, chunk)] = true;
    }
    for (int at = 0; at < 8 * HEAD_DIM; at += CHUNK) {
        if (!taken[at]) return false;
    }
    return true;
}
"""


def test_rows_meet_no_bank_twice_for_any_head_dim(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    swizzle = (
        _environment().from_string('{% from "_stages/mma.jinja" import swizzle %}{{ swizzle() }}').render()
    ) + SWIZZLE_CHECK
    spaces = "".join(f"namespace d{d} {{ constexpr int HEAD_DIM = {d};\n{swizzle}}}\n" for d in HEAD_DIMS)
    prints = "".join(f'    if (!d{d}::right()) std::puts("head_dim {d}");\n' for d in HEAD_DIMS)
    source = tmp_path / "swizzle.cpp"
    source.write_text(
        "#include <cstdint>\n#include <cstdio>\n#define __device__\n#define __forceinline__ inline\n"
        f"using Element = uint16_t;\n{spaces}int main() {{\n{prints}}}\n"
    )
    subprocess.run([compiler, "-std=c++17", "-O1", "-o", tmp_path / "swizzle", source], check=True)
    found = subprocess.run([tmp_path / "swizzle"], check=True, capture_output=True, text=True).stdout
    assert found == ""


def test_masks_and_scores_stay_in_registers() -> None:
    # One place in shared memory for the query tile, none for scores: what wmma cannot do.
    source = render(kernel("sm_90a", "bfloat16", 128, ("bound",), "analytic", 128, 64, 4, 2)).sources["kernel.cu"]
    assert "smem_s" not in source
    assert "mma_m16n8k16<Element>" in source


LATEST: dict[str, object] = {"tile_order": "reversed"}
HELD: dict[str, object] = {"q_in_registers": True}

# Each value of each axis, each mask form and term, both dtypes, both loops.
SAMPLE = [
    kernel("sm_80", "float16", 80, ("bound", "document"), "analytic", 64, 32, 2, 1, **LATEST, **HELD),
    kernel("sm_80", "bfloat16", 256, ("window", "tokens"), "gather", 128, 64, 8, 1),
    kernel("sm_89", "bfloat16", 32, (), "scan", 128, 64, 4, 2, **HELD),
    kernel("sm_90a", "bfloat16", 64, ("and_blocks",), "list", 64, 64, 4, 2, blocks_per_sm=4, **HELD),
    kernel("sm_90a", "float16", 32, ("window", "stride", "or_blocks", "and_bits"), "bitmap", 64, 32, 2, 2, **HELD),
    kernel("sm_90a", "float16", 128, ("bound", "and_blocks"), "list", 128, 64, 4, 2, tile_order="longest"),
    kernel("sm_90a", "bfloat16", 48, ("bound",), "analytic", 128, 64, 4, 3, **HELD, **LATEST),
    kernel("sm_80", "bfloat16", 160, ("window", "stride"), "gather", 128, 64, 8, 2, **HELD),
    kernel("sm_90a", "float16", 32, ("bound",), "analytic", 32, 32, 2, 3, **HELD, **LATEST),
    kernel("sm_120", "float16", 96, (), "analytic", 64, 32, 4, 2, blocks_per_sm=3, **HELD, **LATEST),
]


@pytest.mark.nvcc
@pytest.mark.parametrize("sample", SAMPLE[::2], ids=lambda k: f"{k.arch}-{k.dtype}-D{k.head_dim}-{k.spec.mask_form}")
def test_a_covering_sample_compiles(sample: Kernel, tmp_path: Path) -> None:
    # That shared memory is what space.toml counts is asserted in the source.
    report = compile_report(sample, tmp_path)
    assert report.registers <= 255
    assert report.spill_store_bytes <= 32


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("arch", "head_dim", "terms"),
    [
        ("sm_90a", 64, ("window", "stride")),
        ("sm_90a", 128, ("bound",)),
        ("sm_90a", 128, ("and_bits",)),
        ("sm_90a", 256, ("bound",)),
        ("sm_80", 192, ("bound",)),
    ],
    ids=lambda value: (" ".join(value) or "dense") if isinstance(value, tuple) else str(value),
)
def test_defaults_spill_nothing(arch: str, head_dim: int, terms: tuple[str, ...], tmp_path: Path) -> None:
    asked = problem(arch, "bfloat16", head_dim, terms)
    spec = family_default(asked, FAMILY)
    assert spec is not None
    report = compile_report(kernel_of(asked, spec), tmp_path)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)
