"""The whole space of a problem measured, variant by variant, into a file that other searches can be tried on."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tilewright.generator.build import build_digest
from tilewright.generator.build_pool import BuildPool, BuildResult, available_cores
from tilewright.generator.errors import InvalidInput, VariantFailed
from tilewright.generator.render import render
from tilewright.generator.space import default_variant, legal_variants
from tilewright.generator.variant import VariantSpec, kernel_of
from tilewright.tuner.crew import Crew, Job
from tilewright.tuner.devices import TuningTarget
from tilewright.tuner.measured import Measured
from tilewright.tuner.problem_run import MEASURE_TIMEOUT_S
from tilewright.tuner.sweep_record import RecordWriter, SweepLine, read_record
from tilewright.tuner.timing import SURVEY_S
from tilewright.tuner.worker import Worker
from tilewright.tuner.workloads import WorkloadRow

SLOW = 10.0
"""A variant that takes this many times the best so far is not timed further, nor compared at the swept shape."""

WORKER_LIFE = 1000
"""Variants after which the measuring processes start afresh: a loaded kernel can't be unloaded."""

BATCH = 64
"""Variants dealt out among the devices at once."""

METHOD = (
    "each variant passed every adversarial case, then a sample of this shape's rows against fp64; median of up to 50"
    f" calls in {SURVEY_S:g} s, caches flushed; over {SLOW:g} times the best so far: one call (two where short), not"
    " compared at this shape"
)


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """How to sweep.

    families: only these, all main ones when empty. limit: only so many of the cheapest-looking variants. time_limit_s:
    for all rows together. jobs: compilers at once. command: what the files say they were made by.
    """

    families: tuple[str, ...] = ()
    limit: int | None = None
    time_limit_s: float | None = None
    jobs: int | None = None
    command: str = ""


@dataclass(slots=True)
class SweepResult:
    """How far one row came: of `wanted` variants `known` were in the file before and `measured` were added."""

    row: WorkloadRow
    path: Path
    legal: int
    wanted: int
    known: int
    default: VariantSpec
    measured: int = 0
    lines: list[SweepLine] = field(default_factory=list)
    best: SweepLine | None = None
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        return self.known + self.measured >= self.wanted

    def take(self, line: SweepLine) -> None:
        """Add a line, and keep `best` the fastest of them all."""
        self.lines.append(line)
        if line.time_us is not None and (self.best is None or line.time_us < (self.best.time_us or math.inf)):
            self.best = line

    @property
    def default_us(self) -> float | None:
        """The default's time in microseconds."""
        return next((line.time_us for line in self.lines if line.spec == self.default), None)


Progress = Callable[[SweepResult, SweepLine | None], None]
"""Told when a row begins (no line) and of each line that is added."""


def record_path(out: Path, row: WorkloadRow) -> Path:
    """The row's file in the directory `out`, named after it: `W5 block-sparse` goes to `w5-block-sparse.csv`."""
    return out / f"{re.sub(r'[^a-z0-9.]+', '-', row.name.lower()).strip('-.')}.csv"


def sweep(
    rows: Sequence[WorkloadRow], target: TuningTarget, out: Path, settings: SweepSettings, progress: Progress
) -> Iterator[SweepResult]:
    """Measure every legal variant of each row; yields each row's result when it is done or its time is up.

    What a row's file in `out` holds already is kept, where kernel and environment are the same, and not measured again.
    Raises `InvalidInput` for a file of another device, software or problem, and `ToolMissing`.
    """
    paths = [record_path(out, row) for row in rows]
    for path in paths:
        if paths.count(path) > 1:
            raise InvalidInput(f"several rows would be written to {path}: let their names differ by letters or digits")
    deadline = time.monotonic() + settings.time_limit_s if settings.time_limit_s is not None else math.inf
    # On a GPU kernels are timed while others compile: each measuring process keeps a core for itself.
    spare = 0 if target.arch == "cpu" else len(target.devices)
    with BuildPool(settings.jobs or max(1, available_cores() - spare)) as pool, Crew(target.devices) as crew:
        for row, path in zip(rows, paths, strict=True):
            yield _RowSweep(row, path, target, settings, pool, crew, deadline, progress).run()


class _RowSweep:
    def __init__(
        self,
        row: WorkloadRow,
        path: Path,
        target: TuningTarget,
        settings: SweepSettings,
        pool: BuildPool,
        crew: Crew,
        deadline: float,
        progress: Progress,
    ) -> None:
        self._row, self._path, self._target, self._settings = row, path, target, settings
        self._pool, self._crew, self._deadline, self._progress = pool, crew, deadline, progress
        self._problem = row.problem(target.arch)

    def run(self) -> SweepResult:
        started = time.monotonic()
        default = default_variant(self._problem)
        legal = legal_variants(self._problem)
        if default not in legal:
            legal.insert(0, default)
        ranks = {spec: rank for rank, spec in enumerate(legal)}
        wanted = self._wanted(legal, default)
        known = [line for line in self._known() if line.spec in ranks and line.kernel == self._digest(line.spec)]
        found = {line.spec for line in known}
        left = [spec for spec in wanted if spec not in found]
        result = SweepResult(self._row, self._path, len(legal), len(wanted), len(wanted) - len(left), default)
        for line in known:
            result.take(line)
        self._progress(result, None)
        with RecordWriter(self._path, self._about(legal, default), known, legal) as writer:

            def record(
                spec: VariantSpec, measured: Measured, device: str, kernel: str, compile_s: float | None
            ) -> None:
                line = SweepLine.of(spec, ranks[spec], measured, device, kernel, compile_s)
                writer.add(line)
                result.take(line)
                result.measured += 1
                self._progress(result, line)

            self._measure(left, result, record)
        result.seconds = time.monotonic() - started
        return result

    def _wanted(self, legal: Sequence[VariantSpec], default: VariantSpec) -> list[VariantSpec]:
        """What to measure, the default first: what follows is then stopped against a time that is not slow."""
        families = self._settings.families
        unknown = sorted(set(families) - {spec.family for spec in legal})
        if unknown:
            raise InvalidInput(
                f"{self._row.name} has no variant of {', '.join(unknown)}; its families are"
                f" {', '.join(sorted({spec.family for spec in legal}))}"
            )
        chosen = [spec for spec in legal if not families or spec.family in families]
        first = [default] if default in chosen else []
        return list(dict.fromkeys([*first, *chosen]))[: self._settings.limit]

    def _known(self) -> tuple[SweepLine, ...]:
        if not self._path.exists():
            return ()
        record = read_record(self._path)
        for name, value in self._identity().items():
            if record.about.get(name) != value:
                raise InvalidInput(
                    f"{self._path} is a sweep with another {name}: {record.about.get(name)}, this one has {value};"
                    " give another --out"
                )
        return record.lines

    def _identity(self) -> dict[str, str]:
        """What times in one file share."""
        return {
            "row": self._row.name,
            "problem": json.dumps(self._problem.to_dict(), sort_keys=True),
            "inputs": json.dumps(self._row.asked_of.identity(self._row)),
            "environment": json.dumps(self._target.environment.to_dict(), sort_keys=True),
        }

    def _about(self, legal: Sequence[VariantSpec], default: VariantSpec) -> dict[str, str]:
        return {
            **self._identity(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "devices": " ".join(self._target.devices),
            "legal": str(len(legal)),
            "default": default.name,
            "method": METHOD,
            "command": self._settings.command,
        }

    def _digest(self, spec: VariantSpec) -> str:
        """The name of the build of `spec` today; empty where it is no longer legal."""
        try:
            return build_digest(render(kernel_of(self._problem, spec)))
        except VariantFailed:
            return ""

    def _measure(
        self,
        specs: Sequence[VariantSpec],
        result: SweepResult,
        record: Callable[[VariantSpec, Measured, str, str, float | None], None],
    ) -> None:
        self._crew.take_up(self._row)
        in_life = 0
        for built in self._built(specs):
            jobs = []
            for one in built:
                if one.artifact is not None:
                    jobs.append(Job(one.kernel.spec, one.kernel, one.artifact, one.compile_s))
                elif one.error is not None:
                    failed = Measured(one.error.outcome, message=str(one.error))
                    record(one.kernel.spec, failed, "", self._digest(one.kernel.spec), one.compile_s)
            steps = self._crew.measure(
                jobs,
                wanted=lambda job: time.monotonic() < self._deadline,
                limit_us=lambda: _limit_us(result),
                timeout_s=MEASURE_TIMEOUT_S,
                how=Worker.survey,
            )
            for step in steps:
                if step.measured is not None:
                    job = step.job
                    record(job.spec, step.measured, step.device, job.artifact.parent.name, job.compile_s)
            in_life += len(jobs)
            if in_life >= WORKER_LIFE * len(self._crew.devices):
                self._crew.close()
                in_life = 0

    def _built(self, specs: Sequence[VariantSpec]) -> Iterator[list[BuildResult]]:
        """Compile these, and yield them as they come: on a GPU while the rest compiles, on the CPU once none does."""
        size = 8 * self._pool.jobs if self._target.arch == "cpu" else max(1, len(specs))
        for start in range(0, len(specs), size):
            futures = [self._pool.submit(kernel_of(self._problem, spec)) for spec in specs[start : start + size]]
            try:
                if self._target.arch == "cpu":
                    wait(futures, self._left_s())
                    yield [future.result() for future in futures if future.done()]
                else:
                    yield from self._as_done(futures)
            finally:
                for future in futures:
                    future.cancel()
            if time.monotonic() >= self._deadline:
                return

    def _as_done(self, futures: Sequence[Future[BuildResult]]) -> Iterator[list[BuildResult]]:
        done: queue.SimpleQueue[Future[BuildResult]] = queue.SimpleQueue()
        for future in futures:
            future.add_done_callback(done.put)
        count = len(futures)
        while count:
            ready: list[Future[BuildResult]] = []
            with contextlib.suppress(queue.Empty):
                ready.append(done.get(timeout=self._left_s()))
                while len(ready) < min(count, BATCH):
                    ready.append(done.get_nowait())
            if not ready:
                return  # the time is up
            count -= len(ready)
            yield [future.result() for future in ready]

    def _left_s(self) -> float | None:
        return None if self._deadline == math.inf else max(0.0, self._deadline - time.monotonic())


def _limit_us(result: SweepResult) -> float | None:
    return SLOW * result.best.time_us if result.best is not None and result.best.time_us is not None else None
