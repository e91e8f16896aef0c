"""One tuning run: every problem of a workload in turn, resumable at any moment, on one device model."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.generator.build_pool import BuildPool
from tilewright.generator.errors import InvalidInput, VariantFailed
from tilewright.generator.space import default_variant, legal_variants
from tilewright.runtime.store.database import Store
from tilewright.runtime.winners import WinnerTable, shipped_winners
from tilewright.tuner.builder import Builder
from tilewright.tuner.crew import Crew
from tilewright.tuner.devices import TuningTarget
from tilewright.tuner.effort import effort_named
from tilewright.tuner.history import History
from tilewright.tuner.problem_run import Deadlines, ProblemRun, Tools
from tilewright.tuner.progress import Listener, Plan, ProblemResult, Status, TuneReport
from tilewright.tuner.workloads import WorkloadRow

SEARCH_SHARE = 0.8
"""Of a problem's time under a time limit; the rest is for its finalists and the last check."""


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """How to tune.

    effort: `quick`, `default` or `full`. time_limit_s: for the whole run, split evenly over what is left to do.
    jobs: compilers at once, None for as many as cores and memory allow. seed: of the search.
    """

    effort: str = "default"
    time_limit_s: float | None = None
    jobs: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        effort_named(self.effort)
        if self.time_limit_s is not None and not (math.isfinite(self.time_limit_s) and self.time_limit_s > 0):
            raise InvalidInput(f"time limit must be a positive number of seconds, got {self.time_limit_s}")


def tune(
    rows: Sequence[WorkloadRow],
    target: TuningTarget,
    store: Store,
    settings: TuneSettings | None = None,
    listener: Listener | None = None,
) -> TuneReport:
    """Tune every row for the target; what is found is stored as it is found.

    Killed at any moment and started again, a run goes on where it was: at most what was in flight is measured again.
    Ctrl-C and the time limit end it in order; problems that were finished by then have their winners.
    Raises `ToolMissing`, `InvalidInput` or `StoreError` where nothing can be built, made or stored at all.
    """
    settings, listener = settings or TuneSettings(), listener or Listener()
    started = time.monotonic()
    report = TuneReport(target, [], 0.0)
    listener.run_started(target, len(rows))
    warm = WinnerTable([*store.winners(device=target.environment.device), *store.winners(), *shipped_winners()])
    try:
        with BuildPool(settings.jobs) as pool, Crew(target.devices) as crew:
            tools = Tools(Builder(pool, listener), crew, listener, warm, effort_named(settings.effort), settings.seed)
            run = _Run(rows, target, store, settings, tools, started, uuid.uuid4().hex)
            for index in range(len(rows)):
                run.one(index, report)
    except KeyboardInterrupt:
        report.interrupted = True
        for result in report.results:
            if result.status is Status.UNREACHED:
                result.message = "interrupted; what was measured is kept"
        reached = {result.row.name for result in report.results}
        report.results += [_unreached(row, target) for row in rows if row.name not in reached]
    report.out_of_time = any(result.status in (Status.PARTIAL, Status.UNREACHED) for result in report.results)
    report.out_of_time &= not report.interrupted
    report.seconds = time.monotonic() - started
    return report


@dataclass(frozen=True, slots=True)
class _Run:
    rows: Sequence[WorkloadRow]
    target: TuningTarget
    store: Store
    settings: TuneSettings
    tools: Tools
    started: float
    run_id: str

    def one(self, index: int, report: TuneReport) -> None:
        """Tune the row of this index; its result goes into the report whatever ends it."""
        row = self.rows[index]
        problem = row.problem(self.target.arch)
        try:
            default = default_variant(problem)
        except VariantFailed as error:
            failed = ProblemResult(row, problem, Status.FAILED, message=str(error))
            report.results.append(failed)
            self.tools.listener.problem_finished(failed)
            return
        legal = legal_variants(problem)
        candidates = legal if default in legal else [default, *legal]
        history = History(self.store, self.target.environment, problem, self.run_id)
        plan = Plan(
            row,
            problem,
            index + 1,
            len(self.rows),
            candidates=len(candidates),
            budget=self.tools.effort.budget(len(candidates)),
            known=len(history.searched),
        )
        run = ProblemRun(plan, candidates, default, history, self.tools, self._deadlines(index))
        report.results.append(run.result)
        run.run()
        self.tools.listener.problem_finished(run.result)

    def _deadlines(self, index: int) -> Deadlines:
        """An even share of what is left of the time limit; what one problem leaves over goes to the next."""
        if self.settings.time_limit_s is None:
            return Deadlines(math.inf, math.inf)
        now = time.monotonic()
        left_s = max(0.0, self.started + self.settings.time_limit_s - now)
        share_s = left_s / (len(self.rows) - index)
        return Deadlines(now + SEARCH_SHARE * share_s, now + share_s)


def _unreached(row: WorkloadRow, target: TuningTarget) -> ProblemResult:
    return ProblemResult(row, row.problem(target.arch), Status.UNREACHED, message="interrupted before it began")
