"""Kernels built for the CPU to execute: published whole, found again, each with a runtime of its own linked in."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import shutil
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tilewright.generator import host_build, toolchain
from tilewright.generator.arch import arch_named
from tilewright.generator.build import find_artifact
from tilewright.generator.errors import CompileFailed, InvalidInput, ToolMissing
from tilewright.generator.family import family_named
from tilewright.generator.host_build import (
    MODULE_NAME,
    build_host,
    host_artifact_path,
    is_host_artifact,
    is_sanitized,
    sanitizer_libraries,
)
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.render import Rendered, render
from tilewright.generator.space import family_default
from tilewright.generator.variant import kernel_of


def rendered(family: str = "ladder", dtype: str = "float32", arch: str = "sm_80") -> Rendered:
    terms = ("window", "stride")
    problem = Problem(dtype, 16, 1, 1, 1, 64, 64, arch, MaskClass(terms, " & ".join(terms)))
    spec = family_default(problem, family_named(family))
    assert spec is not None
    return render(kernel_of(problem, spec))


def with_source(one: Rendered, text: str) -> Rendered:
    return dataclasses.replace(one, sources={**one.sources, "kernel.cu": text})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own, with the runtime and the binding that other tests have built."""
    path = tmp_path / "cache"
    (path / "host").mkdir(mode=0o700, parents=True)
    build_host(rendered())
    for part in (p for p in (toolchain.cache_path() / "host").glob("*-*") if p.is_dir()):
        shutil.copytree(part, path / "host" / part.name)
    monkeypatch.setenv(toolchain.CACHE_VARIABLE, str(path))
    return path


@pytest.fixture
def known_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another CXX from here on passes for the compiler that the runtime was built with, which is not built again."""
    identity = toolchain.compiler_identity("cpp")
    monkeypatch.setattr(toolchain, "compiler_identity", lambda language: identity)


def symbols(library: Path) -> set[str]:
    """The names that a library exports."""
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in listed.stdout.splitlines()}


def test_a_library_is_published_with_its_source_and_found_again(
    cache: Path, known_compiler: None, slow_compiler
) -> None:
    kernel = rendered()
    path = build_host(kernel)
    assert path == host_artifact_path(kernel)
    assert path.parent.parent == cache / "host"
    done = slow_compiler.compilations
    assert build_host(kernel) == path
    assert slow_compiler.compilations == done
    assert sorted(p.name for p in path.parent.iterdir()) == ["kernel.cu", "kernel.so", "manifest.json"]
    assert (path.parent / "kernel.cu").read_text() == kernel.sources["kernel.cu"]
    manifest = json.loads(path.with_name("manifest.json").read_text())
    assert manifest["key"]["module"] == MODULE_NAME
    assert manifest["kernel"] == kernel.kernel.to_dict()


def test_it_is_no_artifact_of_a_gpu(cache: Path) -> None:
    kernel = rendered()
    path = build_host(kernel)
    assert is_host_artifact(path)
    assert not is_host_artifact(cache / "kernels" / "0123456789abcdef" / "kernel.so")
    assert not is_sanitized(path)
    assert find_artifact(kernel) is None


def test_kernels_share_the_runtime_and_the_binding(cache: Path, known_compiler: None, slow_compiler) -> None:
    build_host(rendered("ladder"))
    before = slow_compiler.compilations
    build_host(rendered("forward_simt"))
    build_host(rendered("ladder", arch="sm_90a"))
    assert slow_compiler.compilations == before + 2


def test_it_exports_its_interface_and_needs_no_sanitizer(cache: Path) -> None:
    path = build_host(rendered())
    runtime = ("watch", "forget", "seed", "smem_limit")
    assert symbols(path) == {f"PyInit_{MODULE_NAME}", *(f"tilewright_host_{name}" for name in runtime)}
    needed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    assert "libtsan" not in needed
    assert "libubsan" not in needed


@pytest.mark.parametrize("what", ["source", "runtime", "flags", "compiler", "abi", "sanitize"])
def test_the_path_changes_with(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = rendered()
    before = host_artifact_path(kernel)
    assert host_artifact_path(kernel) == before
    if what == "source":
        kernel = with_source(kernel, kernel.sources["kernel.cu"] + "\n")
    elif what == "runtime":
        copy = shutil.copytree(host_build._runtime_folder(), tmp_path / "_host")
        with (copy / "device.cuh").open("a") as header:
            header.write("// changed\n")
        monkeypatch.setattr(host_build, "_runtime_folder", lambda: copy)
    elif what == "flags":
        monkeypatch.setattr(host_build, "KERNEL_FLAGS", (*host_build.KERNEL_FLAGS, "-g"))
    elif what == "compiler":
        monkeypatch.setattr(toolchain, "compiler_identity", lambda language: "g++ 99.1")
    elif what == "abi":
        monkeypatch.setattr(toolchain, "python_abi", lambda: "cpython-399-riscv")
    assert host_artifact_path(kernel, sanitize=what == "sanitize") != before


def test_an_error_points_at_kernel_cu_and_leaves_no_artifact(cache: Path) -> None:
    kernel = rendered()
    line = kernel.sources["kernel.cu"].count("\n") + 1
    broken = with_source(kernel, kernel.sources["kernel.cu"] + "int unfinished = ;\n")
    with pytest.raises(CompileFailed, match=rf"kernel\.cu:{line}:.*error: expected primary-expression") as failed:
        build_host(broken)
    assert failed.value.source_path == host_artifact_path(broken).with_name("kernel.cu")
    assert "int unfinished" in failed.value.source_path.read_text()
    assert "unfinished" in failed.value.log
    assert not host_artifact_path(broken).exists()
    with pytest.raises(CompileFailed):
        build_host(broken)


def test_what_a_killed_build_left_is_built_anew(cache: Path) -> None:
    kernel = rendered()
    directory = host_artifact_path(kernel).parent
    directory.mkdir(parents=True)
    (directory / "kernel.o").write_bytes(b"half an object")
    assert build_host(kernel).exists()
    assert not (directory / "kernel.o").exists()
    assert list(directory.parent.glob("*stale*")) == []


def test_of_two_processes_one_compiles(cache: Path, slow_compiler) -> None:
    kernel = rendered("forward_simt")
    build_host(rendered())  # the runtime and the binding are there
    before = slow_compiler.compilations
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        assert set(pool.map(build_host, [kernel] * 2)) == {host_artifact_path(kernel)}
    assert slow_compiler.compilations == before + 1


def test_only_cuda_kernels_are_built_for_it(cache: Path) -> None:
    problem = Problem("float32", 16, 1, 1, 1, 64, 64, "cpu")
    spec = family_default(problem, family_named("forward_cpu"))
    assert spec is not None
    with pytest.raises(InvalidInput, match="only CUDA kernels are built for the host check, got forward_cpu"):
        build_host(render(kernel_of(problem, spec)))


def test_a_missing_compiler_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolMissing, match="no-such-compiler"):
        build_host(rendered())


def test_a_sanitized_library_is_another_one(cache: Path) -> None:
    try:
        libraries = sanitizer_libraries()
    except InvalidInput:
        pytest.skip("this compiler has no libasan")
    assert [path.name.split(".")[0] for path in libraries] == ["libasan", "libstdc++"]
    assert all(path.exists() for path in libraries)
    path = build_host(rendered(), sanitize=True)
    assert is_sanitized(path)
    assert is_host_artifact(path)
    needed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    assert "libasan" in needed


def test_every_architecture_of_a_gpu_may_be_asked_for() -> None:
    for arch in ("sm_75", "sm_120"):
        assert arch_named(arch).compute_capability is not None
        assert rendered("forward_simt", arch=arch).language == "cuda"
