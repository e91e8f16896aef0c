"""The schema's versions: new, older, newer and damaged ones, and what must not change without a migration."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from tilewright.generator.errors import Outcome, StoreError
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.variant import VariantSpec
from tilewright.runtime.environment import Environment
from tilewright.runtime.store import Store
from tilewright.runtime.store.connection import Database
from tilewright.runtime.store.migrations import MIGRATIONS, SCHEMA_VERSION, Migration, prepare, rekey
from tilewright.runtime.store.models import Base, EnvironmentRow, ProblemRow

RECORDS = {
    1: "Environment(device arch driver cuda torch compiler python os tilewright threads) "
    "MaskClass(terms structure per_head per_batch density) "
    "Problem(dtype head_dim batch num_heads num_kv_heads seqlen_q seqlen_kv target mask operation) "
    "VariantSpec(family mask_form block_m block_n axes)",
}
TABLES = {1: "d585b074a9e852d8"}


def run_sql(database: Database, statement: str) -> None:
    with database.writing() as session:
        session.execute(text(statement))


def add_column(session: Session) -> None:
    session.execute(text("ALTER TABLE measurements ADD COLUMN clock_mhz INTEGER"))


def fail_after_adding_a_column(session: Session) -> None:
    add_column(session)
    session.execute(text("SELECT * FROM no_such_table"))


def columns(database: Database) -> set[str]:
    with database.reading() as session:
        return set(session.execute(text("SELECT * FROM measurements")).keys())


def version(database: Database) -> int | None:
    with database.reading() as session:
        return session.scalar(text("SELECT version FROM tilewright_schema"))


def test_records_change_only_together_with_the_schema_version() -> None:
    found = " ".join(
        f"{record.__name__}({' '.join(f.name for f in dataclasses.fields(record))})"
        for record in (Environment, MaskClass, Problem, VariantSpec)
    )
    # A new field changes every stored key: raise SCHEMA_VERSION, add a migration that calls rekey, extend RECORDS.
    assert found == RECORDS[SCHEMA_VERSION]


def test_tables_change_only_together_with_the_schema_version() -> None:
    described = "\n".join(
        f"{table.name}.{column.name} {column.type} {'null' if column.nullable else 'not null'}"
        for table in Base.metadata.sorted_tables
        for column in table.columns
    )
    # A changed table needs a migration for the databases that exist: raise SCHEMA_VERSION, add it, extend TABLES.
    assert hashlib.sha256(described.encode()).hexdigest()[:16] == TABLES[SCHEMA_VERSION], described


def test_every_version_after_the_first_has_its_migration() -> None:
    assert [step.version for step in MIGRATIONS] == list(range(2, SCHEMA_VERSION + 1))


def test_an_older_database_is_brought_forward_with_what_it_holds(
    url: str, environment: Environment, problem: Problem, spec: VariantSpec
) -> None:
    with Store(url) as store:
        stored = store.add_measurement(environment, problem, spec, Outcome.OK, time_us=1.0)
    database = Database(url)
    steps = [Migration(SCHEMA_VERSION + 1, "clocks", add_column), Migration(SCHEMA_VERSION, "done long ago", run_away)]
    prepare(database, steps, SCHEMA_VERSION + 1)
    assert "clock_mhz" in columns(database)
    assert version(database) == SCHEMA_VERSION + 1
    prepare(database, steps, SCHEMA_VERSION + 1)
    with database.reading() as session:
        assert session.scalar(text("SELECT uid FROM measurements")) == stored.uid
    database.close()


def run_away(session: Session) -> None:
    raise AssertionError("a step that was done must not be done again")


def test_a_migration_that_fails_changes_nothing(url: str) -> None:
    Store(url).close()
    database = Database(url)
    before = columns(database)
    with pytest.raises(StoreError, match="no_such_table"):
        prepare(database, [Migration(SCHEMA_VERSION + 1, "bad", fail_after_adding_a_column)], SCHEMA_VERSION + 1)
    assert columns(database) == before
    assert version(database) == SCHEMA_VERSION
    database.close()


def test_a_newer_database_is_refused_and_left_alone(url: str) -> None:
    with Store(url) as store:
        run_sql(store.database, f"UPDATE tilewright_schema SET version = {SCHEMA_VERSION + 7}")
    with pytest.raises(StoreError, match=rf"schema is {SCHEMA_VERSION + 7}, newer than .*upgrade tilewright"):
        Store(url)
    database = Database(url)
    assert version(database) == SCHEMA_VERSION + 7
    database.close()


def test_a_database_without_its_version_is_refused(url: str) -> None:
    with Store(url) as store:
        run_sql(store.database, "DELETE FROM tilewright_schema")
    with pytest.raises(StoreError, match="has no version"):
        Store(url)


def test_an_older_read_only_database_says_that_it_must_be_migrated(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    Store(str(path)).close()
    database = Database(str(path))
    database.read_only = True
    with pytest.raises(StoreError, match="must be migrated"):
        prepare(database, [Migration(SCHEMA_VERSION + 1, "clocks", add_column)], SCHEMA_VERSION + 1)
    database.close()


def test_rekey_finds_again_what_was_stored_before_a_record_gained_a_field(
    url: str, environment: Environment, problem: Problem, spec: VariantSpec
) -> None:
    with Store(url) as store:
        store.set_winner(environment, problem, spec, time_us=1.0)
        with store.database.writing() as session:
            for table, newest in ((ProblemRow, "operation"), (EnvironmentRow, "threads")):
                row = session.scalars(select(table)).one()
                row.record = {name: value for name, value in row.record.items() if name != newest}
                row.key = "of the old fields"
        assert store.winners(problem=problem) == []
        with store.database.writing() as session:
            rekey(session)
        (found,) = store.winners(problem=problem)
    assert found.problem == problem
    assert found.environment == dataclasses.replace(environment, threads=0)
