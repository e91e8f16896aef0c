"""Compile many kernels at once, in worker processes that may crash, hang or be killed without ending the run.

A worker is a fresh interpreter (`python -m tilewright.generator.build_pool`) in a session of its own that reads one
request a line and answers one line. Not multiprocessing: that would run the caller's main module once more.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

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
from tilewright.generator.render import Rendered
from tilewright.generator.variant import Kernel

TIMEOUT_S = 300.0
KILL_S = 5.0

JOB_BYTES = {"cpp": 1 << 30, "cuda": 2 << 30}
"""Memory set aside for one compiler: cicc and ptxas pass 1 GiB on unrolled kernels, cc1plus 0.5 GiB, and the worker
itself holds PyTorch. One job a core without this cap is what exhausts the memory of many-core machines."""

_ERRORS: dict[str, type[TilewrightError]] = {
    kind.__name__: kind for kind in (CompileFailed, IllegalVariant, LaunchFailed, InvalidInput, ToolMissing)
}


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What became of one build: `artifact` is the library, or `error` says why there is none.

    compile_s: seconds in the worker; next to nothing where the artifact was there already.
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


class WorkerDied(Exception):
    """The worker ended without an answer."""


class _Worker:
    """The parent's end of one build process."""

    def __init__(self) -> None:
        # The kernels are named by the path of this package, wherever the parent found it.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            # load_inline asks whether there is a GPU; through NVML that opens no CUDA context.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by kill()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tilewright.generator.build_pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One request and its answer. Raises `TimeoutError` and `WorkerDied`; the worker is of no use after either."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the end of its output says so below
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        answer = b""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                chunk = os.read(self.process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise WorkerDied(self._last_words())
                answer += chunk
        values: dict[str, Any] = json.loads(answer)
        return values

    def _last_words(self) -> str:
        code = self.process.wait()
        if code < 0:
            return f"the build process was killed by {signal.Signals(-code).name}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"the build process ended with code {code}: {lines[-1] if lines else 'it said nothing'}"

    def kill(self) -> None:
        """End the worker and every compiler below it."""
        # ninja puts each compiler in a process group of its own, so the worker's group is not enough; all of them
        # stay in the session that the worker leads.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        # Once more until none is left: one may have been starting another.
        while (members := session_members(self.process.pid)) and time.monotonic() < deadline:
            for pid in members:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def session_members(session: int) -> list[int]:
    """The living processes of a session, by /proc; empty where there is no /proc."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        # pid (name, which may hold anything) state parent group session ...
        fields = _read(str(entry)).rpartition(")")[2].split()
        if len(fields) > 3 and int(fields[3]) == session and fields[0] not in "ZX":
            members.append(int(entry.parent.name))
    return members


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
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._alive: set[_Worker] = set()
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
            worker.kill()
        self._threads.shutdown(wait=True)

    def _build(self, item: Kernel | Rendered) -> BuildResult:
        kernel = item if isinstance(item, Kernel) else item.kernel
        language = "cpp" if kernel.arch == "cpu" else "cuda"
        with self._budget.share(JOB_BYTES[language]):
            worker = self._take_worker()
            started = time.monotonic()
            try:
                answer = worker.ask(_request(item), self._timeout_s)
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

    def _take_worker(self) -> _Worker:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            with self._lock:
                if self._closed:
                    raise concurrent.futures.CancelledError from None
                worker = _Worker()
                self._alive.add(worker)
            return worker

    def _drop(self, worker: _Worker) -> None:
        with self._lock:
            if worker not in self._alive:
                return  # close() has killed it
            self._alive.discard(worker)
        worker.kill()


def _request(item: Kernel | Rendered) -> dict[str, Any]:
    if isinstance(item, Kernel):
        return {"kernel": item.to_dict()}
    return {
        "kernel": item.kernel.to_dict(),
        "sources": item.sources,
        "language": item.language,
        "digest": item.digest,
    }


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


def serve() -> None:
    """The worker's loop: build each kernel that comes in on standard input, until it ends."""
    import logging

    from torch.utils import cpp_extension  # noqa: F401  slow to import, so before the first request is timed

    from tilewright.generator.build import build

    # PyTorch's remarks about this machine would be repeated once a worker.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not be read as an answer
    for line in sys.stdin:
        values = json.loads(line)
        started = time.perf_counter()
        try:
            kernel = Kernel.from_dict(values["kernel"])
            item = (
                Rendered(kernel, values["sources"], values["language"], values["digest"])
                if "sources" in values
                else kernel
            )
            answer: dict[str, Any] = {"artifact": str(build(item))}
        except Exception as error:
            answer = {
                "error": type(error).__name__,
                "message": str(error),
                "log": getattr(error, "log", ""),
                "source_path": str(getattr(error, "source_path", None) or ""),
            }
        answer["compile_s"] = time.perf_counter() - started
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
