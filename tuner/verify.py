"""Checks one compiled kernel: a variant that did not pass here cannot win."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tilewright.generator.variant import Kernel
from tilewright.runtime.plans import MaskPlan, plan_for
from tilewright.tuner.case_book import CaseBook, Prepared
from tilewright.tuner.expected import Expected
from tilewright.tuner.layouts import FarBuffer, Placed, bits_of, place, poison, still_poisoned

__all__ = ["CaseBook", "Prepared", "Runnable", "VerifyReport", "verify", "verify_call"]


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
class VerifyReport:
    """What a verification found.

    max_error, rms_error: the largest over the cases, absolute. worst_ratio: the largest error over its bound.
    case: the case that failed, else the one nearest to its bound. message: why it failed, else what was checked.
    skipped: cases that the device had no memory for.
    """

    ok: bool
    max_error: float
    rms_error: float
    case: str
    message: str
    worst_ratio: float = 0.0
    cases: int = 0
    skipped: tuple[str, ...] = ()


def verify(loaded: Runnable, device: torch.device | str, *, book: CaseBook | None = None) -> VerifyReport:
    """Run the kernel on every adversarial case and judge it.

    Each case: outputs poisoned with NaN, the call, a second identical call; then nothing unwritten, nothing written
    beside the outputs, inputs as before, rows without a key exactly 0 and -inf, out and lse within their bounds
    (max and RMS), and the same bits both times. Reads the device once, at the end. `VariantFailed` from the launch
    passes through; a CUDA error that surfaces late comes as PyTorch raises it.
    """
    book = book or CaseBook(torch.device(device))
    prepared = book.cases_for(loaded.kernel)
    far: FarBuffer | None = None
    skipped: list[str] = []
    judged: list[tuple[Prepared, Tensor]] = []
    for item in prepared:
        shape = item.case.shape
        plan = plan_for(
            loaded.kernel,
            item.mask,
            batch=shape.batch,
            num_heads=shape.num_heads,
            seqlen_q=shape.seqlen_q,
            seqlen_kv=shape.seqlen_kv,
            device=book.device,
        )
        if item.inputs is not None:
            out = place(tuple(item.case.query.shape), shape.layout, item.case.query.dtype, book.device)
            stats = _run_twice(loaded, [p.view for p in item.inputs], plan, item.case.scale, out, item.expected)
            stats[_CHANGED] = _changed([p.buffer for p in item.inputs], item.pristine)
        else:
            far = far or _far_buffer(item.case.query.dtype, book.device)
            if far is None:
                skipped.append(shape.name)
                continue
            sources = (item.case.query, item.case.key, item.case.value)
            views = [far.cut(_size4(t), shape.layout).copy_(t) for t in sources]
            far_out = far.cut(_size4(item.case.query), shape.layout)
            stats = _run_twice(loaded, views, plan, item.case.scale, Placed(far_out, far_out), item.expected)
            stats[_CHANGED] = _changed(views, sources)
        judged.append((item, stats))
    report = _report([(i.case.name, i.expected, s) for i, s in _read(judged)], tuple(skipped))
    if not report.ok:
        for item in prepared:
            for placed, good in zip(item.inputs or (), item.pristine, strict=False):
                placed.buffer.copy_(good)
    return report


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
    """The same judgement of one call of one's own, of the rows that `expected` holds.

    Poison, guards, inputs and repetition are checked over all rows. The message says how many rows were compared.
    """
    before = [_fingerprint(t) for t in (query, key, value)]
    out = place(tuple(query.shape), "packed", query.dtype, query.device)
    stats = _run_twice(loaded, [query, key, value], plan, scale, out, expected)
    after = [_fingerprint(t) for t in (query, key, value)]
    stats[_CHANGED] = torch.stack([(a != b).double() for a, b in zip(before, after, strict=True)]).sum()
    report = _report([(case, expected, stats.tolist())], ())
    if not report.ok:
        return report
    rows = query.shape[2] if expected.rows is None else len(expected.rows)
    text = f"{case}: {rows} of {query.shape[2]} query rows within bounds"
    return VerifyReport(True, report.max_error, report.rms_error, case, text, report.worst_ratio, 1)


_UNWRITTEN, _NONFINITE, _MAX, _SQUARE, _EMPTY, _LSE, _HOLES, _REPEAT, _OUTSIDE, _CHANGED = range(10)


def _run_twice(
    loaded: Runnable, inputs: list[Tensor], plan: MaskPlan, scale: float, out: Placed, expected: Expected
) -> Tensor:
    """Poison, run, keep, poison, run; the statistics as one fp64 tensor [10] on the device."""
    query, key, value = inputs
    lse = place(tuple(query.shape[:3]), "packed", torch.float32, query.device)
    poison(out.view)
    loaded.run(query, key, value, plan, scale, out=out.view, lse=lse.view)
    first_out, first_lse = out.view.clone(), lse.view.clone()
    poison(out.view)
    poison(lse.view)
    loaded.run(query, key, value, plan, scale, out=out.view, lse=lse.view)
    stats = torch.zeros(10, dtype=torch.float64, device=query.device)
    stats[_UNWRITTEN] = still_poisoned(first_out).count_nonzero() + still_poisoned(first_lse).count_nonzero()
    stats[_NONFINITE] = (~first_out.isfinite()).count_nonzero() + first_lse.isnan().count_nonzero()
    stats[_REPEAT] = _differing(first_out, out.view) + _differing(first_lse, lse.view)
    stats[_OUTSIDE] = lse.outside() + out.outside()  # what the first run wrote there is still there
    if expected.rows is not None:
        first_out, first_lse = first_out[:, :, expected.rows], first_lse[:, :, expected.rows]
    # By chunks of rows, so that a long shape's fp64 temporaries stay small beside its tensors.
    step = max(1, 2**25 // max(1, query.shape[0] * query.shape[1] * query.shape[3]))
    for start in range(0, expected.out.shape[2], step):
        rows = slice(start, start + step)
        want, want_lse = expected.out[:, :, rows], expected.lse[:, :, rows]
        got, got_lse = first_out[:, :, rows], first_lse[:, :, rows].double()
        error = (got.double() - want).abs().nan_to_num(torch.inf, torch.inf)
        empty = want_lse == -torch.inf
        stats[_MAX] = torch.maximum(stats[_MAX], error.amax())
        stats[_SQUARE] += error.square().sum()
        stats[_EMPTY] += ((got != 0) & empty.unsqueeze(-1)).count_nonzero()
        stats[_HOLES] += ((got_lse == -torch.inf) != empty).count_nonzero()
        lse_error = torch.where(empty, 0.0, (got_lse - want_lse).abs().nan_to_num(torch.inf, torch.inf))
        stats[_LSE] = torch.maximum(stats[_LSE], lse_error.amax())
    return stats


def _report(judged: Iterable[tuple[str, Expected, list[float]]], skipped: tuple[str, ...]) -> VerifyReport:
    """The verdict over all cases: the first that failed, else the one nearest to its bound."""
    max_error = rms_error = worst_ratio = 0.0
    count, nearest, failed = 0, "", ""
    message = ""
    for name, expected, stats in judged:
        count += 1
        rms = (stats[_SQUARE] / max(1, expected.out.numel())) ** 0.5
        pairs = ((stats[_MAX], expected.max_bound), (rms, expected.rms_bound), (stats[_LSE], expected.lse_bound))
        ratio = max(error / max(bound, 1e-300) for error, bound in pairs)
        max_error, rms_error = max(max_error, stats[_MAX]), max(rms_error, rms)
        if ratio >= worst_ratio:
            worst_ratio, nearest = ratio, name
        reason = _reason(expected, stats, rms)
        if reason and not failed:
            failed, message = name, f"case '{name}': {reason}"
    if failed:
        return VerifyReport(False, max_error, rms_error, failed, message, worst_ratio, count, skipped)
    text = f"{count} cases within bounds" + (f"; no memory for {', '.join(skipped)}" if skipped else "")
    return VerifyReport(True, max_error, rms_error, nearest, text, worst_ratio, count, skipped)


def _reason(expected: Expected, stats: list[float], rms: float) -> str | None:
    """Why these statistics fail, the most telling reason first; None when they pass."""
    if stats[_CHANGED]:
        return "the inputs were changed"
    if stats[_OUTSIDE]:
        return f"{stats[_OUTSIDE]:.0f} elements beside the outputs were written"
    if stats[_UNWRITTEN]:
        return f"{stats[_UNWRITTEN]:.0f} output elements were never written"
    if stats[_NONFINITE]:
        return f"{stats[_NONFINITE]:.0f} output elements are NaN or infinite"
    if stats[_HOLES]:
        return f"{stats[_HOLES]:.0f} rows have lse = -inf where a key is active, or the other way round"
    if stats[_EMPTY]:
        return f"{stats[_EMPTY]:.0f} elements of rows without an active key are not 0"
    if not stats[_LSE] <= expected.lse_bound:
        return f"lse is off by {stats[_LSE]:.3g}, at most {expected.lse_bound:.3g} is allowed"
    if not stats[_MAX] <= expected.max_bound:
        return f"the largest error is {stats[_MAX]:.3g}, at most {expected.max_bound:.3g} is allowed"
    if not rms <= expected.rms_bound:
        return f"the RMS error is {rms:.3g}, at most {expected.rms_bound:.3g} is allowed"
    if stats[_REPEAT]:
        return f"a second identical call gave other bits in {stats[_REPEAT]:.0f} elements"
    return None


def _read(judged: list[tuple[Prepared, Tensor]]) -> list[tuple[Prepared, list[float]]]:
    """The statistics on the host, with one copy for all cases."""
    values = torch.stack([stats for _, stats in judged]).tolist()
    return [(item, row) for (item, _), row in zip(judged, values, strict=True)]


def _far_buffer(dtype: torch.dtype, device: torch.device) -> FarBuffer | None:
    """The buffer of the far layouts, or None where the device lacks the memory."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 1.25 * FarBuffer.bytes_needed(dtype):
        return None
    try:
        return FarBuffer(dtype, device)
    except RuntimeError:
        return None


def _size4(tensor: Tensor) -> tuple[int, int, int, int]:
    batch, heads, tokens, dim = tensor.shape
    return batch, heads, tokens, dim


def _differing(one: Tensor, other: Tensor) -> Tensor:
    return (bits_of(one) != bits_of(other)).count_nonzero()


def _changed(now: Iterable[Tensor], before: Iterable[Tensor]) -> Tensor:
    return torch.stack([_differing(a, b) for a, b in zip(now, before, strict=True)]).sum()


def _fingerprint(tensor: Tensor) -> Tensor:
    """A sum over the tensor's bits: tells a changed input without keeping a second copy of it."""
    return bits_of(tensor).sum(dtype=torch.int64)
