"""Several processes that tune and dispatch against one cache directory and one database, all starting at once.

    TILEWRIGHT_TEST_PROCESSES=8 pytest tests/test_shared_cache.py -s

uses eight processes instead of four, and prints what they did.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tilewright.generator import toolchain
from tilewright.generator.errors import Outcome
from tilewright.runtime.store import Store
from tilewright.tuner.effort import Effort
from tilewright.tuner.workloads import WorkloadRow

pytestmark = pytest.mark.early

PROCESSES = int(os.environ.get("TILEWRIGHT_TEST_PROCESSES", "3"))

ROWS = (
    WorkloadRow("window", "float32", 16, 2, 64, mask="sliding_window(4, 4) | global_stride(16)"),
    WorkloadRow("causal", "float32", 32, 2, 48, mask="causal()"),
)
LEVEL = Effort("quick", trials=2, exhaustive_up_to=2, batch=2, seeds=1, finalists=2)

MEMBER = """
import dataclasses, json, logging, sys, time
from pathlib import Path
import brief_timing
import torch
import tilewright as tw
from tilewright.runtime.store import Store
from tilewright.tuner import effort
from tilewright.tuner.devices import resolve_target
from tilewright.tuner.effort import Effort
from tilewright.tuner.oracle import oracle
from tilewright.tuner.tune import TuneSettings, tune
from tilewright.tuner.workloads import WorkloadRow

tunes, rows, level, stop = map(json.loads, sys.argv[1:])
rows = [WorkloadRow(**row) for row in rows]
effort.EFFORTS["quick"] = Effort(**level)
said, results, calls, worst = [], [], 0, 0.0

class Listen(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

logging.getLogger("tilewright").addHandler(Listen())
asked = []
for row in rows:
    query, key, value, mask = row.make_inputs("cpu")
    for length in (row.seqlen_q, row.seqlen_q - 7):  # the second is in the shape bucket of the first
        call = [t[:, :, :length] for t in (query, key, value)]
        want, _ = oracle(*call, mask, row.head_dim**-0.5)
        asked.append((call, mask, want))

def dispatch():
    global calls, worst
    tw.reload_winners()
    for call, mask, want in asked:
        worst = max(worst, (tw.attention(*call, mask).double() - want).abs().max().item())
        calls += 1

print("ready", flush=True)
sys.stdin.readline()
dispatch()
if tunes:
    with Store() as store:
        results = tune(rows, resolve_target("cpu"), store, TuneSettings("quick", jobs=1)).results
else:
    while not Path(stop).exists():
        dispatch()
        time.sleep(0.5)
dispatch()
print(json.dumps({
    "calls": calls,
    "worst": worst,
    "reasons": [tw.explain(*call, mask).reason for call, mask, _ in asked],
    "kernels": [tw.explain(*call, mask).kernel.name for call, mask, _ in asked],
    "winners": {r.row.name: r.winner.name for r in results},
    "statuses": [r.status for r in results],
    "measured": sum(r.measured for r in results),
    "warnings": [text for text in said if not text.startswith("compiling ")],
}))
"""
"""Tunes all rows, or calls attention over and over until everyone has tuned; both before and after."""


def counting_compiler(directory: Path) -> tuple[Path, Path]:
    """A compiler that writes down the build directory of each compilation, and the file where it does."""
    script, log = directory / "counting-c++", directory / "compiled"
    real = toolchain.cxx_compiler().path
    script.write_text(
        f'#!/bin/sh\ncase " $* " in *" -c "*) echo "$PWD" >> {shlex.quote(str(log))};; esac\n'
        f'exec {shlex.quote(str(real))} "$@"\n'
    )
    script.chmod(0o755)
    return script, log


def test_processes_tune_and_dispatch_against_one_cache_at_once(tmp_path: Path) -> None:
    cache, stop = tmp_path / "cache", tmp_path / "stop"
    compiler, log = counting_compiler(tmp_path)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
        "CXX": str(compiler),
        toolchain.CACHE_VARIABLE: str(cache),
    }
    members: list[subprocess.Popen[str]] = []
    try:
        for index in range(PROCESSES):
            # Of those that tune, half begin with the other row: both the same problem and two at once.
            rows = [dataclasses.asdict(row) for row in (ROWS if index % 4 == 0 else ROWS[::-1])]
            level = {f.name: getattr(LEVEL, f.name) for f in dataclasses.fields(LEVEL)}
            arguments = [json.dumps(argument) for argument in (index % 2 == 0, rows, level, str(stop))]
            members.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-c", MEMBER, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                    text=True,
                )
            )
        for member in members:
            assert member.stdout is not None
            assert member.stdout.readline() == "ready\n", member.communicate()[1]
        assert not cache.exists(), "the directory and the database are made by all of them at once"
        for member in members:
            assert member.stdin is not None
            member.stdin.write("\n")
            member.stdin.flush()
        answers = [member.communicate(timeout=540) for member in members[::2]]
        stop.touch()
        answers += [member.communicate(timeout=120) for member in members[1::2]]
    finally:
        for member in members:
            member.kill()
            member.wait()
    assert [member.returncode for member in members] == [0] * PROCESSES, [error for _, error in answers]
    found = [json.loads(out) for out, _ in answers]
    tuners = [f for f in found if f["statuses"]]

    compiled = Counter(log.read_text().split())
    with Store(str(cache / "tilewright.db")) as store:
        measurements, winners = store.measurements(), store.winners()
    calls, worst = sum(f["calls"] for f in found), max(f["worst"] for f in found)
    print(
        f"\n{PROCESSES} processes, {len(tuners)} of them tuning: {calls} calls, largest difference {worst:.1e}, "
        f"{sum(len(f['warnings']) for f in found)} warnings, {len(compiled)} kernels in {compiled.total()} "
        f"compilations, {len(measurements)} measurements, {len(winners)} winners"
    )

    assert [f["warnings"] for f in found] == [[]] * PROCESSES
    assert worst < 1e-5
    assert {status for f in tuners for status in f["statuses"]} <= {"tuned", "known"}

    assert set(compiled.values()) == {1}, compiled
    published = {str(path.parent) for path in (cache / "kernels").glob("*/kernel.so")}
    assert published == set(compiled)
    assert not list((cache / "kernels").glob("*.stale.*"))

    assert all(m.outcome is Outcome.OK for m in measurements)
    assert len({m.environment for m in measurements}) == 1
    counts = Counter((m.problem, m.kind, m.label, m.kernel_digest) for m in measurements)
    assert set(counts.values()) == {1}, "what one process measured, no other measures again"
    searched = [m for m in measurements if m.kind == "search"]
    assert len(searched) == len(ROWS) * LEVEL.trials == sum(f["measured"] for f in tuners)

    assert len(winners) == len(ROWS)
    finals = {m.uid: m for m in measurements if m.kind == "final"}
    assert all(w.verified and w.measurement in finals for w in winners)
    names = {w.problem: w.spec.name for w in winners}
    chosen = {row.name: names[row.problem("cpu")] for row in ROWS}
    assert [f["winners"] for f in tuners] == [chosen] * len(tuners)
    for answer in found:
        assert answer["reasons"] == ["exact", "bucket"] * len(ROWS)
        assert set(answer["kernels"]) == set(chosen.values())
