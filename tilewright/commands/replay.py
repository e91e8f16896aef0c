"""`tilewright replay`: how many evaluations search strategies need on recorded sweeps."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.commands.tune import positive_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilewright.tuner.replay import Landscape, Needed

PIPE_WIDTH = 200
"""Columns of a table that goes into a pipe or a file."""

DESCRIPTION = """\
Run search strategies against the files of `tilewright sweep`, as `tilewright tune` runs them, and count the evaluations
until each has met a variant within 5 % of the best, and the best itself. No device and no compiler is needed.

Each strategy starts from the default variant and knows no other problem's winners. A variant that failed in the sweep
counts as an evaluation.

example: tilewright replay results/h200/sweeps/*.csv"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `replay`."""
    parser = subparsers.add_parser(
        "replay",
        help="try search strategies on recorded sweeps",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="CSV", help="files that tilewright sweep wrote")
    add("--strategies", metavar="A,B", help="only these (default: all)")
    add("--effort", choices=("quick", "default", "full"), default="default", help="whose batch and starts to use")
    add("--batch", type=positive_count, metavar="N", help="variants proposed at once (default: the effort's)")
    add("--starts", type=positive_count, metavar="N", help="variants that a model starts from (default: the effort's)")
    add(
        "--runs",
        type=positive_count,
        default=20,
        metavar="N",
        help="runs of each strategy, seeded 0, 1, ... (default: 20)",
    )
    add("--within", type=_percent, default=5.0, metavar="PERCENT", help="what counts as near the best (default: 5)")
    add(
        "--limit",
        type=positive_count,
        default=300,
        metavar="N",
        help="give up after so many evaluations (default: 300)",
    )
    add("--json", action="store_true", help="print JSON, with the counts of every run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay; raises `InvalidInput` for what is no sweep."""
    from tilewright.tuner.effort import effort_named
    from tilewright.tuner.replay import effort_with, read_landscape, replay
    from tilewright.tuner.strategies import STRATEGIES, strategy_named

    names = args.strategies.split(",") if args.strategies else list(STRATEGIES)
    strategies = {name: strategy_named(name) for name in names}
    effort = effort_with(effort_named(args.effort), args.batch, args.starts)
    landscapes = [read_landscape(path) for path in args.files]
    found = []
    for name, make in strategies.items():
        for landscape in landscapes:
            print(f"{name}: {landscape.name}", file=sys.stderr, flush=True)
            within = args.within / 100
            found.append(replay(landscape, name, make, effort, runs=args.runs, limit=args.limit, within=within))
    if args.json:
        document = {
            "effort": args.effort,
            "batch": effort.batch,
            "starts": effort.seeds,
            "runs": args.runs,
            "within_percent": args.within,
            "landscapes": [_about(landscape, args.within / 100) for landscape in landscapes],
            "strategies": [_figures(needed) for needed in found],
        }
        print(json.dumps(document, indent=2))
    else:
        _print(landscapes, found, args.within)
    return 0


def _print(landscapes: Sequence[Landscape], found: Sequence[Needed], percent: float) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    for landscape in landscapes:
        about = _about(landscape, percent / 100)
        slower = about["default_slower"]
        default = "the default failed" if slower is None else f"the default takes {slower:.2f}x its time"
        console.print(
            f"{landscape.name}: {about['variants']} of {about['legal']} legal variants, {about['failed']} failed;"
            f" {about['near']} within {percent:g} % of the best, {default}",
            markup=False,
        )
    console.print(f"Evaluations until within {percent:g} %, median / worst; in brackets until the very best:")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy")
    for landscape in landscapes:
        table.add_column(landscape.name, justify="right")
    for name in dict.fromkeys(needed.strategy for needed in found):
        table.add_row(name, *(_cell(needed) for needed in found if needed.strategy == name))
    console.print(table)


def _cell(needed: Needed) -> str:
    def pair(counts: Sequence[int | None]) -> str:
        figures = (needed.median(counts), needed.worst(counts))
        return " / ".join(f">{needed.limit}" if figure is None else f"{figure:g}" for figure in figures)

    return f"{pair(needed.near)} ({pair(needed.best)})"


def _about(landscape: Landscape, within: float) -> dict[str, Any]:
    default_us = landscape.times_us.get(landscape.default)
    return {
        "row": landscape.name,
        "legal": landscape.legal,
        "variants": len(landscape.candidates),
        "failed": len(landscape.candidates) - len(landscape.times_us),
        "best_us": landscape.best_us,
        "near": landscape.near(within),
        "default": landscape.default.name,
        "default_slower": None if default_us is None else default_us / landscape.best_us,
    }


def _figures(needed: Needed) -> dict[str, Any]:
    return {
        "strategy": needed.strategy,
        "row": needed.landscape,
        "limit": needed.limit,
        "near": {"median": needed.median(needed.near), "worst": needed.worst(needed.near), "runs": needed.near},
        "best": {"median": needed.median(needed.best), "worst": needed.worst(needed.best), "runs": needed.best},
    }


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1000:
        raise argparse.ArgumentTypeError(f"must be a percentage of 0 or more, got {text}")
    return value
