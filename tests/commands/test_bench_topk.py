"""`tilewright bench --suite topk` from the command line, at small lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tilewright.cli import main
from tilewright.commands.bench_topk import topk_table
from tilewright.tuner import topk_bench
from tilewright.tuner.peers import ANOTHER
from tilewright.tuner.topk_bench import TopkBenchRow

ADDED = {"block_size", "top_k", "dense_share", "own_ratio", "launches"}


def test_the_suite_gives_tables_json_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(topk_bench, "UNEVEN", (1, 2, 3, 4, 5, 8, 15, 2))
    monkeypatch.setattr(topk_bench, "EVEN", (5,) * 8)
    target, picture = tmp_path / "rows.json", tmp_path / "rows.svg"
    arguments = ["bench", "--suite", "topk", "--target", "cpu", "--lengths", "64,1088", "--json", str(target)]
    assert main([*arguments, "--peers", "tilewright_stage1,sdpa_dense", "--peer-time", "60"]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(target.read_text())
    found = [(row["workload"], row["implementation"]) for row in rows]
    assert found == [
        *[("topk N64", name) for name in ("tilewright", "tilewright_stage1", "sdpa_dense")],
        *[("topk N1088", name) for name in ("tilewright", "tilewright_stage1", "sdpa_dense")],
        *[("topk N1088 budgets", name) for name in ("tilewright_uneven", "tilewright_even")],
    ]
    assert all(set(row) >= ADDED for row in rows)
    by_name = dict(zip(found, rows, strict=True))
    dense = by_name["topk N1088", "sdpa_dense"]
    assert dense["own_ratio"] == pytest.approx(dense["time_ms"] / by_name["topk N1088", "tilewright"]["time_ms"])
    assert dense["variant"].startswith(f"dense: {ANOTHER}")
    assert ANOTHER not in by_name["topk N64", "sdpa_dense"]["variant"], "all blocks are taken"
    assert by_name["topk N64", "tilewright_stage1"]["error"] == "the budgets take every block, so nothing is chosen"
    uneven, even = rows[-2:]
    assert (uneven["top_k"], even["top_k"]) == (5, 5)
    assert uneven["beside_ratio"] == pytest.approx(uneven["time_ms"] / even["time_ms"])
    assert (uneven["own_ratio"], even["beside_ratio"]) == (None, None)
    ratio = f"topk N1088 budgets: tilewright_uneven takes {uneven['beside_ratio']:.3f} times as long as tilewright_even"
    assert ratio in printed
    assert "% dense FLOPs" in printed
    (crossing,) = [line for line in printed.splitlines() if "sdpa_dense (another function)" in line]
    assert "length 64 to 1088" in crossing
    assert main(["plot", str(target), "--out", str(picture)]) == 0
    assert crossing in capsys.readouterr().out
    assert "tilewright_uneven" in picture.read_text()


def test_rows_are_selected_and_json_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--suite", "topk", "--target", "cpu", "--lengths", "64,128", "--rows", "N128"]
    assert main([*arguments, "--peers", "none", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["workload"], row["implementation"], row["error"]) == ("topk N128", "tilewright", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "N7"], "no row of topk for cpu has 'N7' in its name; rows: topk N1024, "),
        (["--peers", "flex"], "peers must be among tilewright_stage1"),
        (["--target", "gpu"], "target must be auto, cpu, cuda or cuda:INDEX"),
        (["--json", "/proc/nothing/rows.json", "--lengths", "64", "--peers", "none"], "rows.json cannot be written"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "topk", "--target", "cpu", *arguments]) == 2
    complaint = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tilewright: ")]
    assert len(complaint) == 1
    assert message in complaint[0]


def test_a_failure_of_ours_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*arguments: object) -> float:
        raise RuntimeError("no [such] kernel")

    monkeypatch.setattr(topk_bench, "judge", wrong)
    arguments = ["bench", "--suite", "topk", "--target", "cpu", "--lengths", "64", "--peers", "none"]
    assert main(arguments) == 1
    assert "no [such] kernel" in capsys.readouterr().out


def test_launches_are_a_column() -> None:
    row = TopkBenchRow("topk N1", "tilewright", "GPU", 1.0, launches=2, dense_share=0.125, ceiling_tflops=700.0)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(topk_table([row]))
    text = console.export_text()
    for expected in ("topk N1 (GPU, ceiling 700 TFLOP/s)", "launches", " 2 ", "12.50"):
        assert expected in text
