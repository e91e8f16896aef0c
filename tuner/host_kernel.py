"""A CUDA kernel that this CPU executes with every access watched: how it is loaded, called and reported on."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.generator.abi import MASK_ARGUMENTS
from tilewright.generator.arch import arch_named
from tilewright.generator.errors import InvalidInput, LaunchFailed, VariantFailed
from tilewright.generator.family import family_named
from tilewright.generator.host_build import is_sanitized
from tilewright.generator.variant import Kernel
from tilewright.runtime.launch import LoadedKernel
from tilewright.runtime.plans import MaskPlan
from tilewright.tuner.case_book import CaseBook
from tilewright.tuner.report_lines import located
from tilewright.tuner.verify import VerifyReport, verify

_READ, _WRITE, _WRITE_FIRST = range(3)
"""What a kernel may do with a tensor, as `tilewright_host_watch` of `templates/_host/tensors.cpp` takes it."""

_POINTERS = tuple(number for number, argument in enumerate(MASK_ARGUMENTS) if argument.ctype == "pointer")


@dataclass(frozen=True, slots=True)
class HostReport:
    """What `verify` said, and the milliseconds that each case took: both launches, without the judging."""

    report: VerifyReport
    case_ms: tuple[tuple[str, float], ...]


class HostKernel(LoadedKernel):
    """One artifact of `generator.host_build` in this process.

    Every tensor of a call is watched: the kernel may touch its elements and nothing else. seed: the order in which a
    block's threads run between barriers; each call takes the next one, so that a repeated call runs in another order.
    launch_ms: how long each call so far took. Its times say nothing about a GPU.
    Raises `LaunchFailed` when it cannot be loaded, and `InvalidInput` for a sanitized library in a process without
    AddressSanitizer, which that library would end.
    """

    def __init__(self, path: Path, kernel: Kernel, module_name: str, seed: int = 0) -> None:
        if is_sanitized(path) and "libasan" not in os.environ.get("LD_PRELOAD", ""):
            raise InvalidInput(
                f"{path} is watched by AddressSanitizer, which must be in the process from its start: load it in a"
                " worker whose environment has LD_PRELOAD, see `host_check.worker_environment`"
            )
        super().__init__(path, kernel, module_name)
        self.seed = seed
        self.launch_ms: list[float] = []
        self._library = _declared(path)
        self._library.tilewright_host_smem_limit(arch_named(kernel.arch).smem_limit_bytes)
        report = self._error_name
        self._error_name = lambda code: located(report(code), path)

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: MaskPlan,
        scale: float,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The same call as on a GPU, of tensors in this machine's memory; returns when the kernel is done.

        Raises `IllegalAccess` with the runtime's report, `LaunchFailed`, `OutOfMemory`, and `InvalidInput` for a GPU's
        tensors.
        """
        if out is None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if lse is None:
            lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        read_only = {"query": query, "key": key, "value": value}
        self._forget({**read_only, "out": out, "lse": lse})
        for name, tensor in read_only.items():
            self._watch(name, tensor, _READ)
        for name, tensor in _plan_tensors(plan):
            self._watch(name, tensor, _READ)
        self._watch("out", out, _WRITE)
        self._watch("lse", lse, _WRITE)
        with self._timed():
            return super().run(query, key, value, plan, scale, out, lse)

    def workspace(self, size: int, device: torch.device) -> Tensor:
        """Scratch that is watched: nothing is there to read before it is written."""
        made = super().workspace(size, device).fill_(0xFF)  # NaN in every element type, where nobody watches
        self._watch("workspace", made, _WRITE_FIRST)
        return made

    def launch(self, values: Sequence[int | float], touched: Mapping[str, tuple[Tensor, bool]]) -> None:
        """The same launch as on a GPU, with `touched` watched: what it may write it cannot read before it wrote it.

        Raises what `run` does.
        """
        self._forget({name: tensor for name, (tensor, _) in touched.items()})
        for name, (tensor, writable) in touched.items():
            self._watch(name, tensor, _WRITE_FIRST if writable else _READ)
            if name == "workspace":
                tensor.fill_(0xFF)  # NaN in every element type, where nobody watches
        with self._timed():
            super().launch(values, touched)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """One launch: with its own order of threads, and its milliseconds kept."""
        self._library.tilewright_host_seed(self.seed + len(self.launch_ms))
        started = time.perf_counter()
        try:
            yield
        finally:
            self.launch_ms.append((time.perf_counter() - started) * 1e3)

    def _forget(self, tensors: Mapping[str, Tensor]) -> None:
        """Watch nothing any more. Raises `InvalidInput` where one of the next launch's tensors is a GPU's."""
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                raise InvalidInput(
                    f"{name} is on {tensor.device}: a kernel built for the host check runs on the CPU alone"
                    "; pass CPU tensors, or build the kernel with generator.build for the GPU"
                )
        self._library.tilewright_host_forget()

    def _watch(self, name: str, tensor: Tensor, access: int) -> None:
        numbers = ctypes.c_int64 * tensor.dim()
        self._library.tilewright_host_watch(
            name.encode(),
            tensor.data_ptr(),
            tensor.element_size(),
            tensor.dim(),
            numbers(*tensor.shape),
            numbers(*tensor.stride()),
            access,
        )


def check_cases(loaded: HostKernel, book: CaseBook) -> HostReport:
    """Verify a freshly loaded kernel on each case of the book, up to the first that fails.

    A case that a teaching kernel refuses at launch is skipped: its shared memory may grow with the length of a row.
    Raises the `VariantFailed` that ended it, the case's name and the seed before its text.
    """
    may_refuse = family_named(loaded.kernel.spec.family).purpose == "ladder"
    reports: list[VerifyReport] = []
    case_ms: list[tuple[str, float]] = []
    skipped: list[str] = []
    for index, prepared in enumerate(book.cases_for(loaded.kernel)):
        before = len(loaded.launch_ms)
        try:
            report = verify(loaded, book.device, book=book.only(index))
        except VariantFailed as error:
            if may_refuse and isinstance(error, LaunchFailed):
                skipped.append(prepared.name)
                continue
            raise type(error)(f"case '{prepared.name}', seed {loaded.seed}: {error}") from error
        skipped += report.skipped
        reports.append(report)
        case_ms.append((prepared.name, sum(loaded.launch_ms[before:])))
        if not report.ok:
            break
    if not any(report.cases for report in reports):
        raise LaunchFailed(f"{loaded.kernel.spec.name} refuses every case")
    return HostReport(_joined(reports, tuple(skipped)), tuple(case_ms))


def _joined(reports: Sequence[VerifyReport], skipped: tuple[str, ...]) -> VerifyReport:
    """One report of cases verified one by one, of which the last alone may have failed."""
    last, nearest = reports[-1], max(reports, key=lambda report: report.worst_ratio)
    count = sum(report.cases for report in reports)
    message = f"{count} cases within bounds" + (f"; skipped {', '.join(skipped)}" if skipped else "")
    return VerifyReport(
        last.ok,
        max(report.max_error for report in reports),
        max(report.rms_error for report in reports),
        nearest.case if last.ok else last.case,
        message if last.ok else last.message,
        nearest.worst_ratio,
        count,
        skipped,
    )


def _plan_tensors(plan: MaskPlan) -> Iterator[tuple[str, Tensor]]:
    """The plan's tensors, each under the names of the arguments that point at it."""
    for tensor in plan.tensors:
        if tensor.numel():
            names = [MASK_ARGUMENTS[n].name for n in _POINTERS if plan.arguments[n] == tensor.data_ptr()]
            yield " and ".join(names) or "the mask's plan", tensor


def _declared(path: Path) -> ctypes.CDLL:
    """The runtime's own functions in a host library that is loaded already."""
    try:
        library = ctypes.CDLL(str(path))
        numbers = ctypes.POINTER(ctypes.c_int64)
        watch = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, numbers, numbers, ctypes.c_int]
        signatures: dict[str, list[Any]] = {
            "tilewright_host_watch": watch,
            "tilewright_host_forget": [],
            "tilewright_host_seed": [ctypes.c_uint64],
            "tilewright_host_smem_limit": [ctypes.c_int],
        }
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
    except (OSError, AttributeError) as error:
        raise LaunchFailed(f"{path} was not built for the host check: {error}; build it with build_host") from error
    return library
