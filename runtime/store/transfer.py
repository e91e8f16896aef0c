"""Export and import: measurements and winners between databases, merged without duplicates."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sqlalchemy import select
from sqlalchemy.orm import Session

from tilewright.generator.errors import InvalidInput, StoreError
from tilewright.runtime.lines import LineWriter, read_lines
from tilewright.runtime.records import Measurement, Winner
from tilewright.runtime.store.connection import Database
from tilewright.runtime.store.models import EnvironmentRow, MeasurementRow, ProblemRow, WinnerRow
from tilewright.runtime.store.rows import RowCache, measurement_of, new_measurement, put_winner, winner_of

UIDS_A_QUERY = 500
"""How many uids are looked up at once: SQLite takes 999 parameters where it is old."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import changed, in measurements and winners."""

    measurements_added: int
    measurements_known: int
    winners_added: int
    winners_replaced: int
    winners_kept: int


def export_to(database: Database, file: str | Path | IO[bytes], *, winners_only: bool, device: str | None) -> int:
    """Write the export to a path or a binary stream; see `Store.export`."""
    if not isinstance(file, (str, Path)):
        return _write(database, file, winners_only, device)
    # A link keeps pointing where it points; a pipe or a device is written to, not replaced.
    path = Path(file).resolve()
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as stream:
                return _write(database, stream, winners_only, device)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                count = _write(database, stream, winners_only, device)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise InvalidInput(
            f"cannot export to {path}: {error.strerror}; name a file in a directory that exists"
        ) from error
    except OSError as error:
        raise StoreError(f"cannot export to {path}: {error.strerror}; nothing was changed there") from error
    return count


def _write(database: Database, stream: IO[bytes], winners_only: bool, device: str | None) -> int:
    count = 0
    with database.reading() as session:
        for line in _lines(session, winners_only, device):
            stream.write(line.encode())
            count += 1
    stream.flush()
    return count


def _lines(session: Session, winners_only: bool, device: str | None) -> Iterator[str]:
    writer = LineWriter()
    yield writer.header()
    if not winners_only:
        query = select(MeasurementRow).order_by(MeasurementRow.created_at, MeasurementRow.uid)
        if device is not None:
            query = query.where(MeasurementRow.environment.has(EnvironmentRow.device == device))
        for row in session.scalars(query.execution_options(yield_per=500)):
            yield from writer.measurement(measurement_of(row))
    winners = [winner_of(row, "store") for row in session.scalars(select(WinnerRow))]
    winners.sort(key=_winner_order)
    for winner in winners:
        if device is None or winner.device == device:
            yield from writer.winner(winner)


def _winner_order(winner: Winner) -> tuple[str, str, str, float]:
    # By what a person reads, so that a diff of two exports shows what changed; the newest of a problem first,
    # since a table of winners keeps the first.
    age = -winner.created_at.timestamp() if winner.created_at else 0.0
    return winner.device, winner.problem.name, winner.problem.digest, age


def import_from(database: Database, file: str | Path | IO[bytes]) -> ImportReport:
    """Merge the export at a path or in a binary stream; see `Store.import_`."""
    if not isinstance(file, (str, Path)):
        return _merge(database, file, str(getattr(file, "name", "the import")))
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot import {file}: {error.strerror}") from error
    return _merge(database, io.BytesIO(content), str(file))


def _merge(database: Database, stream: IO[bytes], name: str) -> ImportReport:
    # Every line is read and checked before the first is stored.
    measurements: dict[str, Measurement] = {}
    winners: list[Winner] = []
    for found in read_lines(stream, name):
        if isinstance(found, Measurement):
            measurements.setdefault(found.uid, found)
        else:
            winners.append(found)
    with database.writing() as session:
        database.lock(session)
        cache = RowCache(session)
        known = _known(session, list(measurements))
        for uid, measurement in measurements.items():
            if uid not in known:
                session.add(new_measurement(cache, measurement))
        session.flush()
        fates = [_merge_winner(cache, winner) for winner in winners]
    return ImportReport(
        measurements_added=len(measurements) - len(known),
        measurements_known=len(known),
        winners_added=fates.count("added"),
        winners_replaced=fates.count("replaced"),
        winners_kept=fates.count("kept"),
    )


def _known(session: Session, uids: list[str]) -> set[str]:
    found: set[str] = set()
    for start in range(0, len(uids), UIDS_A_QUERY):
        part = uids[start : start + UIDS_A_QUERY]
        found.update(session.scalars(select(MeasurementRow.uid).where(MeasurementRow.uid.in_(part))))
    return found


def _merge_winner(cache: RowCache, winner: Winner) -> str:
    assert winner.environment is not None
    query = (
        select(WinnerRow)
        .where(WinnerRow.environment.has(EnvironmentRow.key == winner.environment.digest))
        .where(WinnerRow.problem.has(ProblemRow.key == winner.problem.digest))
    )
    here = cache.session.scalars(query).one_or_none()
    if here is not None:
        newer = winner.created_at is not None and winner.created_at > here.created_at
        if not newer or (here.verified and not winner.verified):
            return "kept"
    put_winner(cache, winner.environment, winner)
    return "added" if here is None else "replaced"
