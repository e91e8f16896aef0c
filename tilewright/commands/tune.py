"""`tilewright tune`: find the best variant of each problem of a workload on this machine."""

from __future__ import annotations

import argparse
import json
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_NO_WINNER = 1
EXIT_INTERRUPTED = 130

DESCRIPTION = """\
Find the fastest kernel variant for each problem of a workload, on this machine's own device.

Variants are compiled side by side, verified against an fp64 reference, and timed alone. Every measurement is stored
at once: a run that is stopped, by Ctrl-C, by the time limit or by kill -9, goes on from there when started again."""

EPILOG = """\
Exit codes: 0 every problem has a winner, 1 some problem has none, 2 bad input or a missing tool, 130 interrupted.

Examples:
  tilewright tune                                    a few small problems, on the GPU if there is one
  tilewright tune --workload longformer --effort full --time-limit 3600
  tilewright tune --target cpu --workload mine.toml --db sqlite:///mine.db"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tune`."""
    parser = subparsers.add_parser(
        "tune",
        help="find the best kernel variants on this machine",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--target",
        default="auto",
        metavar="auto|cpu|cuda[:i]",
        help="what to tune for; auto is the GPU where it and nvcc work, else the CPU; cuda is every GPU of one model"
        " (default: auto)",
    )
    parser.add_argument(
        "--workload",
        default="quick",
        metavar="NAME|FILE.toml",
        help="the problems: quick, longformer, longcontext, blocksparse, dense, decode, anchors, topk, or a file"
        " (default: quick)",
    )
    parser.add_argument(
        "--effort",
        choices=("quick", "default", "full"),
        default="default",
        help="variants measured a problem: 13, 60, or all of them (300 where there are more than 400)",
    )
    parser.add_argument(
        "--time-limit",
        type=positive_seconds,
        metavar="SECONDS",
        help="end the search by then; every problem gets an even share, and its best so far becomes its winner",
    )
    parser.add_argument("--db", metavar="URL", help="the database: a path or a SQLAlchemy URL")
    parser.add_argument(
        "--jobs", type=positive_count, metavar="N", help="compilers at once (default: by cores and memory)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the search (default: 0)")
    parser.add_argument("--json", action="store_true", help="print a summary as JSON; the progress goes to stderr")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `tilewright tune`; gives the exit code. Raises `TilewrightError` for what the caller prints."""
    # The heavy imports (PyTorch, SQLAlchemy) are made here, so that the other commands start without them.
    from tilewright.commands.tune_display import display_on_stderr, print_summary
    from tilewright.runtime.store import Store
    from tilewright.tuner.devices import resolve_target
    from tilewright.tuner.progress import Status
    from tilewright.tuner.summary import summary
    from tilewright.tuner.tune import TuneSettings, tune
    from tilewright.tuner.workloads import load_workload

    workload = load_workload(args.workload)
    settings = TuneSettings(effort=args.effort, time_limit_s=args.time_limit, jobs=args.jobs, seed=args.seed)
    target = resolve_target(args.target)
    rows = workload.rows_for(target.arch)
    with termination_as_interrupt(), Store(args.db) as store:
        with display_on_stderr(workload.name, settings.effort, store.label) as display:
            report = tune(rows, target, store, settings, display)
        database = store.label
    if args.json:
        values = summary(report, workload=workload.name, effort=settings.effort, database=database)
        print(json.dumps(values, indent=2), flush=True)
    else:
        print_summary(report, database, dispatched=args.db is None)
    if report.interrupted:
        return EXIT_INTERRUPTED
    lost = [result for result in report.results if result.winner is None or result.status is Status.FAILED]
    return EXIT_NO_WINNER if lost else 0


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the run as Ctrl-C does: in order, its child processes with it."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def positive_seconds(text: str) -> float:
    """An option's value in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text}")
    return value


def positive_count(text: str) -> int:
    """An option's value that counts something."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return int(text)
