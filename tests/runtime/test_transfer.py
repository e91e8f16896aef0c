"""Export and import: nothing lost, nothing doubled, nothing half-done, and no code let in."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from tilewright.generator.errors import InvalidInput, Outcome, StoreError
from tilewright.generator.problem import Problem
from tilewright.generator.variant import VariantSpec
from tilewright.runtime.environment import Environment
from tilewright.runtime.store import Store
from tilewright.runtime.winners import WinnerTable, read_winner_lines


@pytest.fixture
def filled(
    url: str, environment: Environment, gpu_environment: Environment, make_problem: Callable[..., Problem]
) -> Store:
    """Two devices, two problems: failures, a baseline and winners among them."""
    store = Store(url)
    for e, target in ((environment, "cpu"), (gpu_environment, "sm_90a")):
        for length in (128, 8192):
            p = make_problem(target=target, seqlen_q=length)
            for n in (16, 32):
                spec = VariantSpec("forward", "list", 64, n, (("pack", n == 16), ("schedule", "static")))
                best = store.add_measurement(e, p, spec, Outcome.OK, time_us=float(n), times_us=[1.0 * n, 2.5])
            store.add_measurement(e, p, spec, Outcome.COMPILE, kind="final", message='error: "ü"\n  at line 3')
            store.add_measurement(e, p, None, Outcome.OK, kind="baseline", baseline="flex", time_us=99.0)
            store.set_winner(e, p, spec, time_us=16.0, default_time_us=32.0, verified=True, measurement=best.uid)
    return store


def exported(store: Store, **options: Any) -> bytes:
    stream = io.BytesIO()
    lines = store.export(stream, **options)
    assert stream.getvalue().count(b"\n") == lines
    return stream.getvalue()


def imported(path: Path, content: bytes) -> Store:
    store = Store(str(path))
    store.import_(io.BytesIO(content))
    return store


def test_an_export_holds_everything_and_an_import_gives_it_back(filled: Store, tmp_path: Path) -> None:
    content = exported(filled)
    with filled, Store(str(tmp_path / "other.db")) as other:
        report = other.import_(io.BytesIO(content))
        assert (report.measurements_added, report.winners_added) == (16, 4)
        assert other.measurements() == filled.measurements()
        assert sorted(other.winners(), key=repr) == sorted(filled.winners(), key=repr)
        assert exported(other) == content


def test_importing_again_changes_nothing(filled: Store) -> None:
    content = exported(filled)
    with filled:
        for _ in range(2):
            report = filled.import_(io.BytesIO(content))
            assert dataclasses.astuple(report) == (0, 16, 0, 0, 4)
        assert exported(filled) == content


def test_what_comes_from_another_gpu_stays_that_gpus(filled: Store, tmp_path: Path) -> None:
    content = exported(filled, device="Test GPU")
    filled.close()
    with imported(tmp_path / "other.db", content) as other:
        assert {m.environment.device for m in other.measurements()} == {"Test GPU"}
        table = WinnerTable(other.winners())
        problem = other.winners()[0].problem
        assert table.find(problem, "Test GPU") is not None
        assert table.find(problem, "Test CPU") is None


def test_exported_winners_are_the_shipped_format(filled: Store, tmp_path: Path) -> None:
    path = tmp_path / "here" / "winners.jsonl"
    path.parent.mkdir()
    with filled:
        filled.export(path, winners_only=True)
        found = read_winner_lines(path)
        assert [dataclasses.replace(w, source="store") for w in found] == sorted(
            filled.winners(), key=lambda w: (w.device, w.problem.name)
        )
    with Store(str(tmp_path / "fresh.db")) as fresh:
        assert fresh.import_(path).winners_added == 4
        assert fresh.measurements() == []


def test_a_newer_winner_replaces_and_an_unverified_never_does(
    tmp_path: Path, environment: Environment, problem: Problem, spec: VariantSpec
) -> None:
    other_spec = dataclasses.replace(spec, block_n=256)
    with Store(str(tmp_path / "a.db")) as a, Store(str(tmp_path / "b.db")) as b:
        older = a.set_winner(environment, problem, spec, time_us=3.0, verified=True)
        newer = b.set_winner(environment, problem, other_spec, time_us=2.0, verified=True)
        old_lines, new_lines = exported(a), exported(b)
        assert a.import_(io.BytesIO(new_lines)).winners_replaced == 1
        assert a.winners() == [newer]
        assert a.import_(io.BytesIO(old_lines)).winners_kept == 1
        assert a.winners() == [newer]
        assert older != newer
        b.set_winner(environment, problem, spec, time_us=1.0, verified=False)
        assert a.import_(io.BytesIO(exported(b))).winners_kept == 1
        assert a.winners() == [newer]


def edit(kind: str, /, **changes: Any) -> Callable[[list[dict[str, Any]]], int]:
    """Change the last line of this type; gives its number."""

    def apply(lines: list[dict[str, Any]]) -> int:
        index = max(n for n, line in enumerate(lines) if line["type"] == kind)
        for name, value in changes.items():
            target = lines[index]
            *path, last = name.split("__")
            for part in path:
                target = target[part]
            target[last] = value
        return index + 1

    return apply


BAD_LINES = {
    "unknown type": (edit("winner", type="kernel"), "type must be"),
    "unknown problem": (edit("measurement", problem="0" * 16), "not defined on a line before"),
    "unknown variant": (edit("winner", variant="0" * 16), "not defined on a line before"),
    "uid": (edit("measurement", uid="../../x"), "32 hex digits"),
    "outcome": (edit("measurement", outcome="splendid"), "splendid"),
    "kind": (edit("measurement", kind="x"), "kind must be"),
    "time as text": (edit("measurement", time_us="1.0"), "must be a number"),
    "negative time": (edit("winner", time_us=-1.0), "must not be negative"),
    "no time": (edit("winner", time_us=None), "time in microseconds"),
    "huge integer": (edit("measurement", registers=10**30), "integer from 0"),
    "date": (edit("measurement", created_at="yesterday"), "ISO 8601"),
    "verified": (edit("winner", verified="yes"), "true or false"),
    "dtype": (edit("problem", record__dtype="int8"), "dtype must be one of"),
    "head_dim as text": (edit("problem", record__head_dim="64"), "head_dim must be"),
    "head_dim": (edit("problem", record__head_dim=40), "multiple of 16"),
    "length": (edit("problem", record__seqlen_q=2**40), "seqlen_q must be"),
    "unknown field": (edit("problem", record__flavour="x"), "flavour"),
    "mask": (edit("problem", record__mask=None), "mask"),
    "mask terms": (edit("problem", record__mask__terms=["window", 3]), "mask terms"),
    "mask field": (edit("problem", record__mask__flavour=1), "mask fields"),
    "density": (edit("problem", record__mask__density=2.0), "density must be"),
    "terminal codes": (edit("problem", record__mask__structure="\x1b[2J"), "line of text"),
    "record": (edit("variant", record=[1]), "object is expected"),
    "path as family": (edit("variant", record__family="../evil"), "family must be a word"),
    "code in an axis": (edit("variant", record__schedule='static"; system("x"); //'), "schedule must be a word"),
    "code in a name": (edit("variant", record={"family": "f", "x;y": 1}), "axis name"),
    "nested axis": (edit("variant", record__pack={"a": 1}), "pack must be a word"),
    "mask form": (edit("variant", record__mask_form="magic"), "mask_form must be one of"),
    "missing tile": (edit("variant", record__block_m=None), "block_m"),
    "device": (edit("environment", record__device=""), "device"),
    "header": (edit("tilewright", type="other"), "not a tilewright export"),
    "newer format": (edit("tilewright", format=99), "format 99 is newer than 1.*upgrade"),
}


@pytest.fixture(scope="module")
def plain_export(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    environment = Environment("Test CPU", "cpu")
    problem = Problem("float32", 64, 1, 8, 8, 512, 512, "cpu")
    spec = VariantSpec("forward", "list", 64, 64, (("pack", True), ("schedule", "static")))
    with Store(str(tmp_path_factory.mktemp("plain") / "t.db")) as store:
        for _ in range(3):
            store.add_measurement(environment, problem, spec, Outcome.OK, time_us=1.0, times_us=[1.0])
        store.set_winner(environment, problem, spec, time_us=1.0)
        return exported(store)


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_and_nothing_is_imported(tmp_path: Path, plain_export: bytes, name: str) -> None:
    change, words = BAD_LINES[name]
    lines = [json.loads(line) for line in plain_export.splitlines()]
    number = change(lines)
    content = "\n".join(json.dumps(line) for line in lines).encode()
    with Store(str(tmp_path / "t.db")) as store:
        with pytest.raises(InvalidInput, match=rf"import, line {number}: .*{words}"):
            store.import_(io.BytesIO(content))
        assert (store.stats()["measurements"], store.stats()["environments"], store.winners()) == (0, 0, [])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x00", "line 1: not UTF-8"),
        (b"SQLite format 3\x00", "line 1: not JSON"),
        (b"[]\n", "line 1: an object is expected"),
        (b'{"type": "measurement"}\n', "line 1: not a tilewright export"),
        (b"[" * 100_000, "line 1: "),
    ],
    ids=["empty", "binary", "database", "list", "headless", "deep"],
)
def test_what_is_no_export_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    with Store(str(tmp_path / "t.db")) as store, pytest.raises(InvalidInput, match=words):
        store.import_(io.BytesIO(content))


def test_numbers_that_json_does_not_have_are_refused(tmp_path: Path, plain_export: bytes) -> None:
    for wrong in (b"NaN", b"Infinity", b"1e999"):
        content = plain_export.replace(b'"compile_s": null', b'"compile_s": ' + wrong)
        with Store(str(tmp_path / "t.db")) as store, pytest.raises(InvalidInput, match="number"):
            store.import_(io.BytesIO(content))


def test_a_file_cut_short_inside_a_line_is_refused(tmp_path: Path, plain_export: bytes) -> None:
    with Store(str(tmp_path / "t.db")) as store:
        lengths = list(range(1, len(plain_export), 97))
        for length in lengths:
            cut = plain_export[:length]
            if cut.endswith((b"}", b"\n")):
                continue
            with pytest.raises(InvalidInput, match=r"not JSON|header"):
                store.import_(io.BytesIO(cut))
        assert store.stats()["measurements"] == 0


def test_a_record_from_before_a_field_existed_has_its_default(tmp_path: Path, plain_export: bytes) -> None:
    lines = [json.loads(line) for line in plain_export.splitlines()]
    for line in lines:
        if line["type"] == "environment":
            del line["record"]["threads"], line["record"]["compiler"]
    with imported(tmp_path / "t.db", "\n".join(json.dumps(line) for line in lines).encode()) as store:
        assert store.measurements()[0].environment == Environment("Test CPU", "cpu")


def test_a_failed_export_leaves_the_old_file(tmp_path: Path, environment: Environment, problem: Problem) -> None:
    path = tmp_path / "export.jsonl"
    path.write_text("precious")
    spec = VariantSpec("forward", "list", 64, 64)
    with Store(str(tmp_path / "t.db")) as store:
        store.add_measurement(environment, problem, spec, Outcome.OK, time_us=1.0)
        with store.database.writing() as session:
            session.execute(text("UPDATE measurements SET outcome = 'nonsense'"))
        with pytest.raises(StoreError, match="cannot be read"):
            store.export(path)
    assert path.read_text() == "precious"
    assert {p.name for p in tmp_path.iterdir() if not p.name.startswith("t.db")} == {"export.jsonl"}


def test_an_export_onto_a_full_disk_says_so(tmp_path: Path) -> None:
    with Store(str(tmp_path / "t.db")) as store, pytest.raises(StoreError, match="No space left"):
        store.export("/dev/full")


def test_an_export_follows_a_link_and_fills_a_pipe(tmp_path: Path, plain_export: bytes) -> None:
    (tmp_path / "real.jsonl").write_text("old")
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    with imported(tmp_path / "t.db", plain_export) as store:
        store.export(tmp_path / "link.jsonl")
        assert (tmp_path / "link.jsonl").is_symlink()
        assert (tmp_path / "real.jsonl").read_bytes() == plain_export
        pipe = tmp_path / "pipe"
        subprocess.run(["mkfifo", str(pipe)], check=True)
        with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
            store.export(pipe)
            assert reader.communicate()[0] == plain_export


@pytest.mark.parametrize("name", ["missing/export.jsonl", "t.db/export.jsonl"])
def test_an_export_into_nowhere_is_invalid(tmp_path: Path, name: str) -> None:
    with Store(str(tmp_path / "t.db")) as store, pytest.raises(InvalidInput, match="cannot export to"):
        store.export(tmp_path / name)


def test_an_import_of_a_missing_file_is_invalid(tmp_path: Path) -> None:
    with Store(str(tmp_path / "t.db")) as store:
        for name in ("missing.jsonl", "."):
            with pytest.raises(InvalidInput, match="cannot import"):
                store.import_(tmp_path / name)


def test_a_large_import_is_whole(tmp_path: Path, plain_export: bytes) -> None:
    lines = [json.loads(line) for line in plain_export.splitlines()]
    model = next(line for line in lines if line["type"] == "measurement")
    lines += [{**model, "uid": f"{n:032x}"} for n in range(1200)]
    with imported(tmp_path / "t.db", "\n".join(json.dumps(line) for line in lines).encode()) as store:
        assert store.stats()["measurements"] == 1203
