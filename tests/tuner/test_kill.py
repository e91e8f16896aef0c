"""A tuning run that is killed with SIGKILL, at random moments and at the worst ones, and then run again.

    TILEWRIGHT_TEST_KILLS=10 TILEWRIGHT_TEST_SEED=7 pytest tests/tuner/test_kill.py -s

kills ten times at random instead of once, at other moments, and prints what it counted.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
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

RUNS = """
import os, signal, sys
from multiprocessing.connection import Connection
import brief_timing
from sqlalchemy import event
from sqlalchemy.orm import Session
from tilewright.generator.toolchain import CACHE_VARIABLE
from tilewright.runtime.store import Store
from tilewright.runtime.store.models import MeasurementRow, WinnerRow
from tilewright.tuner import decision, effort
from tilewright.tuner.devices import resolve_target
from tilewright.tuner.tune import TuneSettings, tune

pipe = Connection(int(sys.argv[1]))
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

def run(url, cache, row, level, moment):
    os.environ[CACHE_VARIABLE] = cache
    effort.EFFORTS["quick"] = level
    if moment == "between two finals":
        event.listen(MeasurementRow, "after_insert", final_inserted)
    if moment == "before the winner":
        event.listen(WinnerRow, "before_insert", die)
    if moment == "after the winner":
        event.listen(WinnerRow, "after_insert", lambda *_: event.listen(Session, "after_commit", committed))
    pipe.send(os.getpid())
    (result,) = tune([row], resolve_target("cpu"), Store(url), TuneSettings("quick", jobs=1)).results
    pipe.send({"status": result.status, "known": result.known, "measured": result.measured})

while True:
    try:
        arguments = pipe.recv()
    except EOFError:
        break
    child = os.fork()
    if not child:
        run(*arguments)
        os._exit(0)
    pipe.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""Runs, each in a process of its own that may kill itself at a moment that no clock would hit.

They are forked from one process, since what a run imports takes longer than the run.
"""


@dataclass
class Run:
    """A run that has begun to tune; `code` is how it ended, `said` what it told of itself before."""

    pid: int
    pipe: Connection
    said: dict[str, Any] = field(default_factory=dict)
    code: int | None = None

    def ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.code is None and self.pipe.poll(max(0.0, deadline - time.monotonic())):
            answer = self.pipe.recv()
            if isinstance(answer, int):
                self.code = answer
            else:
                self.said = answer
        return self.code is not None

    def kill(self) -> None:
        kill_all([self.pid])
        assert self.ends_within(60)


@dataclass
class Tune:
    """A tuning that is started over and over on one database, and what was seen in that database in between.

    A row is known by its uid; `lost` and `repeated` are the figures that have to be 0.
    """

    directory: Path
    cache: Path
    runs: Connection
    seen: dict[str, Measurement] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        return str(self.directory / "tune.db")

    def start(self, moment: str = "") -> Run:
        """Start a run; it has begun to tune when this returns."""
        level = Effort("quick", trials=TRIALS, exhaustive_up_to=3, batch=BATCH, seeds=2, finalists=2)
        self.runs.send((self.url, str(self.cache), ROW, level, moment))
        return Run(self.runs.recv(), self.runs)

    def finish(self, moment: str = "") -> dict[str, Any]:
        """Run to the end; what the run said of itself, nothing where it killed itself."""
        run = self.start(moment)
        assert run.ends_within(300)
        assert run.code == (-signal.SIGKILL if moment else 0)
        self.look()
        return run.said

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


@pytest.fixture(scope="module")
def runs() -> Iterator[Connection]:
    """The process that starts a run for each tuple of arguments it is sent."""
    ours, theirs = Pipe()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",  # threads that wait for each other are slow where a machine has others to serve
    }
    command = [sys.executable, "-P", "-c", RUNS, str(theirs.fileno())]
    process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    yield ours
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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


def test_kill_9_loses_and_repeats_nothing(tmp_path: Path, cache: Path, runs: Connection) -> None:
    """First at random moments, spread over a whole tuning by what it has stored so far; where a run is done before its
    moment comes, the tuning is checked, and the kills that are left are for a new one. Every other kill takes the run's
    workers and compilers with it, as when a container ends; else they outlive it.

    Then around the decision: the finals are there together or not at all, and from then on the winner follows.
    """
    rng = random.Random(SEED)
    tunes = [Tune(tmp_path / "0", cache, runs)]
    tunes[0].directory.mkdir()
    kills, log = 0, []
    while kills < KILLS:
        moments = sorted(rng.uniform(0, STORED) for _ in range(KILLS - kills))
        tune = tunes[-1]
        for moment in moments:
            run = tune.start()
            wait_for(tune, int(moment), run)
            everything = kills % 2 == 0
            if run.ends_within(rng.uniform(0, SECONDS_A_ROW)):
                assert run.code == 0
                break
            # The run first: one that still lives would take the end of a worker for its kernel's doing.
            run.kill()
            if everything:
                kill_all(processes_of(cache))
            kills += 1
            kinds = Counter(m.kind for m in tune.look())
            log.append(f"{kills}: {'all' if everything else 'run'} killed, stored {dict(kinds)}")
        else:
            break
        tune.check_finished()
        tunes.append(Tune(tmp_path / str(len(tunes)), cache, runs))
        tunes[-1].directory.mkdir()
    if any(m.kind == "final" for m in tunes[-1].look()):  # the last kill came after the decision
        tunes[-1].finish()
        tunes[-1].check_finished()
        tunes.append(Tune(tmp_path / str(len(tunes)), cache, runs))
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


def wait_for(tune: Tune, count: int, run: Run) -> None:
    """Until the database holds this many measurements, or the run is done."""
    deadline = time.monotonic() + 300
    while not run.ends_within(0) and time.monotonic() < deadline:
        if count == 0 or (Path(tune.url).exists() and len(tune.look()) >= count):
            return
        time.sleep(0.1)
    assert run.code is not None, f"no {count} measurements within 300 s"
