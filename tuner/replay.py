"""Search strategies run against recorded sweeps: how many evaluations each needs, without a device."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.generator.errors import InvalidInput
from tilewright.generator.variant import VariantSpec
from tilewright.tuner.effort import Effort
from tilewright.tuner.search import Strategy
from tilewright.tuner.strategies import Start
from tilewright.tuner.sweep_record import SweepRecord, read_record

WITHIN = 0.05
"""A variant this fraction slower than the best counts as found."""


@dataclass(frozen=True, slots=True)
class Landscape:
    """A space and what was measured of it.

    candidates: cheapest-looking first. times_us: of those that ran. legal: how many variants the space has; more than
    there are candidates where the sweep was cut off or narrowed.
    """

    name: str
    candidates: tuple[VariantSpec, ...]
    times_us: dict[VariantSpec, float]
    default: VariantSpec
    legal: int

    @property
    def best_us(self) -> float:
        return min(self.times_us.values())

    def near(self, within: float) -> int:
        """How many variants are at most this fraction slower than the best."""
        return sum(time <= (1 + within) * self.best_us for time in self.times_us.values())


def landscape_of(record: SweepRecord, source: str) -> Landscape:
    """The landscape of a sweep; `InvalidInput` where its default was not measured or nothing ran."""
    lines = sorted(record.lines, key=lambda line: line.rank)
    times = {line.spec: line.time_us for line in lines if line.time_us is not None}
    default = next((line.spec for line in lines if line.spec.name == record.about.get("default")), None)
    if default is None or not times:
        missing = "the default variant's time" if default is None else "a variant that ran"
        raise InvalidInput(f"{source} lacks {missing}; go on with the sweep that wrote it")
    specs = tuple(line.spec for line in lines)
    return Landscape(record.name, specs, times, default, int(record.about.get("legal", len(specs))))


def read_landscape(path: Path) -> Landscape:
    """As `landscape_of`, of a file."""
    return landscape_of(read_record(path), str(path))


@dataclass(frozen=True, slots=True)
class Needed:
    """Evaluations that one strategy needed on one landscape, one number a run, None where `limit` came first.

    near: to a variant within the fraction asked for. best: to the fastest of all.
    """

    strategy: str
    landscape: str
    limit: int
    near: tuple[int | None, ...]
    best: tuple[int | None, ...]

    def median(self, counts: Sequence[int | None]) -> float | None:
        """Over the runs; None where that is past the limit."""
        middle = statistics.median(self.limit + 1 if count is None else count for count in counts)
        return None if middle > self.limit else middle

    def worst(self, counts: Sequence[int | None]) -> int | None:
        """The most over the runs; None where one went past the limit."""
        known = [count for count in counts if count is not None]
        return max(known) if len(known) == len(counts) else None


def replay(
    landscape: Landscape,
    name: str,
    make: Callable[[Start], Strategy],
    effort: Effort,
    *,
    runs: int = 20,
    limit: int | None = None,
    within: float = WITHIN,
) -> Needed:
    """Run a strategy as the tuner would at this effort, with the seeds 0, 1, ..., until it meets the best or the limit.

    It starts from the default and no other problem's winner, and is told of each batch before it proposes the next.
    limit: evaluations at most, None for as many as there are candidates.
    """
    most = min(limit or len(landscape.candidates), len(landscape.candidates))
    bound_us = (1 + within) * landscape.best_us
    found: list[tuple[int | None, int | None]] = []
    for seed in range(runs):
        start = Start(landscape.candidates, (landscape.default,), effort.seeds, seed)
        times = _run(landscape, make(start), effort.batch, most)
        near = next((n for n, time in enumerate(times, 1) if time is not None and time <= bound_us), None)
        best = next((n for n, time in enumerate(times, 1) if time == landscape.best_us), None)
        found.append((near, best))
    return Needed(name, landscape.name, most, tuple(near for near, _ in found), tuple(best for _, best in found))


def _run(landscape: Landscape, strategy: Strategy, batch: int, limit: int) -> list[float | None]:
    """The times in the order of measuring, up to the best of all."""
    times: list[float | None] = []
    while len(times) < limit:
        specs = strategy.propose(min(batch, limit - len(times)))
        if not specs:
            break
        # As `ProblemRun` measures them: the default before any other.
        for spec in sorted(specs, key=lambda spec: spec != landscape.default):
            times.append(landscape.times_us.get(spec))
            strategy.tell(spec, times[-1])
        if landscape.best_us in times:
            break
    return times


def effort_with(effort: Effort, batch: int | None, starts: int | None) -> Effort:
    """The effort with another batch, and another number of variants to start from, where they are given."""
    return dataclasses.replace(effort, batch=batch or effort.batch, seeds=starts or effort.seeds)
