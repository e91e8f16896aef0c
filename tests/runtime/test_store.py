"""The store: what goes in comes out, from several processes, after kills, and out of unusable databases in words."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import math
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from sqlalchemy import event

from tilewright.generator.errors import InvalidInput, Outcome, StoreError
from tilewright.generator.problem import Problem
from tilewright.generator.variant import VariantSpec
from tilewright.runtime.environment import Environment
from tilewright.runtime.records import MESSAGE_MAX, Measurement
from tilewright.runtime.store import Store
from tilewright.runtime.store.rows import RowCache, new_problem, put_winner

FORK = multiprocessing.get_context("fork")
"""Real processes that need not import torch again; each opens its own store."""

ENVIRONMENT = Environment("Test CPU", "cpu")
PROBLEM = Problem("float32", 64, 1, 8, 8, 512, 512, "cpu")


def numbered(n: int) -> VariantSpec:
    return VariantSpec("forward_cpu", "list", 64, 64, (("unroll", n),))


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_measurement_comes_back_as_it_went_in(
    url: str, environment: Environment, problem: Problem, spec: VariantSpec
) -> None:
    with Store(url) as store:
        stored = store.add_measurement(
            environment,
            problem,
            spec,
            Outcome.OK,
            kind="final",
            time_us=12.5,
            times_us=[12.0, 12.5, 13.0],
            compile_s=1.25,
            max_error=1e-6,
            rms_error=1e-7,
            registers=128,
            smem_bytes=49152,
            message="naïve ✓",
            run_id="run",
            kernel_digest="abc",
        )
        assert store.measurements(environment, problem) == [stored]
    with Store(url) as store:
        assert store.measurements(environment, problem) == [stored]
    assert stored.created_at.tzinfo is not None


def test_measurements_that_belong_together_are_all_stored_or_none(
    url: str, environment: Environment, problem: Problem
) -> None:
    first, second, third = (
        Measurement(
            environment=environment, problem=problem, spec=numbered(n), outcome=Outcome.OK, kind="final", time_us=n
        )
        for n in (1, 2, 3)
    )
    with Store(url) as store:
        store.add_measurements([])
        store.add_measurements([first, second])
        assert store.measurements() == [first, second]
        with pytest.raises(StoreError):
            store.add_measurements([third, first])
        assert store.measurements() == [first, second], "the third was good, but came with one that is there already"


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.OK], ids=str)
def test_failures_are_stored_with_their_outcome_and_words(
    url: str, environment: Environment, problem: Problem, spec: VariantSpec, outcome: Outcome
) -> None:
    with Store(url) as store:
        store.add_measurement(environment, problem, spec, outcome, message="line one\x00\nline two \udcff")
        (found,) = store.measurements()
    assert (found.outcome, found.time_us) == (outcome, None)
    assert found.message == "line one\nline two ?"


def test_what_is_not_finite_is_stored_as_absent_and_long_messages_are_cut(
    url: str, environment: Environment, problem: Problem, spec: VariantSpec
) -> None:
    with Store(url) as store:
        store.add_measurement(
            environment, problem, spec, Outcome.WRONG, max_error=math.nan, rms_error=math.inf, message="x" * 10**6
        )
        (found,) = store.measurements()
    assert (found.max_error, found.rms_error) == (None, None)
    assert len(found.message) == MESSAGE_MAX


def test_ok_needs_a_time(url: str, environment: Environment, problem: Problem, spec: VariantSpec) -> None:
    with Store(url) as store:
        for time_us in (None, math.nan, math.inf, 0.0, -1.0):
            with pytest.raises(InvalidInput, match="time in microseconds"):
                store.add_measurement(environment, problem, spec, Outcome.OK, time_us=time_us)
        assert store.measurements() == []


def test_a_baseline_has_a_name_and_no_variant(
    url: str, environment: Environment, problem: Problem, spec: VariantSpec
) -> None:
    with Store(url) as store:
        stored = store.add_measurement(
            environment, problem, None, Outcome.OK, kind="baseline", baseline="flex", time_us=9.0
        )
        assert store.measurements(kind="baseline") == [stored]
        for wrong in ({"kind": "search", "spec": None}, {"kind": "baseline", "spec": spec, "baseline": "flex"}):
            with pytest.raises(InvalidInput, match="baseline"):
                store.add_measurement(environment, problem, outcome=Outcome.OK, time_us=1.0, **wrong)  # type: ignore[arg-type]


def test_measurements_are_told_apart_by_every_filter(
    url: str, environment: Environment, gpu_environment: Environment, make_problem: Callable[..., Problem]
) -> None:
    problems = make_problem(), make_problem(seqlen_q=1)
    specs = VariantSpec("forward_cpu", "list", 16, 16), VariantSpec("forward_cpu", "list", 16, 32)
    with Store(url) as store:
        stored = [
            store.add_measurement(e, p, s, Outcome.OK, time_us=1.0, run_id=r)
            for e in (environment, gpu_environment)
            for p in problems
            for s in specs
            for r in ("a", "b")
        ]
        assert store.measurements() == stored
        for filters in (
            {"environment": environment},
            {"device": "Test GPU"},
            {"problem": problems[1]},
            {"spec": specs[0]},
            {"run_id": "b"},
        ):
            assert len(store.measurements(**filters)) == 8, filters  # type: ignore[arg-type]
        assert store.measurements(outcome=Outcome.WRONG) == []
        assert store.measurements(newest_first=True, limit=2) == stored[:-3:-1]


def test_a_winner_replaces_the_one_before_it_of_its_environment_and_problem_alone(
    url: str, environment: Environment, gpu_environment: Environment, problem: Problem, spec: VariantSpec
) -> None:
    other = dataclasses.replace(spec, block_n=128)
    with Store(url) as store:
        store.set_winner(environment, problem, spec, time_us=10.0)
        on_gpu = store.set_winner(gpu_environment, problem, spec, time_us=1.0, verified=True)
        kept = store.set_winner(
            environment,
            problem,
            other,
            time_us=8.0,
            default_time_us=16.0,
            baseline_name="flex",
            baseline_time_us=32.0,
            verified=True,
        )
        assert store.winners() == [kept, on_gpu]
        assert store.winners(device="Test GPU") == store.winners(environment=gpu_environment) == [on_gpu]
        assert store.winners(verified=False) == []
    assert (kept.gain, kept.speedup, kept.device) == (2.0, 4.0, "Test CPU")


@pytest.mark.parametrize("field", ["time_us", "default_time_us", "baseline_time_us"])
def test_a_winners_times_must_be_times(
    tmp_path: Path, environment: Environment, problem: Problem, spec: VariantSpec, field: str
) -> None:
    with Store(str(tmp_path / "t.db")) as store:
        for value in (0.0, math.nan, -1.0):
            with pytest.raises(InvalidInput, match="microseconds"):
                store.set_winner(environment, problem, spec, **{"time_us": 1.0, field: value})
        assert store.winners() == []


def write_ten(url: str, name: str) -> None:
    for half in range(2):
        with Store(url) as store:
            for n in range(5):
                spec = numbered(half * 5 + n)
                store.add_measurement(ENVIRONMENT, PROBLEM, spec, Outcome.OK, time_us=1.0, run_id=name)
                store.set_winner(ENVIRONMENT, PROBLEM, spec, time_us=1.0)
                assert len(store.measurements(run_id=name)) == half * 5 + n + 1


def test_processes_open_a_new_database_and_write_at_once(url: str) -> None:
    writers = [FORK.Process(target=write_ten, args=(url, f"run {n}")) for n in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    with Store(url) as store:
        assert len({m.uid for m in store.measurements()}) == 60
        assert len(store.winners()) == 1
        stats = store.stats()
    assert (stats["environments"], stats["problems"], stats["variants"]) == (1, 1, 10)


def test_threads_share_a_store(url: str, environment: Environment, problem: Problem) -> None:
    def add(n: int) -> None:
        spec = VariantSpec("forward_cpu", "list", 16, 16, (("unroll", n % 7),))
        store.add_measurement(environment, problem, spec, Outcome.OK, time_us=1.0)

    with Store(url) as store, ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(60)))
        assert len(store.measurements()) == 60


def test_readers_see_the_state_before_an_unfinished_write_and_do_not_wait(
    url: str, environment: Environment, problem: Problem, spec: VariantSpec
) -> None:
    with Store(url) as store, Store(url) as reader:
        winner = store.set_winner(environment, problem, spec, time_us=2.0)
        with store.database.writing() as session:
            put_winner(RowCache(session), environment, dataclasses.replace(winner, time_us=1.0))
            session.flush()
            assert reader.winners() == [winner]
        assert [w.time_us for w in reader.winners()] == [1.0]


def write_until_killed(url: str, told: Connection) -> None:
    store = Store(url)
    for n in itertools.count():
        stored = store.add_measurement(
            ENVIRONMENT, PROBLEM, numbered(n % 50), Outcome.OK, time_us=1.0, message="x" * 5000
        )
        told.send(stored.uid)


@pytest.mark.parametrize("count", [1, 7, 40])
def test_a_killed_writer_loses_nothing_that_it_was_told_was_stored(url: str, count: int) -> None:
    receiver, sender = FORK.Pipe(duplex=False)
    writer = FORK.Process(target=write_until_killed, args=(url, sender))
    writer.start()
    sender.close()
    told = [receiver.recv() for _ in range(count)]
    writer.kill()
    with contextlib.suppress(EOFError):
        while True:
            told.append(receiver.recv())
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    with Store(url) as store:
        stored = [m.uid for m in store.measurements()]
    # The one in flight may have been committed just before it was told.
    assert set(told) <= set(stored)
    assert len(stored) <= len(told) + 1


def hang_while_writing(url: str, told: Connection) -> None:
    with Store(url).database.writing() as session:
        RowCache(session).environment(ENVIRONMENT)
        told.send("inside")
        time.sleep(600)


def test_a_writer_killed_inside_a_transaction_leaves_nothing_and_blocks_nobody(url: str) -> None:
    receiver, sender = FORK.Pipe(duplex=False)
    writer = FORK.Process(target=hang_while_writing, args=(url, sender))
    writer.start()
    assert receiver.recv() == "inside"
    writer.kill()
    writer.join()
    with Store(url) as store:
        assert store.stats()["environments"] == 0
        store.add_measurement(ENVIRONMENT, PROBLEM, numbered(1), Outcome.OK, time_us=1.0)


@pytest.mark.parametrize(
    "content",
    [b"\x00\x01junk" * 2000, b"SQLite format 3\x00" + b"\xff" * 5000, b"an export, not a database\n", b"x"],
    ids=["noise", "header-then-noise", "text", "one-byte"],
)
def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tuning.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"tuning\.db: .*(no SQLite database|damaged)"):
        Store(str(path))
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["tuning.db"]


def test_damaged_pages_are_told_and_left_alone(
    tmp_path: Path, environment: Environment, problem: Problem, spec: VariantSpec
) -> None:
    path = tmp_path / "tuning.db"
    with Store(str(path)) as store:
        for _ in range(30):
            store.add_measurement(environment, problem, spec, Outcome.WRONG, message="x" * 3000)
    content = bytearray(path.read_bytes())
    # The first pages hold the schema; the measurements after them turn to noise.
    for start in range(16 * 4096, len(content) - 4096, 4096):
        content[start : start + 4096] = b"\xa5" * 4096
    path.write_bytes(content)
    with Store(str(path)) as store, pytest.raises(StoreError, match="damaged and was left as it is"):
        store.measurements()
    assert path.read_bytes() == bytes(content)


def test_a_database_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (text)")
    before = sha(path)
    with pytest.raises(StoreError, match=r"belongs to something else \(tables notes\).*--db"):
        Store(str(path))
    assert sha(path) == before
    assert os.listdir(tmp_path) == ["notes.db"]


@pytest.mark.postgres
def test_a_server_database_of_something_else_is_refused(postgres_url: str) -> None:
    import psycopg

    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
        connection.execute("CREATE TABLE notes (text text)")
    with pytest.raises(StoreError, match="belongs to something else"):
        Store(postgres_url)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere/t\.db: it cannot be opened; check that its directory exists"):
        Store(str(tmp_path / "nowhere" / "t.db"))


@pytest.mark.parametrize("bad", ["", "nosuchdb://host/x", "://", "postgresql://h:x/"])
def test_a_url_that_makes_no_sense_is_invalid(bad: str) -> None:
    with pytest.raises((InvalidInput, StoreError), match="database"):
        Store(bad)


@pytest.mark.postgres
def test_an_unreachable_server_is_told_without_the_password(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        Store(f"postgresql://someone:s3cret@/db?host={tmp_path}")
    assert "s3cret" not in str(caught.value)
    assert "someone" in str(caught.value)


def fill(store: Store, stored: list[Measurement]) -> None:
    while True:
        stored.append(store.add_measurement(ENVIRONMENT, PROBLEM, numbered(1), Outcome.WRONG, message="x" * 8000))


def test_a_full_disk_is_told_and_what_was_stored_stays(
    tmp_path: Path, environment: Environment, problem: Problem, spec: VariantSpec
) -> None:
    def limit(pages: int) -> None:
        store.close()
        event.listen(store.database.engine, "connect", lambda c, _: c.execute(f"PRAGMA max_page_count={pages}"))

    with Store(str(tmp_path / "t.db")) as store:
        stored = [store.add_measurement(environment, problem, spec, Outcome.WRONG, message="x" * 8000)]
        limit(60)
        with pytest.raises(StoreError, match="the disk is full; free some space"):
            fill(store, stored)
        assert len(stored) > 3
        assert store.measurements() == stored
        limit(10_000)
        stored.append(store.add_measurement(environment, problem, spec, Outcome.WRONG))
        assert store.measurements() == stored


def test_a_disk_that_really_fills_up(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system can be mounted only by root")
    try:
        with Store(str(tmp_path / "t.db")) as store:
            stored: list[Measurement] = []
            with pytest.raises(StoreError, match="full"):
                fill(store, stored)
            assert store.measurements() == stored
        with Store(str(tmp_path / "t.db")) as store:
            assert store.measurements() == stored
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def as_nobody(action: Callable[[], None]) -> str:
    """What `action` raises in a process that root's powers do not help; empty where it succeeds."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = ""
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            action()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        told = stream.read().decode()
    os.waitpid(pid, 0)
    return told


def open_up(path: Path) -> None:
    """Let other users look into the directories above `path`, which pytest makes for its own user alone."""
    for directory in (path, *path.parents):
        if directory.stat().st_uid == os.geteuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o055)
        if directory.name.startswith("pytest-of-"):
            break


def test_a_read_only_directory_can_be_read_and_says_why_not_written(
    tmp_path: Path, environment: Environment, problem: Problem, spec: VariantSpec
) -> None:
    path = tmp_path / "cache" / "t.db"
    path.parent.mkdir()
    with Store(str(path)) as store:
        stored = store.add_measurement(environment, problem, spec, Outcome.OK, time_us=1.0)
    before = sha(path)
    open_up(path.parent)
    path.chmod(0o444)
    path.parent.chmod(0o555)

    def read() -> None:
        with Store(str(path)) as store:
            assert store.measurements() == [stored]

    def write() -> None:
        with Store(str(path)) as store:
            store.add_measurement(environment, problem, spec, Outcome.OK, time_us=1.0)

    assert as_nobody(read) == ""
    told = as_nobody(write)
    assert told.startswith("StoreError:")
    assert "it is read-only; make it writable" in told
    told = as_nobody(lambda: Store(str(path.parent / "new.db")).close())
    assert told.startswith("StoreError:")
    assert "cannot be opened" in told
    assert sha(path) == before
    path.parent.chmod(0o755)


def test_looking_for_a_database_never_makes_one(tmp_path: Path) -> None:
    assert Store.open_existing(str(tmp_path / "t.db")) is None
    assert os.listdir(tmp_path) == []
    Store(str(tmp_path / "t.db")).close()
    found = Store.open_existing(str(tmp_path / "t.db"))
    assert found is not None
    found.close()


def test_show_finds_by_the_beginning_of_an_id_and_says_when_it_cannot(
    url: str, environment: Environment, problem: Problem, spec: VariantSpec
) -> None:
    with Store(url) as store:
        stored = store.add_measurement(environment, problem, spec, Outcome.OK, time_us=1.0)
        assert store.show(stored.uid[:10])["uid"] == stored.uid
        assert store.show(problem.digest)["record"] == problem.to_dict()
        assert store.show(spec.digest)["name"] == spec.name
        assert store.show(environment.digest)["measurement_count"] == 1
        for wrong, words in (("f" * 32, "nothing"), ("%%%%", "hex digits"), ("abc", "hex digits")):
            with pytest.raises(InvalidInput, match=words):
                store.show(wrong)


def test_show_lists_the_candidates_of_an_ambiguous_id(
    tmp_path: Path, environment: Environment, problem: Problem
) -> None:
    with Store(str(tmp_path / "t.db")) as store:
        with store.database.writing() as session:
            for n, key in enumerate(("abcd01", "abcd02")):
                row = new_problem(dataclasses.replace(problem, batch=n))
                row.key = key
                session.add(row)
        with pytest.raises(InvalidInput, match=r"abcd01, abcd02; give more digits"):
            store.show("abcd")


def test_best_is_the_winner_or_the_fastest_so_far(
    url: str, environment: Environment, make_problem: Callable[..., Problem]
) -> None:
    finished, unfinished, failed = (make_problem(seqlen_q=n) for n in (1, 2, 3))
    specs = [VariantSpec("forward_cpu", "list", 16, n) for n in (16, 32, 64)]
    with Store(url) as store:
        for p in (finished, unfinished):
            for n, s in enumerate(specs):
                store.add_measurement(environment, p, s, Outcome.OK, time_us=30.0 - n)
        store.add_measurement(environment, unfinished, None, Outcome.OK, kind="baseline", baseline="flex", time_us=1.0)
        store.add_measurement(environment, failed, specs[0], Outcome.WRONG, time_us=1.0)
        store.set_winner(environment, finished, specs[0], time_us=20.0, default_time_us=30.0, verified=True)
        found = store.best()
        assert [(b.problem, b.spec, b.time_us, b.final, b.measured) for b in found] == [
            (finished, specs[0], 20.0, True, 3),
            (unfinished, specs[2], 28.0, False, 3),
        ]
        assert store.best(device="another") == store.best(target="sm_80") == []


def test_stats_count_and_take_medians(url: str, environment: Environment, make_problem: Callable[..., Problem]) -> None:
    spec = VariantSpec("forward_cpu", "list", 16, 16)
    with Store(url) as store:
        assert store.stats()["measurements"] == 0
        for n, outcome in enumerate((Outcome.OK, Outcome.OK, Outcome.COMPILE)):
            p = make_problem(batch=n)
            store.add_measurement(environment, p, spec, outcome, time_us=1.0, compile_s=0.5)
            store.set_winner(environment, p, spec, time_us=1.0, default_time_us=n + 1.0)
        found = store.stats()
    assert found["by_outcome"] == {"compile": 1, "ok": 2}
    assert found["by_device"] == {"Test CPU": 3}
    assert (found["winners"], found["winners_verified"], found["median_gain_over_default"]) == (3, 0, 2.0)
    assert found["compile_s"] == 1.5
