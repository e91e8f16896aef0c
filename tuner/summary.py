"""A tuning run as plain data: what `tilewright tune --json` prints."""

from __future__ import annotations

import dataclasses
from typing import Any

from tilewright.tuner.bench import OWN, BenchRow
from tilewright.tuner.history import fairest_baseline
from tilewright.tuner.progress import ProblemResult, Status, TuneReport


def summary(report: TuneReport, *, workload: str, effort: str, database: str) -> dict[str, Any]:
    """The run as JSON-ready values: `rows` as `tilewright bench` writes them, `problems`, and counts by outcome.

    A row's rate counts active or chosen pairs only, 4 head_dim operations each, and scored ones of a choice, 2 head_dim
    each. Counting reads every row's mask, or makes its choice, on the device.
    """
    environment = report.target.environment
    return {
        "workload": workload,
        "effort": effort,
        "target": report.target.arch,
        "device": environment.device,
        "devices": list(report.target.devices),
        "database": database,
        "seconds": round(report.seconds, 3),
        "interrupted": report.interrupted,
        "out_of_time": report.out_of_time,
        "outcomes": dict(report.outcomes),
        "problems": [_problem(result) for result in report.results],
        "rows": [row for result in report.results for row in _rows(result, report)],
    }


def _problem(result: ProblemResult) -> dict[str, Any]:
    baseline = fairest_baseline(result.problem, result.baselines)
    return {
        "workload": result.row.name,
        "problem": result.problem.name,
        "status": str(result.status),
        "variant": result.winner.name if result.winner else None,
        "time_us": result.time_us,
        "default_variant": result.default.name if result.default else None,
        "default_time_us": result.default_time_us,
        "gain": _ratio(result.default_time_us, result.time_us),
        "baseline": baseline[0] if baseline else None,
        "speedup": _ratio(baseline[1] if baseline else None, result.time_us),
        "measured": result.measured,
        "known": result.known,
        "outcomes": dict(result.outcomes),
        "message": result.message,
        "seconds": round(result.seconds, 3),
    }


def _rows(result: ProblemResult, report: TuneReport) -> list[dict[str, Any]]:
    times: list[tuple[str, float | None, str | None]] = []
    if result.winner is not None:
        times.append((OWN, result.time_us, result.winner.name))
    if result.default is not None and result.default_time_us is not None:
        times.append(("tilewright_default", result.default_time_us, result.default.name))
    times += [(name, time_us, None) for name, time_us in result.baselines.items()]
    rows = [_row(result, report, *entry) for entry in times]
    if result.winner is None:
        error = result.message or ("not reached" if result.status is Status.UNREACHED else "no winner")
        rows.insert(0, {**_row(result, report, OWN, None, None), "error": error})
    return rows


def _row(
    result: ProblemResult, report: TuneReport, implementation: str, time_us: float | None, variant: str | None
) -> dict[str, Any]:
    shape = result.row
    row = BenchRow(
        shape.name,
        implementation,
        report.target.environment.device,
        time_ms=time_us / 1e3 if time_us else None,
        max_error=result.max_error if implementation == OWN else None,
        variant=variant,
        seqlen_q=shape.seqlen_q,
        seqlen_kv=shape.seqlen_kv,
    )
    if time_us:
        work = shape.asked_of.work(shape, report.target.devices[0])
        row = dataclasses.replace(row, tflops=work.flops / time_us / 1e6, density=work.density)
    return row.to_dict()


def _ratio(other_us: float | None, time_us: float | None) -> float | None:
    return other_us / time_us if other_us and time_us else None
