"""CUDA sources of the tests' own, compiled for the host's execution as generated kernels are."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tilewright.generator.host_build import KERNEL_FLAGS, WATCHED_FLAGS, runtime_object
from tilewright.generator.toolchain import cxx_compiler

HOST = Path(__file__).parents[2] / "templates" / "_host"

HostLibrary = Callable[..., Path]


def _run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> HostLibrary:
    """host_library(source, defines=()): the source as a library, under the name kernel.cu, which reports then give."""
    runtime = runtime_object()

    def build(source: Path, defines: Sequence[str] = ()) -> Path:
        folder = tmp_path_factory.mktemp(source.stem)
        (folder / "kernel.cu").write_text(source.read_text())
        flags = (*KERNEL_FLAGS, *WATCHED_FLAGS, *defines, f"-I{HOST}")
        _run(cxx_compiler().path, *flags, "-c", folder / "kernel.cu", "-o", folder / "kernel.o")
        _run(cxx_compiler().path, "-shared", "-Wl,-Bsymbolic", folder / "kernel.o", runtime, "-o", folder / "probe.so")
        return folder / "probe.so"

    return build
