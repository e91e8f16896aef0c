"""Cases of attention under a mask, laid out on a device with their answers, and the judgement of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tilewright.generator.variant import Kernel
from tilewright.runtime.canonical import CanonicalMask, canonical
from tilewright.runtime.plans import MaskPlan, plan_for
from tilewright.tuner.attention_outputs import (
    CHANGED,
    Fingerprints,
    changed,
    examine_outputs,
    output_difference,
    verdict_on_outputs,
)
from tilewright.tuner.cases import Case, CaseShape
from tilewright.tuner.expected import Expected, expect
from tilewright.tuner.layouts import Placed, place, size4
from tilewright.tuner.operations import Difference, FarRoom, Prepared
from tilewright.tuner.verdicts import Verdict, VerifyReport, report_on_call


class Runnable(Protocol):
    """What is verified: `runtime.launch.LoadedKernel`, or anything that runs like one."""

    @property
    def kernel(self) -> Kernel:
        """What the artifact was made from."""
        ...

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
        """Run it; out and lse are written where they are given."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardCase(Prepared):
    """A case laid out on the device, with its answer; inputs are None for the far layouts, placed at each run."""

    case: Case
    mask: CanonicalMask
    expected: Expected
    inputs: tuple[Placed, ...] | None
    pristine: tuple[Tensor, ...]

    @property
    def shape(self) -> CaseShape:
        return self.case.shape

    def examine(self, loaded: Runnable, far: FarRoom) -> Tensor | None:
        case, layout = self.case, self.shape.layout
        sources = (case.query, case.key, case.value)
        plan = self._plan(loaded.kernel)
        if self.inputs is not None:
            out = place(tuple(case.query.shape), layout, case.query.dtype, case.query.device)
            stats = _examine(loaded, [p.view for p in self.inputs], plan, case.scale, out, self.expected)
            stats[CHANGED] = changed([p.buffer for p in self.inputs], self.pristine)
            return stats
        buffer = far.buffer(case.query.dtype)
        if buffer is None:
            return None
        views = [buffer.cut(size4(t), layout).copy_(t) for t in sources]
        far_out = buffer.cut(size4(case.query), layout)
        stats = _examine(loaded, views, plan, case.scale, Placed(far_out, far_out), self.expected)
        stats[CHANGED] = changed(views, sources)
        return stats

    def verdict(self, stats: Sequence[float]) -> Verdict:
        return verdict_on_outputs(self.expected, stats)

    def restore(self) -> None:
        for placed, good in zip(self.inputs or (), self.pristine, strict=False):
            placed.buffer.copy_(good)

    def outputs(self, loaded: Runnable) -> tuple[Tensor, ...]:
        assert self.inputs is not None
        query, key, value = (placed.view for placed in self.inputs)
        out = place(tuple(query.shape), self.shape.layout, query.dtype, query.device).view
        lse = place(tuple(query.shape[:3]), "packed", torch.float32, query.device).view
        return loaded.run(query, key, value, self._plan(loaded.kernel), self.case.scale, out=out, lse=lse)

    def difference(self, ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> Difference:
        return output_difference(self.expected, ours, theirs)

    def _plan(self, kernel: Kernel) -> MaskPlan:
        shape = self.shape
        return plan_for(
            kernel,
            self.mask,
            batch=shape.batch,
            num_heads=shape.num_heads,
            seqlen_q=shape.seqlen_q,
            seqlen_kv=shape.seqlen_kv,
            device=self.case.query.device,
        )


def prepare_case(case: Case) -> ForwardCase:
    """Lay a case out and work out its answer."""
    tensors = (case.query, case.key, case.value)
    expected = expect(case.query, case.key, case.value, case.mask, case.scale)
    mask = canonical(case.mask, case.shape.seqlen_q, case.shape.seqlen_kv)
    if case.shape.layout.startswith("far"):
        return ForwardCase(case, mask, expected, None, ())
    placed = tuple(place(tuple(t.shape), case.shape.layout, t.dtype, t.device) for t in tensors)
    for target, source in zip(placed, tensors, strict=True):
        target.view.copy_(source)
    return ForwardCase(case, mask, expected, placed, tuple(p.buffer.clone() for p in placed))


def verify_call(
    loaded: Runnable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: MaskPlan,
    scale: float,
    expected: Expected,
    case: str = "tuned shape",
) -> VerifyReport:
    """The judgement of a case on one call of one's own, of the rows that `expected` holds.

    Poison, guards, inputs and repetition are checked over all rows. The message says how many rows were compared.
    """
    before = Fingerprints(query, key, value)
    out = place(tuple(query.shape), "packed", query.dtype, query.device)
    stats = _examine(loaded, [query, key, value], plan, scale, out, expected)
    stats[CHANGED] = before.changed()
    count = query.shape[2] if expected.rows is None else len(expected.rows)
    return report_on_call(case, verdict_on_outputs(expected, stats.tolist()), f"{count} of {query.shape[2]} query rows")


def _examine(
    loaded: Runnable, inputs: list[Tensor], plan: MaskPlan, scale: float, out: Placed, expected: Expected
) -> Tensor:
    query, key, value = inputs
    return examine_outputs(lambda o, s: loaded.run(query, key, value, plan, scale, out=o, lse=s), out, expected)
