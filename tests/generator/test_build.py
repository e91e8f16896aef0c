"""Real builds: published whole, found again, and none the worse for kills, races and missing tools."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tilewright.generator import build as building
from tilewright.generator import toolchain
from tilewright.generator.build import artifact_path, build, build_digest, find_artifact, first_errors
from tilewright.generator.errors import CompileFailed, InvalidInput, LaunchFailed, ToolMissing
from tilewright.generator.render import Rendered

FORK = multiprocessing.get_context("fork")
"""Another process that builds, without importing PyTorch again."""


def loaded(path: Path, rendered: Rendered) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(rendered.module_name, str(path))
    spec = importlib.util.spec_from_loader(rendered.module_name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def build_in_small_files(rendered: Rendered) -> Path:
    """Build where the system refuses to write past 64 bytes of a file, as it does on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
    return build(rendered)


def wait_for(condition, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.02)


def test_a_built_kernel_loads_and_is_found_again(cache: Path, cpp_kernel, slow_compiler) -> None:
    rendered = cpp_kernel()
    assert find_artifact(rendered) is None
    assert not cache.exists(), "looking must not create the cache"
    path = build(rendered)
    assert path == artifact_path(rendered) == find_artifact(rendered)
    assert loaded(path, rendered).launch(1, 2, 3) == 64 + 6
    assert build(rendered) == path
    assert slow_compiler.compilations == 1
    manifest = json.loads(path.with_name("manifest.json").read_text())
    assert manifest["kernel"] == rendered.kernel.to_dict()
    assert manifest["compile_s"] > 0
    assert (path.with_name("main.cpp")).read_text() == rendered.sources["kernel.cpp"]


def test_the_library_needs_nothing_of_libtorch(cache: Path, cpp_kernel) -> None:
    path = build(cpp_kernel())
    assert b"libtorch" not in path.read_bytes()
    assert b"libc10" not in path.read_bytes()


@pytest.mark.parametrize(
    "field", ["source", "header", "module", "language", "arch", "flags", "compiler", "torch", "abi"]
)
def test_the_digest_changes_with(field: str, cpp_kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = cpp_kernel()
    before = build_digest(rendered)
    assert build_digest(rendered) == before
    if field == "source":
        changed = {name: text + "\n" for name, text in rendered.sources.items()}
        rendered = dataclasses.replace(rendered, sources=changed)
    elif field == "header":
        rendered = dataclasses.replace(rendered, sources={**rendered.sources, "device.cuh": "// included\n"})
    elif field == "module":
        rendered = dataclasses.replace(rendered, digest="0" * 16)
    elif field == "language":
        monkeypatch.setattr(toolchain, "build_flags", lambda arch, language: ["-O3"])
        monkeypatch.setattr(toolchain, "compiler_identity", lambda language: "one compiler")
        before = build_digest(rendered)
        rendered = dataclasses.replace(rendered, language="cuda")
    elif field == "arch":
        monkeypatch.setattr(toolchain, "build_flags", lambda arch, language: ["-O3"])
        before = build_digest(rendered)
        rendered = dataclasses.replace(rendered, kernel=dataclasses.replace(rendered.kernel, arch="sm_80"))
    elif field == "flags":
        monkeypatch.setattr(toolchain, "CPU_FLAGS", (*toolchain.CPU_FLAGS, "-g"))
    elif field == "compiler":
        monkeypatch.setattr(toolchain, "compiler_identity", lambda language: "g++ 99.1")
    elif field == "torch":
        monkeypatch.setattr(torch, "__version__", "99.0+cu999")
    elif field == "abi":
        monkeypatch.setattr(toolchain, "python_abi", lambda: "cpython-399-riscv")
    assert build_digest(rendered) != before


def test_an_artifact_is_found_without_any_compiler(
    cache: Path, cpp_kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered, other = cpp_kernel(), cpp_kernel("// another\n")
    path = build(rendered)
    broken = cache / "kernels" / "0000000000000000"
    broken.mkdir()
    (broken / "manifest.json").write_text("{ not json")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissing):
        build_digest(rendered)
    assert find_artifact(rendered) == path
    assert build(rendered) == path
    assert find_artifact(other) is None
    with pytest.raises(ToolMissing, match=r"apt install g\+\+"):
        build(other)
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert find_artifact(rendered) is None


def test_no_ninja_is_one_line(cache: Path, cpp_kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(toolchain.cxx_compiler().path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setitem(sys.modules, "ninja", None)
    toolchain._ninja.cache_clear()
    with pytest.raises(ToolMissing, match="pip install ninja"):
        build(cpp_kernel())


def test_a_compile_error_points_at_the_dumped_source(cache: Path, cpp_kernel) -> None:
    rendered = cpp_kernel("int broken = no_such_name;\n")
    for _ in range(2):  # the second attempt starts over and fails the same way
        with pytest.raises(CompileFailed) as error:
            build(rendered)
        source = error.value.source_path
        assert source is not None
        line = rendered.sources["kernel.cpp"].splitlines().index("int broken = no_such_name;") + 1
        assert source.read_text().splitlines()[line - 1] == "int broken = no_such_name;"
        message = str(error.value)
        assert f"{source}:{line}:" in message
        assert "no_such_name" in message
        assert "\n" not in message
        log = source.with_name("build.log")
        assert str(log) in message
        assert log.read_text() == error.value.log
    assert find_artifact(rendered) is None


def test_a_library_that_does_not_load_is_not_published(cache: Path, cpp_kernel) -> None:
    rendered = cpp_kernel(
        "extern int nowhere(); int use_it() { return nowhere(); }\n__attribute__((used)) int (*keep)() = use_it;\n"
    )
    with pytest.raises(LaunchFailed, match="cannot be loaded"):
        build(rendered)
    assert find_artifact(rendered) is None


def test_one_process_can_build_the_same_kernel_twice(cache: Path, cpp_kernel, slow_compiler) -> None:
    rendered = cpp_kernel()
    path = build(rendered)
    shutil.rmtree(cache)
    assert build(rendered) == path
    assert path.exists()
    assert slow_compiler.compilations == 2


def test_a_killed_build_is_recovered_from(cache: Path, cpp_kernel, slow_compiler) -> None:
    rendered = cpp_kernel()
    slow_compiler.stop.touch()
    process = FORK.Process(target=build, args=(rendered,))
    process.start()
    directory = artifact_path(rendered).parent
    wait_for(lambda: slow_compiler.compilations == 1, "the compile")
    process.kill()
    process.join()
    assert (directory / "lock").exists(), "this test is about the lock that load_inline leaves"
    (directory / "main.o").write_bytes(b"half an object file")
    slow_compiler.stop.unlink()
    path = build(rendered)
    assert loaded(path, rendered).launch() == 64
    assert not list(directory.parent.glob("*.stale.*"))


def test_processes_that_want_the_same_kernel_compile_it_once(cache: Path, cpp_kernel, slow_compiler) -> None:
    rendered = cpp_kernel()
    with ProcessPoolExecutor(2, FORK) as pool:
        assert set(pool.map(build, [rendered] * 2)) == {artifact_path(rendered)}
    assert slow_compiler.compilations == 1
    assert loaded(artifact_path(rendered), rendered).launch() == 64


def test_a_cache_that_cannot_be_made_is_one_line(cpp_kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(InvalidInput, match="set TILEWRIGHT_CACHE_DIR") as error:
        build(cpp_kernel())
    assert "\n" not in str(error.value)


def test_a_full_disk_is_not_the_variants_fault(cache: Path, cpp_kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(cpp_kernel())
    # Filling a disk needs one of our own; what is replaced is the system's answer about free space.
    monkeypatch.setattr(building.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 4096))
    with pytest.raises(InvalidInput, match="is full"):
        build(cpp_kernel("int broken = no_such_name;\n"))
    assert first.exists()


def test_a_disk_that_fills_while_sources_are_written_is_one_line(cache: Path, cpp_kernel) -> None:
    with (
        ProcessPoolExecutor(1, FORK) as pool,
        pytest.raises(InvalidInput, match=r"^the cache directory.*TILEWRIGHT_CACHE_DIR") as error,
    ):
        pool.submit(build_in_small_files, cpp_kernel()).result()
    assert "\n" not in str(error.value)


def test_first_errors_reads_every_compiler() -> None:
    assert first_errors("[1/2] c++ ...\na.cpp:3:1: error: x\n  3 | y\na.cpp:9:1: error: z\nb.cpp:1:1: error: w\n") == (
        "a.cpp:3:1: error: x | a.cpp:9:1: error: z"
    )
    assert "cuda.cu(17): error: y" in first_errors("cuda.cu(17): error: y\n\n1 error detected")
    assert first_errors("ptxas error   : Entry uses too much shared data").startswith("ptxas error")
    assert first_errors("ld: main.o: undefined reference to `f'\ncollect2: error: ld returned 1").startswith("ld:")
    assert first_errors("Killed\n") == "Killed"
    assert first_errors("") == "the compiler failed without a word"


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_90a"])
def test_a_cuda_kernel_builds_through_load_inline(
    arch: str, cache: Path, cuda_kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole CUDA path but the launch, also where PyTorch has no CUDA: its two libraries, from which the kernel
    needs nothing, are then empty ones.
    """
    if torch.version.cuda is None:
        for name in ("c10_cuda", "torch_cuda"):
            empty = ["-shared", "-x", "c++", os.devnull, "-o", str(tmp_path / f"lib{name}.so")]
            subprocess.run([toolchain.cxx_compiler().path, *empty], check=True)
        monkeypatch.setenv("LIBRARY_PATH", str(tmp_path))
        release = ".".join(map(str, toolchain.cuda_toolkit().release))
        monkeypatch.setattr(torch.version, "cuda", release)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    rendered = cuda_kernel(arch)
    path = build(rendered)
    assert "TORCH_CUDA_ARCH_LIST" not in os.environ
    module = loaded(path, rendered)
    assert module.error_name(2) == "cudaErrorMemoryAllocation"
    ninja_file = path.with_name("build.ninja").read_text()
    assert f"code=sm_{arch.removeprefix('sm_')}" in ninja_file
    assert ninja_file.count("-gencode") == 1
    assert path.with_name("cuda.cu").read_text() == rendered.sources["kernel.cu"]
    assert path.with_name("device.cuh").read_text() == rendered.sources["device.cuh"]
    with pytest.raises(CompileFailed) as error:
        build(cuda_kernel(arch, "__device__ int broken = no_such_name;\n"))
    assert error.value.source_path is not None
    assert error.value.source_path.name == "cuda.cu"
    assert "no_such_name" in str(error.value)
