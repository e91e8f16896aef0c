"""Opening a database and running transactions on it; every failure comes out as one `StoreError`."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Engine, StaticPool, create_engine, event, make_url, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool

from tilewright.generator.errors import InvalidInput, StoreError

BUSY_TIMEOUT_S = 30.0
"""How long a writer waits for another process's transaction; each is a few rows, so minutes never pass."""

SQLITE_HEADER = b"SQLite format 3\x00"

ADVISORY_LOCK = 7_745_119_301
"""PostgreSQL's number of the lock behind `Database.lock`: an arbitrary constant."""

SQLITE_FAILURES: dict[int, str] = {
    sqlite3.SQLITE_FULL: "the disk is full; free some space (what was stored before is intact)",
    sqlite3.SQLITE_READONLY: "it is read-only; make it writable, or name another with TILEWRIGHT_CACHE_DIR or --db",
    sqlite3.SQLITE_BUSY: f"another process held it for {BUSY_TIMEOUT_S:g} s; end that process or try again",
    sqlite3.SQLITE_NOTADB: "it is no SQLite database and was left as it is; move it away, or name another with --db",
    sqlite3.SQLITE_CORRUPT: "the file is damaged and was left as it is; move it away, then import an export of it",
    sqlite3.SQLITE_IOERR: "the disk fails or is full; what was stored before is untouched",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check that its directory exists and that you may write there",
    sqlite3.SQLITE_PERM: "permission denied; check who owns the file and its directory",
}
"""What to tell for SQLite's primary result codes."""


def parse_url(url: str) -> URL:
    """The SQLAlchemy URL in `url`; a bare path is an SQLite file. Raises `InvalidInput` on anything else."""
    if "://" not in url:
        if not url.strip():
            raise InvalidInput("the database must be a path or a URL such as sqlite:///tuning.db, got nothing")
        return URL.create("sqlite", database=url)
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise InvalidInput(
            "the database must be a path or a SQLAlchemy URL such as sqlite:///tuning.db or "
            f"postgresql://user@host/name; got one that does not parse: {_first_line(error)}"
        ) from error
    # The driver that the `postgresql` extra installs, whatever this SQLAlchemy's default is.
    return parsed.set(drivername="postgresql+psycopg") if parsed.drivername == "postgresql" else parsed


class Database:
    """An engine with this store's settings: WAL, a busy timeout, foreign keys, one writer at a time.

    Opens nothing until asked. A file in a place that cannot be written is opened for reading only.
    """

    def __init__(self, url: str) -> None:
        self.url = parse_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.path: Path | None = None
        if self.is_sqlite and self.url.database not in (None, "", ":memory:"):
            self.path = Path(str(self.url.database))
        self.read_only = self.path is not None and self.path.exists() and not _writable(self.path)
        try:
            self.engine = self._create_engine()
        except NoSuchModuleError as error:
            raise InvalidInput(f"no database of the kind {self.url.drivername}: {_first_line(error)}") from error
        except ModuleNotFoundError as error:
            hint = "pip install 'tilewright[postgresql]'" if "postgresql" in self.url.drivername else "pip install it"
            raise StoreError(f"database {self.label}: the driver {error.name} is not installed; {hint}") from error
        except (ArgumentError, TypeError) as error:
            raise InvalidInput(f"database {self.label}: {_first_line(error)}") from error

    @property
    def label(self) -> str:
        """The database in messages: the file's path, or the URL without its password."""
        return str(self.path) if self.path is not None else self.url.render_as_string(hide_password=True)

    def _create_engine(self) -> Engine:
        if not self.is_sqlite:
            return create_engine(self.url, pool_pre_ping=True)
        options: dict[str, Any] = {"connect_args": {"timeout": BUSY_TIMEOUT_S, "check_same_thread": False}}
        if self.path is None:
            options["poolclass"] = StaticPool
        elif self.read_only:
            options = {"creator": self._connect_read_only, "poolclass": QueuePool}
        engine = create_engine(self.url, **options)
        event.listen(engine, "connect", _on_sqlite_connect)
        event.listen(engine, "begin", _on_sqlite_begin)
        return engine

    def _connect_read_only(self) -> sqlite3.Connection:
        assert self.path is not None
        # Reading a WAL database needs its -shm file, which cannot be made here. Without a -wal file nothing is
        # pending, and the main file alone is the whole truth.
        pending = Path(f"{self.path}-wal").exists()
        uri = f"file:{quote(str(self.path.absolute()))}?mode=ro" + ("" if pending else "&immutable=1")
        return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, check_same_thread=False)

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session that sees one state of the database and changes nothing."""
        with self.failures(), Session(self.engine) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session whose changes are all committed at the end, or none of them."""
        if self.read_only:
            raise self.failure(SQLITE_FAILURES[sqlite3.SQLITE_READONLY])
        writer = self.engine.execution_options(tilewright_write=True)
        with self.failures(), Session(writer, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Turn what SQLAlchemy and the driver raise inside into a `StoreError` in words."""
        try:
            yield
        except DBAPIError as error:
            code = getattr(error.orig, "sqlite_errorcode", None)
            told = SQLITE_FAILURES.get(code & 0xFF) if code is not None else None
            raise self.failure(told or _first_line(error.orig or error)) from error
        except (sqlite3.Error, SQLAlchemyError) as error:
            raise self.failure(_first_line(error)) from error

    def failure(self, reason: str) -> StoreError:
        """A `StoreError` about this database."""
        return StoreError(f"database {self.label}: {reason}")

    def check_file(self) -> None:
        """Refuse an existing file that is not SQLite's: a very short one it would take for empty, and overwrite."""
        if self.path is None or not self.path.exists():
            return
        try:
            with self.path.open("rb") as stream:
                header = stream.read(len(SQLITE_HEADER))
        except OSError as error:
            raise self.failure(f"it cannot be read: {error.strerror}") from error
        if header not in (b"", SQLITE_HEADER):
            raise self.failure(SQLITE_FAILURES[sqlite3.SQLITE_NOTADB])

    def use_wal(self) -> None:
        """Make an SQLite file use a write-ahead log, so that readers and a writer do not block each other."""
        if self.path is None or self.read_only:
            return
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        with self.failures():
            while True:
                connection = self.engine.raw_connection()
                try:
                    # A file system that can't do it answers with another mode; that one works too, only slower.
                    connection.cursor().execute("PRAGMA journal_mode=WAL").fetchall()
                    return
                except sqlite3.OperationalError as error:
                    # SQLite does not always wait for this lock itself when several processes open a new file.
                    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                        raise DBAPIError("PRAGMA journal_mode", None, error) from error
                    time.sleep(0.02)
                finally:
                    connection.close()

    def lock(self, session: Session) -> None:
        """Hold off every other process that makes, migrates or merges, until this transaction ends."""
        # An SQLite writer is alone as it is.
        if self.url.get_backend_name() == "postgresql":
            session.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": ADVISORY_LOCK})

    def close(self) -> None:
        """Close every connection; the next use opens them again."""
        self.engine.dispose()


def _on_sqlite_connect(connection: sqlite3.Connection, _record: object) -> None:
    # Python's driver must not begin transactions on its own: `_on_sqlite_begin` says which kind.
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys=ON")
    # With a write-ahead log this survives any kill of the process. A power cut may take the last commits, never the
    # database; writers hold the lock for much shorter without a flush to the disk each time.
    connection.execute("PRAGMA synchronous=NORMAL")


def _on_sqlite_begin(connection: Connection) -> None:
    # A writer takes the lock first: one that read before it writes fails at once, without the busy timeout,
    # when another process wrote in between.
    writes = connection.get_execution_options().get("tilewright_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK) and os.access(path.absolute().parent, os.W_OK)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
