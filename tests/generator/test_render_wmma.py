"""The wmma family: a default on every tensor-core architecture, and a covering sample that nvcc compiles."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tilewright.generator.arch import all_archs
from tilewright.generator.family import family_named
from tilewright.generator.legality import legality
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.render import render
from tilewright.generator.resources import compile_report
from tilewright.generator.space import default_variant, family_default, legal_variants
from tilewright.generator.variant import Kernel, VariantSpec

FAMILY = family_named("forward_wmma")
ARCHS = [name for name, arch in all_archs().items() if "wmma" in arch.instructions]


def problem(arch: str, dtype: str = "float16", head_dim: int = 64, terms: tuple[str, ...] = ("bound",)) -> Problem:
    return Problem(dtype, head_dim, 1, 8, 8, 4096, 4096, arch, MaskClass(terms, " & ".join(terms)))


def kernel(
    arch: str, dtype: str, head_dim: int, terms: tuple[str, ...], form: str, *tile: int, **changes: object
) -> Kernel:
    block_m, block_n, num_warps, num_stages = tile
    axes = {"smem_padding": 8, "q_in_registers": True, "tile_order": "forward", "blocks_per_sm": 1, **changes}
    values = {
        "mask_form": form,
        "block_m": block_m,
        "block_n": block_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
        **axes,
    }
    return Kernel("attention_forward", dtype, head_dim, terms, VariantSpec.from_values("forward_wmma", values), arch)


@pytest.mark.parametrize(("arch", "head_dim"), list(itertools.product(ARCHS, [16, 64, 80, 128, 256])))
def test_every_architecture_has_a_default(arch: str, head_dim: int) -> None:
    dtypes = FAMILY.dtypes if arch != "sm_75" else ("float16",)
    for dtype, terms in itertools.product(dtypes, [(), ("bound",), ("window", "tokens"), ("and_blocks",)]):
        asked = problem(arch, dtype, head_dim, terms)
        assert family_default(asked, FAMILY) is not None
        assert (default_variant(asked).family == "forward_wmma") == (arch == "sm_75")


def test_bfloat16_falls_to_another_family_where_wmma_has_none() -> None:
    assert family_default(problem("sm_75", "bfloat16"), FAMILY) is None
    assert default_variant(problem("sm_75", "bfloat16")).family != "forward_wmma"


@pytest.mark.parametrize(("arch", "least", "most"), [("sm_75", 200, 1500), ("sm_90a", 30, 100)])
def test_many_variants_are_legal_where_no_faster_family_is(arch: str, least: int, most: int) -> None:
    legal = legal_variants(problem(arch, head_dim=64), [FAMILY])
    assert least <= len(legal) <= most
    assert {spec.mask_form for spec in legal} == {"analytic", "list", "bitmap", "scan"}


@pytest.mark.parametrize(
    ("arch", "tile", "changes", "reason"),
    [
        ("sm_90a", (64, 64, 2, 2), {"block_m": 128}, "a warp owns 16 or 32 query rows"),
        ("sm_75", (64, 64, 4, 3), {}, "3 stages need cp.async"),
        ("sm_90a", (64, 64, 4, 2), {"smem_padding": 0}, "unpadded rows"),
        ("sm_90a", (64, 64, 4, 2), {"blocks_per_sm": 2}, "fit by their registers anyway"),
        ("sm_90a", (128, 64, 4, 3), {}, "differ from the default in one way; this one does in 2"),
        ("sm_75", (128, 128, 8, 1), {"q_in_registers": False}, "bytes of shared memory a block; sm_75 allows 65536"),
    ],
)
def test_the_reason_is_given(arch: str, tile: tuple[int, ...], changes: dict[str, object], reason: str) -> None:
    answer = legality(kernel(arch, "float16", 64, ("bound",), "analytic", *tile, **changes))
    assert answer is not None
    assert reason in answer


def test_bfloat16_fragments_are_loaded_from_shared_memory() -> None:
    # Through generic addresses, as nvcc compiles wmma's own loads of bfloat16, each would be four reads for one.
    source = render(kernel("sm_90a", "bfloat16", 64, (), "analytic", 64, 64, 4, 2)).sources["device.cuh"]
    assert "shared.bf16" in source
    assert "load_matrix_sync(fragment" not in source


# Each value of each axis, each mask form and term, both dtypes, the three pipelines.
SAMPLE = [
    kernel("sm_75", "float16", 64, ("bound",), "analytic", 64, 64, 4, 2),
    kernel("sm_75", "float16", 256, ("window", "tokens"), "gather", 32, 32, 2, 1, q_in_registers=False),
    kernel("sm_75", "float16", 80, ("bound", "document"), "analytic", 128, 32, 8, 2, tile_order="reversed"),
    kernel("sm_75", "float16", 64, (), "scan", 32, 32, 2, 1, smem_padding=0, q_in_registers=False),
    kernel("sm_75", "float16", 32, ("window", "stride"), "bitmap", 128, 64, 4, 1),
    kernel("sm_80", "float16", 80, ("bound",), "analytic", 64, 64, 4, 3),
    kernel("sm_80", "bfloat16", 256, ("bound",), "analytic", 32, 32, 2, 1, q_in_registers=False),
    kernel("sm_90a", "bfloat16", 64, ("and_blocks",), "list", 64, 64, 4, 2, blocks_per_sm=3),
    kernel("sm_90a", "bfloat16", 32, ("window", "stride", "or_blocks", "and_bits"), "list", 128, 128, 4, 2),
]


@pytest.mark.nvcc
@pytest.mark.parametrize("sample", SAMPLE[::2], ids=lambda k: f"{k.arch}-{k.dtype}-D{k.head_dim}-{k.spec.mask_form}")
def test_a_covering_sample_compiles(sample: Kernel, tmp_path: Path) -> None:
    # That shared memory is what space.toml counts is asserted in the source.
    report = compile_report(sample, tmp_path)
    assert report.registers <= 255
    assert report.spill_store_bytes <= 64
