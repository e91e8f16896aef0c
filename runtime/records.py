"""What the store takes and gives: `Measurement` and `Winner`, plain values that need no database."""

from __future__ import annotations

import dataclasses
import math
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tilewright.generator.errors import InvalidInput, Outcome
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.variant import VariantSpec
from tilewright.runtime.environment import Environment

KINDS = ("search", "final", "baseline")
"""Why a measurement was taken: during the search, among the interleaved finalists, of PyTorch's own."""

MESSAGE_MAX = 16_000
"""Characters of a failure's text that are kept; a compiler can print megabytes."""

INT_MAX = 2**31 - 1
_WORD = re.compile(r"[A-Za-z0-9_.+-]{1,64}")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One attempt at one variant (or at one of PyTorch's own implementations) and what came of it.

    spec is None and `baseline` names the implementation (`sdpa_dense`, `flex`) when kind is `baseline`.
    time_us: the median; times_us: the samples. compile_s: seconds. Errors are absolute, against fp64.
    kernel_digest: the build digest of the artifact. uid: 32 hex digits, unique across machines. created_at: UTC.
    Left out, the last two are those of a measurement that was taken just now.
    """

    uid: str = field(default_factory=lambda: uuid.uuid4().hex, kw_only=True)
    environment: Environment
    problem: Problem
    spec: VariantSpec | None
    outcome: Outcome
    kind: str
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    time_us: float | None = None
    times_us: tuple[float, ...] = ()
    compile_s: float | None = None
    max_error: float | None = None
    rms_error: float | None = None
    registers: int | None = None
    smem_bytes: int | None = None
    message: str = ""
    run_id: str = ""
    kernel_digest: str = ""
    baseline: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{32}", self.uid):
            raise InvalidInput(f"measurement uid must be 32 hex digits, got {self.uid!r}")
        if self.kind not in KINDS:
            raise InvalidInput(f"measurement kind must be one of {', '.join(KINDS)}; got {self.kind}")
        if (self.spec is None) != (self.kind == "baseline") or (self.kind == "baseline") != bool(self.baseline):
            raise InvalidInput("a baseline measurement has a baseline name and no variant; any other has a variant")
        for name in ("run_id", "kernel_digest", "baseline"):
            if len(getattr(self, name)) > 64 or not getattr(self, name).isprintable():
                raise InvalidInput(f"{name} must be up to 64 printable characters, got {getattr(self, name)!r:.80}")
        if self.outcome is Outcome.OK and not is_time(self.time_us):
            raise InvalidInput(f"a measurement with outcome ok needs a time in microseconds, got {self.time_us}")
        # What is not finite has no place in JSON; the message tells what happened.
        for name in ("time_us", "compile_s", "max_error", "rms_error"):
            object.__setattr__(self, name, finite(getattr(self, name)))
        object.__setattr__(self, "times_us", tuple(float(t) for t in self.times_us if math.isfinite(t)))
        object.__setattr__(self, "message", clean_text(self.message))

    @property
    def label(self) -> str:
        """The variant's name, or the baseline's."""
        return self.spec.name if self.spec is not None else self.baseline

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values, environment, problem and variant spelled out."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            **values,
            "environment": self.environment.to_dict(),
            "problem": self.problem.to_dict(),
            "spec": self.spec.to_dict() if self.spec is not None else None,
            "outcome": str(self.outcome),
            "created_at": self.created_at.isoformat(),
            "times_us": list(self.times_us),
        }


@dataclass(frozen=True, slots=True)
class Winner:
    """The variant that a problem runs with on one device, and how much it gained.

    device: `Environment.device` of the tuning. source: where it was read (`store`, or a shipped file's folder).
    default_time_us: the default variant in the same run; baseline: PyTorch's fastest there. None where not measured.
    verified: checked against the fp64 reference at the tuned shape.
    """

    problem: Problem
    spec: VariantSpec
    time_us: float
    default_time_us: float | None
    device: str
    source: str = "store"
    baseline_name: str = ""
    baseline_time_us: float | None = None
    verified: bool = True
    created_at: datetime | None = None
    environment: Environment | None = None
    measurement: str | None = None

    def __post_init__(self) -> None:
        if not is_time(self.time_us):
            raise InvalidInput(f"a winner needs its time in microseconds, got {self.time_us}")

    @property
    def gain(self) -> float | None:
        """The default variant's time over the winner's; 1.0 is no gain."""
        return self.default_time_us / self.time_us if self.default_time_us else None

    @property
    def speedup(self) -> float | None:
        """PyTorch's fastest time over the winner's."""
        return self.baseline_time_us / self.time_us if self.baseline_time_us else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            **values,
            "problem": self.problem.to_dict(),
            "spec": self.spec.to_dict(),
            "created_at": self.created_at.isoformat() if self.created_at else None,
            "environment": self.environment.to_dict() if self.environment else None,
        }


def is_time(value: float | None) -> bool:
    """Whether this is a finite, positive number."""
    return value is not None and math.isfinite(value) and value > 0


def finite(value: float | None) -> float | None:
    """The number, or None where it is None, infinite or NaN."""
    return float(value) if value is not None and math.isfinite(value) else None


def clean_text(text: str) -> str:
    """Text that every database takes: no NUL, no lone surrogates, at most `MESSAGE_MAX` characters."""
    text = text.replace("\x00", "").encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= MESSAGE_MAX else text[: MESSAGE_MAX - 4] + " ..."


def problem_from(values: Any) -> Problem:
    """The problem in a record that came from outside; `InvalidInput` unless every field has its type and range."""
    record = _mapping(values, "problem")
    mask = _mapping(record.get("mask"), "problem mask")
    for name in ("dtype", "operation", "target"):
        _check(name, record.get(name), isinstance(record.get(name), str) and _WORD.fullmatch(record[name]), "a word")
    for name in ("head_dim", "batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_kv"):
        _check(name, record.get(name), _is_count(record.get(name)), f"an integer from 0 to {INT_MAX}")
    # A field that is missing is newer than the file and has its default; one that is unknown is from a newer version.
    known = {f.name for f in dataclasses.fields(MaskClass)}
    _check("mask fields", sorted(mask), set(mask) <= known, f"among {', '.join(sorted(known))}")
    structure, density, terms = mask.get("structure"), mask.get("density"), mask.get("terms")
    is_line = isinstance(structure, str) and structure.isprintable() and len(structure) <= 2000
    _check("mask structure", structure, is_line, "a line of text")
    _check("mask terms", terms, isinstance(terms, list) and all(isinstance(t, str) for t in terms), "a list of words")
    for name in ("per_head", "per_batch"):
        _check(name, mask.get(name), isinstance(mask.get(name), bool), "true or false")
    _check("density", density, density is None or (_is_number(density) and 0 <= density <= 1), "null or from 0 to 1")
    return Problem.from_dict(dict(record))


def spec_from(values: Any) -> VariantSpec:
    """The variant in a record that came from outside.

    Names and values must be plain words or integers: specs are rendered into source, and no code may travel in them.
    """
    record = _mapping(values, "variant")
    for name, value in record.items():
        _check("axis name", name, _WORD.fullmatch(name), "a word")
        fits = isinstance(value, str) and _WORD.fullmatch(value) is not None
        _check(f"axis {name}", value, isinstance(value, bool) or _is_count(value) or fits, "a word, integer or bool")
    for name in ("family", "mask_form"):
        _check(name, record.get(name), isinstance(record.get(name), str), "a word")
    for name in ("block_m", "block_n"):
        _check(name, record.get(name), _is_count(record.get(name)), "an integer")
    return VariantSpec.from_dict(record)


def _mapping(values: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise InvalidInput(f"not a {what} record: an object is expected, got {type(values).__name__}")
    return values


def _check(name: str, value: object, fits: object, allowed: str) -> None:
    if not fits:
        raise InvalidInput(f"{name} must be {allowed}; got {value!r:.80}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= INT_MAX


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
