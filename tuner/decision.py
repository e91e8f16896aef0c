"""From a finished search to a winner: the finalists interleaved, the choice verified, the result stored."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.generator.errors import Outcome, VariantFailed
from tilewright.generator.problem import Problem
from tilewright.generator.space import complexity
from tilewright.generator.variant import VariantSpec, kernel_of
from tilewright.runtime.records import Measurement, Winner
from tilewright.tuner.builder import Builder
from tilewright.tuner.crew import Crew, Job
from tilewright.tuner.finalists import NOISE_FLOOR, Finalist, rank
from tilewright.tuner.history import Figures, History
from tilewright.tuner.progress import Listener

FINALIST_SPAN = 1.25
"""Variants slower than this many times the fastest in the search are no finalists."""

COMPARE_SECONDS, COMPARE_ROUNDS = 3.0, (7, 31)
"""How long the finalists are compared, and the rounds at least and at most."""

COMPARE_TIMEOUT_S = 120.0

SEARCH_NOISE = 0.05
"""As `NOISE_FLOOR`, for times that were taken minutes apart in the search."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A stored winner; times in microseconds. `final`: it won an interleaved comparison, not only the search so far."""

    spec: VariantSpec
    time_us: float
    default_time_us: float | None
    max_error: float | None
    final: bool


class Jury:
    """Decides one problem.

    default: the variant that tuning must not be slower than. incumbent: the winner from before, if any: it stays
    unless it is beaten by more than the noise. finalists: how many of the fastest are compared beside those two.
    """

    def __init__(
        self,
        problem: Problem,
        history: History,
        builder: Builder,
        crew: Crew,
        listener: Listener,
        *,
        default: VariantSpec,
        incumbent: Winner | None,
        finalists: int,
    ) -> None:
        self._problem, self._history = problem, history
        self._builder, self._crew, self._listener = builder, crew, listener
        self._default, self._incumbent, self._finalists = default, incumbent, finalists

    def decide(self, deadline: float) -> Decision | None:
        """Choose, verify at the tuned shape and store; None where no variant is left that is right.

        deadline: by `time.monotonic`; after it nothing is compared any more, and unless an earlier run did that, the
        fastest of the search is taken.
        """
        while specs := self._finalist_specs():
            finals = self._compare(specs, deadline)
            taken = finals or [self._history.searched[spec] for spec in specs]
            floor = NOISE_FLOOR if finals else SEARCH_NOISE
            ranked = [entry.finalist for entry in rank([self._finalist(m) for m in taken], floor)]
            chosen = next(m for m in taken if m.spec == ranked[0].spec)
            verified, max_error = self._verify(ranked[0].spec)
            if verified:
                times = {finalist.spec: finalist.time_us for finalist in ranked}
                decision = Decision(
                    ranked[0].spec, ranked[0].time_us, times.get(self._default), max_error, final=bool(finals)
                )
                self._history.set_winner(chosen, decision.time_us, decision.default_time_us, verified=True)
                return decision
        return None

    def _finalist_specs(self) -> list[VariantSpec]:
        usable = self._history.usable()
        if not usable:
            return []
        times = {spec: self._history.time_of(spec) or math.inf for spec in usable}
        near = [spec for spec in usable if times[spec] <= FINALIST_SPAN * times[usable[0]]]
        always = [self._default, *([self._incumbent.spec] if self._incumbent else [])]
        return list(dict.fromkeys([*near[: self._finalists], *(spec for spec in always if spec in times)]))

    def _finalist(self, measurement: Measurement) -> Finalist:
        spec = measurement.spec
        assert spec is not None
        assert measurement.time_us is not None
        standing = 1 if spec == self._default else 2
        if self._incumbent is not None and self._incumbent.spec == spec:
            standing = 0
        times = measurement.times_us if measurement.kind == "final" else (measurement.time_us,)
        return Finalist(spec, times, complexity(kernel_of(self._problem, spec)), standing)

    def _compare(self, specs: Sequence[VariantSpec], deadline: float) -> list[Measurement] | None:
        """Measure these interleaved, unless another run did; None where that was not possible."""
        known = self._history.finals_of(specs)
        if known is not None or time.monotonic() >= deadline:
            return known
        jobs = self._jobs(specs)
        self._listener.comparing(specs)
        total_s = sum(self._history.time_of(job.spec) or 0.0 for job in jobs) / 1e6
        rounds = min(max(int(COMPARE_SECONDS / max(total_s, 1e-6)), COMPARE_ROUNDS[0]), COMPARE_ROUNDS[1])
        try:
            with self._crew.lead() as worker:
                self._history.refresh()  # whoever held the device until now may have compared the same
                known = self._history.finals_of([job.spec for job in jobs])
                if known is not None:
                    return known
                samples = worker.compare([(job.kernel, job.artifact) for job in jobs], rounds, COMPARE_TIMEOUT_S)
                return self._history.add_finals(dict(zip((job.spec for job in jobs), samples, strict=True)))
        except VariantFailed as error:
            self._listener.note(f"the finalists could not be compared, so their times in the search count: {error}")
            return None

    def _verify(self, spec: VariantSpec) -> tuple[bool, float | None]:
        """Whether `spec` is right at the tuned shape, and its largest error there; what is wrong is recorded."""
        jobs = self._jobs([spec])
        if not jobs:
            return False, None
        try:
            with self._crew.lead() as worker:
                report = worker.verify_at_shape(jobs[0].kernel, jobs[0].artifact)
        except VariantFailed as error:
            self._reject(spec, error.outcome, Figures(), str(error))
            return False, None
        if not report.ok:
            figures = Figures(max_error=report.max_error, rms_error=report.rms_error)
            self._reject(spec, Outcome.WRONG, figures, report.message)
        return report.ok, report.max_error

    def _reject(self, spec: VariantSpec, outcome: Outcome, figures: Figures, message: str) -> None:
        self._history.add(spec, outcome, figures, kind="final", message=message)
        self._listener.note(f"{spec.name} cannot win, it fails at the tuned shape ({outcome}): {message}")

    def _jobs(self, specs: Sequence[VariantSpec]) -> list[Job]:
        """These variants' artifacts, built again where the cache has lost them; one that fails now is recorded."""

        def failed(spec: VariantSpec, error: VariantFailed, compile_s: float | None) -> None:
            self._reject(spec, error.outcome, Figures(compile_s=compile_s), str(error))

        return self._builder.build(self._problem, specs, math.inf, failed)
