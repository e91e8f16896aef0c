"""templates <- generator <- runtime <- tuner <- tilewright: no room imports one that is drawn to its right."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("templates", "generator", "runtime", "tuner", "tilewright")
PACKAGES = {"templates": 0, "generator": 1, "runtime": 2, "tuner": 3, "results": 0}
FACE = len(ROOMS) - 1

KEPT_OUT = {
    "generator": {"sqlalchemy", "optuna", "pandas", "sqlite3"},
    "runtime": {"optuna", "pandas"},
    "templates": {"torch", "jinja2"},
}
"""What a room never imports, not even inside a function."""

LAZY = ("optuna", "pandas", "sqlalchemy", "jinja2")


def modules() -> Iterator[tuple[str, Path]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield room, path


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import, wherever it stands in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            module = node.module or ""
            # `from tilewright import generator` names a room as well
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def rank(name: str) -> int | None:
    """How far right the imported module stands; None for other packages."""
    parts = name.split(".")
    if parts[0] != "tilewright":
        return None
    return PACKAGES.get(parts[1], FACE) if len(parts) > 1 else FACE


def violations(room: str, path: Path) -> list[str]:
    found = []
    for line, name in imported(path):
        right = rank(name)
        if right is not None and right > ROOMS.index(room):
            found.append(f"{path}:{line}: {room} imports {name}")
        if name.split(".")[0] in KEPT_OUT.get(room, set()):
            found.append(f"{path}:{line}: {room} imports {name}")
    return found


@pytest.mark.parametrize(("room", "path"), [pytest.param(r, p, id=str(p.relative_to(ROOT))) for r, p in modules()])
def test_imports_point_left(room: str, path: Path) -> None:
    assert violations(room, path) == []


@pytest.mark.parametrize(
    ("room", "text"),
    [
        ("generator", "import sqlalchemy"),
        ("generator", "def f():\n    from tilewright.runtime.masks import causal"),
        ("generator", "from tilewright import runtime"),
        ("runtime", "import tilewright.tuner.search"),
        ("runtime", "import tilewright as tw"),
        ("tuner", "from tilewright.commands import db"),
        ("tuner", "from tilewright.cli import main"),
    ],
)
def test_a_wrong_import_is_seen(room: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert len(violations(room, path)) == 1


def test_rooms_do_not_move() -> None:
    assert all((ROOT / room / "__init__.py").exists() for room in (*ROOMS, "results"))


def test_the_reference_knows_no_kernel_and_no_plan() -> None:
    """The oracle is the specification; it must not share code with what it judges."""
    judged = ("build", "launch", "plans", "canonical", "dispatch", "fallback")
    names = {name for _, name in imported(ROOT / "tuner" / "oracle.py")}
    assert [name for name in names if any(part in judged for part in name.split("."))] == []


def test_import_tilewright_is_light_and_needs_nothing(tmp_path: Path) -> None:
    """No Optuna, pandas, SQLAlchemy or Jinja; no compiler, no GPU, no cache directory; nothing is created."""
    code = (
        "import json, sys, torch; before = set(sys.modules); import tilewright;"
        "print(json.dumps(sorted({m.split('.')[0] for m in set(sys.modules) - before})))"
    )
    environment = {
        "PATH": str(tmp_path),
        "HOME": str(tmp_path / "home"),
        "TILEWRIGHT_CACHE_DIR": str(tmp_path / "home" / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        **{name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONPATH") if name in os.environ},
    }
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert run.returncode == 0, run.stderr
    loaded = set(json.loads(run.stdout))
    assert "tilewright" in loaded
    assert loaded.isdisjoint(LAZY)
    assert not (tmp_path / "home").exists()
