"""What compilers report about kernels, read from real compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.generator.errors import CompileFailed, TimedOut
from tilewright.generator.resources import ResourceReport, compile_sources, parse_ptxas

SPILLS = r"""
__global__ void __launch_bounds__(1024) spills(float* x) {
  float v[128];
  for (int i = 0; i < 128; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int j = 0; j < 64; ++j)
#pragma unroll
    for (int i = 0; i < 128; ++i) v[i] = v[i] * x[j] + v[(i + 1) % 128];
#pragma unroll
  for (int i = 0; i < 128; ++i) x[i * 1024 + threadIdx.x] = v[i];
}
"""


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_a_cuda_kernel_is_measured_without_a_gpu(arch: str, cuda_kernel, tmp_path: Path) -> None:
    report = compile_sources(cuda_kernel(arch), tmp_path / "out")
    assert 0 < report.registers < 64
    assert report.smem_bytes >= 512
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)
    assert (tmp_path / "out" / "kernel.cubin").exists()
    assert (tmp_path / "out" / "binding.cpp").exists()


@pytest.mark.nvcc
def test_spills_are_counted(cuda_kernel, tmp_path: Path) -> None:
    report = compile_sources(cuda_kernel("sm_80", SPILLS), tmp_path)
    assert report.registers == 64
    assert report.spill_store_bytes > 0
    assert report.spill_load_bytes > 0


@pytest.mark.nvcc
def test_a_compile_error_names_source_and_log(cuda_kernel, tmp_path: Path) -> None:
    with pytest.raises(CompileFailed, match="no_such_name") as error:
        compile_sources(cuda_kernel("sm_80", "__device__ int broken = no_such_name;\n"), tmp_path)
    assert error.value.source_path == tmp_path / "kernel.cu"
    assert (tmp_path / "build.log").read_text() == error.value.log


def test_a_cpu_kernel_reports_zeros(cpp_kernel, tmp_path: Path) -> None:
    report = compile_sources(cpp_kernel(), tmp_path)
    assert report == ResourceReport(0, 0, 0, 0, report.seconds)
    assert (tmp_path / "kernel.o").exists()


def test_a_compiler_that_hangs_is_killed(cpp_kernel, tmp_path: Path, slow_compiler) -> None:
    slow_compiler.stop.touch()
    with pytest.raises(TimedOut, match="after 1 s"):
        compile_sources(cpp_kernel(), tmp_path / "out", timeout_s=1.0)


def test_the_largest_of_several_kernels_counts() -> None:
    log = (
        "    8 bytes stack frame, 16 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem\n"
        "    0 bytes stack frame, 0 bytes spill stores, 32 bytes spill loads\n"
        "ptxas info    : Used 64 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]\n"
    )
    assert parse_ptxas(log) == (64, 16, 32, 2048)
