"""A PostgreSQL server of the tests' own, databases on it and on SQLite, values to store."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.variant import VariantSpec
from tilewright.runtime.environment import Environment


def _server_binary(name: str) -> str | None:
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    return shutil.which(name) or (str(installed[0]) if installed else None)


def _server_user() -> dict[str, Any]:
    """Whom the server runs as: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = names.get("postgres") or names["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The socket directory of a running PostgreSQL server that ends with the tests."""
    initdb, pg_ctl = _server_binary("initdb"), _server_binary("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("PostgreSQL's initdb and pg_ctl are not installed")
    # Not pytest's own directory: that one is closed to the server's user, and too long a name for a socket.
    directory = Path(tempfile.mkdtemp(prefix="tw-pg-"))
    user = _server_user()
    if user:
        os.chown(directory, user["user"], user["group"])
    options: dict[str, Any] = {"check": True, "cwd": directory, "env": {**os.environ, "HOME": str(directory)}, **user}
    data, log = directory / "data", directory / "log"
    try:
        command = [initdb, "-D", str(data), "-U", "tester", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(command, stdout=subprocess.DEVNULL, **options)
        settings = f"-k {directory} -c listen_addresses='' -c fsync=off"
        start = [pg_ctl, "-D", str(data), "-l", str(log), "-w", "-t", "60", "-o", settings, "start"]
        subprocess.run(start, stdout=subprocess.DEVNULL, **options)
        yield str(directory)
        stop = [pg_ctl, "-D", str(data), "-m", "immediate", "-w", "stop"]
        subprocess.run(stop, stdout=subprocess.DEVNULL, **options)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_server: str) -> str:
    """The URL of an empty database on the server."""
    import psycopg

    # Emptied rather than made anew: a new database is a thousand files.
    with psycopg.connect(host=postgres_server, user="tester", dbname="postgres", autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return f"postgresql://tester@/postgres?host={postgres_server}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that does not hold anything yet, of each kind."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{tmp_path}/tuning.db"


@pytest.fixture
def environment() -> Environment:
    return Environment("Test CPU", "cpu", torch="2.9.0", compiler="g++ 13", python="3.11", os="Linux", threads=2)


@pytest.fixture
def gpu_environment() -> Environment:
    return Environment("Test GPU", "sm_90a", driver="550.1", cuda="12.8", torch="2.9.0", compiler="nvcc 12.8")


@pytest.fixture
def make_problem() -> Callable[..., Problem]:
    """A sliding-window problem, fields replaced by what is given."""

    def make(**fields: Any) -> Problem:
        mask = MaskClass(("window", "stride"), "sliding_window(32, 32) | global_stride(512)", density=0.01)
        values: dict[str, Any] = {
            "dtype": "float32",
            "head_dim": 64,
            "batch": 1,
            "num_heads": 8,
            "num_kv_heads": 8,
            "seqlen_q": 8192,
            "seqlen_kv": 8192,
            "target": "cpu",
            "mask": mask,
        }
        return Problem(**{**values, **fields})

    return make


@pytest.fixture
def problem(make_problem: Callable[..., Problem]) -> Problem:
    return make_problem()


@pytest.fixture
def spec() -> VariantSpec:
    return VariantSpec("forward_cpu", "gather", 64, 64, (("pack", True), ("schedule", "dynamic"), ("unroll", 4)))
