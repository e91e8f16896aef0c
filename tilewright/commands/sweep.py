"""`tilewright sweep`: measure every legal variant of a workload's rows into files that searches are compared on."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.commands.tune import positive_count, positive_seconds, termination_as_interrupt
from tilewright.generator.errors import InvalidInput

if TYPE_CHECKING:
    from tilewright.tuner.sweep import SweepResult
    from tilewright.tuner.sweep_record import SweepLine

UNFINISHED = 1

SAY_EVERY_S = 10.0
"""Between two lines of progress."""

DESCRIPTION = """\
Measure every legal variant of each row, in every mask form and every main family, into DIR/<row>.csv: one line a
variant, added as soon as it is measured. A sweep that was cut off goes on from its files when started again.
`tilewright replay` tries search strategies on them.

Nothing is stored in the database: winners come from `tilewright tune`, which also compares the finalists."""

EPILOG = """\
Exit codes: 0 every row is complete, 1 the time limit came first, 2 bad input or a missing tool, 130 interrupted.

Examples:
  tilewright sweep --workload anchors --rows W7 --target cuda:0 --out sweeps
  tilewright sweep --workload mine.toml --target cpu --out sweeps --time-limit 600"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `sweep`."""
    parser = subparsers.add_parser(
        "sweep",
        help="measure every legal variant into files",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--workload", default="quick", metavar="NAME|FILE", help="a workload or a .toml file (default: quick)")
    add("--rows", metavar="TEXT,TEXT", help="only the rows whose name contains one of these")
    add("--target", default="auto", metavar="TARGET", help="auto, cpu, cuda or cuda:INDEX (default: auto)")
    add("--out", type=Path, required=True, metavar="DIR", help="where the files are, or go")
    add("--families", metavar="A,B", help="only these kernel families (default: every main family)")
    add("--limit", type=positive_count, metavar="N", help="only the N variants of a row that look cheapest")
    add(
        "--time-limit",
        type=positive_seconds,
        metavar="SECONDS",
        help="end by then; the same command goes on from there",
    )
    add("--jobs", type=positive_count, metavar="N", help="compilers at once (default: by cores and memory)")
    add("--json", action="store_true", help="print a summary as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Sweep; 1 where variants are left."""
    from tilewright.tuner.devices import resolve_target
    from tilewright.tuner.sweep import SweepSettings, sweep
    from tilewright.tuner.workloads import load_workload

    target = resolve_target(args.target)
    texts = [text for text in (args.rows or "").split(",") if text]
    rows = load_workload(args.workload).rows_for(target.arch)
    chosen = [row for row in rows if not texts or any(text in row.name for text in texts)]
    if not chosen:
        raise InvalidInput(f"no row of {args.workload} for {target.arch} has {args.rows!r} in its name")
    settings = SweepSettings(
        families=tuple(name for name in (args.families or "").split(",") if name),
        limit=args.limit,
        time_limit_s=args.time_limit,
        jobs=args.jobs,
        command=_command(args),
    )
    said = _Said()
    with termination_as_interrupt():
        results = []
        for result in sweep(chosen, target, args.out, settings, said.progress):
            said.line(summary_line(result))
            results.append(result)
    if args.json:
        print(json.dumps({"rows": [_summary(result) for result in results]}, indent=2))
    return 0 if all(result.complete for result in results) else UNFINISHED


def _command(args: argparse.Namespace) -> str:
    """What decides the measurements, as one would type it."""
    words = ["tilewright", "sweep", "--workload", args.workload, "--target", args.target]
    for name in ("rows", "families", "limit"):
        value = getattr(args, name)
        words += [f"--{name}", str(value)] if value is not None else []
    return shlex.join(words)


class _Said:
    """Progress on standard error: a line as a row begins and ends, and now and then one between."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()

    def line(self, text: str) -> None:
        self._last = time.monotonic()
        print(f"[{self._last - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)

    def progress(self, result: SweepResult, line: SweepLine | None) -> None:
        if line is None:
            self.line(
                f"{result.row.name}: {result.wanted} of {result.legal} legal variants to measure,"
                f" {result.known} known, into {result.path}"
            )
        elif time.monotonic() - self._last >= SAY_EVERY_S:
            self.line(f"  {summary_line(result)}")


def summary_line(result: SweepResult) -> str:
    """`120/400 ok 118, wrong 2, best 84.2 us, the default 1.30x: forward_mma/...`."""
    from collections import Counter

    from tilewright.commands.tune_display import duration

    counts = Counter(str(line.outcome) for line in result.lines)
    parts = [f"{outcome} {count}" for outcome, count in sorted(counts.items())]
    text = f"{result.known + result.measured}/{result.wanted} {', '.join(parts) or 'nothing measured'}"
    if result.best is not None and result.best.time_us is not None:
        text += f", best {duration(result.best.time_us)}"
        if result.default_us is not None:
            text += f", the default {result.default_us / result.best.time_us:.2f}x"
        text += f": {result.best.spec.name}"
    return text


def _summary(result: SweepResult) -> dict[str, Any]:
    best = result.best
    return {
        "row": result.row.name,
        "file": str(result.path),
        "legal": result.legal,
        "wanted": result.wanted,
        "known": result.known,
        "measured": result.measured,
        "complete": result.complete,
        "best": best.spec.name if best else None,
        "best_us": best.time_us if best else None,
        "default": result.default.name,
        "default_us": result.default_us,
        "seconds": round(result.seconds, 1),
    }
