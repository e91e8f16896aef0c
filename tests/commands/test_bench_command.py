"""`tilewright bench` and `tilewright profile` from the command line, on small calls."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from tilewright.cli import main
from tilewright.commands.bench import best_peer, ladder_table, suite_table
from tilewright.commands.profile import variant_named
from tilewright.generator.errors import InvalidInput
from tilewright.tuner import ladder
from tilewright.tuner.bench import BenchRow
from tilewright.tuner.ladder import CPU_RUNGS, LadderRow
from tilewright.tuner.peers import ANOTHER_FUNCTION
from tilewright.tuner.workloads import load_workload

KEYS = [
    *("workload", "implementation", "device", "time_ms", "tflops", "extra_mib", "max_error", "variant", "error"),
    *("seqlen_q", "seqlen_kv", "density", "ceiling_tflops", "ceiling_percent", "beside_ratio"),
]

SUITE = """
[[row]]
name = "window"
dtype = "float32"
head_dim = 32
num_heads = 2
seqlen_q = 96
mask = "sliding_window(8, 8) | global_stride(32)"

[[row]]
name = "dense"
dtype = "float32"
head_dim = 32
num_heads = 2
seqlen_q = 64
"""


@pytest.fixture
def suite(tmp_path: Path) -> str:
    path = tmp_path / "own.toml"
    path.write_text(SUITE)
    return str(path)


def _text(table: object) -> str:
    console = Console(width=220, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def _row(implementation: str, time_ms: float | None, variant: str | None = None, error: str | None = None) -> BenchRow:
    return BenchRow("w", implementation, "Test CPU", time_ms, 0.5, 1.0, 1e-6, variant, error)


def test_a_suite_gives_a_table_and_json(suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "rows.json"
    arguments = ["bench", "--suite", suite, "--target", "cpu", "--peers", "sdpa_dense,sdpa_masked,fa4"]
    assert main([*arguments, "--json", str(target)]) == 0
    rows = json.loads(target.read_text())
    assert all(list(row) == KEYS for row in rows)
    implementations = ["tilewright", "sdpa_dense", "sdpa_masked", "fa4"]
    assert [(r["workload"], r["implementation"]) for r in rows] == [
        (workload, name) for workload in ("window", "dense") for name in implementations
    ]
    by_name = {(r["workload"], r["implementation"]): r for r in rows}
    assert by_name["window", "sdpa_dense"]["variant"].startswith(ANOTHER_FUNCTION)
    assert not by_name["dense", "sdpa_dense"]["variant"].startswith(ANOTHER_FUNCTION)
    assert "CUDA" in by_name["window", "fa4"]["error"]
    assert by_name["dense", "sdpa_masked"]["error"] == "there is no mask"
    printed = capsys.readouterr().out
    assert "forward_cpu/" in printed
    assert "x best peer" in printed


SERIES = """
along = "length"

[[row]]
name = "N64"
dtype = "float32"
head_dim = 32
num_heads = 2
seqlen_q = 64
mask = "sliding_window(8, 0)"

[[row]]
name = "N160"
dtype = "float32"
head_dim = 32
num_heads = 2
seqlen_q = 160
mask = "sliding_window(8, 0)"
beside = "N64"
"""


def test_a_series_tells_its_ratios_and_crossings_and_can_be_plotted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite, target, picture = tmp_path / "series.toml", tmp_path / "rows.json", tmp_path / "rows.svg"
    suite.write_text(SERIES)
    arguments = ["bench", "--suite", str(suite), "--target", "cpu", "--peers", "sdpa_dense", "--json", str(target)]
    assert main([*arguments, "--peer-time", "60"]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(target.read_text())
    assert [row["beside_ratio"] for row in rows[:2]] == [None, None]
    for small, large in zip(rows[:2], rows[2:], strict=True):
        assert large["beside_ratio"] == pytest.approx(large["time_ms"] / small["time_ms"])
    said = f"N160 / N64: tilewright {rows[2]['beside_ratio']:.3f}, sdpa_dense {rows[3]['beside_ratio']:.3f}"
    assert said in printed
    crossing = next(line for line in printed.splitlines() if line.startswith("tilewright "))
    assert "sdpa_dense (another function)" in crossing
    assert "length 64 to 160" in crossing

    pytest.importorskip("matplotlib")
    assert main(["plot", str(target), "--out", str(picture), "--title", "Windows & lengths"]) == 0
    assert capsys.readouterr().out == f"{crossing}\nwrote {picture}\n"
    drawn = picture.read_text()
    assert "Windows &amp; lengths" in drawn
    assert "sdpa_dense (another function)" in drawn


def test_a_plot_s_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, old, row = tmp_path / "bad.json", tmp_path / "old.json", _row("tilewright", 1.0).to_dict()
    bad.write_text("[")
    old.write_text(json.dumps([{name: row[name] for name in KEYS[:9]}]))
    for arguments, message in (
        ([str(tmp_path / "none.json"), "--out", "x.svg"], "none.json cannot be read: No such file"),
        ([str(bad), "--out", "x.svg"], "bad.json is not JSON"),
        ([str(old), "--out", "x.svg"], "have no seqlen_q, density; write them anew with `tilewright bench --json`"),
        ([str(old), "--out", "x.gif"], "--out must end with .svg, .png, .pdf; got x.gif"),
    ):
        assert main(["plot", *arguments]) == 2
        complaint = capsys.readouterr().err
        assert message in complaint
        assert complaint.count("\n") == 1


def test_the_ceiling_and_the_percentage_of_it_are_shown() -> None:
    row = dataclasses.replace(_row("tilewright", 2.0), ceiling_tflops=800.4, ceiling_percent=45.25)
    text = _text(suite_table([row]))
    for expected in ("Test CPU, ceiling 800 TFLOP/s", "% ceiling", "45.2"):
        assert expected in text
    assert "ceiling 800" not in _text(suite_table([_row("tilewright", 2.0)]))


def test_json_on_standard_output_is_all_there_is(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "--suite", suite, "--target", "cpu", "--peers", "none", "--rows", "dense", "--json", "-"]) == 0
    )
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["workload"], row["implementation"], row["error"]) == ("dense", "tilewright", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "nonesuch"], "workload must be one of"),
        (["--peers", "flax"], "peers must be among sdpa_flash"),
        (["--target", "gpu"], "target must be auto, cpu, cuda or cuda:INDEX"),
        (["--rows", "nothing has this"], "no row of quick for cpu has 'nothing has this' in its name"),
        (["--suite", "ladder", "--out", "/proc/nothing"], "--out /proc/nothing cannot be made"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--target", "cpu", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert message in complaint
    assert complaint.count("\n") == 1


def test_losses_and_other_functions_are_marked() -> None:
    dense = _row("sdpa_dense", 0.5, f"{ANOTHER_FUNCTION}, flash")
    rows = [_row("tilewright", 2.0, "forward_cpu/gather"), dense, _row("flex", 1.0, "64x16")]
    assert best_peer(rows) == 1.0
    text = _text(suite_table(rows))
    assert "0.50 LOSS" in text
    assert "LOSS" not in _text(suite_table([_row("tilewright", 0.4), *rows[1:]]))
    assert best_peer([rows[0], dense, _row("flex", None, error="no [tile]")]) is None
    assert "no [tile]" in _text(suite_table([rows[0], _row("flex", None, error="no [tile]")]))


def test_the_ladder_s_table_has_what_kernels_use_and_why_rungs_fail() -> None:
    rows = [
        LadderRow(64, _row("naive", 1.0), 96, 0, 0),
        LadderRow(64, _row("tiled_full_row", 0.5), 54, 8, 9344),
        LadderRow(8192, _row("tiled_full_row", None, error="4 full rows do not fit")),
        LadderRow(64, _row("sdpa_dense", 0.1)),
    ]
    text = _text(ladder_table(rows))
    for expected in (
        "N=8192",
        "registers",
        "96",
        "sdpa_dense (another function)",
        "tiled_full_row: 4 full rows do not",
    ):
        assert expected in text


def test_the_ladder_writes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(ladder, "CPU_RUNGS", CPU_RUNGS[4:5])
    out = tmp_path / "new"
    arguments = ["bench", "--suite", "ladder", "--target", "cpu", "--lengths", "64,128", "--out", str(out)]
    assert main([*arguments, "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {(r["workload"], r["implementation"]) for r in rows} >= {("ladder N64", "gather"), ("ladder N128", "gather")}
    assert (out / "ladder.csv").read_text().count("\n") == 1 + len(rows)
    assert (out / "ladder.png").exists()
    assert "N=128" in capsys.readouterr().out


def test_profile_prints_a_command_that_runs(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["profile", "--target", "cpu", "--workload", suite, "--row", "win", "--variant", "forward_cpu/list 32x32"])
        == 0
    )
    command = shlex.split(capsys.readouterr().out.strip().splitlines()[-1])
    assert command[:2] == ["perf", "record"]
    ours = command[command.index("profile") :]
    assert ours[:2] == ["profile", "--run-once"]
    assert "forward_cpu/list 32x32 cached_panels=64 panel=16 row_unroll=4 schedule=dynamic" in ours
    assert main(ours) == 0
    assert capsys.readouterr().out == ""


def test_a_variant_is_read_as_it_is_printed() -> None:
    row = load_workload("quick").rows_for("cuda")[0]
    problem = row.problem("sm_90a")
    spec = variant_named("forward_wmma/gather 64x64 num_stages=1", problem)
    assert variant_named(spec.name, problem) == spec
    assert dict(spec.axes)["num_stages"] == 1
    # the form that was asked for, not the one that the family's first default has
    assert variant_named("forward_mma/analytic 64x64", problem).mask_form == "analytic"
    for text, message in (
        ("gather 64x32", "--variant must be FAMILY/FORM"),
        ("forward_simt/gather 64x33", "block_n of forward_simt must be one of"),
        ("forward_simt/gather 64x32 colour=1", "forward_simt has no axis colour"),
        ("forward_cpu/gather 32x64", "cannot run"),
    ):
        with pytest.raises(InvalidInput, match=message):
            variant_named(text, problem)
