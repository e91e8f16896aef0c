"""The measuring workers of a run: one process a device, each timing alone on its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tilewright.generator.variant import Kernel, VariantSpec
from tilewright.tuner.devices import measuring_alone
from tilewright.tuner.measured import Measured
from tilewright.tuner.worker import Worker
from tilewright.tuner.workloads import WorkloadRow


@dataclass(frozen=True, slots=True)
class Job:
    """One compiled variant to measure."""

    spec: VariantSpec
    kernel: Kernel
    artifact: Path
    compile_s: float | None


@dataclass(frozen=True, slots=True)
class Step:
    """A job starts on a device (`measured` is None), or is done there."""

    job: Job
    device: str
    measured: Measured | None


class Crew:
    """Workers by device, started when first needed, all set to one workload row at a time; a context manager."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self._workers: dict[str, Worker] = {}
        self._row: WorkloadRow | None = None
        self._prepared: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill every worker, whatever it is doing."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._prepared.clear()

    def take_up(self, row: WorkloadRow) -> None:
        """Measure on this row from now on; its inputs are made when the first measurement needs them."""
        self._row = row
        self._prepared.clear()

    @contextmanager
    def lead(self) -> Iterator[Worker]:
        """The worker of the first device, ready for the row, its device held: what is compared is compared on one."""
        with measuring_alone(self.devices[0]):
            yield self._ready(self.devices[0])

    def _ready(self, device: str) -> Worker:
        assert self._row is not None
        if device not in self._workers:
            self._workers[device] = Worker(device)
        if device not in self._prepared:
            self._workers[device].prepare(self._row)
            self._prepared.add(device)
        return self._workers[device]

    def measure(
        self,
        jobs: Sequence[Job],
        *,
        wanted: Callable[[Job], bool],
        limit_us: Callable[[], float | None],
        timeout_s: float,
        how: Callable[[Worker, Kernel, Path, float | None, float], Measured] = Worker.measure,
    ) -> Iterator[Step]:
        """Measure the jobs, split over the devices; yields two steps for each, as it starts and when it is done.

        wanted: asked before each one, its device already held; False leaves it out. May be called from any thread.
        limit_us: asked before each one; a variant clearly slower than that many microseconds stops early.
        how: `Worker.measure` or `Worker.survey`.
        """

        def steps_of(job: Job, device: str) -> Iterator[Step]:
            with measuring_alone(device):
                if wanted(job):
                    worker = self._ready(device)
                    yield Step(job, device, None)
                    yield Step(job, device, how(worker, job.kernel, job.artifact, limit_us(), timeout_s))

        if len(self.devices) == 1 or len(jobs) == 1:
            for job in jobs:
                yield from steps_of(job, self.devices[0])
        else:
            yield from self._in_parallel(jobs, steps_of)

    def _in_parallel(self, jobs: Sequence[Job], steps_of: Callable[[Job, str], Iterator[Step]]) -> Iterator[Step]:
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        done: queue.SimpleQueue[Step | BaseException | None] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)

        def serve(device: str) -> None:
            try:
                while True:
                    for step in steps_of(waiting.get_nowait(), device):
                        done.put(step)
            except queue.Empty:
                done.put(None)
            except BaseException as error:
                done.put(error)

        running = len(self.devices)
        threads = [threading.Thread(target=serve, args=(device,), daemon=True) for device in self.devices]
        for thread in threads:
            thread.start()
        try:
            while running:
                item = done.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            # Left early, by an error or Ctrl-C: what is measured now ends with its worker, and nothing follows it.
            while not waiting.empty():
                waiting.get()
            while running and any(thread.is_alive() for thread in threads):
                for worker in list(self._workers.values()):
                    worker.kill()
                for thread in threads:
                    thread.join(0.05)
