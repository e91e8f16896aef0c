"""What a verification found, of one case and of all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the statistics of one case say.

    max_error, rms_error: as the operation measures them, 0 where it was exact. ratio: the largest error over its bound.
    reason: why the kernel is wrong, the most telling reason first; None where it is right.
    """

    max_error: float
    rms_error: float
    ratio: float
    reason: str | None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification found.

    max_error, rms_error: the largest over the cases: of attention absolute, of a choice of blocks relative to the
    lengths of the vectors that are scored. worst_ratio: the largest error over its bound.
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


def report_on(judged: Iterable[tuple[str, Verdict]], skipped: Sequence[str] = ()) -> VerifyReport:
    """The verdict over all cases, by name: the first that failed, else the one nearest to its bound."""
    max_error = rms_error = worst_ratio = 0.0
    count, nearest, failed = 0, "", ""
    message = ""
    for name, verdict in judged:
        count += 1
        max_error, rms_error = max(max_error, verdict.max_error), max(rms_error, verdict.rms_error)
        if verdict.ratio >= worst_ratio:
            worst_ratio, nearest = verdict.ratio, name
        if verdict.reason and not failed:
            failed, message = name, f"case '{name}': {verdict.reason}"
    if failed:
        return VerifyReport(False, max_error, rms_error, failed, message, worst_ratio, count, tuple(skipped))
    text = f"{count} cases within bounds" + (f"; no memory for {', '.join(skipped)}" if skipped else "")
    return VerifyReport(True, max_error, rms_error, nearest, text, worst_ratio, count, tuple(skipped))


def report_on_call(case: str, verdict: Verdict, compared: str) -> VerifyReport:
    """The same of one call of one's own; compared: how much of it was, such as `256 of 8192 query rows`."""
    report = report_on([(case, verdict)])
    return dataclasses.replace(report, message=f"{case}: {compared} within bounds") if report.ok else report
