"""Builds a batch of variants side by side, and hands over what can be measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from tilewright.generator.build import find_artifact
from tilewright.generator.build_pool import BuildPool, BuildResult
from tilewright.generator.errors import IllegalVariant, VariantFailed
from tilewright.generator.problem import Problem
from tilewright.generator.render import render
from tilewright.generator.variant import VariantSpec, kernel_of
from tilewright.tuner.crew import Job
from tilewright.tuner.progress import Listener

Failed = Callable[[VariantSpec, VariantFailed, float | None], None]
"""Told of a variant that has no artifact, why, and after how many seconds of compiling."""


class Builder:
    """Compiles variants in the pool, unless they were compiled before."""

    def __init__(self, pool: BuildPool, listener: Listener) -> None:
        self._pool, self._listener = pool, listener

    def build(self, problem: Problem, specs: Sequence[VariantSpec], deadline: float, failed: Failed) -> list[Job]:
        """The variants of `problem` that compile, in the order of `specs`.

        deadline: by `time.monotonic`; what was not started by then is left out. No compiler runs when this returns,
        because timing beside a compiler would be timing the compiler.
        Raises `ToolMissing` or `InvalidInput` where nothing at all can be built.
        """
        jobs: dict[VariantSpec, Job] = {}
        futures: dict[Future[BuildResult], VariantSpec] = {}
        for spec in specs:
            kernel = kernel_of(problem, spec)
            try:
                rendered = render(kernel)
            except IllegalVariant as error:
                failed(spec, error, None)
                continue
            artifact = find_artifact(rendered)
            if artifact is not None:
                jobs[spec] = Job(spec, kernel, artifact, None)
            else:
                futures[self._pool.submit(rendered)] = spec
        if futures:
            self._listener.building(len(futures))
        waiting = set(futures)
        try:
            while waiting:
                left_s = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
                done, waiting = wait(waiting, left_s, FIRST_COMPLETED)
                if not done:
                    break
                for future in done:
                    self._take(futures[future], future.result(), jobs, failed)
        finally:
            running = [future for future in waiting if not future.cancel()]
        for future in running:
            self._take(futures[future], future.result(), jobs, failed)
        return [jobs[spec] for spec in specs if spec in jobs]

    def _take(self, spec: VariantSpec, built: BuildResult, jobs: dict[VariantSpec, Job], failed: Failed) -> None:
        self._listener.built(built)
        if built.artifact is not None:
            jobs[spec] = Job(spec, built.kernel, built.artifact, built.compile_s)
        elif built.error is not None:
            failed(spec, built.error, built.compile_s)
