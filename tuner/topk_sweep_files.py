"""A sweep of block sizes and budgets as a CSV file and as a plot."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

from tilewright.generator.errors import ToolMissing
from tilewright.tuner.plots import MISSING, SETTINGS
from tilewright.tuner.topk_sweep import SweepPoint, SweepResult

COLUMNS = (*(field.name for field in dataclasses.fields(SweepPoint)), "dense_ms")


def write_csv(result: SweepResult, path: Path) -> None:
    """One line a point, with the columns of `COLUMNS`; empty where there is no figure, fronts with a space between."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for point in result.points:
            values = {**dataclasses.asdict(point), "fronts": " ".join(point.fronts), "dense_ms": result.dense_ms}
            writer.writerow([_text(values[name]) for name in COLUMNS])


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write_plot(result: SweepResult, path: Path, title: str) -> None:
    """Mass against work and, where it was timed, error against time; a line a block size, Pareto fronts ringed.

    The same result gives the same bytes. Raises `ToolMissing` without matplotlib, `OSError` where it cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ToolMissing(MISSING) from error
    timed = all(point.time_ms is not None for point in result.points)
    with rc_context(SETTINGS):
        figure = Figure(figsize=(13 if timed else 7, 5.5), layout="constrained")
        panels = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
        _panel(panels[0], result, "flops")
        panels[0].set_xlabel("multiplications and additions, of dense attention's")
        panels[0].set_ylabel("attention mass on the chosen tokens")
        if timed:
            _panel(panels[1], result, "time")
            panels[1].set_yscale("log")
            panels[1].set_xlabel("ms")
            panels[1].set_ylabel("output error, relative RMS")
            if result.dense_ms is not None:
                panels[1].axvline(result.dense_ms, color="black", linestyle=":", label="dense attention (SDPA)")
                panels[1].legend(fontsize="small")
        figure.suptitle(title)
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=120, metadata=metadata)


def _panel(axes: Any, result: SweepResult, front: str) -> None:
    for block_size in dict.fromkeys(point.block_size for point in result.points):
        points = [point for point in result.points if point.block_size == block_size and _has_place(point, front)]
        if not points:
            continue
        places = [_place(point, front) for point in points]
        (line,) = axes.plot(*zip(*places, strict=True), marker="o", markersize=3, label=f"blocks of {block_size}")
        ringed = [place for point, place in zip(points, places, strict=True) if front in point.fronts]
        if ringed:
            axes.scatter(*zip(*ringed, strict=True), s=70, facecolors="none", edgecolors=line.get_color())
        for point, place in zip(points, places, strict=True):
            axes.annotate(str(point.top_k), place, xytext=(3, 4), textcoords="offset points", fontsize="x-small")
    axes.set_xscale("log")
    axes.grid(True, alpha=0.3)
    axes.set_title("numbers: blocks a query; rings: Pareto front", fontsize="small")
    axes.legend(fontsize="small")


def _place(point: SweepPoint, front: str) -> tuple[float, float]:
    if front == "flops":
        return point.dense_share, point.mass_mean
    assert point.time_ms is not None
    return point.time_ms, point.error


def _has_place(point: SweepPoint, front: str) -> bool:
    """Where every block is in, the error is a rounding or nothing: it would take up all of a logarithmic axis."""
    return front == "flops" or point.top_k < point.num_blocks
