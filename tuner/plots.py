"""Line plots on logarithmic axes, through matplotlib, which is optional (`tilewright[plots]`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.generator.errors import ToolMissing
from tilewright.tuner.bench import OWN, BenchRow
from tilewright.tuner.comparison import curves

MISSING = "matplotlib is not installed, which plots are drawn with; pip install 'tilewright[plots]'"

SETTINGS: dict[Any, Any] = {
    # Text stays text: a quarter of the size, and it can be searched. The salt makes the file the same every time.
    "svg.fonttype": "none",
    "svg.hashsalt": "tilewright",
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
}

LABELS = {"length": "tokens", "density": "active pairs of all pairs"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot: x to milliseconds. is_dashed: drawn so; lines of one kind should be alike."""

    label: str
    points: Mapping[float, float]
    is_dashed: bool = False
    is_bold: bool = False


def draw(lines: Sequence[Line], path: Path, *, title: str, x_label: str, x_base: int) -> None:
    """Write the lines to `path`, in the format of its suffix; both axes logarithmic, x to the base `x_base`.

    The same lines give the same bytes. Raises `ToolMissing` without matplotlib, `OSError` where it cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import StrMethodFormatter
    except ImportError as error:
        raise ToolMissing(MISSING) from error
    with rc_context(SETTINGS):
        figure = Figure(figsize=(9, 6), layout="constrained")
        axes = figure.add_subplot()
        for line in lines:
            axes.plot(
                list(line.points),
                list(line.points.values()),
                marker="o",
                markersize=4,
                linestyle="--" if line.is_dashed else "-",
                linewidth=2.5 if line.is_bold else 1.5,
                label=line.label,
            )
        axes.set_xscale("log", base=x_base)
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:.9g}"))
        axes.set_xlabel(x_label)
        axes.set_ylabel("ms")
        axes.set_title(title)
        axes.grid(True, which="major", alpha=0.3)
        axes.legend(fontsize="small")
        # An SVG has the time and matplotlib's version in it unless told otherwise.
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=120, metadata=metadata)


def plot_rows(rows: Sequence[BenchRow], axis: str, path: Path, title: str) -> None:
    """Time along `axis`, a line an implementation; dashed where it computes another function. Raises as `draw` does."""
    lines = []
    for name, curve in curves(rows, axis).items():
        other = any(row.is_another_function for row in curve.values())
        points = {place: row.time_ms for place, row in curve.items() if row.time_ms is not None}
        lines.append(Line(f"{name} (another function)" if other else name, points, other, name == OWN))
    draw(lines, path, title=title, x_label=LABELS[axis], x_base=2 if axis == "length" else 10)
