"""CUDA sources of the tests' own, compiled for the host's execution as generated kernels are."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tilewright.generator.arch import host_cpu_flags
from tilewright.generator.host_build import KERNEL_FLAGS, RUNTIME_FLAGS, WATCHED_FLAGS
from tilewright.generator.toolchain import cxx_compiler

HOST = Path(__file__).parents[2] / "templates" / "_host"

HostLibrary = Callable[..., Path]


def _run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> HostLibrary:
    """host_library(source, defines=()): the source as a library, under the name kernel.cu, which reports then give."""
    objects: list[Path] = []
    runtime = tmp_path_factory.mktemp("runtime")
    for source in sorted(HOST.glob("*.cpp")):
        objects.append(runtime / f"{source.stem}.o")
        _run(cxx_compiler().path, *RUNTIME_FLAGS, *host_cpu_flags(), "-c", source, "-o", objects[-1])

    def build(source: Path, defines: Sequence[str] = ()) -> Path:
        folder = tmp_path_factory.mktemp(source.stem)
        (folder / "kernel.cu").write_text(source.read_text())
        flags = (*KERNEL_FLAGS, *WATCHED_FLAGS, *defines, f"-I{HOST}")
        _run(cxx_compiler().path, *flags, "-c", folder / "kernel.cu", "-o", folder / "kernel.o")
        _run(cxx_compiler().path, "-shared", "-Wl,-Bsymbolic", folder / "kernel.o", *objects, "-o", folder / "probe.so")
        return folder / "probe.so"

    return build
