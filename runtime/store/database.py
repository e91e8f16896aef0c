"""`Store`: every measurement and every winner, in one database that several processes may use at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from sqlalchemy import Select, select

from tilewright.generator.errors import InvalidInput, Outcome
from tilewright.generator.problem import Problem
from tilewright.generator.variant import VariantSpec
from tilewright.runtime.environment import Environment
from tilewright.runtime.records import Measurement, Winner, is_time
from tilewright.runtime.store import queries, transfer
from tilewright.runtime.store.connection import Database
from tilewright.runtime.store.migrations import SCHEMA_VERSION, prepare
from tilewright.runtime.store.models import EnvironmentRow, MeasurementRow, ProblemRow, VariantRow, WinnerRow
from tilewright.runtime.store.queries import Best
from tilewright.runtime.store.rows import (
    RowCache,
    measurement_of,
    new_measurement,
    put_winner,
    winner_of,
)
from tilewright.runtime.store.transfer import ImportReport

DEFAULT_FILE = "tilewright.db"
"""The database's name in the cache directory."""


def default_path() -> Path:
    """Where the store is when nothing else is said: one SQLite file in the cache directory. Makes neither."""
    from tilewright.generator.toolchain import cache_path

    return cache_path() / DEFAULT_FILE


def _default_for_writing() -> str:
    from tilewright.generator.toolchain import cache_dir

    return str(cache_dir() / DEFAULT_FILE)


class Store:
    """The tuning database at `url`: a SQLAlchemy URL, a path to an SQLite file, or None for the default file.

    A new database is made, an older one migrated. Every method is one transaction, safe beside other processes and
    threads, and a process killed at any moment loses at most what it had not yet been told was stored.
    Raises `StoreError` for a database that is corrupt, foreign, newer, locked, full or unreachable, leaving it as it
    is; `InvalidInput` for a URL that makes no sense and for a cache directory that cannot be used. A place that
    cannot be written is opened for reading.
    """

    def __init__(self, url: str | None = None) -> None:
        self.database = Database(_default_for_writing() if url is None else url)
        try:
            prepare(self.database)
        except BaseException:
            self.database.close()
            raise

    @classmethod
    def open_existing(cls, url: str | None = None) -> Store | None:
        """The store at `url`, or None where there is no such SQLite file yet; looking never makes one."""
        from tilewright.generator.toolchain import check_cache_dir

        if url is None and default_path().exists():
            check_cache_dir(default_path().parent)
        url = str(default_path()) if url is None else url
        path = Database(url).path
        return cls(url) if path is None or path.exists() else None

    @property
    def label(self) -> str:
        """The file's path, or the URL without its password."""
        return self.database.label

    def close(self) -> None:
        """Close every connection."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add_measurement(
        self,
        environment: Environment,
        problem: Problem,
        spec: VariantSpec | None,
        outcome: Outcome,
        *,
        kind: str = "search",
        time_us: float | None = None,
        times_us: Sequence[float] = (),
        compile_s: float | None = None,
        max_error: float | None = None,
        rms_error: float | None = None,
        registers: int | None = None,
        smem_bytes: int | None = None,
        message: str = "",
        run_id: str = "",
        kernel_digest: str = "",
        baseline: str = "",
    ) -> Measurement:
        """Store one measurement, whatever its outcome; no kill of this process loses it once this returned.

        spec: None with kind `baseline`, where `baseline` names PyTorch's implementation.
        time_us: the median, required when outcome is ok; times_us: the samples; compile_s: seconds.
        """
        measurement = Measurement(
            environment=environment,
            problem=problem,
            spec=spec,
            outcome=Outcome(outcome),
            kind=kind,
            time_us=time_us,
            times_us=tuple(times_us),
            compile_s=compile_s,
            max_error=max_error,
            rms_error=rms_error,
            registers=registers,
            smem_bytes=smem_bytes,
            message=message,
            run_id=run_id,
            kernel_digest=kernel_digest,
            baseline=baseline,
        )
        self.add_measurements([measurement])
        return measurement

    def add_measurements(self, measurements: Iterable[Measurement]) -> None:
        """Store these in one transaction: whatever becomes of this process, all of them are there or none.

        For what makes sense only together, such as an interleaved comparison: half of one could only be taken again.
        """
        with self.database.writing() as session:
            cache = RowCache(session)
            session.add_all([new_measurement(cache, measurement) for measurement in measurements])

    def measurements(
        self,
        environment: Environment | None = None,
        problem: Problem | None = None,
        *,
        spec: VariantSpec | None = None,
        outcome: Outcome | None = None,
        kind: str | None = None,
        run_id: str | None = None,
        device: str | None = None,
        newest_first: bool = False,
        limit: int | None = None,
    ) -> list[Measurement]:
        """The measurements that match every argument given, in the order they were taken."""
        query = select(MeasurementRow)
        if environment is not None:
            query = query.where(MeasurementRow.environment.has(EnvironmentRow.key == environment.digest))
        if device is not None:
            query = query.where(MeasurementRow.environment.has(EnvironmentRow.device == device))
        if problem is not None:
            query = query.where(MeasurementRow.problem.has(ProblemRow.key == problem.digest))
        if spec is not None:
            query = query.where(MeasurementRow.variant.has(VariantRow.key == spec.digest))
        for column, value in (
            (MeasurementRow.outcome, outcome),
            (MeasurementRow.kind, kind),
            (MeasurementRow.run_id, run_id),
        ):
            if value is not None:
                query = query.where(column == str(value))
        order = (MeasurementRow.created_at, MeasurementRow.id)
        query = query.order_by(*(column.desc() for column in order) if newest_first else order).limit(limit)
        with self.database.reading() as session:
            return [measurement_of(row) for row in session.scalars(query)]

    def set_winner(
        self,
        environment: Environment,
        problem: Problem,
        spec: VariantSpec,
        *,
        time_us: float,
        default_time_us: float | None = None,
        baseline_name: str = "",
        baseline_time_us: float | None = None,
        verified: bool = False,
        measurement: str | None = None,
    ) -> Winner:
        """Make `spec` the winner of `problem` in `environment`, in place of the one before.

        measurement: the uid of the measurement that it won with. Times in microseconds, from one interleaved run.
        """
        for name, value in (("default_time_us", default_time_us), ("baseline_time_us", baseline_time_us)):
            if value is not None and not is_time(value):
                raise InvalidInput(f"{name} must be a positive number of microseconds or None, got {value}")
        winner = Winner(
            problem=problem,
            spec=spec,
            time_us=time_us,
            default_time_us=default_time_us,
            device=environment.device,
            baseline_name=baseline_name,
            baseline_time_us=baseline_time_us,
            verified=verified,
            created_at=datetime.now(UTC),
            environment=environment,
            measurement=measurement,
        )
        with self.database.writing() as session:
            put_winner(RowCache(session), environment, winner)
        return winner

    def winners(
        self,
        *,
        device: str | None = None,
        environment: Environment | None = None,
        problem: Problem | None = None,
        verified: bool | None = None,
    ) -> list[Winner]:
        """The winners that match every argument given, newest first (so the first of equal keys counts)."""
        query: Select[Any] = select(WinnerRow)
        if environment is not None:
            query = query.where(WinnerRow.environment.has(EnvironmentRow.key == environment.digest))
        if device is not None:
            query = query.where(WinnerRow.environment.has(EnvironmentRow.device == device))
        if problem is not None:
            query = query.where(WinnerRow.problem.has(ProblemRow.key == problem.digest))
        if verified is not None:
            query = query.where(WinnerRow.verified == verified)
        query = query.order_by(WinnerRow.created_at.desc(), WinnerRow.id.desc())
        with self.database.reading() as session:
            return [winner_of(row, "store") for row in session.scalars(query)]

    def best(self, *, device: str | None = None, target: str | None = None) -> list[Best]:
        """For each problem and environment the winner, or the fastest so far where the tuning was not finished."""
        with self.database.reading() as session:
            return queries.best(session, device, target)

    def stats(self) -> dict[str, Any]:
        """Counts by outcome, kind, device and family, and what tuning gained (medians); JSON-ready."""
        with self.database.reading() as session:
            return {"database": self.label, "schema": SCHEMA_VERSION, **queries.stats(session)}

    def show(self, identity: str) -> dict[str, Any]:
        """All that is stored under a key or uid, or the beginning of one (at least 4 hex digits); JSON-ready.

        Raises `InvalidInput` when nothing or several things are called that.
        """
        with self.database.reading() as session:
            return queries.show(session, identity)

    def export(self, file: str | Path | IO[bytes], *, winners_only: bool = False, device: str | None = None) -> int:
        """Write measurements and winners as JSON lines (see `runtime.lines`); gives the number of lines.

        A path is replaced only when everything was written. Equal contents give equal files.
        """
        return transfer.export_to(self.database, file, winners_only=winners_only, device=device)

    def import_(self, file: str | Path | IO[bytes]) -> ImportReport:
        """Merge an export: all of it or, when a line can't be used, nothing (`InvalidInput` with the line's number).

        What is here already is skipped. A winner is replaced by a newer one, never a verified by an unverified one.
        """
        return transfer.import_from(self.database, file)
