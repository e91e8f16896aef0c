"""`pip install .` gives a wheel that holds the templates and works away from the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("templates", "generator", "runtime", "tuner", "tilewright", "results", "pyproject.toml", "README.md")

USE = """
import sys
sys.path.insert(0, sys.argv[1])
import tilewright
from tilewright.generator.problem import Problem
from tilewright.generator.render import render
from tilewright.generator.space import all_families, default_variant
from tilewright.generator.variant import kernel_of
assert tilewright.__file__.startswith(sys.argv[1]), tilewright.__file__
problem = Problem("float32", 64, 1, 1, 1, 128, 128, "cpu")
print(len(all_families()), len(render(kernel_of(problem, default_variant(problem))).sources["kernel.cpp"]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    source.mkdir()
    # Built from a copy: setuptools leaves a build directory beside what it builds.
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        directory,
        source,
    ]
    subprocess.run(command, check=True)
    (built,) = directory.glob("tilewright-*.whl")
    return built


def test_the_wheel_holds_every_room_and_its_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for room in ("templates", "generator", "runtime", "tuner"):
        for path in (ROOT / room).rglob("*"):
            if path.suffix in (".py", ".jinja", ".toml", ".cuh", ".h", ".cpp"):
                assert f"tilewright/{path.relative_to(ROOT)}" in names
    for path in (ROOT / "results").glob("*/winners.jsonl"):
        assert f"tilewright/{path.relative_to(ROOT)}" in names
    assert {"tilewright/cli.py", "tilewright/py.typed", "tilewright/commands/doctor.py"} <= names
    assert all(name.split("/")[0] in ("tilewright",) or ".dist-info/" in name for name in names), "nothing else"


def test_the_wheel_renders_a_kernel_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    # -S leaves out the editable installation; the dependencies' directory is given by hand.
    import torch

    packages = str(Path(torch.__file__).parent.parent)
    code = f"import sys; sys.path.append({packages!r})\n{USE}"
    run = subprocess.run(
        [sys.executable, "-P", "-S", "-c", code, str(tmp_path / "site")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    families, length = map(int, run.stdout.split())
    assert families >= 1
    assert length > 1000
