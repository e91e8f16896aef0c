"""The rendered sources themselves: a refactor of templates or generator shows here that it changed nothing.

A change that is meant is recorded by `python tests/generator/test_rendered.py`, and its diff reviewed: the golden
sources as C++, the digests as the list of kernels that it reaches. Changed CUDA digests must be verified on a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilewright.generator.abi import ARGUMENTS
from tilewright.generator.arch import arch_named
from tilewright.generator.family import family_named
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.render import render
from tilewright.generator.sample import covering_sample
from tilewright.generator.space import families_for, family_default
from tilewright.generator.variant import Kernel, kernel_of
from tilewright.runtime.selection import Selection
from tilewright.tuner.verified import kernels_to_verify

HERE = Path(__file__).parent
DIGESTS = HERE / "rendered_digests.json"
ARCHS = ("cpu", "sm_75", "sm_80", "sm_90a", "sm_120")
LONGFORMER = MaskClass(("window", "stride"), "sliding_window(32, 32) | global_stride(512)")


def problem(target: str, dtype: str, head_dim: int, mask: MaskClass) -> Problem:
    return Problem(dtype, head_dim, 1, 8, 8, 4096, 4096, target, mask)


BLOCKS = MaskClass(("and_blocks",), "block_mask(128, 128)")


def default_kernel(family: str, asked: Problem) -> Kernel:
    spec = family_default(asked, family_named(family))
    assert spec is not None
    return kernel_of(asked, spec)


GOLDEN_KERNELS: dict[str, Kernel] = {
    name: default_kernel(name, asked)
    for name, asked in {
        "forward_cpu": problem("cpu", "float32", 64, LONGFORMER),
        "forward_decode_cpu": Problem("float32", 64, 1, 8, 2, 1, 4096, "cpu", LONGFORMER),
        "forward_simt": problem("sm_90a", "float32", 64, LONGFORMER),
        "forward_wmma": problem("sm_90a", "bfloat16", 128, BLOCKS),
        "forward_mma": problem("sm_90a", "bfloat16", 128, BLOCKS),
        "forward_wgmma": problem("sm_90a", "bfloat16", 128, BLOCKS),
        "forward_decode": Problem("bfloat16", 128, 1, 32, 8, 1, 4096, "sm_90a", BLOCKS),
    }.items()
}


def calls(operation: str, target: str, dtype: str) -> list[Problem]:
    """Whose defaults the sample of axis values starts from: many queries and few, groups of them and one."""
    if operation == "attention_forward":
        few = Problem(dtype, 64, 1, 32, 1, 1, 4096, target, LONGFORMER)
        return [problem(target, dtype, 64, LONGFORMER), few]
    return [
        Selection(64, 16, 8, query_group, causal=True).problem(
            operation,
            dtype=dtype,
            head_dim=64,
            batch=1,
            num_heads=8,
            num_kv_heads=8,
            seqlen_q=seqlen_q,
            seqlen_kv=4096,
            target=target,
        )
        for query_group, seqlen_q in ((64, 4096), (1, 1), (1, 4096))
    ]


def kernels(arch_name: str) -> list[Kernel]:
    """Defaults for every common class of masks, and each axis value of each family at least once."""
    arch = arch_named(arch_name)
    found = dict.fromkeys(kernels_to_verify(arch))
    for operation in ARGUMENTS:
        for family in families_for(operation, arch):
            for asked in calls(operation, arch_name, family.dtypes[0]):
                found.update(dict.fromkeys(kernel_of(asked, spec) for spec in covering_sample(asked, family)))
    return list(found)


def named_digests(arch_name: str) -> dict[str, str]:
    return {
        f"{k.spec.name} {k.dtype} D{k.head_dim} [{' '.join(k.mask_terms)}]": render(k).digest
        for k in kernels(arch_name)
    }


def golden_sources() -> dict[str, str]:
    """Each golden kernel's sources but its binding, by the file that records them: NAME.cu, NAME.device.cuh."""
    return {
        f"{name}.{file.removeprefix('kernel.')}": text
        for name, kernel in GOLDEN_KERNELS.items()
        for file, text in render(kernel).sources.items()
        if file != "binding.cpp"
    }


@pytest.mark.parametrize("arch", ARCHS)
def test_rendered_digests_are_the_recorded_ones(arch: str) -> None:
    recorded, now = json.loads(DIGESTS.read_text())[arch], named_digests(arch)
    moved = [name for name, digest in now.items() if recorded.get(name) != digest]
    moved += [name for name in recorded if name not in now]
    advice = "if that is meant, run `python tests/generator/test_rendered.py` and review the diff"
    assert not moved, f"{len(moved)} kernels changed or are gone ({advice}): {moved[:5]}"


@pytest.mark.parametrize("file", [path.name for path in sorted((HERE / "golden").iterdir())])
def test_golden_sources(file: str) -> None:
    assert golden_sources()[file] == (HERE / "golden" / file).read_text()


def test_every_source_of_a_golden_kernel_is_recorded() -> None:
    assert sorted(golden_sources()) == sorted(path.name for path in (HERE / "golden").iterdir())


if __name__ == "__main__":
    DIGESTS.write_text(json.dumps({arch: named_digests(arch) for arch in ARCHS}, indent=1, sort_keys=True) + "\n")
    (HERE / "golden").mkdir(exist_ok=True)
    for file, text in golden_sources().items():
        (HERE / "golden" / file).write_text(text)
