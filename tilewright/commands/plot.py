"""`tilewright plot`: the rows of a benchmark as lines, and where they cross."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.generator.errors import InvalidInput

if TYPE_CHECKING:
    from tilewright.tuner.bench import BenchRow

DESCRIPTION = """\
Draw time against length or density from what `tilewright bench --json` wrote, a line an implementation, both axes
logarithmic, and print where tilewright crosses each peer. Of what several files hold the first counts. Dashed lines
compute another function: dense attention in place of the mask. Needs `pip install 'tilewright[plots]'`.

example: tilewright bench --suite scaling --json scaling.json && tilewright plot scaling.json --out scaling.svg"""

SUFFIXES = (".svg", ".png", ".pdf")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plot`."""
    parser = subparsers.add_parser(
        "plot",
        help="draw a benchmark's rows along length or density",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="what `tilewright bench --json` wrote")
    add("--out", type=Path, required=True, metavar="FILE", help="the picture: .svg, .png or .pdf")
    add("--axis", choices=("length", "density"), help="(default: density where all rows have one length)")
    add("--title", metavar="TEXT", help="above the plot (default: the device)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw; raises `InvalidInput` for rows that are no series, `ToolMissing` without matplotlib."""
    from tilewright.tuner.comparison import axis_of, crossings, merged
    from tilewright.tuner.plots import plot_rows

    if args.out.suffix not in SUFFIXES:
        raise InvalidInput(f"--out must end with {', '.join(SUFFIXES)}; got {args.out}")
    rows = merged(_read(file) for file in args.files)
    axis = args.axis or axis_of(rows)
    try:
        plot_rows(rows, axis, args.out, args.title or rows[0].device)
    except OSError as error:
        raise InvalidInput(f"--out {args.out} cannot be written: {error.strerror}; give another file") from error
    for crossing in crossings(rows, axis):
        print(crossing.text)
    print(f"wrote {args.out}")
    return 0


def _read(name: str) -> list[BenchRow]:
    from tilewright.tuner.comparison import rows_of_json

    try:
        values = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInput(f"{name} is not JSON: {error}; give what `tilewright bench --json` wrote") from error
    return rows_of_json(values, name)
