"""Compile many kernels at once, in worker processes that may crash, hang or be killed without ending the run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tilewright.generator import toolchain
from tilewright.generator.build import find_artifact
from tilewright.generator.build_worker import Worker, WorkerDied, request_for
from tilewright.generator.errors import (
    CompileFailed,
    IllegalVariant,
    InvalidInput,
    LaunchFailed,
    TilewrightError,
    TimedOut,
    ToolMissing,
    VariantFailed,
)
from tilewright.generator.render import Rendered, render
from tilewright.generator.variant import Kernel

TIMEOUT_S = 300.0

JOB_BYTES = {"cpp": 1 << 30, "cuda": 2 << 30}
"""Memory set aside for one job, an allowance: a worker holds PyTorch (0.25 GiB measured) and one compiler, which takes
under 0.25 GiB on small tiles (g++ 12, nvcc 13.0), and several times that for nvcc on deeply unrolled tensor-core tiles.
Without a cap by memory, one nvcc a core is what exhausts machines with many cores."""

_ERRORS: dict[str, type[TilewrightError]] = {
    kind.__name__: kind for kind in (CompileFailed, LaunchFailed, InvalidInput, ToolMissing)
}


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What became of one build: `artifact` is the library, or `error` says why there is none.

    compile_s: seconds that the build took; next to nothing where the artifact was there already.
    """

    kernel: Kernel
    artifact: Path | None
    error: VariantFailed | None
    compile_s: float


def available_cores() -> int:
    """How many cores this process may use: its affinity, capped by its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def available_memory_bytes() -> int | None:
    """Memory that can still be taken, capped by the cgroup's limit; None where the system does not say."""
    amounts = []
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            amounts.append(int(line.split()[1]) << 10)
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        amounts.append(max(0, int(limit) - int(used)))
    return min(amounts) if amounts else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


class _MemoryBudget:
    """Lets builds start while their memory fits; one may always run."""

    def __init__(self, total: int | None) -> None:
        self._free = total
        self._running = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def share(self, amount: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0 or self._free is None or self._free >= amount)
            self._take(1, amount)
        try:
            yield
        finally:
            with self._changed:
                self._take(-1, -amount)
                self._changed.notify_all()

    def _take(self, jobs: int, amount: int) -> None:
        self._running += jobs
        if self._free is not None:
            self._free -= amount


class BuildPool:
    """Builds kernels in parallel worker processes; a context manager.

    jobs: how many at once, by default one a core, fewer where memory is short.
    timeout_s: seconds after which one build is killed and answered with `TimedOut`.
    """

    def __init__(self, jobs: int | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        if jobs is not None and jobs < 1:
            raise InvalidInput(f"jobs must be 1 or more, got {jobs}; leave it out for one a core")
        self.jobs = min(jobs or available_cores(), available_cores())
        self._timeout_s = timeout_s
        self._budget = _MemoryBudget(available_memory_bytes())
        self._threads = ThreadPoolExecutor(self.jobs, thread_name_prefix="build")
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._alive: set[Worker] = set()
        self._closed = False

    def __enter__(self) -> BuildPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, kernel: Kernel | Rendered) -> Future[BuildResult]:
        """Queue one build.

        What is the variant's fault is in `BuildResult.error`; `ToolMissing` and `InvalidInput`, where nothing at all
        can be built here, are raised by the future's `result()`.
        """
        return self._threads.submit(self._build, kernel)

    def as_completed(self, kernels: Iterable[Kernel | Rendered]) -> Iterator[BuildResult]:
        """Build all of these, and yield each result as it comes."""
        futures = [self.submit(kernel) for kernel in kernels]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()

    def close(self) -> None:
        """Drop what is queued and kill what is running. What was published stays."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            workers = list(self._alive)
            self._alive.clear()
        for worker in workers:
            worker.end()
        # A thread that waits for an answer would wait on if the pipe were closed before it saw its end.
        self._threads.shutdown(wait=True)
        for worker in workers:
            worker.kill()

    def _build(self, item: Kernel | Rendered) -> BuildResult:
        kernel = item if isinstance(item, Kernel) else item.kernel
        language = "cpp" if kernel.arch == "cpu" else "cuda"
        started = time.monotonic()
        try:
            rendered = render(item) if isinstance(item, Kernel) else item
        except IllegalVariant as error:
            return BuildResult(kernel, None, error, time.monotonic() - started)
        # A worker imports PyTorch, which takes longer than most builds: none is started for what is there.
        found = find_artifact(rendered)
        if found is not None:
            return BuildResult(kernel, found, None, time.monotonic() - started)
        toolchain.compiler_identity(language)  # nor where there is no compiler
        with self._budget.share(JOB_BYTES[language]):
            worker = self._take_worker()
            started = time.monotonic()
            try:
                answer = worker.ask(request_for(rendered), self._timeout_s)
            except TimeoutError:
                self._drop(worker)
                message = f"the compiler was killed after {self._timeout_s:g} s"
                return BuildResult(kernel, None, TimedOut(message), time.monotonic() - started)
            except WorkerDied as death:
                self._drop(worker)
                return BuildResult(kernel, None, CompileFailed(str(death)), time.monotonic() - started)
            except BaseException:
                self._drop(worker)
                raise
            self._idle.put(worker)
        return _result(kernel, answer)

    def _take_worker(self) -> Worker:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            with self._lock:
                if self._closed:
                    raise concurrent.futures.CancelledError from None
                worker = Worker()
                self._alive.add(worker)
            return worker

    def _drop(self, worker: Worker) -> None:
        with self._lock:
            if worker not in self._alive:
                return  # close() has killed it
            self._alive.discard(worker)
        worker.kill()


def _result(kernel: Kernel, answer: dict[str, Any]) -> BuildResult:
    if "artifact" in answer:
        return BuildResult(kernel, Path(answer["artifact"]), None, answer["compile_s"])
    kind = _ERRORS.get(answer["error"])
    if kind is CompileFailed:
        path = Path(answer["source_path"]) if answer["source_path"] else None
        failed: VariantFailed = CompileFailed(answer["message"], log=answer["log"], source_path=path)
        return BuildResult(kernel, None, failed, answer["compile_s"])
    if kind is None:
        return BuildResult(kernel, None, CompileFailed(f"{answer['error']}: {answer['message']}"), answer["compile_s"])
    error = kind(answer["message"])
    if isinstance(error, VariantFailed):
        return BuildResult(kernel, None, error, answer["compile_s"])
    raise error
