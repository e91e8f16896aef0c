"""The worker's own side: one process, one device, one request at a time. Its parent may kill it at any moment."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilewright.generator.errors import (
    IllegalAccess,
    InvalidInput,
    LaunchFailed,
    Outcome,
    OutOfMemory,
    TilewrightError,
)
from tilewright.generator.host_build import is_host_artifact
from tilewright.generator.variant import Kernel
from tilewright.runtime.launch import LoadedKernel
from tilewright.tuner.agreement import Agreement, compare_with_gpu
from tilewright.tuner.case_book import CaseBook
from tilewright.tuner.host_kernel import HostKernel, HostReport, check_cases
from tilewright.tuner.measured import Measured
from tilewright.tuner.operations import BoundCall, PreparedRow
from tilewright.tuner.timing import SURVEY_S, TIMING_S, Stopwatch, Timing, interleaved, time_kernel, time_once
from tilewright.tuner.verdicts import VerifyReport
from tilewright.tuner.verify import verify
from tilewright.tuner.worker import TAKEN

if TYPE_CHECKING:
    from tilewright.tuner.workloads import WorkloadRow

ALARM_GRACE_S = 5.0
"""The parent kills a late worker itself; this much later a worker whose parent is gone dies by the kernel's alarm,
which works even while compiled code never returns to Python."""

Target = tuple[Kernel, Path]


class Session:
    """The tensors, cases and loaded kernels of one worker."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.stopwatch = Stopwatch(self.device)
        self.book = CaseBook(self.device)
        self.host_book: CaseBook | None = None
        self.gpu_book: CaseBook | None = None
        self._loaded: dict[Path, LoadedKernel] = {}
        self._passed: dict[Path, VerifyReport] = {}
        self._prepared: PreparedRow | None = None

    def prepare(self, row: WorkloadRow) -> None:
        """Make this row's inputs and the fp64 answer of a sample of its rows."""
        self._prepared = None  # what an earlier row holds is not needed beside it
        prepared = row.asked_of.row(row, self.device)
        prepared.answer()
        self._prepared = prepared

    @property
    def _row(self) -> PreparedRow:
        if self._prepared is None:
            raise LaunchFailed("the worker has no row; call prepare first")
        return self._prepared

    def measure(self, kernel: Kernel, artifact: Path, limit_us: float | None) -> Measured:
        """Verify on every case, then on a sample of the tuned shape's rows; only what is right is timed."""
        loaded = self._load(kernel, artifact)
        report = self._pass_cases(loaded)
        if not report.ok:
            return self._wrong(loaded, report)
        return self._time(loaded, report, self._row.bind(loaded), limit_us)

    def survey(self, kernel: Kernel, artifact: Path, limit_us: float | None) -> Measured:
        """As `Worker.survey` says."""
        loaded = self._load(kernel, artifact)
        report = self._pass_cases(loaded)
        if not report.ok:
            return self._wrong(loaded, report)
        call = self._row.bind(loaded)
        if limit_us is not None:
            timing = time_once(call.runner(), limit_us, self.stopwatch)
            if timing.stopped_early:
                return self._timed(loaded, timing, f"{report.message}; too slow to repeat", [report])
        return self._time(loaded, report, call, None, SURVEY_S)

    def _pass_cases(self, loaded: LoadedKernel) -> VerifyReport:
        """The verdict over every case; of a kernel that passed before, the one from then."""
        report = self._passed.get(loaded.path) or verify(loaded, self.device, book=self.book)
        if report.ok:
            self._passed[loaded.path] = report
        return report

    def _time(
        self,
        loaded: LoadedKernel,
        cases: VerifyReport,
        call: BoundCall,
        limit_us: float | None,
        budget_s: float = TIMING_S,
    ) -> Measured:
        """Compare with fp64 at the tuned shape, then time."""
        shape = call.check()
        if not shape.ok:
            self._row.renew()  # what is wrong may have written to the inputs
            return self._wrong(loaded, shape)
        timing = time_kernel(call.runner(), self.device, limit_us=limit_us, budget_s=budget_s, stopwatch=self.stopwatch)
        return self._timed(loaded, timing, f"{cases.message}; {shape.message}", [cases, shape])

    def _timed(self, loaded: LoadedKernel, timing: Timing, message: str, reports: list[VerifyReport]) -> Measured:
        return Measured(
            Outcome.OK,
            timing.median_us,
            timing.times_us,
            message=message,
            stopped_early=timing.stopped_early,
            **self._errors(reports),
            **_used(loaded),
        )

    def _wrong(self, loaded: LoadedKernel, report: VerifyReport) -> Measured:
        return Measured(Outcome.WRONG, message=report.message, **self._errors([report]), **_used(loaded))

    def verify(self, kernel: Kernel, artifact: Path) -> VerifyReport:
        """Every adversarial case of the kernel; needs no row."""
        return verify(self._load(kernel, artifact), self.device, book=self.book)

    def check(self, kernel: Kernel, artifact: Path, seed: int) -> HostReport:
        """Every case for the host of a kernel built by `host_build`; needs no row, and no GPU whatever the device."""
        self.host_book = self.host_book or CaseBook(torch.device("cpu"), "host")
        return check_cases(HostKernel(artifact, kernel, module_name(kernel, artifact), seed), self.host_book)

    def agree(self, kernel: Kernel, host: Path, gpu: Path) -> Agreement:
        """The same cases on the CPU and on this session's GPU, compared; needs no row."""
        self.host_book = self.host_book or CaseBook(torch.device("cpu"), "host")
        self.gpu_book = self.gpu_book or CaseBook(self.device, "host")
        on_host = HostKernel(host, kernel, module_name(kernel, host))
        return compare_with_gpu(on_host, self._load(kernel, gpu), self.host_book, self.gpu_book)

    def compare(self, targets: Sequence[Target], rounds: int) -> list[list[float]]:
        """Times in microseconds of each kernel, taken in turn."""
        runs = [self._row.bind(self._load(kernel, artifact)).runner() for kernel, artifact in targets]
        return interleaved(runs, rounds, self.device, stopwatch=self.stopwatch)

    def verify_at_shape(self, kernel: Kernel, artifact: Path) -> VerifyReport:
        """Compare the tuned shape with fp64: every query row on a GPU, the bounded sample of them on the CPU."""
        report = self._row.bind(self._load(kernel, artifact)).check(whole=True)
        if not report.ok:
            self._row.renew()
        return report

    def baselines(self) -> dict[str, float]:
        """PyTorch's times for the row, in microseconds, by name."""
        return self._row.baselines(self.stopwatch)

    def is_healthy(self) -> bool:
        """Whether the device still answers; after an illegal address on a GPU every later call of a process fails."""
        if self.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self.device)
            return bool((torch.ones(1, device=self.device) + 1).item() == 2)
        except RuntimeError:
            return False

    def _load(self, kernel: Kernel, artifact: Path) -> LoadedKernel:
        if is_host_artifact(artifact):
            raise InvalidInput(
                f"{artifact} was built for the host check: its times and results are no GPU's; build the kernel with"
                " generator.build to verify or measure it, or ask for `check`"
            )
        if artifact not in self._loaded:
            self._loaded[artifact] = LoadedKernel(artifact, kernel, module_name(kernel, artifact))
        return self._loaded[artifact]

    @staticmethod
    def _errors(reports: list[VerifyReport]) -> dict[str, Any]:
        return {
            name: max(getattr(report, name) for report in reports) for name in ("max_error", "rms_error", "worst_ratio")
        }


def _used(loaded: LoadedKernel) -> dict[str, Any]:
    info = loaded.info()
    return {name: info.get(name, 0) for name in ("registers", "smem_bytes", "local_bytes")}


def module_name(kernel: Kernel, artifact: Path) -> str:
    """The name that the artifact's module was compiled under, from the manifest beside it."""
    try:
        manifest = json.loads(artifact.with_name("manifest.json").read_text())
        return str(manifest["key"]["module"])
    except (OSError, ValueError, KeyError, TypeError):
        from tilewright.generator.render import render

        return render(kernel).module_name


def serve(fd: int, device: str) -> None:
    """Answer requests on this pipe until it closes. A request is (method, arguments, seconds); see `_answer`."""
    connection = Connection(fd)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        session = Session(device)
    except Exception as error:  # whatever keeps the device from starting is told to the parent, which stops there
        connection.send(("error", LaunchFailed(f"the worker cannot use {device}: {_brief(error)}"), False))
        return
    connection.send(("ok", os.getpid(), True))
    while True:
        try:
            method, arguments, limit_s = connection.recv()
            connection.send(TAKEN)
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_REAL, limit_s + ALARM_GRACE_S)
        answer = _answer(session, method, arguments)
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            connection.send(answer)
        except OSError:
            return
        if not answer[2]:
            # A broken CUDA context may hang on its way out; nothing here needs an orderly end.
            sys.stderr.flush()
            os._exit(0)


def _answer(session: Session, method: str, arguments: tuple[Any, ...]) -> tuple[str, Any, bool]:
    """("ok", value, True), or ("error", an error of ours, whether this process can go on)."""
    try:
        with torch.no_grad():
            return "ok", getattr(session, method)(*arguments), True
    except Exception as error:  # every failure of a variant is an outcome, of whatever type it comes
        failure = _as_ours(error)
        traceback.print_exc()
    healthy = session.is_healthy()
    if not healthy and not isinstance(failure, IllegalAccess):
        failure = IllegalAccess(str(failure))
    return "error", failure, healthy


def _as_ours(error: Exception) -> TilewrightError:
    """The error as one of ours, made of its text alone, since it travels to the parent."""
    if isinstance(error, TilewrightError):
        return type(error)(str(error))
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        torch.cuda.empty_cache()
        return OutOfMemory(_brief(error))
    return LaunchFailed(_brief(error))


def _brief(error: Exception) -> str:
    """The error's first line, with its type."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"
