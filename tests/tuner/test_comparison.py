"""What rows say of each other: ratios beside another row, curves, crossings, and the plots of them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from tilewright.generator.errors import InvalidInput, ToolMissing
from tilewright.tuner.bench import BenchRow
from tilewright.tuner.comparison import (
    axis_of,
    crossings,
    curves,
    merged,
    ratio_line,
    rows_of_json,
    with_ratios,
)
from tilewright.tuner.peers import ANOTHER_FUNCTION
from tilewright.tuner.plots import plot_rows


def _row(name: str, time_ms: float | None, seqlen: int = 1024, density: float = 0.5, variant: str = "v") -> BenchRow:
    workload = f"N{seqlen} {density}"
    return BenchRow(workload, name, "Test GPU", time_ms, variant=variant, seqlen_q=seqlen, density=density)


def _series(name: str, times: dict[int, float | None], variant: str = "v") -> list[BenchRow]:
    return [_row(name, time_ms, seqlen, variant=variant) for seqlen, time_ms in times.items()]


# Linear against quadratic: 1000 tokens take 1 ms and 0.1 ms, so they meet at 10000.
LINEAR: dict[int, float | None] = {1000: 1.0, 4000: 4.0, 16000: 16.0, 64000: 64.0}
QUADRATIC: dict[int, float | None] = {1000: 0.1, 4000: 1.6, 16000: 25.6, 64000: 409.6}


def test_a_crossing_is_where_straight_lines_on_logarithmic_axes_meet() -> None:
    rows = _series("tilewright", LINEAR) + _series("dense", QUADRATIC, f"{ANOTHER_FUNCTION}, causal")
    (found,) = crossings(rows, "length")
    assert found.places == pytest.approx([10000])
    assert not found.starts_faster
    assert found.text == (
        "tilewright against dense (another function), length 1000 to 64000: slower, faster from 10000 on"
    )
    (found,) = crossings(_series("tilewright", QUADRATIC) + _series("flex", LINEAR), "length")
    assert found.places == pytest.approx([10000])
    assert found.text == "tilewright against flex, length 1000 to 64000: faster, slower from 10000 on"


def test_curves_that_do_not_cross_and_that_cross_twice() -> None:
    own = _series("tilewright", {1000: 1.0, 2000: 1.0, 4000: 1.0})
    slow = _series("slow", {1000: 2.0, 2000: 3.0, 4000: 4.0})
    bent = _series("bent", {1000: 2.0, 2000: 0.5, 4000: 2.0})
    once, none = _series("once", {1000: 2.0}), _series("none", {1000: None})
    texts = [found.text for found in crossings(own + slow + bent + once + none, "length")]
    assert texts == [
        "tilewright is faster than slow at all of length 1000 to 4000",
        "tilewright against bent, length 1000 to 4000: faster, slower from 1414 on, faster from 2828 on",
    ]
    (swapped,) = crossings(
        _series("tilewright", {1000: 2.0, 2000: 3.0}) + _series("x", {1000: 1.0, 2000: 1.0}), "length"
    )
    assert swapped.text == "tilewright is slower than x at all of length 1000 to 2000"
    assert crossings(slow, "length") == []


def test_density_is_the_axis_where_there_is_one_length() -> None:
    rows = [_row("tilewright", 4 * density, density=density) for density in (0.5, 0.1)]
    rows += [_row("dense", 1.0, density=density) for density in (0.5, 0.1)]
    assert axis_of(rows) == "density"
    assert axis_of(_series("tilewright", LINEAR)) == "length"
    assert list(curves(rows, "density")["tilewright"]) == [0.1, 0.5], "ascending"
    (found,) = crossings(rows, "density")
    assert found.places == pytest.approx([0.25])
    assert found.text.endswith("density 0.1 to 0.5: faster, slower from 0.25 on")


def test_rows_that_are_no_series_are_refused() -> None:
    with pytest.raises(
        InvalidInput, match=r"rows must differ in length; got 'N1024 0.5' and 'N1024 0.7', both at 1024"
    ):
        curves([_row("tilewright", 1.0), _row("tilewright", 1.0, density=0.7)], "length")
    with pytest.raises(InvalidInput, match="one device to be compared; got Test GPU, Other"):
        curves([_row("a", 1.0), dataclasses.replace(_row("b", 1.0), device="Other")], "length")
    with pytest.raises(InvalidInput, match="no row has a time"):
        curves([_row("a", None)], "length")
    with pytest.raises(InvalidInput, match="axis must be length or density; got 'heads'"):
        curves([_row("a", 1.0)], "heads")


def test_of_several_runs_the_first_time_counts() -> None:
    first = [_row("tilewright", 1.0), _row("flex", None)]
    second = [_row("tilewright", 2.0), _row("flex", 3.0), _row("fa4", 4.0)]
    assert [(row.implementation, row.time_ms) for row in merged([first, second])] == [
        ("tilewright", 1.0),
        ("flex", 3.0),
        ("fa4", 4.0),
    ]


def test_rows_are_read_as_they_were_written() -> None:
    row = _row("tilewright", 1.0)
    assert rows_of_json([{**row.to_dict(), "more": 1}], "f.json") == [row]
    for values in ({}, [], [1]):
        with pytest.raises(InvalidInput, match=r"f\.json must hold the list of rows"):
            rows_of_json(values, "f.json")


def test_times_beside_another_row() -> None:
    even = [_row("tilewright", 2.0), _row("flex", 1.0), _row("fa4", None), _row("once", 1.0)]
    skewed = [dataclasses.replace(row, workload="skewed") for row in even[:3]]
    skewed = [dataclasses.replace(row, time_ms=row.time_ms and 1.5 * row.time_ms) for row in skewed]
    found = with_ratios(skewed, even, even[0].workload)
    assert [row.beside_ratio for row in found] == [1.5, 1.5, None]
    assert ratio_line(found, "even") == "skewed / even: tilewright 1.500, flex 1.500"
    assert ratio_line(with_ratios(skewed, even, "another"), "another") is None


def test_a_plot_is_the_same_every_time_and_small(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = _series("tilewright", LINEAR) + _series("dense", QUADRATIC, f"{ANOTHER_FUNCTION}, full")
    for name in ("one.svg", "two.svg", "one.png"):
        plot_rows(rows, "length", tmp_path / name, "Growth")
    drawn = (tmp_path / "one.svg").read_bytes()
    assert drawn == (tmp_path / "two.svg").read_bytes()
    assert len(drawn) < 40_000
    text = drawn.decode()
    for shown in ("Growth", ">tilewright<", "dense (another function)", ">tokens<", ">ms<", "stroke-dasharray"):
        assert shown in text
    assert "dc:date" not in text
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ToolMissing, match=r"matplotlib is not installed.*; pip install 'tilewright\[plots\]'"):
        plot_rows(_series("tilewright", LINEAR), "length", tmp_path / "none.svg", "")
    assert not (tmp_path / "none.svg").exists()
