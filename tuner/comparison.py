"""What a benchmark's rows say of each other: times beside another row's, curves along an axis, and where they cross."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tilewright.generator.errors import InvalidInput
from tilewright.tuner.bench import OWN, BenchRow
from tilewright.tuner.workloads import AXES

_NEEDED = ("workload", "implementation", "device", "seqlen_q", "density", "time_ms", "variant")
_FIELDS = {field.name for field in dataclasses.fields(BenchRow)}

Curve = dict[float, BenchRow]
"""One implementation's timed rows by their place on the axis, ascending."""


def rows_of_json(values: Any, source: str) -> list[BenchRow]:
    """The rows that `bench --json` wrote; raises `InvalidInput` naming `source` and what is missing."""
    if not isinstance(values, list) or not values or not all(isinstance(value, dict) for value in values):
        raise InvalidInput(f"{source} must hold the list of rows that `tilewright bench --json` writes")
    missing = [name for name in _NEEDED if any(name not in value for value in values)]
    if missing:
        raise InvalidInput(
            f"the rows of {source} have no {', '.join(missing)}; write them anew with `tilewright bench --json`"
        )
    return [BenchRow(**{name: value for name, value in row.items() if name in _FIELDS}) for row in values]


def merged(files: Iterable[Sequence[BenchRow]]) -> list[BenchRow]:
    """The rows of several runs; what is timed in more than one counts as the first has it."""
    rows: dict[tuple[str, str], BenchRow] = {}
    for row in (row for file in files for row in file):
        key = (row.workload, row.implementation)
        if key not in rows or (rows[key].time_ms is None and row.time_ms is not None):
            rows[key] = row
    return list(rows.values())


def with_ratios(rows: Sequence[BenchRow], earlier: Sequence[BenchRow], beside: str) -> list[BenchRow]:
    """The rows with `beside_ratio`, by the earlier rows of the workload named `beside`."""
    times = {row.implementation: row.time_ms for row in earlier if row.workload == beside}
    found = []
    for row in rows:
        other = times.get(row.implementation)
        ratio = row.time_ms / other if row.time_ms and other else None
        found.append(dataclasses.replace(row, beside_ratio=ratio))
    return found


def ratio_line(rows: Sequence[BenchRow], beside: str) -> str | None:
    """`skewed / balanced: tilewright 1.04, flex 1.31`; None where no implementation was timed on both."""
    ratios = [f"{row.implementation} {row.beside_ratio:.3f}" for row in rows if row.beside_ratio is not None]
    return f"{rows[0].workload} / {beside}: {', '.join(ratios)}" if ratios else None


def axis_of(rows: Sequence[BenchRow]) -> str:
    """`density` where all rows have one length, else `length`."""
    return "density" if len({row.seqlen_q for row in rows}) == 1 else "length"


def curves(rows: Sequence[BenchRow], axis: str) -> dict[str, Curve]:
    """Each implementation's timed rows along `axis`, implementations in the order of the rows.

    Raises `InvalidInput` where the rows are no series: two of an implementation at one place, or of several devices.
    """
    if axis not in AXES:
        raise InvalidInput(f"axis must be {' or '.join(AXES)}; got {axis!r}")
    timed = [row for row in rows if row.time_ms is not None and row.density and row.seqlen_q]
    if not timed:
        raise InvalidInput("no row has a time; see the rows' errors")
    devices = list(dict.fromkeys(row.device for row in timed))
    if len(devices) > 1:
        raise InvalidInput(f"rows must be of one device to be compared; got {', '.join(devices)}")
    found: dict[str, Curve] = {}
    for row in timed:
        place = float((row.seqlen_q if axis == "length" else row.density) or 0)
        curve = found.setdefault(row.implementation, {})
        if place in curve:
            raise InvalidInput(
                f"rows must differ in {axis}; got {curve[place].workload!r} and {row.workload!r}, both at {place:.6g}"
            )
        curve[place] = row
    return {name: dict(sorted(curve.items())) for name, curve in found.items()}


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where tilewright's curve meets a peer's.

    places: interpolated between the neighbouring rows, straight lines on logarithmic axes. first, last: the range in
    which both were timed. starts_faster: whether tilewright is the faster one at `first`.
    """

    peer: str
    is_another_function: bool
    axis: str
    places: tuple[float, ...]
    first: float
    last: float
    starts_faster: bool

    @property
    def text(self) -> str:
        """The crossing as a sentence without a full stop."""
        peer = f"{self.peer} (another function)" if self.is_another_function else self.peer
        span = f"{self.axis} {_figure(self.first)} to {_figure(self.last)}"
        if not self.places:
            return f"{OWN} is {'faster' if self.starts_faster else 'slower'} than {peer} at all of {span}"
        changes = []
        faster = self.starts_faster
        for place in self.places:
            faster = not faster
            changes.append(f"{'faster' if faster else 'slower'} from {_figure(place)} on")
        return f"{OWN} against {peer}, {span}: {'faster' if self.starts_faster else 'slower'}, {', '.join(changes)}"


def crossings(rows: Sequence[BenchRow], axis: str) -> list[Crossing]:
    """Where tilewright crosses each peer that was timed at two places or more that it was timed at."""
    found = curves(rows, axis)
    own = found.pop(OWN, {})
    return [
        _crossing(name, own, peer, places, axis)
        for name, peer in found.items()
        if len(places := [place for place in own if place in peer]) > 1
    ]


def _crossing(name: str, own: Curve, peer: Curve, places: Sequence[float], axis: str) -> Crossing:
    # Positive where the peer takes longer.
    leads = [math.log(_time(peer[place]) / _time(own[place])) for place in places]
    crossed = []
    for (left, right), (before, after) in zip(pairwise(places), pairwise(leads), strict=True):
        if (before > 0) != (after > 0):
            share = before / (before - after)
            crossed.append(math.exp(math.log(left) + share * (math.log(right) - math.log(left))))
    return Crossing(
        peer=name,
        is_another_function=any(row.is_another_function for row in peer.values()),
        axis=axis,
        places=tuple(crossed),
        first=places[0],
        last=places[-1],
        starts_faster=leads[0] > 0,
    )


def _time(row: BenchRow) -> float:
    assert row.time_ms is not None
    return row.time_ms


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
