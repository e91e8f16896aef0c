"""Whole tuning runs on the CPU target: real compilers, real workers, a real database, a really killed process."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tilewright.generator.errors import InvalidInput, Outcome
from tilewright.generator.render import Rendered, render
from tilewright.generator.space import default_variant, legal_variants
from tilewright.generator.variant import Kernel, VariantSpec
from tilewright.runtime.environment import Environment
from tilewright.runtime.records import Measurement
from tilewright.runtime.store import Store
from tilewright.tuner import builder, effort
from tilewright.tuner.devices import TuningTarget, measuring_alone, resolve_target
from tilewright.tuner.effort import Effort, effort_named, strategy_for
from tilewright.tuner.problem_run import Deadlines, ProblemRun
from tilewright.tuner.progress import Attempt, Listener, Plan, ProblemResult, Status, TuneReport
from tilewright.tuner.search import Exhaustive
from tilewright.tuner.search_model import GaussianSearch
from tilewright.tuner.tune import TuneSettings, tune
from tilewright.tuner.workloads import WorkloadRow

pytestmark = [pytest.mark.early, pytest.mark.usefixtures("lasting_workers")]

FORK = multiprocessing.get_context("fork")
ROW = WorkloadRow("small", "float32", 16, 2, 64, mask="sliding_window(4, 4) | global_stride(16)")

FEW = Effort("quick", trials=3, exhaustive_up_to=3, batch=2, seeds=2, finalists=2)
"""Three variants a problem in two batches: as the real efforts, in a few seconds."""


@pytest.fixture(autouse=True)
def _few_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(effort.EFFORTS, "quick", FEW)


@pytest.fixture(scope="module")
def target() -> TuningTarget:
    return resolve_target("cpu")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(str(tmp_path / "tune.db")) as opened:
        yield opened


class Recorder(Listener):
    """Keeps what it is told, and can act on an attempt."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.attempts: list[Attempt] = []
        self.notes: list[str] = []
        self.results: list[ProblemResult] = []
        self.baseline_times: dict[str, float] = {}

    def problem_started(self, plan: Plan) -> None:
        self.plans.append(plan)

    def attempted(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)

    def baselines(self, times_us: Mapping[str, float]) -> None:
        self.baseline_times = dict(times_us)

    def problem_finished(self, result: ProblemResult) -> None:
        self.results.append(result)

    def note(self, text: str) -> None:
        self.notes.append(text)


def run(store: Store, target: TuningTarget, listener: Listener | None = None, row: WorkloadRow = ROW) -> TuneReport:
    return tune([row], target, store, TuneSettings(effort="quick", jobs=1), listener)


def searched(store: Store) -> list[Measurement]:
    return store.measurements(kind="search")


def test_a_run_stores_a_verified_winner_and_the_next_one_measures_nothing(store: Store, target: TuningTarget) -> None:
    recorder = Recorder()
    report = run(store, target, recorder)
    (result,) = report.results
    assert result.status is Status.TUNED
    found = searched(store)
    assert len(found) == len({m.spec for m in found}) == FEW.trials
    assert found[0].spec == result.default, "the default variant is measured first"
    assert all(m.kernel_digest and m.environment == target.environment for m in found)
    for m in found:
        assert m.outcome is Outcome.OK
        assert m.times_us
        assert m.max_error is not None
        assert m.compile_s is not None or m.spec != found[0].spec
    (winner,) = store.winners()
    assert winner.verified
    assert winner.spec == result.winner
    assert winner.default_time_us is not None
    assert winner.time_us <= winner.default_time_us * 1.5
    finals = {m.uid: m for m in store.measurements(kind="final")}
    assert winner.measurement in finals
    assert {result.default, winner.spec} <= {m.spec for m in finals.values()}
    assert len({len(m.times_us) for m in finals.values()}) == 1, "finalists are timed in shared rounds"
    assert set(recorder.baseline_times) == {m.baseline for m in store.measurements(kind="baseline")} != set()
    assert winner.baseline_name == "sdpa_masked", "dense attention beside a mask is not the same function"
    assert [a.done for a in recorder.attempts] == [1, 2, 3]
    assert recorder.attempts[-1].default_us is not None

    before = [m.uid for m in store.measurements()]
    again = Recorder()
    (second,) = run(store, target, again).results
    assert second.status is Status.KNOWN
    assert second.winner == result.winner
    assert again.attempts == []
    assert [m.uid for m in store.measurements()] == before


class Interrupting(Recorder):
    def attempted(self, attempt: Attempt) -> None:
        super().attempted(attempt)
        raise KeyboardInterrupt


def test_ctrl_c_keeps_what_was_measured(store: Store, target: TuningTarget) -> None:
    other = WorkloadRow("later", "float32", 16, 2, 64)
    report = tune([ROW, other], target, store, TuneSettings(effort="quick", jobs=1), Interrupting())
    assert report.interrupted
    assert [r.status for r in report.results] == [Status.UNREACHED, Status.UNREACHED]
    assert [r.row for r in report.results] == [ROW, other]
    assert len(searched(store)) == 1
    assert store.winners() == []
    (result,) = run(store, target).results
    assert (result.known, result.measured) == (1, FEW.trials - 1)


@pytest.mark.parametrize("compares", [True, False], ids=["finalists-compared", "best-so-far"])
def test_the_time_limit_leaves_a_valid_winner(
    compares: bool, store: Store, target: TuningTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[ProblemRun] = []
    original = ProblemRun._search

    def remember(self: ProblemRun) -> None:
        runs.append(self)
        original(self)

    class TimeIsUp(Recorder):
        def attempted(self, attempt: Attempt) -> None:
            super().attempted(attempt)
            if attempt.done == 2:
                runs[0].deadlines = Deadlines(search=0.0, compare=float("inf") if compares else 0.0)

    monkeypatch.setattr(ProblemRun, "_search", remember)
    report = run(store, target, TimeIsUp())
    (result,) = report.results
    assert report.out_of_time
    assert result.status is Status.PARTIAL
    assert len(searched(store)) == 2
    (winner,) = store.winners()
    assert winner.verified
    assert winner.spec in {m.spec for m in searched(store)}
    assert bool(store.measurements(kind="final")) == compares

    if compares:
        return
    monkeypatch.setattr(ProblemRun, "_search", original)
    (after,) = run(store, target).results
    assert after.status is Status.TUNED
    assert (after.known, after.measured) == (2, FEW.trials - 2)


def test_a_time_limit_already_over_measures_nothing(store: Store, target: TuningTarget) -> None:
    report = tune([ROW], target, store, TuneSettings(effort="quick", time_limit_s=1e-6))
    (result,) = report.results
    assert result.status is Status.UNREACHED
    assert "time limit" in result.message
    assert searched(store) == []
    assert report.out_of_time


def test_a_variant_that_does_not_compile_is_an_outcome(
    store: Store, target: TuningTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = ROW.problem("cpu")
    # The second variant that a run of this effort takes up.
    broken = strategy_for(FEW, legal_variants(problem), default_variant(problem)).propose(2)[1]

    def breaking(kernel: Kernel) -> Rendered:
        rendered = render(kernel)
        if kernel.spec != broken:
            return rendered
        sources = {name: text + "\n#error broken on purpose\n" for name, text in rendered.sources.items()}
        return Rendered(kernel, sources, rendered.language, rendered.digest)

    monkeypatch.setattr(builder, "render", breaking)
    recorder = Recorder()
    (result,) = run(store, target, recorder).results
    failed = store.measurements(outcome=Outcome.COMPILE)
    assert [m.spec for m in failed] == [broken]
    assert "broken on purpose" in failed[0].message
    assert result.outcomes == {"ok": FEW.trials - 1, "compile": 1}
    assert result.status is Status.TUNED
    assert result.winner != broken
    assert [a.outcome for a in recorder.attempts if a.spec == broken] == [Outcome.COMPILE]


def test_without_a_usable_variant_the_problem_fails_in_words(
    store: Store, target: TuningTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaking(kernel: Kernel) -> Rendered:
        rendered = render(kernel)
        return Rendered(
            kernel, dict.fromkeys(rendered.sources, "#error all broken\n"), rendered.language, rendered.digest
        )

    monkeypatch.setattr(builder, "render", breaking)
    recorder = Recorder()
    (result,) = run(store, target, recorder).results
    assert result.status is Status.FAILED
    assert result.winner is None
    assert "compile: " in result.message
    assert "all broken" in result.message
    assert store.winners() == []


def test_only_the_same_kernel_and_environment_count(store: Store, target: TuningTarget) -> None:
    """Measurements of another source (another digest) or another device stay in the store, and are not used.

    The run has two workers, here both on the CPU: each variant is measured once, by one of them.
    """
    problem = ROW.problem("cpu")
    default = default_variant(problem)
    for environment in (target.environment, Environment("Other CPU", "cpu")):
        store.add_measurement(
            environment, problem, default, Outcome.OK, time_us=1.0, kernel_digest="0" * 16, run_id="before"
        )
    two = TuningTarget("cpu", ("cpu", "cpu:0"), target.environment)
    devices: set[str] = set()

    class Watching(Recorder):
        def measuring(self, spec: VariantSpec, device: str) -> None:
            devices.add(device)

    (result,) = run(store, two, Watching()).results
    assert result.status is Status.TUNED
    assert (result.known, result.measured) == (0, FEW.trials)
    assert result.time_us != 1.0
    counts = Counter(m.spec for m in searched(store) if m.run_id != "before")
    assert set(counts.values()) == {1}
    assert len(counts) == FEW.trials
    assert "cpu" in devices <= {"cpu", "cpu:0"}


def hold_until_killed(sender: Connection) -> None:
    with measuring_alone("cpu"):
        sender.send("held")
        time.sleep(60)


def test_two_processes_do_not_time_at_once() -> None:
    receiver, sender = FORK.Pipe(duplex=False)
    holder = FORK.Process(target=hold_until_killed, args=(sender,))
    holder.start()
    assert receiver.recv() == "held"
    killed_at: list[float] = []

    def kill(*_: object) -> None:
        killed_at.append(time.monotonic())
        holder.kill()

    before = signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with measuring_alone("cpu"):
            assert killed_at, "the lock was taken while another process held it"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        holder.kill()
        holder.join()


def test_efforts_choose_their_strategy() -> None:
    few = [VariantSpec("a", "list", 16, n) for n in (16, 32, 64)]
    many = [VariantSpec("a", form, m, n) for form in ("list", "scan") for m in range(1, 30) for n in range(1, 20)]
    full = effort_named("full")
    assert isinstance(strategy_for(full, few, few[1]), Exhaustive)
    assert full.budget(400) == 400
    assert full.budget(401) == 300
    model = strategy_for(effort_named("default"), many, many[5], warm=[many[9], VariantSpec("b", "list", 1, 1)])
    assert isinstance(model, GaussianSearch)
    assert model.propose(3)[:2] == [many[5], many[9]], "the default first, then the neighbour's winner"
    with pytest.raises(InvalidInput, match="effort must be one of quick, default, full; got 'huge'"):
        effort_named("huge")


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_time_limits_that_make_no_sense(limit: float) -> None:
    with pytest.raises(InvalidInput, match="positive number of seconds"):
        TuneSettings(time_limit_s=limit)


@pytest.mark.parametrize("text", ["", "tpu", "CPU", "sm_90a"])
def test_unknown_targets(text: str) -> None:
    with pytest.raises(InvalidInput, match="target must be auto, cpu, cuda or cuda:INDEX"):
        resolve_target(text)


def test_a_missing_compiler_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.generator.errors import ToolMissing

    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolMissing, match="install"):
        resolve_target("cpu")
