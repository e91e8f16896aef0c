"""Small hand-written modules to compile, and compilers that are slow or count what they do.

It also lets the tests import what lies beside them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tilewright.generator.render import Rendered
from tilewright.generator.variant import Kernel, VariantSpec

sys.path.insert(0, str(Path(__file__).parent))

CPP = r"""
#include <Python.h>
#include <cmath>
static PyObject* launch(PyObject*, PyObject* const* args, Py_ssize_t count) {
  long long total = 0;
  #pragma omp parallel for reduction(+ : total)
  for (int i = 0; i < 64; ++i) total += std::lround(std::exp(0.0));
  for (Py_ssize_t i = 0; i < count; ++i) total += PyLong_AsLongLong(args[i]);
  return PyLong_FromLongLong(total);
}
static PyMethodDef methods[] = {
    {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(launch)), METH_FASTCALL, ""},
    {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tw_DIGEST", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_tw_DIGEST() { return PyModule_Create(&definition); }
"""

HEADER = """
#include <cuda_fp16.h>
#include <cuda_runtime.h>
"""

CU = r"""
#include "device.cuh"
__global__ void twice(__half* x, int n) {
  __shared__ __half tile[256];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < n) x[threadIdx.x] = tile[n - threadIdx.x - 1] * __half(2.0f);
}
int launch_twice(void* x, int n) {
  twice<<<1, 256>>>(static_cast<__half*>(x), n);
  return static_cast<int>(cudaGetLastError());
}
"""

BINDING = r"""
#include <Python.h>
#include <cuda_runtime.h>
int launch_twice(void* x, int n);
static PyObject* launch(PyObject*, PyObject* const* args, Py_ssize_t) {
  return PyLong_FromLong(launch_twice(PyLong_AsVoidPtr(args[0]), static_cast<int>(PyLong_AsLong(args[1]))));
}
static PyObject* error_name(PyObject*, PyObject* code) {
  return PyUnicode_FromString(cudaGetErrorName(static_cast<cudaError_t>(PyLong_AsLong(code))));
}
static PyMethodDef methods[] = {
    {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(launch)), METH_FASTCALL, ""},
    {"error_name", error_name, METH_O, ""},
    {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tw_DIGEST", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_tw_DIGEST() { return PyModule_Create(&definition); }
"""

SLOW_COMPILER = """#!/bin/sh
case " $* " in *" -c "*)
  echo compiled >> {log}
  if [ -e {stop} ]; then sleep 600; fi ;;
esac
exec {real} "$@"
"""


def _rendered(sources: dict[str, str], language: str, arch: str) -> Rendered:
    digest = hashlib.sha256(repr((sorted(sources.items()), arch)).encode()).hexdigest()[:16]
    spec = VariantSpec("hand_written", "analytic", 64, 64)
    kernel = Kernel("attention_forward", "float16", 64, (), spec, arch)
    return Rendered(kernel, {n: t.replace("DIGEST", digest) for n, t in sources.items()}, language, digest)


@pytest.fixture
def cpp_kernel() -> Callable[..., Rendered]:
    """A CPU module whose `launch(*ints)` gives 64 plus their sum; `extra` is appended to its source."""
    return lambda extra="": _rendered({"kernel.cpp": CPP + extra}, "cpp", "cpu")


@pytest.fixture
def cuda_kernel() -> Callable[..., Rendered]:
    """A CUDA module whose kernel includes a header of its own, uses half operators and 512 bytes of shared memory."""
    return lambda arch, extra="": _rendered(
        {"kernel.cu": CU + extra, "device.cuh": HEADER, "binding.cpp": BINDING}, "cuda", arch
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory of the test's own."""
    path = tmp_path / "cache"
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(path))
    return path


class SlowCompiler:
    """A compiler in `CXX` that writes a line to `log` each time it compiles, and hangs while `stop` exists."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.stop = directory / "stop"
        self.log = directory / "log"
        self.path = directory / "g++"
        # In the order of `toolchain.CXX_NAMES`: what is already built by a compiler of this version is not built again.
        real = shutil.which("c++") or shutil.which("g++")
        self.path.write_text(SLOW_COMPILER.format(log=self.log, stop=self.stop, real=real))
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    def kill_orphans(self) -> None:
        """End what a killed build left running: each compiler that ninja starts is in a process group of its own."""
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self.path) in entry.read_text():
                    os.killpg(os.getpgid(int(entry.parent.name)), signal.SIGKILL)

    @property
    def compilations(self) -> int:
        return self.log.read_text().count("compiled") if self.log.exists() else 0


@pytest.fixture
def slow_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowCompiler]:
    compiler = SlowCompiler(tmp_path / "compiler")
    monkeypatch.setenv("CXX", str(compiler.path))
    yield compiler
    compiler.kill_orphans()
