"""`tilewright tune` as its users call it: exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tilewright.cli import main
from tilewright.runtime.store import Store
from tilewright.tuner import effort
from tilewright.tuner.bench import BenchRow
from tilewright.tuner.effort import Effort

pytestmark = pytest.mark.usefixtures("lasting_workers")

WORKLOAD = """
[[row]]
name = "tiny"
targets = ["cpu"]
dtype = "float32"
head_dim = 16
num_heads = 2
seqlen_q = 64
mask = "causal()"
"""


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(WORKLOAD)
    return str(path)


@pytest.fixture
def _two_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        effort.EFFORTS, "quick", Effort("quick", trials=2, exhaustive_up_to=2, batch=2, seeds=1, finalists=2)
    )


@pytest.mark.usefixtures("_two_variants")
def test_json_on_stdout_progress_on_stderr(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    db = str(tmp_path / "tune.db")
    arguments = ["tune", "--target", "cpu", "--workload", workload, "--effort", "quick", "--jobs", "1", "--db", db]
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    values = json.loads(captured.out)
    (problem,) = values["problems"]
    assert problem["status"] == "tuned"
    assert values["outcomes"] == {"ok": 2}
    assert problem["time_us"] > 0
    rows = {row["implementation"]: row for row in values["rows"]}
    assert {"tilewright", "tilewright_default", "sdpa_causal"} <= set(rows)
    assert set(rows["tilewright"]) == set(BenchRow("", "", "").to_dict())
    assert rows["tilewright"]["error"] is None
    # 2 heads of 64 causal queries, 4 head_dim operations a pair
    pairs = 2 * 64 * 65 // 2
    assert rows["tilewright"]["tflops"] * rows["tilewright"]["time_ms"] * 1e9 == pytest.approx(4 * 16 * pairs)
    assert rows["tilewright"]["variant"] == problem["variant"]
    for shown in ("tiny", "compiling 2 variants", "best", "default", "PyTorch"):
        assert shown in captured.err

    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "known" in captured.out
    assert problem["variant"] in captured.out
    assert "tuned before" in captured.err


@pytest.mark.usefixtures("_two_variants")
def test_a_problem_without_a_winner_is_exit_code_1(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["tune", "--target", "cpu", "--workload", workload, "--db", str(tmp_path / "t.db")]
    assert main([*arguments, "--time-limit", "0.001", "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["out_of_time"]
    (row,) = values["rows"]
    assert "time limit" in row["error"]
    assert row["time_ms"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workload", "nope"], "workload must be one of anchors"),
        (["--target", "tpu"], "target must be auto, cpu, cuda or cuda:INDEX; got 'tpu'"),
        (["--db", "nosuch://here"], "nosuch"),
        (["--time-limit", "-1"], "must be a positive number of seconds, got -1"),
        (["--time-limit", "soon"], "must be a positive number of seconds, got soon"),
        (["--effort", "huge"], "invalid choice"),
        (["--jobs", "0"], "must be 1 or more, got 0"),
    ],
)
def test_bad_input_is_exit_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["tune", *arguments])
    except SystemExit as stopped:  # argparse's own way
        code = int(stopped.code or 0)
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_no_compiler_says_what_to_install(
    workload: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    assert main(["tune", "--target", "cpu", "--workload", workload]) == 2
    assert "no C++ compiler" in (said := capsys.readouterr().err)
    assert "install" in said


SMALL_BATCHES = """
import signal, sys
import brief_timing
from tilewright.cli import main
from tilewright.tuner import effort
effort.EFFORTS["quick"] = effort.Effort("quick", trials=20, exhaustive_up_to=20, batch=2, seeds=2, finalists=2)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
sys.exit(main())
"""
"""The command, with the first measurement after two variants are built and many more to come."""


def test_ctrl_c_on_a_terminal_is_130_and_goes_on_later(workload: str, tmp_path: Path) -> None:
    """The live display on a pseudo-terminal, interrupted after the first measurement: what was measured is kept."""
    db = tmp_path / "tune.db"
    terminal, ours = pty.openpty()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "TERM": "xterm",
        "COLUMNS": "160",
    }
    command = [sys.executable, "-P", "-c", SMALL_BATCHES, "tune", "--target", "cpu", "--workload", workload]
    process = subprocess.Popen(
        [*command, "--effort", "quick", "--jobs", "1", "--db", str(db), "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=ours,
        start_new_session=True,
    )
    os.close(ours)
    os.set_blocking(terminal, False)
    shown = b""
    deadline = time.monotonic() + 300
    try:
        while time.monotonic() < deadline and b"best" not in shown:
            assert process.poll() is None, shown
            time.sleep(0.05)
            shown += _read(terminal)
        process.send_signal(signal.SIGINT)
        while process.poll() is None and time.monotonic() < deadline:
            shown += _read(terminal)  # a full terminal would block the display
            time.sleep(0.05)
        assert process.poll() == 130, shown
    finally:
        process.kill()
        out, _ = process.communicate()
        os.close(terminal)
    assert json.loads(out)["interrupted"]
    assert b"\x1b[?25h" in shown, "the cursor is shown again"
    with Store(str(db)) as store:
        assert len(store.measurements(kind="search")) >= 1


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""
