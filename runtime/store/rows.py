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


class RowCache:
    """The rows of environments, problems and variants by key, within one session; adds those that are new."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._rows: dict[tuple[type, str], EnvironmentRow | ProblemRow | VariantRow] = {}

    def environment(self, environment: Environment) -> EnvironmentRow:
        return self._keyed(EnvironmentRow, environment.digest, lambda: new_environment(environment))

    def problem(self, problem: Problem) -> ProblemRow:
        return self._keyed(ProblemRow, problem.digest, lambda: new_problem(problem))

    def variant(self, spec: VariantSpec) -> VariantRow:
        return self._keyed(VariantRow, spec.digest, lambda: new_variant(spec))

    def _keyed(self, table: type[KeyedRow], key: str, make: Callable[[], KeyedRow]) -> KeyedRow:
        row = self._rows.get((table, key))
        if not isinstance(row, table):
            row = self._rows[table, key] = self._found_or_added(table, key, make)
        return row

    def _found_or_added(self, table: type[KeyedRow], key: str, make: Callable[[], KeyedRow]) -> KeyedRow:
        query = select(table).where(table.key == key)
        found = self.session.scalars(query).one_or_none()
        if found is not None:
            return found
        try:
            # A savepoint: on a server, another client may add the same row between the look and the insert.
            with self.session.begin_nested():
                row = make()
                self.session.add(row)
                self.session.flush()
                return row
        except IntegrityError:
            return self.session.scalars(query).one()


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


def new_measurement(cache: RowCache, measurement: Measurement) -> MeasurementRow:
    """A row for this measurement, with the rows it refers to."""
    spec = measurement.spec
    return MeasurementRow(
        environment=cache.environment(measurement.environment),
        problem=cache.problem(measurement.problem),
        variant=cache.variant(spec) if spec is not None else None,
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


def put_winner(cache: RowCache, environment: Environment, winner: Winner) -> None:
    """Add this winner, or replace the one that its environment and problem have."""
    session = cache.session
    rows = cache.environment(environment), cache.problem(winner.problem)
    variant = cache.variant(winner.spec)
    query = select(WinnerRow).where(WinnerRow.environment_id == rows[0].id, WinnerRow.problem_id == rows[1].id)
    found = session.scalars(query.with_for_update(of=WinnerRow)).one_or_none()
    if found is None:
        try:
            with session.begin_nested():
                session.add(WinnerRow(environment=rows[0], problem=rows[1], variant=variant, **winner_values(winner)))
                session.flush()
                return
        except IntegrityError:
            found = session.scalars(query).one()
    found.variant = variant
    for name, value in winner_values(winner).items():
        setattr(found, name, value)
