"""Judges what attention wrote: out and lse of one call, run twice on poison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from tilewright.tuner.expected import Expected
from tilewright.tuner.layouts import Placed, bits_of, place, poison, still_poisoned
from tilewright.tuner.operations import Difference
from tilewright.tuner.verdicts import Verdict

Call = Callable[[Tensor, Tensor], object]
"""Runs the kernel into out [B, H, Nq, D] and lse [B, H, Nq]."""

_UNWRITTEN, _NONFINITE, _MAX, _SQUARE, _EMPTY, _LSE, _HOLES, _REPEAT, OUTSIDE, CHANGED = range(10)
"""Places in the statistics; `CHANGED`, of the inputs, is for the caller to fill, and `OUTSIDE` to add to."""


def examine_outputs(call: Call, out: Placed, expected: Expected) -> Tensor:
    """Poison, run, keep, poison, run; the statistics as one fp64 tensor [10] on the device."""
    device = out.view.device
    batch, num_heads, _, head_dim = out.view.shape
    lse = place(tuple(out.view.shape[:3]), "packed", torch.float32, device)
    poison(out.view)
    call(out.view, lse.view)
    first_out, first_lse = out.view.clone(), lse.view.clone()
    poison(out.view)
    poison(lse.view)
    call(out.view, lse.view)
    stats = torch.zeros(10, dtype=torch.float64, device=device)
    stats[_UNWRITTEN] = still_poisoned(first_out).count_nonzero() + still_poisoned(first_lse).count_nonzero()
    stats[_NONFINITE] = (~first_out.isfinite()).count_nonzero() + first_lse.isnan().count_nonzero()
    stats[_REPEAT] = differing(first_out, out.view) + differing(first_lse, lse.view)
    stats[OUTSIDE] = lse.outside() + out.outside()  # what the first run wrote there is still there
    if expected.rows is not None:
        first_out, first_lse = first_out[:, :, expected.rows], first_lse[:, :, expected.rows]
    # By chunks of rows, so that a long shape's fp64 temporaries stay small beside its tensors.
    step = max(1, 2**25 // max(1, batch * num_heads * head_dim))
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


def verdict_on_outputs(expected: Expected, stats: Sequence[float]) -> Verdict:
    """What the statistics mean beside the bounds."""
    rms = (stats[_SQUARE] / max(1, expected.out.numel())) ** 0.5
    pairs = ((stats[_MAX], expected.max_bound), (rms, expected.rms_bound), (stats[_LSE], expected.lse_bound))
    ratio = max(error / max(bound, 1e-300) for error, bound in pairs)
    return Verdict(stats[_MAX], rms, ratio, _reason(expected, stats, rms))


def _reason(expected: Expected, stats: Sequence[float], rms: float) -> str | None:
    """Why these statistics fail, the most telling reason first; None when they pass."""
    if stats[CHANGED]:
        return "the inputs were changed"
    if stats[OUTSIDE]:
        return f"{stats[OUTSIDE]:.0f} elements beside the outputs were written"
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


def output_difference(expected: Expected, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Difference:
    """How far two pairs of out and lse are apart, beside what a kernel may be off."""
    (out, lse), (other_out, other_lse) = ours, theirs
    errors = (_largest_difference(out, other_out), _largest_difference(lse, other_lse))
    bounds = (expected.max_bound, expected.lse_bound)
    ratio = max(error / max(bound, 1e-300) for error, bound in zip(errors, bounds, strict=True))
    return Difference(errors, ratio, torch.equal(out, other_out))


def _largest_difference(one: Tensor, other: Tensor) -> float:
    """NaN where only one of two values is NaN or infinite counts as infinitely far."""
    same = (one == other) | (one.isnan() & other.isnan())
    return float(torch.where(same, 0.0, (one.double() - other.double()).abs().nan_to_num(torch.inf, torch.inf)).amax())


def differing(one: Tensor, other: Tensor) -> Tensor:
    """How many elements differ in their bits (a device scalar)."""
    return (bits_of(one) != bits_of(other)).count_nonzero()


def changed(now: Iterable[Tensor], before: Iterable[Tensor]) -> Tensor:
    """How many elements of these tensors are not what they were (a device scalar)."""
    return torch.stack([differing(a, b) for a, b in zip(now, before, strict=True)]).sum()


def fingerprint(tensor: Tensor) -> Tensor:
    """A sum over the tensor's bits: tells a changed input without keeping a second copy of it."""
    return bits_of(tensor).sum(dtype=torch.int64)


class Fingerprints:
    """What a call's inputs were, without copies of them."""

    def __init__(self, *inputs: Tensor) -> None:
        self._inputs = inputs
        self._before = [fingerprint(tensor) for tensor in inputs]

    def changed(self) -> Tensor:
        """How many of the inputs are no longer the same (a device scalar)."""
        after = [fingerprint(tensor) for tensor in self._inputs]
        return torch.stack([(a != b).double() for a, b in zip(self._before, after, strict=True)]).sum()
