"""What the tuner has to know of an operation: its adversarial cases, their judgement, and its calls in workloads.

An operation is one object. Verifying, measuring, the host check, workloads and benchmarks ask it and name none:

    operation = operation_named(kernel.operation)
    for prepared in operation.prepare(kernel, device, operation.shapes):      # what `CaseBook` keeps
        stats = prepared.examine(loaded, far)                                # run twice; on the device, nothing read
        verdict = prepared.verdict(stats.tolist())
    row = operation.row(workload_row, device)                                # what a worker keeps
    call = row.bind(loaded)
    call.check(), call.runner()

A kernel is a `runtime.launch.LoadedKernel`, or anything that has what the operation calls of it: `run`, or `launch` and
`workspace_bytes` (`tuner.host_kernel.HostKernel`, the stubs of tests).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from tilewright.generator.errors import InvalidInput
from tilewright.tuner.layouts import FarBuffer, Layout
from tilewright.tuner.verdicts import Verdict, VerifyReport

if TYPE_CHECKING:
    from tilewright.generator.arch import Arch
    from tilewright.generator.problem import Problem
    from tilewright.generator.variant import Kernel
    from tilewright.tuner.timing import Run, Stopwatch
    from tilewright.tuner.workloads import WorkloadRow


class Shape(Protocol):
    """A case before its tensors are made; each operation has a kind of its own."""

    @property
    def name(self) -> str:
        """What reports call the case; different within an operation."""
        ...

    @property
    def layout(self) -> Layout:
        """How its tensors lie in memory."""
        ...


class FarRoom:
    """The huge buffer of the far layouts, made when the first case asks and dropped with this object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: FarBuffer | None = None

    def buffer(self, dtype: torch.dtype) -> FarBuffer | None:
        """The one buffer, for tensors of this dtype; None where the device lacks the memory."""
        if self._buffer is None:
            device = self._device
            if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 1.25 * FarBuffer.bytes_needed(dtype):
                return None
            try:
                self._buffer = FarBuffer(dtype, device)
            except RuntimeError:
                return None
        return self._buffer


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one device's outputs are from another's on the same case.

    errors: the largest absolute difference of the result, and of what comes beside it (lse; 0 where nothing does).
    ratio: the largest over what the case allows a kernel to be off from fp64. identical: the result's bits are equal.
    """

    errors: tuple[float, float]
    ratio: float
    identical: bool


class Prepared(ABC):
    """A case laid out on a device, with its answer."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """What it was made from."""

    @property
    def name(self) -> str:
        """The shape's name."""
        return self.shape.name

    @property
    def is_far(self) -> bool:
        """Whether it lives in the huge buffer; such inputs are placed at each run."""
        return self.shape.layout.startswith("far")

    def fits(self, kernel: Kernel) -> bool:
        """Whether this kernel, whose case set it is in, may be called like this; by lengths and sizes, say."""
        return True

    @abstractmethod
    def examine(self, loaded: Any, far: FarRoom) -> Tensor | None:
        """Run the kernel twice on poisoned outputs and compare: statistics for `verdict`, fp64 [n], on the device.

        Checks that all outputs are written, that nothing is written beside them or to the inputs, that the second call
        gives the same bits, and the answer. Waits for nothing. None where the device has no memory for the case.
        The launch's `VariantFailed` passes through.
        """

    @abstractmethod
    def verdict(self, stats: Sequence[float]) -> Verdict:
        """What the statistics, on the host by now, mean."""

    @abstractmethod
    def restore(self) -> None:
        """Make the inputs what they were, after a kernel that may have written to them."""

    @abstractmethod
    def outputs(self, loaded: Any) -> tuple[Tensor, ...]:
        """What one run gives, poison where it wrote nothing, on the case's own device. Not for far cases."""

    @abstractmethod
    def difference(self, ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> Difference:
        """How far `theirs` are from `ours`, both as `outputs` gives them and on this case's device."""


class BoundCall(ABC):
    """A kernel on the inputs of a workload's row."""

    @abstractmethod
    def check(self, *, whole: bool = False) -> VerifyReport:
        """Judge one call as a case is judged, on a sample of its query rows; whole: on every row, on a GPU."""

    @abstractmethod
    def runner(self) -> Run:
        """The call to time, its outputs allocated beforehand."""


class PreparedRow(ABC):
    """The inputs of a workload's row on a device."""

    @abstractmethod
    def answer(self) -> None:
        """Work out the fp64 answer that `check` will need, now rather than within a variant's time."""

    @abstractmethod
    def renew(self) -> None:
        """Make the inputs anew, after a kernel that may have written to them."""

    @abstractmethod
    def bind(self, loaded: Any) -> BoundCall:
        """This kernel on these inputs."""

    @abstractmethod
    def baselines(self, stopwatch: Stopwatch) -> dict[str, float]:
        """PyTorch's median times for the call in microseconds, by name; what has no memory is left out."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a row asks for. flops: of the pairs that count, 2 a multiply-add. density: those of all pairs."""

    flops: float
    density: float


class Operation(ABC):
    """One operation as the tuner sees it.

    row_keys: fields of `WorkloadRow` that mean something for it and not for every operation.
    shapes: its cases for a device that runs kernels. host_shapes: the same ideas for a machine that executes a GPU's
    threads one after the other.
    """

    name: str
    row_keys: frozenset[str]
    shapes: Sequence[Shape]
    host_shapes: Sequence[Shape]

    @abstractmethod
    def case_key(self, kernel: Kernel) -> Hashable:
        """Kernels that share it have the same cases, `Prepared.fits` aside."""

    @abstractmethod
    def prepare(self, kernel: Kernel, device: torch.device, shapes: Sequence[Any]) -> list[Prepared]:
        """The cases of the kernel's key, the same on every run. Raises `InvalidInput` where a kernel can have none."""

    @abstractmethod
    def problems_to_verify(self, arch: Arch, dtype: str) -> Iterator[Problem]:
        """Calls that are common: a family's defaults for them must have run right before they ship."""

    @abstractmethod
    def forms_to_verify(self, arch: Arch, dtype: str) -> Iterator[Problem]:
        """Calls on which every mask form of a family must have run right."""

    @abstractmethod
    def check_row(self, row: WorkloadRow) -> None:
        """Raise `InvalidInput` where a row's fields are no call of this operation."""

    @abstractmethod
    def problem(self, row: WorkloadRow, target: str) -> Problem:
        """The key under which the row's winner is stored on an architecture."""

    @abstractmethod
    def identity(self, row: WorkloadRow) -> dict[str, Any]:
        """What the row's times depend on beside its problem: JSON-ready values."""

    @abstractmethod
    def row(self, row: WorkloadRow, device: torch.device) -> PreparedRow:
        """The row's inputs on the device."""

    @abstractmethod
    def work(self, row: WorkloadRow, device: str) -> Work:
        """What rates are counted over; may work on the device. Kept for a row once it is known."""

    @abstractmethod
    def same_function(self, problem: Problem, baselines: Mapping[str, float]) -> dict[str, float]:
        """Those of `PreparedRow.baselines` that compute what the kernels do."""


def operation_named(name: str) -> Operation:
    """The operation that kernels call `name`; `InvalidInput` lists the known ones otherwise."""
    known = _operations()
    if name not in known:
        raise InvalidInput(f"operation must be one of {', '.join(known)}; got {name!r}")
    return known[name]


def all_operations() -> tuple[Operation, ...]:
    """Every operation, attention_forward first."""
    return tuple(_operations().values())


def _operations() -> dict[str, Operation]:
    # Imported here, since these modules say what they are in the terms of this one.
    from tilewright.tuner.forward_operation import FORWARD
    from tilewright.tuner.topk_operations import SELECT, SELECTED

    return {operation.name: operation for operation in (FORWARD, SELECT, SELECTED)}
