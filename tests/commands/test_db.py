"""`tilewright db`: each subcommand as a user runs it, with `--json` and without, on good and on bad input."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilewright.cli import main
from tilewright.generator.errors import Outcome
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.variant import VariantSpec
from tilewright.runtime.environment import Environment
from tilewright.runtime.store import Store

ENVIRONMENT = Environment("Test CPU", "cpu", compiler="g++ 13")
GPU = Environment("Test GPU", "sm_90a")
MASK = MaskClass(("window", "stride"), "sliding_window(32, 32) | global_stride(512)", density=0.01)
PROBLEM = Problem("float32", 64, 1, 8, 8, 8192, 8192, "cpu", MASK)
SPEC = VariantSpec("forward_cpu", "gather", 64, 64, (("unroll", 4),))
NASTY = "error: [bold]not markup[/bold] \x1b[2J\x07"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def db(tmp_path: Path) -> str:
    """A database with a winner, an unfinished tuning, a failure and a baseline, on two devices."""
    path = str(tmp_path / "tuning.db")
    gpu_problem = Problem("bfloat16", 128, 1, 16, 4, 4096, 4096, "sm_90a")
    with Store(path) as store:
        best = store.add_measurement(ENVIRONMENT, PROBLEM, SPEC, Outcome.OK, time_us=1234.5, run_id="run-1")
        store.add_measurement(ENVIRONMENT, PROBLEM, None, Outcome.OK, kind="baseline", baseline="flex", time_us=9999.0)
        store.add_measurement(ENVIRONMENT, PROBLEM, SPEC, Outcome.COMPILE, message=NASTY)
        store.add_measurement(GPU, gpu_problem, VariantSpec("simt", "list", 64, 32), Outcome.OK, time_us=77.0)
        store.set_winner(
            *(ENVIRONMENT, PROBLEM, SPEC),
            time_us=1234.5,
            default_time_us=2469.0,
            baseline_name="flex",
            baseline_time_us=9999.0,
            verified=True,
            measurement=best.uid,
        )
    return path


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run `tilewright db ...` in this process; gives exit code, output and error output."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["db", *arguments])
        return code, *capfd.readouterr()

    return call


def as_json(run: Run, *arguments: str) -> Any:
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    return json.loads(out)


def test_list_shows_the_newest_first(run: Run, db: str) -> None:
    code, out, _ = run("list", "--db", db)
    rows = [line for line in out.splitlines() if "Test " in line]
    assert code == 0
    assert [("Test GPU" in row, "compile" in row) for row in rows] == [
        (True, False),
        (False, True),
        (False, False),
        (False, False),
    ]
    assert "1,234.5" in rows[3]
    assert PROBLEM.name in rows[3]
    assert SPEC.name in rows[3]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ((), 4),
        (("--limit", "2"), 2),
        (("--outcome", "ok"), 3),
        (("--device", "Test GPU"), 1),
        (("--run", "run-1"), 1),
        (("--device", "none"), 0),
    ],
    ids=str,
)
def test_list_filters(run: Run, db: str, options: tuple[str, ...], count: int) -> None:
    assert len(as_json(run, "list", "--db", db, *options)) == count


def test_show_takes_what_list_prints(run: Run, db: str) -> None:
    failed = as_json(run, "list", "--db", db, "--outcome", "compile")[0]
    code, out, _ = run("show", failed["uid"][:12], "--db", db)
    assert code == 0
    assert failed["uid"] in out
    assert "[bold]not markup[/bold]" in out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert as_json(run, "show", failed["uid"], "--db", db)["message"] == NASTY
    assert as_json(run, "show", PROBLEM.digest, "--db", db)["record"] == PROBLEM.to_dict()


def test_best_sets_the_winner_against_the_default_and_pytorch(run: Run, db: str) -> None:
    code, out, _ = run("best", "--db", db)
    assert code == 0
    (row,) = [line for line in out.splitlines() if PROBLEM.name in line]
    assert "2,469.0 (2.00x)" in row
    assert "9,999.0 (8.10x) flex" in row
    assert "verified" in row
    assert "tuning not finished" in out
    found = as_json(run, "best", "--db", db, "--target", "cpu")
    assert [(b["variant"], b["time_us"], b["final"]) for b in found] == [(SPEC.name, 1234.5, True)]


def test_stats_counts(run: Run, db: str) -> None:
    found = as_json(run, "stats", "--db", db)
    assert found["by_outcome"] == {"compile": 1, "ok": 3}
    assert found["median_gain_over_default"] == 2.0
    code, out, _ = run("stats", "--db", db)
    assert code == 0
    assert "by_device.Test GPU" in out
    assert "by_family.forward_cpu" in out, "names keep their underscores"


def test_path_and_list_make_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, db: str) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    assert as_json(run, "list") == []
    code, out, _ = run("path")
    assert (code, out) == (0, f"{tmp_path}/cache/tilewright.db\n")
    assert as_json(run, "path") == {"database": f"{tmp_path}/cache/tilewright.db", "exists": False}
    assert not (tmp_path / "cache").exists()
    assert as_json(run, "path", "--db", db)["exists"] is True


def test_export_and_import_by_file(run: Run, db: str, tmp_path: Path) -> None:
    file, other = str(tmp_path / "export.jsonl"), str(tmp_path / "other.db")
    code, out, _ = run("export", file, "--db", db)
    lines = len(Path(file).read_bytes().splitlines())
    assert (code, out) == (0, f"Wrote {lines} lines to {file}\n")
    code, out, _ = run("import", file, "--db", other)
    assert code == 0
    assert "4 new measurements (0 known), 1 new winners" in out
    assert as_json(run, "import", file, "--db", other)["measurements_known"] == 4
    assert as_json(run, "list", "--db", other) == as_json(run, "list", "--db", db)


def test_export_and_import_by_pipe(run: Run, db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("export", "-", "--winners", "--db", db)
    assert code == 0
    assert [json.loads(line)["type"] for line in out.splitlines()] == [
        *("tilewright", "environment", "problem", "variant", "winner")
    ]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(out.encode())))
    assert as_json(run, "import", "-", "--db", str(tmp_path / "other.db"))["winners_added"] == 1


def test_export_of_one_device(run: Run, db: str) -> None:
    _, out, _ = run("export", "-", "--device", "Test GPU", "--db", db)
    assert "Test GPU" in out
    assert "Test CPU" not in out


@pytest.mark.parametrize("command", ["list", "best", "stats"])
def test_nothing_measured_yet_is_no_error_and_makes_nothing(run: Run, tmp_path: Path, command: str) -> None:
    path = tmp_path / "t.db"
    code, out, _ = run(command, "--db", str(path))
    assert code == 0
    assert str(path) in out
    assert as_json(run, command, "--db", str(path)) in ([], {"database": str(path), "measurements": 0, **ZERO})
    assert not path.exists()


ZERO = {"problems": 0, "winners": 0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show", "ffffffff"), "nothing in the database has an ID"),
        (("show", "x"), "4 to 32 hex digits"),
        (("export", "/nowhere/file"), "cannot export to /nowhere/file"),
        (("export", "/dev/full"), "No space left"),
        (("import", "/nowhere/file"), "cannot import /nowhere/file"),
        (("list", "--db", "nosuch://x"), "nosuch"),
        (("show", "ffff", "--db", "/nowhere/t.db"), "there is no database at /nowhere/t.db"),
        (("export", "-", "--db", "/nowhere/t.db"), "nothing to export"),
        (("import", os.devnull, "--db", "/nowhere/t.db"), "check that its directory exists"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_exit_code_2(run: Run, db: str, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run(*arguments, *(() if "--db" in arguments else ("--db", db)))
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["list", "best", "stats", "show 1234", "export -", "import -"])
def test_a_corrupt_database_is_one_line_and_left_alone(run: Run, tmp_path: Path, command: str) -> None:
    path = tmp_path / "t.db"
    path.write_bytes(b"not a database at all")
    code, _, err = run(*command.split(), "--db", str(path))
    assert code == 2
    assert err == (
        f"tilewright: database {path}: it is no SQLite database and was left as it is; "
        "move it away, or name another with --db\n"
    )
    assert path.read_bytes() == b"not a database at all"


@pytest.mark.parametrize("limit", ["0", "-1", "x", "99999999999"])
def test_a_limit_must_be_a_count(run: Run, db: str, limit: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run("list", "--limit", limit, "--db", db)
    assert caught.value.code == 2


def test_it_runs_with_no_compiler_no_gpu_and_a_reader_that_leaves(db: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path / "nothing"), "CXX": "/nowhere/g++", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tilewright", "db", "export", "-", "--db", db]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b'"type": "tilewright"' in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
