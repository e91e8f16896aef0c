"""`tilewright doctor` on this machine, and on machines that lack something."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.commands import doctor
from tilewright.generator import toolchain


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    args = parser.parse_args(["doctor", *arguments])
    return int(args.run(args))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv(toolchain.CACHE_VARIABLE, str(path))
    return path


@pytest.fixture
def _builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building a kernel is right, and takes no time: these tests ask about something else."""
    monkeypatch.setattr(doctor, "build", lambda kernel: None)


def report(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON printed, and its checks by name."""
    values = json.loads(capsys.readouterr().out)
    return values, {check["name"]: check for check in values["checks"]}


def test_a_machine_that_works(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json") == 0
    values, checks = report(capsys)
    assert values["ok"] is True
    assert values["targets"]["cpu"] is True
    assert values["targets"]["cuda"] == torch.cuda.is_available()
    assert "built and loaded" in checks["cpu target"]["found"]
    assert str(cache) in checks["cache directory"]["found"]
    assert checks["database"]["state"] == "ok"
    assert not list(cache.glob("kernels/*")), "the probe is thrown away"


@pytest.mark.usefixtures("_builds")
def test_the_table_says_what_comes_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    text = capsys.readouterr().out
    for name in ("c++ compiler", "ninja", "cuda toolkit", "gpu", "cache directory", "database"):
        assert name in text
    assert "tilewright tune" in text


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert run("--json") == 1
    values, checks = report(capsys)
    assert values["targets"]["cpu"] is False
    for name in ("c++ compiler", "cpu target"):
        assert checks[name]["state"] == "broken"
        assert "no-such-compiler" in checks[name]["found"]
        assert "CXX" in checks[name]["advice"]
    assert run() == 1
    assert "does not work yet" in capsys.readouterr().out


def test_a_compiler_without_openmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers `--version`, so only a real build can tell."""
    real = toolchain.cxx_compiler().path
    compiler = tmp_path / "g++"
    compiler.write_text(
        f'#!/bin/sh\ncase " $* " in *" -fopenmp "*) echo "error: no OpenMP here"; exit 1;; esac\nexec {real} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert run("--json") == 1
    _, checks = report(capsys)
    assert checks["c++ compiler"]["state"] == "ok"
    assert checks["cpu target"]["state"] == "broken"
    assert "no OpenMP here" in checks["cpu target"]["found"]


def test_no_ninja(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", str(toolchain.cxx_compiler().path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setitem(sys.modules, "ninja", None)
    toolchain._ninja.cache_clear()
    assert run("--json") == 1
    _, checks = report(capsys)
    assert checks["ninja"]["state"] == checks["cpu target"]["state"] == "broken"
    assert "pip install ninja" in checks["ninja"]["advice"]


@pytest.mark.usefixtures("_builds")
def test_a_cache_that_others_can_write(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    assert run("--json") == 1
    _, checks = report(capsys)
    assert checks["cache directory"]["state"] == "broken"
    assert "chmod go-w" in checks["cache directory"]["advice"]


@pytest.mark.usefixtures("_builds")
def test_a_corrupt_database_is_told_and_kept(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.mkdir(mode=0o700)
    database = cache / "broken.db"
    database.write_bytes(b"this is no database" * 1000)
    assert run("--json", "--db", str(database)) == 0, "kernels can still be built"
    _, checks = report(capsys)
    assert checks["database"]["state"] == "broken"
    assert str(database) in checks["database"]["found"]
    assert database.read_bytes() == b"this is no database" * 1000


@pytest.mark.usefixtures("_builds")
def test_no_cuda_is_absent_not_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert run("--json") == 0
    values, checks = report(capsys)
    assert values["targets"]["cuda"] is False
    assert checks["gpu"]["state"] == checks["cuda target"]["state"] == "absent"
    assert "CUDA build of PyTorch" in checks["gpu"]["advice"]
