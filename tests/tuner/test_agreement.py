"""Comparing a GPU with the host, the GPU's part played by the host itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tilewright.generator.build import build
from tilewright.generator.host_build import MODULE_NAME, build_host
from tilewright.generator.render import render
from tilewright.generator.variant import Kernel, VariantSpec
from tilewright.runtime.launch import LoadedKernel
from tilewright.runtime.plans import MaskPlan
from tilewright.tuner.agreement import compare_with_gpu
from tilewright.tuner.cases import HOST_SHAPES
from tilewright.tuner.host_kernel import HostKernel
from tilewright.tuner.verify import CaseBook

SHAPES = HOST_SHAPES[:4] + HOST_SHAPES[-1:]
PLAIN = {"num_stages": 1, "lanes_per_row": 8, "vector": 4, "q_in_registers": False, "tile_order": "forward"}
SPEC = VariantSpec.from_values(
    "forward_simt", {"mask_form": "analytic", "block_m": 32, "block_n": 16, "num_warps": 4, **PLAIN}
)


class Altered(HostKernel):
    """A kernel whose output, or lse, is a little off."""

    out_factor, lse_offset = 1.0, 0.0

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: MaskPlan,
        scale: float,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = super().run(query, key, value, plan, scale, out, lse)
        return out.mul_(self.out_factor), lse.add_(self.lse_offset)


@pytest.fixture(scope="module")
def artifact() -> Path:
    return build_host(render(kernel()))


def kernel(arch: str = "sm_80") -> Kernel:
    return Kernel("attention_forward", "float32", 16, ("bound",), SPEC, arch)


def test_the_same_kernel_agrees_with_itself(artifact: Path) -> None:
    book = CaseBook(torch.device("cpu"), SHAPES)
    one, other = (HostKernel(artifact, kernel(), MODULE_NAME, seed) for seed in (1, 2))
    agreement = compare_with_gpu(one, other, book, book)
    assert agreement.ok
    assert (agreement.cases, agreement.identical) == (4, 4)  # the far layout is left out
    assert agreement.out_error == agreement.lse_error == agreement.ratio == 0


@pytest.mark.parametrize(("out_factor", "lse_offset"), [(1.001, 0.0), (1.0, 1e-3), (float("nan"), 0.0)])
def test_a_difference_past_the_bounds_shows(artifact: Path, out_factor: float, lse_offset: float) -> None:
    book = CaseBook(torch.device("cpu"), SHAPES)
    altered = Altered(artifact, kernel(), MODULE_NAME)
    altered.out_factor, altered.lse_offset = out_factor, lse_offset
    agreement = compare_with_gpu(HostKernel(artifact, kernel(), MODULE_NAME), altered, book, book)
    assert not agreement.ok
    assert agreement.ratio > 1
    assert agreement.identical == (4 if out_factor == 1 else 0)
    assert agreement.case in [shape.name for shape in SHAPES]


@pytest.mark.gpu
def test_a_gpu_agrees_with_the_host() -> None:
    from tilewright.tuner.devices import resolve_target

    target = resolve_target("cuda")
    device = torch.device(target.devices[0])
    one = kernel(target.arch)
    host = HostKernel(build_host(render(one)), one, MODULE_NAME)
    gpu = LoadedKernel(build(one), one, render(one).module_name)
    books = [CaseBook(where, HOST_SHAPES) for where in (torch.device("cpu"), device)]
    agreement = compare_with_gpu(host, gpu, *books)
    assert agreement.ok, agreement
    assert agreement.cases == sum(not case.is_far for case in books[0].cases_for(one))
