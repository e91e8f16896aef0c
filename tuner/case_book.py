"""The adversarial cases of a kernel, laid out on a device with their answers, and kept for the next kernel."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch

from tilewright.generator.errors import InvalidInput
from tilewright.generator.variant import Kernel
from tilewright.tuner.operations import Operation, Prepared, Shape, operation_named

CACHED_CASE_SETS = 8
"""A tune meets one or two sets of terms; this many stay in memory (a set is about 30 MiB at head_dim 64)."""

Size = Literal["device", "host"]
"""Which of an operation's sets of shapes: for a device that runs kernels, or a host that executes a GPU's threads."""


class CaseBook:
    """The prepared cases of one device, kept between variants that have the same ones.

    shapes: what the cases are made from: a set that each operation has, or shapes of one operation.
    """

    def __init__(self, device: torch.device, shapes: Size | Sequence[Shape] = "device") -> None:
        self.device = device
        self.shapes = shapes
        self._sets: OrderedDict[Hashable, list[Prepared]] = OrderedDict()

    def cases_for(self, kernel: Kernel) -> list[Prepared]:
        """Every case of this kernel; made on the first call. Raises `InvalidInput` for a kernel that can have none."""
        operation = operation_named(kernel.operation)
        key = (operation.name, operation.case_key(kernel))
        if key not in self._sets:
            self._sets[key] = operation.prepare(kernel, self.device, self._shapes_of(operation))
            if len(self._sets) > CACHED_CASE_SETS:
                self._sets.popitem(last=False)
        self._sets.move_to_end(key)
        fitting = [prepared for prepared in self._sets[key] if prepared.fits(kernel)]
        if not fitting:
            raise InvalidInput(f"no case of {operation.name} suits {kernel.spec.name}: its rules refuse them all")
        return fitting

    def _shapes_of(self, operation: Operation) -> Sequence[Any]:
        if self.shapes == "device":
            return operation.shapes
        return operation.host_shapes if self.shapes == "host" else self.shapes

    def only(self, index: int) -> CaseBook:
        """A book of one case of this one, which stays the owner: to verify case by case."""
        return _OneCase(self, index)


class _OneCase(CaseBook):
    def __init__(self, whole: CaseBook, index: int) -> None:
        super().__init__(whole.device, whole.shapes)
        self._whole, self._index = whole, index

    def cases_for(self, kernel: Kernel) -> list[Prepared]:
        return self._whole.cases_for(kernel)[self._index : self._index + 1]
