"""The adversarial cases of a kernel, laid out on a device with their answers, and kept for the next kernel."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.generator.variant import Kernel
from tilewright.runtime.canonical import CanonicalMask, canonical
from tilewright.tuner.cases import SHAPES, Case, CaseShape, make_cases
from tilewright.tuner.expected import Expected, expect
from tilewright.tuner.layouts import Placed, place

CACHED_CASE_SETS = 8
"""A tune meets one or two sets of terms; this many stay in memory (a set is about 30 MiB at head_dim 64)."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case laid out on the device, with its answer; inputs are None for the far layouts, placed at each run."""

    case: Case
    mask: CanonicalMask
    expected: Expected
    inputs: tuple[Placed, ...] | None
    pristine: tuple[Tensor, ...]


class CaseBook:
    """The prepared cases of one device, kept between variants that share dtype, head_dim and mask terms.

    shapes: what the cases are made from.
    """

    def __init__(self, device: torch.device, shapes: Sequence[CaseShape] = SHAPES) -> None:
        self.device = device
        self.shapes = shapes
        self._sets: OrderedDict[tuple[str, int, tuple[str, ...], bool], list[Prepared]] = OrderedDict()

    def cases_for(self, kernel: Kernel) -> list[Prepared]:
        """Every case of this kernel; made on the first call. Raises `InvalidInput` for terms that no mask has."""
        key = (kernel.dtype, kernel.head_dim, kernel.mask_terms, kernel.spec.mask_form == "scan")
        if key not in self._sets:
            made = make_cases(
                kernel.dtype, kernel.head_dim, kernel.mask_terms, kernel.spec.mask_form, self.device, self.shapes
            )
            self._sets[key] = [_prepare(case) for case in made]
            if len(self._sets) > CACHED_CASE_SETS:
                self._sets.popitem(last=False)
        self._sets.move_to_end(key)
        return self._sets[key]

    def only(self, index: int) -> CaseBook:
        """A book of one case of this one, which stays the owner: to verify case by case."""
        return _OneCase(self, index)


class _OneCase(CaseBook):
    def __init__(self, whole: CaseBook, index: int) -> None:
        super().__init__(whole.device, whole.shapes)
        self._whole, self._index = whole, index

    def cases_for(self, kernel: Kernel) -> list[Prepared]:
        return self._whole.cases_for(kernel)[self._index : self._index + 1]


def _prepare(case: Case) -> Prepared:
    tensors = (case.query, case.key, case.value)
    expected = expect(case.query, case.key, case.value, case.mask, case.scale)
    mask = canonical(case.mask, case.shape.seqlen_q, case.shape.seqlen_kv)
    if case.shape.layout.startswith("far"):
        return Prepared(case, mask, expected, None, ())
    placed = tuple(place(tuple(t.shape), case.shape.layout, t.dtype, t.device) for t in tensors)
    for target, source in zip(placed, tensors, strict=True):
        target.view.copy_(source)
    return Prepared(case, mask, expected, placed, tuple(p.buffer.clone() for p in placed))
