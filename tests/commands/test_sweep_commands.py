"""`tilewright sweep` and `tilewright replay` as their users call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilewright.cli import main
from tilewright.tuner.strategies import STRATEGIES
from tilewright.tuner.sweep_record import read_record

pytestmark = pytest.mark.usefixtures("lasting_workers")

WORKLOAD = """
[[row]]
name = "A1 tiny"
targets = ["cpu"]
dtype = "float32"
head_dim = 48
num_heads = 2
seqlen_q = 64
mask = "causal()"

[[row]]
name = "A2 other"
targets = ["cpu"]
dtype = "float32"
head_dim = 48
num_heads = 1
seqlen_q = 32
"""


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(WORKLOAD)
    return str(path)


def test_a_sweep_is_recorded_resumed_and_replayed(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweeps"
    arguments = ["sweep", "--workload", workload, "--rows", "A1", "--target", "cpu", "--out", str(out)]
    assert main([*arguments, "--limit", "2", "--json"]) == 0
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out)["rows"]
    assert (row["row"], row["wanted"], row["measured"], row["complete"]) == ("A1 tiny", 2, 2, True)
    assert "2 of " in captured.err
    assert "2/2 ok 2, best " in captured.err
    file = out / "a1-tiny.csv"
    assert list(out.iterdir()) == [file]
    record = read_record(file)
    assert record.about["command"].endswith("--target cpu --rows A1 --limit 2")
    assert min(line.time_us for line in record.lines if line.time_us) == pytest.approx(row["best_us"], abs=1e-3)

    assert main([*arguments, "--limit", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2 known" in captured.err
    assert len(read_record(file).lines) == 3

    assert main(["replay", str(file), "--runs", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (landscape,) = document["landscapes"]
    assert (landscape["row"], landscape["variants"]) == ("A1 tiny", 3)
    assert landscape["legal"] > 3
    assert [found["strategy"] for found in document["strategies"]] == list(STRATEGIES)
    for found in document["strategies"]:
        assert len(found["near"]["runs"]) == 2
        assert 1 <= found["near"]["median"] <= found["near"]["worst"] <= 3
        assert found["near"]["worst"] <= found["best"]["worst"] <= 3

    assert main(["replay", str(file), "--strategies", "gaussian,random", "--within", "0", "--limit", "1"]) == 0
    table = capsys.readouterr().out
    assert "A1 tiny: 3 of " in table
    assert "gaussian" in table
    assert "tpe" not in table


def test_a_sweep_that_the_time_limit_cuts_is_exit_code_1(workload: str, tmp_path: Path) -> None:
    out = str(tmp_path / "sweeps")
    arguments = ["sweep", "--workload", workload, "--target", "cpu", "--out", out, "--limit", "1"]
    assert main([*arguments, "--time-limit", "0.001"]) == 1
    assert main(arguments) == 0
    assert {path.name for path in Path(out).iterdir()} == {"a1-tiny.csv", "a2-other.csv"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sweep", "--out", "x", "--workload", "nope"], "workload must be one of anchors"),
        (["sweep", "--out", "x", "--target", "cpu", "--rows", "W99"], "no row of quick for cpu has 'W99' in its name"),
        (["sweep", "--out", "x", "--target", "tpu"], "target must be auto, cpu, cuda or cuda:INDEX; got 'tpu'"),
        (["sweep", "--out", "x", "--time-limit", "0"], "must be a positive number of seconds, got 0"),
        (["sweep", "--target", "cpu"], "--out"),
        (["replay", "none.csv"], "sweep none.csv cannot be read: No such file"),
        (["replay", "none.csv", "--strategies", "luck"], "strategy must be one of tpe"),
        (["replay", "none.csv", "--within", "-1"], "must be a percentage of 0 or more, got -1"),
        (["replay"], "CSV"),
    ],
)
def test_bad_input_is_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(arguments)
    except SystemExit as stopped:  # argparse's own way
        code = int(stopped.code or 0)
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_a_directory_that_cannot_be_written_is_told(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["sweep", "--workload", workload, "--target", "cpu", "--limit", "1", "--rows", "A2"]
    assert main([*arguments, "--out", str(tmp_path / "file")]) == 2
    assert "cannot be written" in (said := capsys.readouterr().err)
    assert "give another --out" in said
