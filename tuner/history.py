"""What the store holds about one problem on one device: the truth that a search is rebuilt from."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tilewright.generator.build import build_digest
from tilewright.generator.errors import IllegalVariant, InvalidInput, Outcome
from tilewright.generator.problem import Problem
from tilewright.generator.render import render
from tilewright.generator.variant import VariantSpec, kernel_of
from tilewright.runtime.environment import Environment
from tilewright.runtime.records import Measurement, Winner
from tilewright.runtime.store.database import Store
from tilewright.tuner.measured import Measured
from tilewright.tuner.operations import operation_named


@dataclass(frozen=True, slots=True)
class Figures:
    """What one measurement found; None where it found nothing. Times in microseconds."""

    time_us: float | None = None
    times_us: tuple[float, ...] = ()
    compile_s: float | None = None
    max_error: float | None = None
    rms_error: float | None = None
    registers: int | None = None
    smem_bytes: int | None = None

    @classmethod
    def of(cls, measured: Measured, compile_s: float | None) -> Figures:
        """What a worker found, and how long the compiler took."""
        names = ("time_us", "times_us", "max_error", "rms_error", "registers", "smem_bytes")
        return cls(compile_s=compile_s, **{name: getattr(measured, name) for name in names})


class History:
    """The measurements of one problem in one environment, those that still count.

    A variant whose source, flags or compiler changed since is a new kernel: what was measured of the old one is left
    in the store and not used.

    run_id: names this run in the measurements it adds.
    """

    def __init__(self, store: Store, environment: Environment, problem: Problem, run_id: str) -> None:
        self._store, self._environment, self._problem, self._run_id = store, environment, problem, run_id
        self._digests: dict[VariantSpec, str | None] = {}
        self.searched: dict[VariantSpec, Measurement] = {}
        self._finals: list[Measurement] = []
        self._baselines: dict[str, Measurement] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the store again: another process may be tuning the same problem."""
        for measurement in self._store.measurements(self._environment, self._problem):
            self._take(measurement)

    def _take(self, measurement: Measurement) -> None:
        spec = measurement.spec
        if spec is None:
            self._baselines[measurement.baseline] = measurement
        elif measurement.kernel_digest == self.kernel_digest(spec):
            if measurement.kind == "search":
                self.searched.setdefault(spec, measurement)
            elif measurement.uid not in {known.uid for known in self._finals}:
                self._finals.append(measurement)

    def kernel_digest(self, spec: VariantSpec) -> str | None:
        """The build digest of `spec` for this problem today; None where it is no longer legal."""
        if spec not in self._digests:
            try:
                self._digests[spec] = build_digest(render(kernel_of(self._problem, spec)))
            except (IllegalVariant, InvalidInput):
                self._digests[spec] = None
        return self._digests[spec]

    def time_of(self, spec: VariantSpec) -> float | None:
        """The time found in the search, in microseconds; None where the variant failed or was not measured."""
        found = self.searched.get(spec)
        return found.time_us if found is not None and found.outcome is Outcome.OK else None

    def usable(self) -> list[VariantSpec]:
        """The variants that run and are right, fastest first; those that a final check found wrong are left out."""
        wrong = {final.spec for final in self._finals if final.outcome is not Outcome.OK}
        timed = [(time, spec) for spec in self.searched if (time := self.time_of(spec)) and spec not in wrong]
        return [spec for _, spec in sorted(timed, key=lambda item: item[0])]

    def outcomes(self) -> Counter[str]:
        """Counts by outcome, one a variant."""
        return Counter(str(measurement.outcome) for measurement in self.searched.values())

    def baselines(self) -> dict[str, float]:
        """PyTorch's implementations that ran, with their times in microseconds."""
        return {n: m.time_us for n, m in self._baselines.items() if m.outcome is Outcome.OK and m.time_us}

    @property
    def has_baselines(self) -> bool:
        return bool(self._baselines)

    def finals_of(self, specs: Sequence[VariantSpec]) -> list[Measurement] | None:
        """The final measurements of these variants in the latest run that took all of them; None where none did.

        Samples of different runs are not compared.
        """
        runs = list(dict.fromkeys(final.run_id for final in reversed(self._finals)))
        for run in runs:
            taken = {f.spec: f for f in self._finals if f.run_id == run and f.outcome is Outcome.OK}
            if set(specs) <= set(taken):
                return [taken[spec] for spec in specs]
        return None

    def winner(self) -> Winner | None:
        """The stored winner, where its kernel is still the one that was measured."""
        for winner in self._store.winners(environment=self._environment, problem=self._problem):
            if winner.spec in self.searched:
                return winner
        return None

    def is_final(self, winner: Winner) -> bool:
        """Whether it is verified and won an interleaved comparison, not only the search so far."""
        return winner.verified and winner.measurement in {final.uid for final in self._finals}

    def add(
        self,
        spec: VariantSpec,
        outcome: Outcome,
        figures: Figures,
        *,
        kind: str = "search",
        message: str = "",
    ) -> Measurement:
        """Store one outcome of a variant; it is on disk when this returns."""
        measurement = self._measurement(spec, outcome, figures, kind, message)
        self._add([measurement])
        return measurement

    def add_finals(self, times_us: Mapping[VariantSpec, Sequence[float]]) -> list[Measurement]:
        """Store the samples of one interleaved comparison, in microseconds: all of it is on disk, or nothing."""
        finals = [
            self._measurement(spec, Outcome.OK, Figures(time_us=median(times), times_us=tuple(times)), "final")
            for spec, times in times_us.items()
        ]
        self._add(finals)
        return finals

    def add_baselines(self, times_us: Mapping[str, float]) -> None:
        """Store the times of PyTorch's implementations, all of them or, killed meanwhile, none."""
        self._add(
            [
                Measurement(
                    environment=self._environment,
                    problem=self._problem,
                    spec=None,
                    outcome=Outcome.OK,
                    kind="baseline",
                    baseline=name,
                    time_us=time_us,
                    run_id=self._run_id,
                )
                for name, time_us in times_us.items()
            ]
        )

    def _measurement(
        self, spec: VariantSpec, outcome: Outcome, figures: Figures, kind: str, message: str = ""
    ) -> Measurement:
        return Measurement(
            environment=self._environment,
            problem=self._problem,
            spec=spec,
            outcome=outcome,
            kind=kind,
            message=message,
            run_id=self._run_id,
            kernel_digest=self.kernel_digest(spec) or "",
            **dataclasses.asdict(figures),
        )

    def _add(self, measurements: Sequence[Measurement]) -> None:
        self._store.add_measurements(measurements)
        for measurement in measurements:
            self._take(measurement)

    def set_winner(
        self, measurement: Measurement, time_us: float, default_time_us: float | None, *, verified: bool
    ) -> None:
        """Store the winner, with PyTorch's fastest beside it."""
        assert measurement.spec is not None, "a baseline cannot win"
        name, baseline_us = fairest_baseline(self._problem, self.baselines()) or ("", None)
        self._store.set_winner(
            self._environment,
            self._problem,
            measurement.spec,
            time_us=time_us,
            default_time_us=default_time_us,
            baseline_name=name,
            baseline_time_us=baseline_us,
            verified=verified,
            measurement=measurement.uid,
        )


def fairest_baseline(problem: Problem, baselines: Mapping[str, float]) -> tuple[str, float] | None:
    """PyTorch's fastest implementation and its time, among those that compute the same function if there is any.

    Dense attention beside a mask or a choice computes another one, and is given only where nothing else fitted into
    memory.
    """
    same = operation_named(problem.operation).same_function(problem, baselines)
    return min((same or baselines).items(), key=lambda item: item[1], default=None)
