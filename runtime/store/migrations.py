"""The schema's versions: how a new database is made, an older one brought forward, a foreign one recognised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import inspect, select, text
from sqlalchemy.orm import Session

from tilewright.generator.problem import Problem
from tilewright.generator.variant import VariantSpec
from tilewright.runtime.environment import Environment
from tilewright.runtime.store.connection import Database
from tilewright.runtime.store.models import Base, EnvironmentRow, ProblemRow, SchemaRow, VariantRow

SCHEMA_VERSION = 1
"""The version that `models.py` describes and that the records' fields belong to.

It goes up by one with each change of a table, and with each new field of `Problem`, `MaskClass`, `VariantSpec` or
`Environment`, whose digests are keys here: its migration then calls `rekey`.
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step: `apply` changes a database of version `version - 1` into one of `version`, inside a transaction."""

    version: int
    reason: str
    apply: Callable[[Session], None]


MIGRATIONS: tuple[Migration, ...] = ()
"""Every step after version 1, in order. Steps use plain SQL, since models.py moves on."""


def prepare(database: Database, migrations: Sequence[Migration] = MIGRATIONS, version: int = SCHEMA_VERSION) -> None:
    """Leave `database` at schema `version`, made new or migrated.

    Raises `StoreError`, having written nothing, when it belongs to something else or to a newer tilewright.
    """
    database.check_file()
    with database.reading() as session:
        found = _version(database, session, version)
    if found == version:
        return
    if database.read_only:
        state = "is empty" if found is None else f"has schema {found}, which must be migrated to {version}"
        raise database.failure(f"it {state}, and it is read-only; open it once where it can be written")
    database.use_wal()
    with database.writing() as session:
        database.lock(session)
        # Another process may have done it while this one waited for the lock.
        found = _version(database, session, version)
        if found is None:
            Base.metadata.create_all(session.connection())
            session.add(SchemaRow(id=1, version=version))
            return
        for step in sorted(migrations, key=lambda m: m.version):
            if found < step.version <= version:
                step.apply(session)
        session.execute(text("UPDATE tilewright_schema SET version = :version"), {"version": version})


def _version(database: Database, session: Session, known: int) -> int | None:
    """The schema version found, None in an empty database; refuses foreign and newer ones."""
    tables = inspect(session.connection()).get_table_names()
    if not tables:
        return None
    if SchemaRow.__tablename__ not in tables:
        listed = ", ".join(sorted(tables)[:5]) + (", ..." if len(tables) > 5 else "")
        raise database.failure(
            f"it belongs to something else (tables {listed}); nothing was written: name another database with --db"
        )
    found: int | None = session.scalar(select(SchemaRow.version))
    if found is None:
        raise database.failure("its schema has no version, so it is damaged; nothing was written: move it away")
    if found > known:
        raise database.failure(
            f"its schema is {found}, newer than {known}, the newest this tilewright knows; nothing was written: "
            "upgrade tilewright, or name another database with --db"
        )
    return found


def rekey(session: Session) -> None:
    """Compute the keys of every environment, problem and variant again, after a record gained a field.

    Records read from before the field have its default, so that what was measured keeps being found.
    """
    for environment in session.scalars(select(EnvironmentRow)).all():
        _rekey_row(environment, Environment.from_dict(environment.record))
    for problem in session.scalars(select(ProblemRow)).all():
        _rekey_row(problem, Problem.from_dict(problem.record))
    for variant in session.scalars(select(VariantRow)).all():
        _rekey_row(variant, VariantSpec.from_dict(variant.record))
    session.flush()


def _rekey_row(row: EnvironmentRow | ProblemRow | VariantRow, value: Environment | Problem | VariantSpec) -> None:
    row.record, row.key = value.to_dict(), value.digest
