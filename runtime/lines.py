"""The export format: JSON lines, a header first, then records that refer to ones before them by their keys.

    {"type": "tilewright", "format": 1, "tilewright": "0.1.0"}
    {"type": "environment", "key": "...", "record": {...}}
    {"type": "problem", "key": "...", "record": {...}}
    {"type": "variant", "key": "...", "record": {...}}
    {"type": "measurement", "uid": "...", "environment": "...", "problem": "...", "variant": "...", ...}
    {"type": "winner", "environment": "...", "problem": "...", "variant": "...", ...}

Specs and measurements travel, never code. A key only names a record inside its file: the store computes its own, so
that a file written before a record gained a field stays readable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NoReturn

from tilewright.generator.errors import InvalidInput, Outcome
from tilewright.generator.problem import Problem
from tilewright.generator.variant import VariantSpec
from tilewright.runtime.environment import Environment, tilewright_version
from tilewright.runtime.records import INT_MAX, Measurement, Winner, finite, problem_from, spec_from

FORMAT = 1
"""The newest format that this reads, and the one it writes."""


class LineWriter:
    """Turns measurements and winners into lines, each referred-to record written once, before its first use."""

    def __init__(self) -> None:
        self._written: set[tuple[str, str]] = set()

    def header(self) -> str:
        """The first line. It carries no date, so that equal contents give equal files."""
        return _line({"type": "tilewright", "format": FORMAT, "tilewright": tilewright_version()})

    def measurement(self, measurement: Measurement) -> Iterator[str]:
        """The lines of one measurement."""
        spec = measurement.spec
        yield from self._referred("environment", measurement.environment)
        yield from self._referred("problem", measurement.problem)
        if spec is not None:
            yield from self._referred("variant", spec)
        values = measurement.to_dict()
        del values["spec"]
        keys = {
            "environment": measurement.environment.digest,
            "problem": measurement.problem.digest,
            "variant": spec.digest if spec is not None else None,
        }
        yield _line({"type": "measurement", **values, **keys})

    def winner(self, winner: Winner) -> Iterator[str]:
        """The lines of one winner; one without an environment is given one that has its device and target alone."""
        environment = winner.environment or Environment(winner.device, winner.problem.target)
        yield from self._referred("environment", environment)
        yield from self._referred("problem", winner.problem)
        yield from self._referred("variant", winner.spec)
        values = winner.to_dict()
        for name in ("spec", "device", "source"):
            del values[name]
        keys = {
            "environment": environment.digest,
            "problem": winner.problem.digest,
            "variant": winner.spec.digest,
        }
        yield _line({"type": "winner", **values, **keys})

    def _referred(self, kind: str, value: Environment | Problem | VariantSpec) -> Iterator[str]:
        if (kind, value.digest) not in self._written:
            self._written.add((kind, value.digest))
            yield _line({"type": kind, "key": value.digest, "record": value.to_dict()})


def _line(values: dict[str, Any]) -> str:
    return json.dumps(values, allow_nan=False, ensure_ascii=False, separators=(", ", ": ")) + "\n"


def read_lines(lines: Iterable[bytes], name: str, source: str = "import") -> Iterator[Measurement | Winner]:
    """The measurements and winners in an export, in its order.

    name: what messages call it. Raises `InvalidInput` with the line's number at the first line that can't be used.
    """
    known: dict[str, dict[str, Any]] = {"environment": {}, "problem": {}, "variant": {}}
    readers: dict[str, Callable[[Any], Any]] = {
        "environment": _environment_from,
        "problem": problem_from,
        "variant": spec_from,
    }
    number = 0
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        try:
            values = _parse(raw)
            kind = values.get("type")
            if number == 1:
                _check_header(values)
            elif kind in readers:
                known[kind][_text(values, "key")] = readers[kind](values.get("record"))
            elif kind == "measurement":
                yield _measurement_from(values, known)
            elif kind == "winner":
                yield _winner_from(values, known, source)
            else:
                raise InvalidInput(f"type must be measurement, winner, {', '.join(readers)}; got {kind!r:.80}")
        except (InvalidInput, ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidInput(f"{name}, line {number}: {error}") from error
    if number == 0:
        raise InvalidInput(f"{name} is empty; an export begins with a tilewright header line")


def read_winner_lines(file: Path | IO[bytes], source: str | None = None) -> list[Winner]:
    """The winners in an export. source: what `Winner.source` says; by default the file's folder.

    Raises `InvalidInput` where the file can't be read or a line can't be used.
    """
    if isinstance(file, Path):
        try:
            with file.open("rb") as stream:
                return read_winner_lines(stream, source or file.parent.name)
        except OSError as error:
            raise InvalidInput(f"{file} cannot be read: {error.strerror}") from error
    name = str(source or getattr(file, "name", "winners"))
    return [found for found in read_lines(file, name, name) if isinstance(found, Winner)]


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        values = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidInput("not UTF-8 text; an export is JSON lines") from error
    except json.JSONDecodeError as error:
        raise InvalidInput(f"not JSON: {error}; the file may have been cut short") from error
    if not isinstance(values, dict):
        raise InvalidInput(f"an object is expected, got {type(values).__name__}")
    return values


def _refuse_constant(constant: str) -> NoReturn:
    raise InvalidInput(f"numbers must be finite, got {constant}")


def _check_header(values: dict[str, Any]) -> None:
    version = values.get("format")
    if values.get("type") != "tilewright" or type(version) is not int:
        raise InvalidInput("not a tilewright export: its first line must be the header that `db export` writes")
    if version > FORMAT:
        raise InvalidInput(f"format {version} is newer than {FORMAT}, the newest known here; upgrade tilewright")


def _environment_from(values: Any) -> Environment:
    if not isinstance(values, dict):
        raise InvalidInput(f"not an environment record: an object is expected, got {type(values).__name__}")
    return Environment.from_dict(values)


def _measurement_from(values: dict[str, Any], known: dict[str, dict[str, Any]]) -> Measurement:
    times = values.get("times_us")
    if not isinstance(times, list):
        raise InvalidInput("times_us must be a list of numbers")
    return Measurement(
        uid=_text(values, "uid"),
        environment=_referred(values, "environment", known),
        problem=_referred(values, "problem", known),
        spec=_referred(values, "variant", known) if values.get("variant") is not None else None,
        outcome=Outcome(_text(values, "outcome")),
        kind=_text(values, "kind"),
        created_at=_time(values),
        times_us=tuple(_number({"times_us": t}, "times_us") or 0.0 for t in times),
        registers=_count(values, "registers"),
        smem_bytes=_count(values, "smem_bytes"),
        time_us=_number(values, "time_us"),
        compile_s=_number(values, "compile_s"),
        max_error=_number(values, "max_error"),
        rms_error=_number(values, "rms_error"),
        message=_text(values, "message"),
        run_id=_text(values, "run_id"),
        kernel_digest=_text(values, "kernel_digest"),
        baseline=_text(values, "baseline"),
    )


def _winner_from(values: dict[str, Any], known: dict[str, dict[str, Any]], source: str) -> Winner:
    environment: Environment = _referred(values, "environment", known)
    verified = values.get("verified")
    if not isinstance(verified, bool):
        raise InvalidInput(f"verified must be true or false, got {verified!r:.80}")
    time_us = _number(values, "time_us")
    return Winner(
        problem=_referred(values, "problem", known),
        spec=_referred(values, "variant", known),
        time_us=time_us if time_us is not None else 0.0,
        default_time_us=_number(values, "default_time_us"),
        device=environment.device,
        source=source,
        baseline_name=_text(values, "baseline_name"),
        baseline_time_us=_number(values, "baseline_time_us"),
        verified=verified,
        created_at=_time(values) if values.get("created_at") is not None else None,
        environment=environment,
        measurement=_text(values, "measurement") if values.get("measurement") is not None else None,
    )


def _referred(values: dict[str, Any], kind: str, known: dict[str, dict[str, Any]]) -> Any:
    key = _text(values, kind)
    if key not in known[kind]:
        raise InvalidInput(f"{kind} {key!r:.80} is not defined on a line before")
    return known[kind][key]


def _text(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise InvalidInput(f"{name} must be text, got {value!r:.80}")
    return value


def _number(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300):
        raise InvalidInput(f"{name} must be a number or null, got {value!r:.80}")
    if value is not None and value < 0:
        raise InvalidInput(f"{name} must not be negative, got {value}")
    return finite(value)


def _count(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is not None and (type(value) is not int or not 0 <= value <= INT_MAX):
        raise InvalidInput(f"{name} must be an integer from 0 to {INT_MAX} or null, got {value!r:.80}")
    return value


def _time(values: dict[str, Any]) -> datetime:
    try:
        found = datetime.fromisoformat(_text(values, "created_at"))
    except ValueError as error:
        raise InvalidInput(f"created_at must be an ISO 8601 time: {error}") from error
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
