"""Between the store's rows and the plain values that everything else uses."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from tilewright.generator.errors import InvalidInput, Outcome, StoreError
from tilewright.generator.problem import Problem
from tilewright.generator.variant import VariantSpec
from tilewright.runtime.environment import Environment
from tilewright.runtime.records import Measurement, Winner
from tilewright.runtime.store.models import EnvironmentRow, MeasurementRow, ProblemRow, VariantRow, WinnerRow

KeyedRow = TypeVar("KeyedRow", EnvironmentRow, ProblemRow, VariantRow)
T = TypeVar("T")


def environment_row(session: Session, environment: Environment) -> EnvironmentRow:
    """The row of this environment, added if new."""
    return _keyed(session, EnvironmentRow, environment.digest, lambda: new_environment(environment))


def problem_row(session: Session, problem: Problem) -> ProblemRow:
    """The row of this problem, added if new."""
    return _keyed(session, ProblemRow, problem.digest, lambda: new_problem(problem))


def variant_row(session: Session, spec: VariantSpec) -> VariantRow:
    """The row of this variant, added if new."""
    return _keyed(session, VariantRow, spec.digest, lambda: new_variant(spec))


def _keyed(session: Session, table: type[KeyedRow], key: str, make: Callable[[], KeyedRow]) -> KeyedRow:
    query = select(table).where(table.key == key)
    found = session.scalars(query).one_or_none()
    if found is not None:
        return found
    try:
        # A savepoint: on a server, another client may add the same row between the look and the insert.
        with session.begin_nested():
            row = make()
            session.add(row)
            session.flush()
            return row
    except IntegrityError:
        return session.scalars(query).one()


def new_environment(environment: Environment) -> EnvironmentRow:
    return EnvironmentRow(
        key=environment.digest,
        device=environment.device,
        arch=environment.arch,
        record=environment.to_dict(),
        created_at=datetime.now(UTC),
    )


def new_problem(problem: Problem) -> ProblemRow:
    names = ("operation", "target", "dtype", "head_dim", "batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_kv")
    return ProblemRow(
        key=problem.digest,
        name=problem.name,
        mask_terms=list(problem.mask.terms),
        mask_structure=problem.mask.structure,
        density=problem.mask.density,
        record=problem.to_dict(),
        created_at=datetime.now(UTC),
        **{name: getattr(problem, name) for name in names},
    )


def new_variant(spec: VariantSpec) -> VariantRow:
    return VariantRow(
        key=spec.digest,
        family=spec.family,
        mask_form=spec.mask_form,
        name=spec.name,
        record=spec.to_dict(),
        created_at=datetime.now(UTC),
    )


MEASUREMENT_COLUMNS = (
    *("uid", "kind", "time_us", "compile_s", "max_error", "rms_error", "registers", "smem_bytes"),
    *("message", "run_id", "kernel_digest", "baseline", "created_at"),
)
"""The fields that a measurement and its row share as they are."""


def new_measurement(session: Session, measurement: Measurement) -> MeasurementRow:
    """The row of this measurement, with the rows it refers to."""
    spec = measurement.spec
    return MeasurementRow(
        environment=environment_row(session, measurement.environment),
        problem=problem_row(session, measurement.problem),
        variant=variant_row(session, spec) if spec is not None else None,
        outcome=str(measurement.outcome),
        times_us=list(measurement.times_us),
        **{name: getattr(measurement, name) for name in MEASUREMENT_COLUMNS},
    )


def measurement_of(row: MeasurementRow) -> Measurement:
    """The measurement in a row; `StoreError` when someone else's hand made it unreadable."""
    return _readable(
        f"measurement {row.uid}",
        lambda: Measurement(
            environment=Environment.from_dict(row.environment.record),
            problem=Problem.from_dict(row.problem.record),
            spec=VariantSpec.from_dict(row.variant.record) if row.variant is not None else None,
            outcome=Outcome(row.outcome),
            times_us=tuple(row.times_us),
            **{name: getattr(row, name) for name in MEASUREMENT_COLUMNS},
        ),
    )


def winner_of(row: WinnerRow, source: str) -> Winner:
    """The winner in a row; `StoreError` when someone else's hand made it unreadable."""

    def read() -> Winner:
        environment = Environment.from_dict(row.environment.record)
        return Winner(
            problem=Problem.from_dict(row.problem.record),
            spec=VariantSpec.from_dict(row.variant.record),
            time_us=row.time_us,
            default_time_us=row.default_time_us,
            device=environment.device,
            source=source,
            baseline_name=row.baseline_name,
            baseline_time_us=row.baseline_time_us,
            verified=row.verified,
            created_at=row.created_at,
            environment=environment,
            measurement=row.measurement_uid,
        )

    return _readable(f"winner of problem {row.problem.key}", read)


def _readable(what: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (InvalidInput, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(f"{what} in the database cannot be read: {error}") from error


def winner_values(winner: Winner) -> dict[str, Any]:
    """The columns of a winner that a newer one replaces."""
    return {
        "measurement_uid": winner.measurement,
        "time_us": winner.time_us,
        "default_time_us": winner.default_time_us,
        "baseline_name": winner.baseline_name,
        "baseline_time_us": winner.baseline_time_us,
        "verified": winner.verified,
        "created_at": winner.created_at or datetime.now(UTC),
    }
