"""What people ask the database: the best so far, the statistics, everything about one record."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Executable, Select, exists, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from tilewright.generator.errors import InvalidInput, Outcome
from tilewright.generator.problem import Problem
from tilewright.generator.variant import VariantSpec
from tilewright.runtime.store.models import EnvironmentRow, MeasurementRow, ProblemRow, VariantRow, WinnerRow
from tilewright.runtime.store.rows import measurement_of, winner_of

SHORT_ID = 12
"""Hex digits of a uid that tables show; any beginning that is unique names the record."""


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest known variant of one problem in one environment.

    final: whether a finished tuning chose it; else it is the fastest correct measurement so far. Times in microseconds.
    """

    problem: Problem
    device: str
    spec: VariantSpec
    time_us: float
    final: bool
    verified: bool
    measured: int
    default_time_us: float | None = None
    baseline_name: str = ""
    baseline_time_us: float | None = None
    environment_key: str = ""
    measurement: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values."""
        return {
            "problem": self.problem.name,
            "problem_key": self.problem.digest,
            "device": self.device,
            "environment_key": self.environment_key,
            "variant": self.spec.name,
            "spec": self.spec.to_dict(),
            "time_us": self.time_us,
            "default_time_us": self.default_time_us,
            "baseline": self.baseline_name,
            "baseline_time_us": self.baseline_time_us,
            "final": self.final,
            "verified": self.verified,
            "measured": self.measured,
            "measurement": self.measurement,
        }


def best(session: Session, device: str | None, target: str | None) -> list[Best]:
    """One row for each problem and environment that has a winner or a correct measurement, by device and problem."""
    where: list[ColumnElement[bool]] = []
    if device is not None:
        where.append(EnvironmentRow.device == device)
    if target is not None:
        where.append(ProblemRow.target == target)
    found = [_best_of_winner(session, row) for row in session.scalars(_filtered(select(WinnerRow), WinnerRow, where))]
    seen: set[tuple[int, int]] = set()
    query = _filtered(select(MeasurementRow), MeasurementRow, where)
    won = exists().where(
        WinnerRow.environment_id == MeasurementRow.environment_id, WinnerRow.problem_id == MeasurementRow.problem_id
    )
    query = query.where(~won, MeasurementRow.outcome == str(Outcome.OK), MeasurementRow.variant_id.is_not(None))
    for row in session.scalars(query.order_by(MeasurementRow.time_us, MeasurementRow.id)):
        if (row.environment_id, row.problem_id) not in seen:
            seen.add((row.environment_id, row.problem_id))
            found.append(_best_of_measurement(session, row))
    return sorted(found, key=lambda b: (b.device, b.problem.name, b.environment_key))


def _filtered(query: Select[Any], table: Any, where: Sequence[ColumnElement[bool]]) -> Select[Any]:
    joined = query.join(EnvironmentRow, table.environment_id == EnvironmentRow.id)
    return joined.join(ProblemRow, table.problem_id == ProblemRow.id).where(*where)


def _best_of_winner(session: Session, row: WinnerRow) -> Best:
    winner = winner_of(row, "store")
    return Best(
        problem=winner.problem,
        device=winner.device,
        spec=winner.spec,
        time_us=winner.time_us,
        final=True,
        verified=winner.verified,
        measured=_count_measured(session, row.environment_id, row.problem_id),
        default_time_us=winner.default_time_us,
        baseline_name=winner.baseline_name,
        baseline_time_us=winner.baseline_time_us,
        environment_key=row.environment.key,
        measurement=winner.measurement,
    )


def _best_of_measurement(session: Session, row: MeasurementRow) -> Best:
    measurement = measurement_of(row)
    assert measurement.spec is not None
    assert measurement.time_us is not None
    return Best(
        problem=measurement.problem,
        device=measurement.environment.device,
        spec=measurement.spec,
        time_us=measurement.time_us,
        final=False,
        verified=False,
        measured=_count_measured(session, row.environment_id, row.problem_id),
        environment_key=row.environment.key,
        measurement=measurement.uid,
    )


def _count_measured(session: Session, environment_id: int, problem_id: int) -> int:
    query = select(func.count(func.distinct(MeasurementRow.variant_id))).where(
        MeasurementRow.environment_id == environment_id, MeasurementRow.problem_id == problem_id
    )
    return session.scalar(query) or 0


def stats(session: Session) -> dict[str, Any]:
    """Counts, spans and medians over the whole database."""
    winners = session.execute(
        select(WinnerRow.time_us, WinnerRow.default_time_us, WinnerRow.baseline_time_us, WinnerRow.verified)
    ).all()
    gains = [w.default_time_us / w.time_us for w in winners if w.default_time_us]
    speedups = [w.baseline_time_us / w.time_us for w in winners if w.baseline_time_us]
    first, last, compile_s = session.execute(
        select(
            func.min(MeasurementRow.created_at), func.max(MeasurementRow.created_at), func.sum(MeasurementRow.compile_s)
        )
    ).one()
    devices = (
        select(EnvironmentRow.device, func.count(MeasurementRow.id))
        .join(MeasurementRow, MeasurementRow.environment_id == EnvironmentRow.id)
        .group_by(EnvironmentRow.device)
    )
    families = (
        select(VariantRow.family, func.count(MeasurementRow.id))
        .join(MeasurementRow, MeasurementRow.variant_id == VariantRow.id)
        .group_by(VariantRow.family)
    )
    outcomes = _counts(session, _grouped(MeasurementRow.outcome))
    return {
        "environments": session.scalar(select(func.count(EnvironmentRow.id))),
        "problems": session.scalar(select(func.count(ProblemRow.id))),
        "variants": session.scalar(select(func.count(VariantRow.id))),
        "measurements": sum(outcomes.values()),
        "by_outcome": outcomes,
        "by_kind": _counts(session, _grouped(MeasurementRow.kind)),
        "by_device": _counts(session, devices),
        "by_family": _counts(session, families),
        "winners": len(winners),
        "winners_verified": sum(w.verified for w in winners),
        "median_gain_over_default": statistics.median(gains) if gains else None,
        "median_speedup_over_pytorch": statistics.median(speedups) if speedups else None,
        "compile_s": compile_s,
        "first_measurement": first.isoformat() if first else None,
        "last_measurement": last.isoformat() if last else None,
    }


def _grouped(column: InstrumentedAttribute[str]) -> Executable:
    return select(column, func.count()).group_by(column)


def _counts(session: Session, query: Executable) -> dict[str, int]:
    return {str(name): int(count) for name, count in sorted(session.execute(query).all())}


def show(session: Session, identity: str) -> dict[str, Any]:
    """The one record whose uid or key begins with `identity`, and what belongs to it."""
    identity = identity.strip().lower()
    if not re.fullmatch(r"[0-9a-f]{4,32}", identity):
        raise InvalidInput(f"an ID is 4 to 32 hex digits, as `tilewright db list` shows them; got {identity!r:.80}")
    found: list[Any] = []
    for table, column in (
        (MeasurementRow, MeasurementRow.uid),
        (ProblemRow, ProblemRow.key),
        (VariantRow, VariantRow.key),
        (EnvironmentRow, EnvironmentRow.key),
    ):
        found += session.scalars(select(table).where(column.startswith(identity)).limit(5))
    if not found:
        raise InvalidInput(f"nothing in the database has an ID that begins with {identity}; see `tilewright db list`")
    if len(found) > 1:
        names = ", ".join(row.uid if isinstance(row, MeasurementRow) else row.key for row in found)
        raise InvalidInput(f"several IDs begin with {identity}: {names}; give more digits")
    return _described(session, found[0])


def _described(session: Session, row: Any) -> dict[str, Any]:
    if isinstance(row, MeasurementRow):
        measurement = measurement_of(row)
        return {
            "type": "measurement",
            **measurement.to_dict(),
            "label": measurement.label,
            "problem_name": row.problem.name,
            "problem_key": row.problem.key,
            "variant_key": row.variant.key if row.variant else None,
            "environment_key": row.environment.key,
        }
    column = {
        ProblemRow: MeasurementRow.problem_id,
        VariantRow: MeasurementRow.variant_id,
        EnvironmentRow: MeasurementRow.environment_id,
    }[type(row)]
    kind = {ProblemRow: "problem", VariantRow: "variant", EnvironmentRow: "environment"}[type(row)]
    query = select(MeasurementRow).where(column == row.id)
    rows = session.scalars(query.order_by(MeasurementRow.created_at.desc(), MeasurementRow.id.desc()).limit(100))
    measurements = [
        {"uid": m.uid, "outcome": m.outcome, "time_us": m.time_us, "label": measurement_of(m).label} for m in rows
    ]
    return {
        "type": kind,
        "key": row.key,
        "name": getattr(row, "name", None) or row.device,
        "record": row.record,
        "created_at": row.created_at.isoformat(),
        "measurement_count": session.scalar(select(func.count()).select_from(MeasurementRow).where(column == row.id)),
        "latest_measurements": measurements,
    }
