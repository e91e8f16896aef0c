"""What runs on the CPU of each CUDA kernel: nvcc compiles it too, where a kernel is looked at alone it is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.generator import toolchain
from tilewright.generator.arch import arch_named
from tilewright.generator.render import render
from tilewright.generator.resources import run_compiler
from tilewright.generator.variant import Kernel
from tilewright.tuner.verified import kernels_to_verify

ARCH = arch_named("sm_90a")
ONE_OF_EACH: dict[str, Kernel] = {}
for needed in kernels_to_verify(ARCH):
    ONE_OF_EACH.setdefault(needed.spec.family, needed)


@pytest.mark.nvcc
@pytest.mark.parametrize("family", list(ONE_OF_EACH))
def test_no_host_function_calls_one_of_the_device(family: str, tmp_path: Path) -> None:
    for file, text in render(ONE_OF_EACH[family]).sources.items():
        (tmp_path / file).write_text(text)
    command = [str(toolchain.cuda_toolkit().path), "-c", "-Xptxas=-O0", *toolchain.host_compiler_flags()]
    command += [*toolchain.build_flags(ARCH, "cuda"), "kernel.cu", "-o", "kernel.o"]
    code, log = run_compiler(command, 600.0, tmp_path)
    assert code == 0, log
