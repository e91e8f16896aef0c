"""The tuning of one problem: propose, build wide, measure alone, compare the finalists, verify, store the winner."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.generator.errors import Outcome, VariantFailed
from tilewright.generator.variant import VariantSpec
from tilewright.runtime.winners import WinnerTable
from tilewright.tuner.builder import Builder
from tilewright.tuner.crew import Crew, Job
from tilewright.tuner.decision import Jury
from tilewright.tuner.effort import Effort, strategy_for
from tilewright.tuner.history import Figures, History
from tilewright.tuner.progress import Attempt, Listener, Plan, ProblemResult, Status

EARLY_STOP = 2.0
"""A variant is given up once it is clearly slower than this many times the best so far."""

MEASURE_TIMEOUT_S = 120.0
"""For the verification and timing of one variant; a kernel that hangs is killed after that."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What the problems of one run share. warm: winners whose neighbours are tried first."""

    builder: Builder
    crew: Crew
    listener: Listener
    warm: WinnerTable
    effort: Effort
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """By `time.monotonic`: when searching ends, and when comparing finalists may no longer start either."""

    search: float
    compare: float


class ProblemRun:
    """One problem of a run. Everything that was found is in the store as soon as it is found.

    candidates: the legal variants, cheapest-looking first, `default` among them. history: what the store knows.
    `result` is kept up to date on the way, for a caller whom Ctrl-C reaches first.
    """

    def __init__(
        self,
        plan: Plan,
        candidates: Sequence[VariantSpec],
        default: VariantSpec,
        history: History,
        tools: Tools,
        deadlines: Deadlines,
    ) -> None:
        self.plan, self.candidates, self.default = plan, candidates, default
        self.history, self.tools, self.deadlines = history, tools, deadlines
        known = len(history.searched)
        self.result = ProblemResult(plan.row, plan.problem, Status.UNREACHED, default=default, known=known)
        self._incumbent = history.winner()
        self._lock = threading.Lock()  # with several devices, `_wanted` and `_limit_us` come from their threads

    def run(self) -> ProblemResult:
        """Tune it, and say what became of it."""
        started = time.monotonic()
        self.tools.listener.problem_started(self.plan)
        try:
            if not self._is_known():
                self.tools.crew.take_up(self.plan.row)
                self._search()
                self._decide()
        except VariantFailed as error:
            self.result.message = str(error)
        finally:
            self._conclude()
            self.result.seconds = time.monotonic() - started
        return self.result

    def _is_known(self) -> bool:
        winner = self._incumbent
        if winner is None or not self._searched_enough() or not self.history.is_final(winner):
            return False
        self._take_incumbent(Status.KNOWN)
        return True

    def _take_incumbent(self, status: Status) -> None:
        if self._incumbent is not None:
            self.result.status, self.result.winner = status, self._incumbent.spec
            self.result.time_us = self._incumbent.time_us
            self.result.default_time_us = self._incumbent.default_time_us

    def _searched_enough(self) -> bool:
        return len(self.history.searched) >= self.plan.budget

    def _out_of_time(self) -> bool:
        return time.monotonic() >= self.deadlines.search

    def _search(self) -> None:
        matches = self.tools.warm.warm_starts(self.plan.problem, set(self.candidates).__contains__)
        warm = [match.winner.spec for match in matches]
        strategy = strategy_for(self.tools.effort, self.candidates, self.default, warm, seed=self.tools.seed)
        told: set[VariantSpec] = set()
        while True:
            for spec in list(self.history.searched):
                if spec not in told:
                    told.add(spec)
                    strategy.tell(spec, self.history.time_of(spec))
            left = self.plan.budget - len(self.history.searched)
            if left <= 0 or self._out_of_time():
                return
            specs = strategy.propose(min(left, self.tools.effort.batch))
            if not specs:
                return
            builder, problem = self.tools.builder, self.plan.problem
            self._measure(builder.build(problem, specs, self.deadlines.search, self._build_failed))

    def _build_failed(self, spec: VariantSpec, error: VariantFailed, compile_s: float | None) -> None:
        self._record(spec, error.outcome, Figures(compile_s=compile_s), str(error))

    def _measure(self, jobs: Sequence[Job]) -> None:
        """Verify and time these, in order, the default before any other starts."""
        jobs = sorted(jobs, key=lambda job: job.spec != self.default)
        if jobs and not self.result.baselines and not self._out_of_time():
            self._take_baselines()
        first = 1 if jobs and jobs[0].spec == self.default else 0
        for group in (jobs[:first], jobs[first:]):
            steps = self.tools.crew.measure(
                group, wanted=self._wanted, limit_us=self._limit_us, timeout_s=MEASURE_TIMEOUT_S
            )
            for step in steps:
                if step.measured is None:
                    self.tools.listener.measuring(step.job.spec, step.device)
                else:
                    figures = Figures.of(step.measured, step.job.compile_s)
                    self._record(step.job.spec, step.measured.outcome, figures, step.measured.message)

    def _wanted(self, job: Job) -> bool:
        with self._lock:
            self.history.refresh()
            return job.spec not in self.history.searched and not self._out_of_time()

    def _limit_us(self) -> float | None:
        with self._lock:
            fastest = self.history.usable()[:1]
            best = self.history.time_of(fastest[0]) if fastest else None
        return EARLY_STOP * best if best is not None else None

    def _record(self, spec: VariantSpec, outcome: Outcome, figures: Figures, message: str) -> None:
        with self._lock:
            self.history.add(spec, outcome, figures, message=message)
            best = next(iter(self.history.usable()), None)
            self.result.measured += 1
            attempt = Attempt(
                spec=spec,
                outcome=outcome,
                time_us=figures.time_us if outcome is Outcome.OK else None,
                message=message,
                done=len(self.history.searched),
                best=best,
                best_us=self.history.time_of(best) if best else None,
                default_us=self.history.time_of(self.default),
            )
        self.tools.listener.attempted(attempt)

    def _take_baselines(self) -> None:
        if not self.history.has_baselines:
            try:
                with self.tools.crew.lead() as worker:
                    self.history.refresh()  # whoever held the device until now may have taken them
                    if not self.history.has_baselines:
                        self.history.add_baselines(worker.baselines())
            except VariantFailed as error:
                self.tools.listener.note(f"PyTorch could not be timed on this problem: {error}")
                return
        self.result.baselines = self.history.baselines()
        self.tools.listener.baselines(self.result.baselines)

    def _decide(self) -> None:
        late = time.monotonic() >= self.deadlines.compare
        if late and self._incumbent is not None:
            # A winner from before, compared properly, is not replaced by times that were not.
            self._take_incumbent(Status.PARTIAL)
            return
        jury = Jury(
            self.plan.problem,
            self.history,
            self.tools.builder,
            self.tools.crew,
            self.tools.listener,
            default=self.default,
            incumbent=self._incumbent,
            finalists=self.tools.effort.finalists,
        )
        decision = jury.decide(self.deadlines.compare)
        if decision is not None:
            complete = decision.final and (self._searched_enough() or not self._out_of_time())
            self.result.status = Status.TUNED if complete else Status.PARTIAL
            self.result.winner, self.result.time_us = decision.spec, decision.time_us
            self.result.default_time_us, self.result.max_error = decision.default_time_us, decision.max_error

    def _conclude(self) -> None:
        self.result.baselines = self.history.baselines()
        self.result.outcomes = self.history.outcomes()
        if self.result.status is Status.UNREACHED and not self.result.message and self._out_of_time():
            self.result.message = "the time limit ended the search before any variant was measured"
        if self.result.winner is None and self.history.searched and not self.history.usable():
            self.result.status = Status.FAILED
            failed = {str(m.outcome): m.message.splitlines() for m in self.history.searched.values()}
            reasons = "; ".join(f"{outcome}: {(lines or ['no message'])[0]}" for outcome, lines in failed.items())
            self.result.message = self.result.message or f"no variant gave a usable kernel ({reasons})"
