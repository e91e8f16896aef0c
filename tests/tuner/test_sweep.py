"""Sweeps on the CPU target: real compilers, real workers, files that go on where they were cut."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tilewright.generator.build_pool import BuildPool
from tilewright.generator.errors import InvalidInput, Outcome
from tilewright.generator.render import Rendered, render
from tilewright.generator.space import default_variant, legal_variants
from tilewright.generator.variant import Kernel, VariantSpec
from tilewright.tuner.crew import Crew, Job, Step
from tilewright.tuner.devices import TuningTarget, resolve_target
from tilewright.tuner.measured import Measured
from tilewright.tuner.sweep import SLOW, SweepResult, SweepSettings, record_path, sweep
from tilewright.tuner.sweep_record import RecordWriter, SweepLine, read_record
from tilewright.tuner.worker import Worker
from tilewright.tuner.workloads import WorkloadRow

pytestmark = [pytest.mark.early, pytest.mark.usefixtures("lasting_workers")]

# A head_dim that other tests do not use: some count on kernels that were never built.
ROW = WorkloadRow("S1 small: causal", "float32", 48, 2, 64, mask="causal()")
OTHER = dataclasses.replace(ROW, name="S2 dense", mask="full()")


@pytest.fixture(scope="module")
def target() -> TuningTarget:
    return resolve_target("cpu")


def run(
    target: TuningTarget, out: Path, limit: int | None = 3, rows: tuple[WorkloadRow, ...] = (ROW,), **settings: object
) -> tuple[list[SweepResult], list[SweepLine]]:
    """The results, and the lines that were added."""
    added: list[SweepLine] = []

    def progress(result: SweepResult, line: SweepLine | None) -> None:
        if line is not None:
            added.append(line)

    return list(sweep(rows, target, out, SweepSettings(limit=limit, jobs=1, **settings), progress)), added  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def swept(
    target: TuningTarget, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[SweepResult], list[SweepLine]]:
    """A finished sweep of three variants: where it lies, and what `run` gave."""
    out = tmp_path_factory.mktemp("swept")
    return out, *run(target, out, command="tilewright sweep --limit 3")


def test_every_variant_has_a_line_and_a_second_sweep_adds_what_is_missing(
    target: TuningTarget, swept: tuple[Path, list[SweepResult], list[SweepLine]], tmp_path: Path
) -> None:
    out, (result,), added = swept
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    assert result.complete
    assert (result.known, result.measured, len(added)) == (0, 3, 3)
    path = tmp_path / "s1-small-causal.csv"
    record = read_record(path)
    legal = legal_variants(ROW.problem("cpu"))
    assert record.about["row"] == ROW.name
    assert record.about["command"] == "tilewright sweep --limit 3"
    assert record.about["legal"] == str(len(legal))
    assert target.environment.device in record.about["environment"]
    default = default_variant(ROW.problem("cpu"))
    assert record.lines[0].spec == default, "the others are stopped against its time"
    assert [line.spec for line in record.lines[1:]] == [spec for spec in legal if spec != default][:2]
    for line in record.lines:
        assert line.outcome is Outcome.OK
        assert line.spec == legal[line.rank]
        assert line.time_us is not None
        assert line.samples >= 1
        assert line.max_error is not None
        assert len(line.kernel) == 16
        assert "17 cases within bounds" in line.message
    assert result.best is not None
    assert result.best.time_us == min(line.time_us for line in added if line.time_us)

    before = path.read_text().splitlines()[-3:]
    ((again,), added) = run(target, tmp_path, limit=4)
    assert (again.known, again.measured, len(added)) == (3, 1, 1)
    assert path.read_text().splitlines()[-4:-1] == before, "what was known stays as it was"
    assert len({line.spec for line in read_record(path).lines}) == 4


def test_a_half_written_line_and_a_changed_kernel_are_measured_again(
    target: TuningTarget, swept: tuple[Path, list[SweepResult], list[SweepLine]], tmp_path: Path
) -> None:
    shutil.copytree(swept[0], tmp_path, dirs_exist_ok=True)
    path = record_path(tmp_path, ROW)
    lines = path.read_text().splitlines(keepends=True)
    changed = read_record(path).lines[0].kernel
    # As kill -9 leaves it, and as a template that was edited since does.
    path.write_text("".join(lines[:-1]).replace(changed, "0" * 16) + lines[-1][:25])
    ((result,), added) = run(target, tmp_path)
    assert (result.known, len(added)) == (1, 2)
    assert [line.kernel for line in read_record(path).lines].count(changed) == 1
    assert result.complete


def test_a_file_of_another_device_or_problem_is_refused_and_kept(
    target: TuningTarget, swept: tuple[Path, list[SweepResult], list[SweepLine]], tmp_path: Path
) -> None:
    shutil.copytree(swept[0], tmp_path, dirs_exist_ok=True)
    path = record_path(tmp_path, ROW)
    before = path.read_text()
    with pytest.raises(InvalidInput, match=r"is a sweep with another inputs: .*give another --out"):
        run(target, tmp_path, rows=(dataclasses.replace(ROW, seed=1),))
    moved = TuningTarget("cpu", ("cpu",), dataclasses.replace(target.environment, device="Other CPU"))
    with pytest.raises(InvalidInput, match="another environment"):
        run(moved, tmp_path)
    assert path.read_text() == before


def test_the_time_limit_ends_a_sweep_that_then_goes_on(target: TuningTarget, tmp_path: Path) -> None:
    (results, added) = run(target, tmp_path, rows=(ROW, OTHER), time_limit_s=1e-3)
    assert [result.complete for result in results] == [False, False]
    assert added == []
    (results, added) = run(target, tmp_path, limit=1, rows=(ROW, OTHER))
    assert [result.complete for result in results] == [True, True]
    assert len(added) == 2


def test_what_does_not_compile_has_a_line(
    target: TuningTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = ROW.problem("cpu")
    broken = next(spec for spec in legal_variants(problem) if spec != default_variant(problem))
    submit = BuildPool.submit

    def breaking(self: BuildPool, kernel: Kernel) -> object:
        rendered = render(kernel)
        if kernel.spec == broken:
            sources = {name: f"{text}\n#error broken on purpose\n" for name, text in rendered.sources.items()}
            rendered = Rendered(kernel, sources, rendered.language, rendered.digest)
        return submit(self, rendered)

    monkeypatch.setattr(BuildPool, "submit", breaking)
    ((result,), added) = run(target, tmp_path)
    (failed,) = [line for line in added if line.outcome is not Outcome.OK]
    assert (failed.spec, failed.outcome, failed.time_us, failed.samples) == (broken, Outcome.COMPILE, None, 0)
    assert "broken on purpose" in failed.message
    assert result.complete
    ((again,), added) = run(target, tmp_path)
    assert (again.known, added) == (3, []), "a failure is an outcome, not tried again"


def test_variants_far_slower_than_the_best_are_told_to_stop(
    target: TuningTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []
    survey = Worker.survey

    def watching(self: Worker, kernel: Kernel, artifact: Path, limit_us: float | None, timeout_s: float) -> Measured:
        limits.append(limit_us)
        return survey(self, kernel, artifact, limit_us, timeout_s)

    monkeypatch.setattr(Worker, "survey", watching)
    (_, added) = run(target, tmp_path)
    first, second = added[0].time_us, added[1].time_us
    assert first is not None
    assert second is not None
    assert limits == [None, SLOW * first, SLOW * min(first, second)]


def test_families_are_chosen_by_name(target: TuningTarget, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="has no variant of forward_mma; its families are forward_cpu"):
        run(target, tmp_path, families=("forward_mma",))


def test_rows_that_would_share_a_file_are_refused(target: TuningTarget, tmp_path: Path) -> None:
    rows = (ROW, dataclasses.replace(ROW, name="s1 small, causal"))
    with pytest.raises(InvalidInput, match="several rows would be written to"):
        run(target, tmp_path, rows=rows)


def test_a_gpu_sweep_takes_builds_as_they_come(
    target: TuningTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path that a GPU takes, on this device: the first variant goes to be timed before the last one is built."""
    problem, built = ROW.problem("cpu"), list[VariantSpec]()
    monkeypatch.setattr(WorkloadRow, "problem", lambda self, arch: problem)
    submit = BuildPool.submit

    def watching(self: BuildPool, kernel: Kernel) -> object:
        future = submit(self, kernel)
        future.add_done_callback(lambda done: built.append(done.result().kernel.spec))
        return future

    monkeypatch.setattr(BuildPool, "submit", watching)
    ahead: list[int] = []
    measure = Crew.measure

    def counting(self: Crew, jobs: Sequence[Job], **how: Any) -> Iterator[Step]:
        ahead.append(len(built))
        return measure(self, jobs, **how)

    monkeypatch.setattr(Crew, "measure", counting)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    streaming = TuningTarget("streaming", ("cpu",), target.environment)
    ((result,), _) = run(streaming, tmp_path / "out", limit=3)
    assert result.complete
    assert ahead[0] < 3
    assert sorted(built, key=str) == sorted((line.spec for line in result.lines), key=str)


AXES = {"block_m": 64, "block_n": 32, "mask_form": "list", "num_stages": 2, "fast": True, "order": "forward"}


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    wide = VariantSpec.from_values("forward_a", AXES)  # type: ignore[arg-type]
    narrow = VariantSpec.from_values("forward_b", {"block_m": 8, "block_n": 16, "mask_form": "scan", "depth": 0})
    lines = [
        SweepLine(
            wide, 1, Outcome.OK, 12.345, 0.0123, 9, 168, 0, 4096, 3.25, 0.00321, "cuda:1", "ab12", "all right, two"
        ),
        SweepLine(narrow, 0, Outcome.COMPILE, message='error: "x", line 1'),
    ]
    path = tmp_path / "deep" / "record.csv"
    with RecordWriter(path, {"row": "a: b"}, lines[:1], [wide, narrow]) as writer:
        writer.add(lines[1])
    record = read_record(path)
    assert record.name == "a: b"
    assert list(record.lines) == lines


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rank,variant\n1,x\n", "is no sweep of format 1: it has no head"),
        ("# format: 9\nrank\n", "format 9"),
        ("# format: 1\nrank,variant,family\n0,x,forward_a\n", "line 3: not a variant's line"),
        (
            "# format: 1\nrank,variant,family,mask_form,block_m,block_n,outcome\n0,x,forward_a,list,8,8,ok\n",
            "its axes give forward_a/list 8x8, its name is x",
        ),
    ],
)
def test_what_is_no_record_is_told_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=said):
        read_record(path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_record(tmp_path / "none.csv")
