"""A tuning run that is killed with SIGKILL, at random moments and at the worst ones, and then run again.

    TILEWRIGHT_TEST_KILLS=10 TILEWRIGHT_TEST_SEED=7 pytest tests/tuner/test_kill.py -s

kills ten times at random instead of once, at other moments, and prints what it counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tilewright.generator import toolchain
from tilewright.generator.errors import Outcome
from tilewright.runtime.records import Measurement
from tilewright.runtime.store import Store
from tilewright.tuner.decision import COMPARE_ROUNDS
from tilewright.tuner.effort import Effort
from tilewright.tuner.workloads import WorkloadRow

pytestmark = pytest.mark.early

KILLS = int(os.environ.get("TILEWRIGHT_TEST_KILLS", "1"))
SEED = int(os.environ.get("TILEWRIGHT_TEST_SEED", "21"))

ROW = WorkloadRow("small", "float32", 16, 2, 64, mask="sliding_window(4, 4) | global_stride(16)")
TRIALS = max(3, 1 + KILLS // 2)
BATCH = 2
STORED = TRIALS + 4
"""About how many rows a run stores: PyTorch twice, the variants, two finalists at least."""

SECONDS_A_ROW = 1.5
"""About how long a row takes, its compilation included: kills are spread over that."""

RUN = """
import json, os, signal, sys
from sqlalchemy import event
from sqlalchemy.orm import Session
from tilewright.runtime.store import Store
from tilewright.runtime.store.models import MeasurementRow, WinnerRow
from tilewright.tuner import decision, effort
from tilewright.tuner.devices import resolve_target
from tilewright.tuner.effort import Effort
from tilewright.tuner.tune import TuneSettings, tune
from tilewright.tuner.workloads import WorkloadRow

url, row, level, moment = sys.argv[1], *map(json.loads, sys.argv[2:])
effort.EFFORTS["quick"] = Effort(**level)
decision.FINALIST_SPAN = float("inf")  # however the clock of a busy machine treats them, there are finalists to compare
finals = []

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def final_inserted(mapper, connection, inserted):
    finals.extend([inserted.uid] if inserted.kind == "final" else [])
    if len(finals) == 2:
        die()

def committed(session):
    if not session.in_nested_transaction():
        die()

if moment == "between two finals":
    event.listen(MeasurementRow, "after_insert", final_inserted)
if moment == "before the winner":
    event.listen(WinnerRow, "before_insert", die)
if moment == "after the winner":
    event.listen(WinnerRow, "after_insert", lambda *_: event.listen(Session, "after_commit", committed))

print("tuning", flush=True)
(result,) = tune([WorkloadRow(**row)], resolve_target("cpu"), Store(url), TuneSettings("quick", jobs=1)).results
print(json.dumps({"status": result.status, "known": result.known, "measured": result.measured}), flush=True)
"""
"""One run, which may kill itself at a moment that no clock would hit."""


@dataclass
class Tune:
    """A tuning that is started over and over on one database, and what was seen in that database in between.

    A row is known by its uid; `lost` and `repeated` are the figures that have to be 0.
    """

    directory: Path
    cache: Path
    seen: dict[str, Measurement] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        return str(self.directory / "tune.db")

    def start(self, moment: str = "") -> subprocess.Popen[str]:
        """Start a run; it has begun to tune when this returns."""
        row = {name: getattr(ROW, name) for name in ("name", "dtype", "head_dim", "num_heads", "seqlen_q", "mask")}
        level = Effort("quick", trials=TRIALS, exhaustive_up_to=3, batch=BATCH, seeds=2, finalists=2)
        arguments = [self.url, *map(json.dumps, (row, {n: getattr(level, n) for n in Effort.__slots__}, moment))]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": "1",  # threads that wait for each other are slow where a machine has others to serve
            toolchain.CACHE_VARIABLE: str(self.cache),
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", RUN, *arguments], stdout=subprocess.PIPE, env=environment, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "tuning\n"
        return process

    def finish(self, moment: str = "") -> dict[str, Any]:
        """Run to the end; what the run said of itself, nothing where it killed itself."""
        process = self.start(moment)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == (-signal.SIGKILL if moment else 0)
        self.look()
        return dict(json.loads(said)) if said else {}

    def look(self) -> list[Measurement]:
        """Read the database, and count what is missing or different from before."""
        with Store(self.url) as store:
            stored = {m.uid: m for m in store.measurements()}
        self.lost |= {uid for uid, before in self.seen.items() if stored.get(uid) != before}
        self.seen |= stored
        return list(stored.values())

    @property
    def repeated(self) -> list[str]:
        """What was measured more than once for one environment, problem and build."""
        counts = Counter((m.environment, m.problem, m.kind, m.label, m.kernel_digest) for m in self.seen.values())
        return [f"{kind} {label}: {count} times" for (_, _, kind, label, _), count in counts.items() if count > 1]

    def check_finished(self) -> None:
        """Assert that everything is as a run that nobody disturbed would have left it."""
        measurements = self.look()
        assert not self.lost
        assert not self.repeated
        assert Counter(m.kind for m in measurements)["search"] == TRIALS
        assert all(m.outcome is Outcome.OK for m in measurements)
        finals = {m.uid: m for m in measurements if m.kind == "final"}
        assert len({m.run_id for m in finals.values()}) == 1, "one comparison, in one run"
        assert {len(m.times_us) for m in finals.values()} <= set(range(COMPARE_ROUNDS[0], COMPARE_ROUNDS[1] + 1))
        with Store(self.url) as store:
            (winner,) = store.winners()
        assert winner.verified
        assert winner.measurement in finals
        assert winner.spec == finals[winner.measurement].spec
        assert winner.baseline_name == "sdpa_masked"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of these tests' own: compiling is part of what is killed, and by it the run's processes are known."""
    directory = tmp_path_factory.mktemp("killed")
    directory.chmod(0o700)
    yield directory
    kill_all(processes_of(directory))


def processes_of(cache: Path) -> list[int]:
    """The living processes that use this cache, by their environment."""
    mark = f"{toolchain.CACHE_VARIABLE}={cache}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def kill_all(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def test_kill_9_loses_and_repeats_nothing(tmp_path: Path, cache: Path) -> None:
    """First at random moments, spread over a whole tuning by what it has stored so far; where a run is done before its
    moment comes, the tuning is checked, and the kills that are left are for a new one. Every other kill takes the run's
    workers and compilers with it, as when a container ends; else they outlive it.

    Then around the decision: the finals are there together or not at all, and from then on the winner follows.
    """
    rng = random.Random(SEED)
    tunes = [Tune(tmp_path / "0", cache)]
    tunes[0].directory.mkdir()
    kills, log = 0, []
    while kills < KILLS:
        moments = sorted(rng.uniform(0, STORED) for _ in range(KILLS - kills))
        tune = tunes[-1]
        for moment in moments:
            process = tune.start()
            wait_for(tune, int(moment), process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, SECONDS_A_ROW))
            everything = kills % 2 == 0
            if process.poll() is not None:
                assert process.returncode == 0
                break
            # The run first: one that still lives would take the end of a worker for its kernel's doing.
            process.kill()
            process.wait()
            if everything:
                kill_all(processes_of(cache))
            kills += 1
            kinds = Counter(m.kind for m in tune.look())
            log.append(f"{kills}: {'all' if everything else 'run'} killed, stored {dict(kinds)}")
        else:
            break
        tune.check_finished()
        tunes.append(Tune(tmp_path / str(len(tunes)), cache))
        tunes[-1].directory.mkdir()
    tune = tunes[-1]
    tune.finish("between two finals")
    assert Counter(m.kind for m in tune.look()) == {"baseline": 2, "search": TRIALS}
    tune.finish("before the winner")
    before = Counter(m.kind for m in tune.look())
    assert before["final"] >= 2
    tune.finish("after the winner")
    assert tune.finish() == {"status": "known", "known": TRIALS, "measured": 0}
    assert Counter(m.kind for m in tune.look()) == before
    tune.check_finished()
    wait_until_gone(cache)
    lost, repeated = sum(len(t.lost) for t in tunes), sum(len(t.repeated) for t in tunes)
    rows = sum(len(t.seen) for t in tunes)
    print("", *log, sep="\n")
    print(f"{kills} kills in {len(tunes)} tunings of {rows} measurements: {lost} lost, {repeated} repeated")
    assert (kills, lost, repeated) == (KILLS, 0, 0)


def wait_until_gone(cache: Path) -> None:
    """The workers and compilers of a killed run end by themselves."""
    deadline = time.monotonic() + 60
    while (left := processes_of(cache)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def wait_for(tune: Tune, count: int, process: subprocess.Popen[str]) -> None:
    """Until the database holds this many measurements, or the run is done."""
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if count == 0 or (Path(tune.url).exists() and len(tune.look()) >= count):
            return
        time.sleep(0.1)
    assert process.poll() is not None, f"no {count} measurements within 300 s"
