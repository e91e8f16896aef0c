"""The worker: a process of its own that runs compiled kernels, so that none of them can take the tuner down."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from tilewright.generator.errors import (
    IllegalAccess,
    OutOfMemory,
    TilewrightError,
    TimedOut,
    VariantFailed,
)
from tilewright.generator.variant import Kernel
from tilewright.tuner.measured import Measured

if TYPE_CHECKING:
    from tilewright.tuner.agreement import Agreement
    from tilewright.tuner.host_kernel import HostReport
    from tilewright.tuner.verify import VerifyReport
    from tilewright.tuner.workloads import WorkloadRow

__all__ = ["Measured", "Worker", "WorkerLost"]

TAKEN = "taken"
"""What the process answers first, before it runs anything: from then on, its end is the request's doing."""

TAKE_UP_S = 60.0

_START = "import sys; from tilewright.tuner.worker_process import serve; serve(int(sys.argv[1]), sys.argv[2])"


class WorkerLost(TilewrightError):
    """No worker starts on the device, so that nothing can be measured any more: no fault of a variant."""


class _NeverTaken(Exception):
    """The process was gone before the request reached it."""


class Worker:
    """The parent's handle on a process that verifies and times kernels on one device.

    device: `cpu`, `cuda` or `cuda:1`. environment: variables of the process that differ from this one's. The process
    starts on the first request, in a session of its own (a Ctrl-C in the terminal does not reach it) and is killed as a
    group. After a crash, a hang or a CUDA error that sticks, the next request starts a fresh one and prepares the same
    row again. A worker whose parent dies ends by itself.
    Use from one thread at a time; as a context manager it closes at the end.
    """

    def __init__(
        self, device: str, *, start_timeout_s: float = 300.0, environment: Mapping[str, str] | None = None
    ) -> None:
        self.device = device
        self.environment = dict(environment or {})
        self.start_timeout_s = start_timeout_s
        self._row: WorkloadRow | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._errors: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process now behind this handle, or None."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def prepare(self, row: WorkloadRow, timeout_s: float = 300.0) -> None:
        """Make the row's inputs on the device; what follows runs on them.

        Raises what making them raises (`InvalidInput`, `OutOfMemory`), and `WorkerLost` where no worker starts.
        """
        self._row = None
        self._request("prepare", (row,), timeout_s)
        self._row = row

    def measure(
        self, kernel: Kernel, artifact: Path, limit_us: float | None = None, timeout_s: float = 60.0
    ) -> Measured:
        """Verify, then time one artifact on the prepared row. Raises nothing for what the kernel does.

        limit_us: a kernel clearly slower than this is timed with few samples. A crash is `illegal`, a hang `timeout`,
        a SIGKILL from elsewhere `memory` (that is how Linux ends a process when memory runs out).
        """
        return self._measured("measure", (kernel, artifact, limit_us), timeout_s)

    def survey(
        self, kernel: Kernel, artifact: Path, limit_us: float | None = None, timeout_s: float = 60.0
    ) -> Measured:
        """As `measure`, quicker (`SURVEY_S`); past `limit_us` a kernel is called once, or twice where that is short,
        and not compared with fp64 on the row.
        """
        return self._measured("survey", (kernel, artifact, limit_us), timeout_s)

    def _measured(self, method: str, arguments: tuple[Kernel, Path, float | None], timeout_s: float) -> Measured:
        try:
            measured: Measured = self._request(method, arguments, timeout_s, prepared=True)
        except VariantFailed as error:
            return Measured(error.outcome, message=str(error))
        return measured

    def verify(self, kernel: Kernel, artifact: Path, timeout_s: float = 120.0) -> VerifyReport:
        """Run every adversarial case of one artifact; no row is needed. Raises the `VariantFailed` that ended it."""
        report: VerifyReport = self._request("verify", (kernel, artifact), timeout_s)
        return report

    def check(self, kernel: Kernel, artifact: Path, seed: int = 0, timeout_s: float = 120.0) -> HostReport:
        """Run every case of `HOST_SHAPES` through a library of `host_build`, on the CPU; no row is needed.

        seed: see `HostKernel`. Raises the `VariantFailed` that ended it: `IllegalAccess` with what the runtime or
        AddressSanitizer reports.
        """
        report: HostReport = self._request("check", (kernel, artifact, seed), timeout_s)
        return report

    def agree(self, kernel: Kernel, host: Path, gpu: Path, timeout_s: float = 120.0) -> Agreement:
        """Run the cases of `HOST_SHAPES` through both libraries of one kernel and compare what they give.

        host: made by `host_build`. gpu: made by `build`, for this worker's GPU. Raises the `VariantFailed` that ended
        it.
        """
        agreement: Agreement = self._request("agree", (kernel, host, gpu), timeout_s)
        return agreement

    def compare(
        self, targets: Sequence[tuple[Kernel, Path]], rounds: int, timeout_s: float = 120.0
    ) -> list[list[float]]:
        """Microseconds, `rounds` for each artifact, taken in turn; raises the `VariantFailed` that ended it."""
        times: list[list[float]] = self._request("compare", (list(targets), rounds), timeout_s, prepared=True)
        return times

    def verify_at_shape(self, kernel: Kernel, artifact: Path, timeout_s: float = 120.0) -> VerifyReport:
        """Compare with fp64 at the prepared row's own shape: all rows on a GPU, a bounded sample on the CPU.

        The report's message says how many rows. Raises the `VariantFailed` that ended it.
        """
        report: VerifyReport = self._request("verify_at_shape", (kernel, artifact), timeout_s, prepared=True)
        return report

    def baselines(self, timeout_s: float = 300.0) -> dict[str, float]:
        """PyTorch's median times for the prepared row in microseconds, by name; see `baselines.baseline_runs`."""
        times: dict[str, float] = self._request("baselines", (), timeout_s, prepared=True)
        return times

    def kill(self) -> None:
        """End the process from any thread; the request it is on fails, and the thread that asked closes the handle."""
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process, now, whatever it is doing."""
        process, self._process = self._process, None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, method: str, arguments: tuple[Any, ...], timeout_s: float, prepared: bool = False) -> Any:
        if prepared and self._row is None:
            raise WorkerLost("the worker has no row to measure on; call prepare first")
        for attempt in (1, 2):
            if self.pid is None:
                self._start()
                if prepared:
                    self._prepare_again()
            try:
                return self._exchange(method, arguments, timeout_s)
            except _NeverTaken as error:
                # It died before it saw the request (killed from elsewhere while idle): no fault of what was asked.
                if attempt == 2:
                    raise WorkerLost(f"the worker on {self.device} keeps dying while idle: {error}") from error
        raise AssertionError("unreachable")

    def _prepare_again(self) -> None:
        assert self._row is not None
        try:
            self._exchange("prepare", (self._row,), self.start_timeout_s)
        except VariantFailed as error:
            raise WorkerLost(f"a fresh worker cannot prepare '{self._row.name}' again: {error}") from error

    def _start(self) -> None:
        self.close()
        ours, theirs = Pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process dies, closed by close()
        # The child imports what this process imports, wherever that lies.
        environment = {**os.environ, **self.environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(
            # -P: a folder called tilewright in the working directory must not be imported instead.
            [sys.executable, "-P", "-c", _START, str(theirs.fileno()), self.device],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=environment,
        )
        theirs.close()
        self._pipe = ours
        try:
            self._receive(self.start_timeout_s)
        except VariantFailed as error:
            self.close()
            raise WorkerLost(f"no worker starts on {self.device}: {error}") from error

    def _exchange(self, method: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        if self._pipe is None or self._errors is None:
            raise WorkerLost("the worker was closed")
        # The child writes through the same open file, so this moves its end as well: what is read there after a
        # death belongs to this request.
        self._errors.seek(0)
        self._errors.truncate()
        try:
            self._pipe.send((method, arguments, timeout_s))
            taken = self._pipe.poll(TAKE_UP_S) and self._pipe.recv() == TAKEN
        except (EOFError, OSError) as error:
            raise _NeverTaken(str(self._death())) from error
        except BaseException:
            self.close()
            raise
        if not taken:
            self.close()
            raise _NeverTaken(f"it did not take up a request within {TAKE_UP_S:g} s")
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> Any:
        if self._pipe is None:
            raise WorkerLost("the worker was closed")
        try:
            if not self._pipe.poll(timeout_s):
                self.close()
                raise TimedOut(f"no answer within {timeout_s:g} s; the worker was killed")
            kind, value, usable = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        except BaseException:
            # Interrupted between question and answer: the pipe holds an answer that nobody will ask for.
            self.close()
            raise
        if not usable:
            self.close()
        if kind == "error":
            assert isinstance(value, TilewrightError)
            raise value
        return value

    def _death(self) -> VariantFailed:
        """The error that tells how the process ended; closes what is left of it."""
        code, said = -signal.SIGKILL, ""
        if self._process is not None:
            try:
                code = self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                code = 0  # it closed its pipe and stays: killed below
        if self._errors is not None:
            self._errors.seek(0)
            said = last_words(self._errors.read().decode(errors="replace"))
            said = f": {said}" if said else ""
        self.close()
        if code == -signal.SIGKILL:
            return OutOfMemory("the worker was killed by SIGKILL, most likely because memory ran out")
        if code == -signal.SIGALRM:
            return TimedOut("the worker ran into its alarm")
        if code < 0:
            return IllegalAccess(f"the worker died of {signal.Signals(-code).name}{said}")
        return IllegalAccess(f"the worker ended with exit code {code}{said}")


def last_words(errors: str) -> str:
    """What a process that died said about it: a sanitizer's summary and the line of kernel.cu, else the last line."""
    lines = errors.strip().splitlines()
    reported = [line.strip() for line in lines if "SUMMARY: " in line or "runtime error: " in line]
    if not reported:
        return lines[-1] if lines else ""
    frame = next((line for line in lines if re.match(r"\s*#\d+ .*kernel\.cu:\d+", line)), "")
    place = re.sub(r"^\s*#\d+ (?:0x[0-9a-f]+ )?(?:in )?(.*?) (?:\S*/)?(kernel\.cu:\d+).*", r"\2 in \1", frame)
    return f"{reported[0].replace('SUMMARY: ', '')}" + (f"; {place}" if place else "")
