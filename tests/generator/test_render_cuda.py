"""CUDA kernels compile for every architecture: a sample that has as many pairs of choices as a few kernels can."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tilewright.generator.arch import all_archs
from tilewright.generator.family import family_named
from tilewright.generator.legality import derived_values, legality
from tilewright.generator.problem import DTYPES, MaskClass, Problem
from tilewright.generator.render import render
from tilewright.generator.resources import compile_report
from tilewright.generator.space import family_default
from tilewright.generator.variant import AxisValue, Kernel, VariantSpec, kernel_of

FAMILY = "forward_simt"
ARCHS = ("sm_75", "sm_80", "sm_90a")
HEAD_DIMS = (16, 48, 64, 96, 128, 192, 256)
MASKS: dict[str, tuple[tuple[str, ...], ...]] = {
    "analytic": ((), ("bound",), ("document", "window", "stride")),
    "gather": (("window", "stride"), ("bound", "window", "tokens")),
    "list": (("bound", "and_blocks"), ("and_bits",)),
    "bitmap": (("window", "tokens", "or_blocks"),),
    "scan": ((),),
}
SAMPLE = 5
JOBS = 2


def _candidates(arch: str, count: int) -> list[Kernel]:
    """Random legal kernels, the same in every run."""
    family, chance = family_named(FAMILY), random.Random(75)
    found: list[Kernel] = []
    while len(found) < count:
        form = chance.choice(list(MASKS))
        values: dict[str, AxisValue] = {"mask_form": form}
        values |= {axis: chance.choice(allowed) for axis, allowed in family.axes.items()}
        kernel = Kernel(
            "attention_forward",
            chance.choice(list(DTYPES)),
            chance.choice(HEAD_DIMS),
            chance.choice(MASKS[form]),
            VariantSpec.from_values(FAMILY, values),
            arch,
        )
        if legality(kernel) is None:
            found.append(kernel)
    return found


def _pairs(kernel: Kernel) -> set[tuple[object, object]]:
    choices = [("dtype", kernel.dtype), ("head_dim", kernel.head_dim), ("terms", kernel.mask_terms)]
    return set(itertools.combinations([*choices, *kernel.spec.values().items()], 2))


def covering_sample(arch: str) -> list[Kernel]:
    """The kernels that, one after the other, bring the most pairs of choices not seen before."""
    candidates, seen, sample = _candidates(arch, 150), set[tuple[object, object]](), list[Kernel]()
    for _ in range(SAMPLE):
        best = max(candidates, key=lambda kernel: len(_pairs(kernel) - seen))
        seen |= _pairs(best)
        sample.append(best)
    return sample


def default_kernel(arch: str, dtype: str, head_dim: int, terms: tuple[str, ...]) -> Kernel:
    problem = Problem(dtype, head_dim, 1, 1, 1, 4096, 4096, arch, MaskClass(terms, "any", density=None))
    spec = family_default(problem, family_named(FAMILY))
    assert spec is not None, f"no default of {FAMILY} is legal for {problem.name}"
    return kernel_of(problem, spec)


@pytest.mark.parametrize("arch", [name for name, arch in all_archs().items() if "simt" in arch.instructions])
def test_a_default_is_legal_for_every_dtype_head_dim_and_mask(arch: str) -> None:
    for dtype, head_dim in itertools.product(DTYPES, range(16, 257, 16)):
        for terms in itertools.chain.from_iterable(MASKS.values()):
            assert legality(default_kernel(arch, dtype, head_dim, terms)) is None


@pytest.mark.parametrize("arch", ARCHS)
def test_sources_say_what_they_are_and_leave_nothing_unrendered(arch: str) -> None:
    for kernel in covering_sample(arch):
        rendered = render(kernel)
        source, binding = rendered.sources["kernel.cu"], rendered.sources["binding.cpp"]
        assert source.startswith("// tilewright, generated: do not edit.\n// " + kernel.spec.name)
        assert rendered.digest in source
        assert "Python.h" not in source
        assert f"PyInit_{rendered.module_name}" in binding
        assert "{{" not in source.replace("{{0", "")
        assert "{%" not in source


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_a_covering_sample_compiles_and_defaults_spill_nothing(arch: str, tmp_path: Path) -> None:
    defaults = [
        default_kernel(arch, "float32", 64, ("window", "stride")),
        default_kernel(arch, "bfloat16", 128, ("bound", "and_blocks")),
        default_kernel(arch, "float32", 256, ("bound",)),
    ]
    kernels = [*defaults, *covering_sample(arch)]
    with ThreadPoolExecutor(JOBS) as pool:
        folders = [tmp_path / str(number) for number in range(len(kernels))]
        reports = list(pool.map(compile_report, kernels, folders))
    for kernel, report in zip(kernels, reports, strict=True):
        # The source itself asserts that its shared memory is what the rules counted.
        assert report.smem_bytes == derived_values(kernel)["smem_bytes"]
        assert report.registers <= 255
    for kernel, report in zip(defaults, reports, strict=False):
        assert report.spill_store_bytes == report.spill_load_bytes == 0, kernel.spec.name
