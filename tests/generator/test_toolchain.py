"""Finding compilers, their flags, and a cache directory that can be trusted."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path

import pytest
import torch

from tilewright.generator import toolchain
from tilewright.generator.arch import all_archs, arch_named, host_cpu_flags
from tilewright.generator.errors import InvalidInput, ToolMissing


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.fixture
def no_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with nothing installed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(toolchain, "DEFAULT_CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setitem(sys.modules, "ninja", None)
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    for cached in (toolchain._cxx_compiler, toolchain._ninja, toolchain._cuda_toolkit):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("find", "advice"),
    [
        (toolchain.cxx_compiler, "apt install g++"),
        (toolchain.ninja, "pip install ninja"),
        (toolchain.cuda_toolkit, "set CUDA_HOME"),
    ],
    ids=["compiler", "ninja", "nvcc"],
)
@pytest.mark.usefixtures("no_tools")
def test_a_missing_tool_is_one_line_with_what_to_install(find, advice) -> None:
    with pytest.raises(ToolMissing) as error:
        find()
    assert advice in one_line(error)


def test_the_compiler_is_a_real_one() -> None:
    tool = toolchain.cxx_compiler()
    assert os.access(tool.path, os.X_OK)
    assert any(character.isdigit() for character in tool.version)


def test_cxx_that_names_nothing_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolMissing) as error:
        toolchain.cxx_compiler()
    assert "'no-such-compiler'" in one_line(error)


def test_a_compiler_that_cannot_run_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(ToolMissing) as error:
        toolchain.cxx_compiler()
    assert str(broken) in one_line(error)


def test_ninja_is_found_beside_python_when_path_lacks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(toolchain.cxx_compiler().path))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = toolchain.ninja().path
    assert found.exists()
    with toolchain.environment(toolchain.build_environment()):
        assert str(found.parent) in os.environ["PATH"]
    assert os.environ["PATH"] == str(tmp_path)


@pytest.mark.nvcc
def test_a_wrapper_script_is_not_taken_for_the_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = toolchain.cuda_toolkit()
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {real.path} "$@"\n')
    wrapper.chmod(0o755)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "DEFAULT_CUDA_HOME", str(real.home))
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    found = toolchain.cuda_toolkit()
    assert (found.home / "include" / "cuda_runtime.h").exists()
    assert found.release == real.release


def test_pytorch_without_cuda_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ToolMissing) as error:
        toolchain.cuda_toolkit_for_torch()
    assert "built without CUDA" in one_line(error)


def test_an_nvcc_older_than_the_architecture_is_refused() -> None:
    old = toolchain.CudaToolkit(Path("/cuda/bin/nvcc"), "nvcc V12.4.0", Path("/cuda"), (12, 4))
    toolchain.check_nvcc_release(old, arch_named("sm_90a"))
    with pytest.raises(ToolMissing) as error:
        toolchain.check_nvcc_release(old, arch_named("sm_120"))
    assert "12.8" in one_line(error)


def test_cpu_flags_keep_infinities_and_name_the_instructions() -> None:
    flags = toolchain.build_flags(arch_named("cpu"), "cpp")
    assert not {"-ffast-math", "-Ofast", "-ffinite-math-only", "-march=native"} & set(flags)
    assert set(host_cpu_flags()) <= set(flags)


@pytest.mark.parametrize("name", [name for name, arch in all_archs().items() if not arch.is_cpu])
def test_cuda_flags_name_exactly_their_architecture(name: str) -> None:
    flags = toolchain.build_flags(arch_named(name), "cuda")
    number = name.removeprefix("sm_")
    assert [flag for flag in flags if "arch" in flag] == [f"-gencode=arch=compute_{number},code=sm_{number}"]


def test_the_cache_directory_is_made_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(toolchain.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    before = os.umask(0)
    try:
        path = toolchain.cache_dir()
    finally:
        os.umask(before)
    assert path == tmp_path / "xdg" / "tilewright"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_asking_for_the_path_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toolchain.CACHE_VARIABLE, str(tmp_path / "cache"))
    assert toolchain.cache_path() == tmp_path / "cache"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_cache_directory_that_others_can_write_is_refused(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(mode)
    monkeypatch.setenv(toolchain.CACHE_VARIABLE, str(tmp_path))
    with pytest.raises(InvalidInput) as error:
        toolchain.cache_dir()
    assert f"{mode:04o}" in one_line(error)
    assert f"chmod go-w {tmp_path}" in str(error.value)


def test_a_cache_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toolchain.CACHE_VARIABLE, str(tmp_path))
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(InvalidInput) as error:
        toolchain.cache_dir()
    assert f"belongs to user id {owner}" in one_line(error)


def test_a_cache_directory_that_is_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    for place in ("file", "file/below"):
        monkeypatch.setenv(toolchain.CACHE_VARIABLE, str(tmp_path / place))
        with pytest.raises(InvalidInput) as error:
            toolchain.cache_dir()
        assert toolchain.CACHE_VARIABLE in one_line(error)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_read_only_cache_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toolchain.CACHE_VARIABLE, str(tmp_path))
    # Permission bits do not stop root, under whom tests may run, so the answer of the system is what is replaced.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InvalidInput) as error:
        toolchain.cache_dir()
    assert "cannot be written" in one_line(error)


def test_environment_is_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TW_OLD", "before")
    monkeypatch.delenv("TW_NEW", raising=False)
    seen: list[str | None] = []
    with contextlib.suppress(KeyError), toolchain.environment({"TW_OLD": "during", "TW_NEW": "during"}):
        seen = [os.environ.get("TW_OLD"), os.environ.get("TW_NEW")]
        raise KeyError
    assert seen == ["during", "during"]
    assert os.environ["TW_OLD"] == "before"
    assert "TW_NEW" not in os.environ
