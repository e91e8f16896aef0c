"""A sweep's file: one line a variant of one problem in CSV, after a few lines that say what it was measured on."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self, TextIO

from tilewright.generator.errors import InvalidInput, Outcome
from tilewright.generator.variant import SHARED_AXES, AxisValue, VariantSpec
from tilewright.tuner.measured import Measured

FORMAT = "1"
MARK = "# "
"""Begins each line of the head: `# name: value`."""

FIGURES = (
    *("outcome", "time_us", "noise", "samples", "registers", "local_bytes", "smem_bytes", "compile_s", "max_error"),
    *("device", "kernel", "message"),
)
"""The columns after the axes."""


@dataclass(frozen=True, slots=True)
class SweepLine:
    """What became of one variant.

    rank: its place among the problem's legal variants, cheapest-looking first, from 0. time_us: the median in
    microseconds, None unless the outcome is ok. noise: the samples' spread as a fraction of it (1.4826 times the median
    deviation), None for fewer than three. samples: calls timed; few where the variant was too slow to repeat.
    registers, local_bytes: a thread's; local_bytes holds what it spills. kernel: digest of source, flags and compiler.
    """

    spec: VariantSpec
    rank: int
    outcome: Outcome
    time_us: float | None = None
    noise: float | None = None
    samples: int = 0
    registers: int = 0
    local_bytes: int = 0
    smem_bytes: int = 0
    compile_s: float | None = None
    max_error: float | None = None
    device: str = ""
    kernel: str = ""
    message: str = ""

    @classmethod
    def of(
        cls, spec: VariantSpec, rank: int, measured: Measured, device: str, kernel: str, compile_s: float | None
    ) -> Self:
        """What a worker found."""
        time_us, times_us = measured.time_us, measured.times_us
        noise = None
        if time_us and len(times_us) > 2:
            noise = 1.4826 * median(abs(one - time_us) for one in times_us) / time_us
        return cls(
            spec=spec,
            rank=rank,
            outcome=measured.outcome,
            time_us=time_us,
            noise=noise,
            samples=len(times_us),
            registers=measured.registers,
            local_bytes=measured.local_bytes,
            smem_bytes=measured.smem_bytes,
            compile_s=compile_s,
            max_error=measured.max_error,
            device=device,
            kernel=kernel,
            message=measured.message,
        )


@dataclass(frozen=True, slots=True)
class SweepRecord:
    """One file: `about`, the names and values of its head, and its lines in the order in which they were measured."""

    about: dict[str, str]
    lines: tuple[SweepLine, ...]

    @property
    def name(self) -> str:
        """The workload row that was swept."""
        return self.about.get("row", "")


def read_record(path: Path) -> SweepRecord:
    """The record in this file; a last line that a killed sweep left half written is dropped.

    Raises `InvalidInput` with file and line for anything that is no sweep's.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InvalidInput(f"sweep {path} cannot be read: {reason}") from error
    rows = text.splitlines(keepends=True)
    if rows and not rows[-1].endswith("\n"):
        rows.pop()
    head = [row for row in rows if row.startswith(MARK)]
    about = dict(row[len(MARK) :].rstrip("\n").split(": ", 1) for row in head if ": " in row)
    if about.get("format") != FORMAT:
        got = about.get("format")
        raise InvalidInput(
            f"{path} is no sweep of format {FORMAT}: {f'format {got}' if got else 'it has no head'};"
            " `tilewright sweep` writes one"
        )
    body = csv.DictReader(rows[len(head) :])
    lines = []
    for number, values in enumerate(body, len(head) + 2):
        try:
            lines.append(_line(values))
        except (InvalidInput, KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"{path}, line {number}: not a variant's line: {error}") from error
    return SweepRecord(about, tuple(lines))


def _line(values: Mapping[str, str]) -> SweepLine:
    axes = {name: _axis(text) for name, text in values.items() if name not in (*_BEFORE, *FIGURES) and text != ""}
    spec = VariantSpec.from_values(values["family"], axes)
    if spec.name != values["variant"]:
        raise InvalidInput(f"its axes give {spec.name}, its name is {values['variant']}")
    return SweepLine(
        spec=spec,
        rank=int(values["rank"]),
        outcome=Outcome(values["outcome"]),
        time_us=_optional(values["time_us"]),
        noise=_optional(values["noise"]),
        samples=int(values["samples"]),
        registers=int(values["registers"]),
        local_bytes=int(values["local_bytes"]),
        smem_bytes=int(values["smem_bytes"]),
        compile_s=_optional(values["compile_s"]),
        max_error=_optional(values["max_error"]),
        device=values["device"],
        kernel=values["kernel"],
        message=values["message"],
    )


_BEFORE = ("rank", "variant", "family")


def _axis(text: str) -> AxisValue:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.lstrip("-").isdigit() else text


def _optional(text: str) -> float | None:
    return float(text) if text else None


class RecordWriter:
    """Writes a record: the head and the lines known before at once, each later line as it comes. A context manager.

    specs: every variant that may come, which gives the columns. Raises `InvalidInput` where the file cannot be written.
    """

    def __init__(
        self, path: Path, about: Mapping[str, str], known: Sequence[SweepLine], specs: Iterable[VariantSpec]
    ) -> None:
        names = {name for spec in (*specs, *(line.spec for line in known)) for name, _ in spec.axes}
        self._columns = [*_BEFORE, *SHARED_AXES, *sorted(names), *FIGURES]
        self._path = path
        text = "".join(f"{MARK}{name}: {value}\n" for name, value in {"format": FORMAT, **about}.items())
        text += self._row({name: name for name in self._columns})
        text += "".join(self._row(_cells(line)) for line in known)
        # Whole or not at all: what an earlier sweep measured must not be lost to a kill in this moment.
        fresh = path.with_name(f"{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(text, "utf-8")
            os.replace(fresh, path)
            self._file: TextIO = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise self._unwritable(error) from error

    def add(self, line: SweepLine) -> None:
        """Append one line; it is in the file when this returns."""
        try:
            self._file.write(self._row(_cells(line)))
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _row(self, cells: Mapping[str, str]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, restval="", lineterminator="\n").writerow(cells)
        return text.getvalue()

    def _unwritable(self, error: OSError) -> InvalidInput:
        return InvalidInput(f"sweep {self._path} cannot be written: {error.strerror}; give another --out")


def _cells(line: SweepLine) -> dict[str, str]:
    axes = {name: json.dumps(v) if isinstance(v, bool) else str(v) for name, v in line.spec.values().items()}
    figures: dict[str, object] = {name: getattr(line, name) for name in FIGURES}
    rounded = {"time_us": 3, "noise": 4, "compile_s": 2}
    for name, digits in rounded.items():
        value = getattr(line, name)
        figures[name] = None if value is None else round(value, digits)
    figures["max_error"] = None if line.max_error is None else f"{line.max_error:.3g}"
    figures["message"] = " ".join(line.message.split())
    texts = {name: "" if value is None else str(value) for name, value in figures.items()}
    return {"rank": str(line.rank), "variant": line.spec.name, "family": line.spec.family, **axes, **texts}
