"""`tilewright bench`: tilewright beside PyTorch's own attention and others', in one run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.generator.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tilewright.tuner.bench import Bench, BenchRow
    from tilewright.tuner.ladder import LadderRow

LADDER, TOPK = "ladder", "topk"

PIPE_WIDTH = 200
"""Columns of a table that goes into a pipe or a file."""

DESCRIPTION = """\
Time tilewright and its peers on the same inputs, each at its best setting, each checked against fp64, caches flushed
between runs. Losses are shown. A row that ignores the mask says so and does not count as the best peer. What the
columns mean is in docs/tuning.md; `tilewright plot` draws what --json wrote.

--suite ladder times the steps from one thread a query to gathered tiles on tensor cores, at 64 to 8192 tokens, and
writes ladder.csv and ladder.png.

--suite topk times attention that chooses its own blocks, whole and by stages, at 512 to 131072 tokens on a GPU and 1024
to 8192 on a CPU, beside PyTorch, Triton and dense attention.

example: tilewright bench --suite longformer --json longformer.json"""

FAILED = 1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench`."""
    parser = subparsers.add_parser(
        "bench",
        help="tilewright beside PyTorch's own attention and others'",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--suite",
        default="quick",
        metavar="NAME|FILE",
        help="a workload, a .toml file, ladder, topk (default: quick)",
    )
    add("--target", default="auto", metavar="TARGET", help="auto, cpu, cuda or cuda:INDEX (default: auto)")
    add("--json", metavar="FILE", help="write the rows as JSON; - is standard output, without a table")
    add("--peers", metavar="A,B", help="only these peers, or none (default: all that can answer the call)")
    add("--rows", metavar="TEXT", help="only the rows whose name contains this")
    add("--peer-time", type=float, metavar="S", help="after so many seconds on a row a peer begins no further setting")
    add("--out", type=Path, default=Path(), metavar="DIR", help="where ladder.csv and ladder.png go")
    add("--lengths", type=_lengths, metavar="N,N", help="lengths of ladder or topk (default: all of the suite's)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Benchmark; 1 where tilewright itself failed on a row."""
    from tilewright.tuner.bench import Bench, bench_device

    if args.suite == TOPK:
        from tilewright.commands.bench_topk import run_topk

        return run_topk(args)
    device = bench_device(args.target)
    console = make_console(to_stderr=args.json == "-")
    with shown_status(console) as say:
        bench = Bench(
            device, lambda workload, implementation: say(f"{workload}: {implementation}"), peer_seconds=args.peer_time
        )
        rows = _ladder(args, bench, console) if args.suite == LADDER else _suite(args, bench, console)
    if args.json:
        write_rows(args.json, rows)
    return FAILED if any(row.error for row in rows if row.implementation == "tilewright") else 0


def _suite(args: argparse.Namespace, bench: Bench, console: Console) -> list[BenchRow]:
    from tilewright.tuner.bench import own
    from tilewright.tuner.comparison import crossings, ratio_line, with_ratios
    from tilewright.tuner.peers import all_peers, peers_named
    from tilewright.tuner.workloads import load_workload

    workload = load_workload(args.suite)
    peers = list(all_peers().values()) if args.peers is None else peers_named(args.peers)
    chosen = [row for row in workload.rows_for(bench.device.type) if not args.rows or args.rows in row.name]
    if not chosen:
        raise InvalidInput(f"no row of {args.suite} for {bench.device.type} has {args.rows!r} in its name")
    rows: list[BenchRow] = []
    said: list[str] = []
    for row in chosen:
        found = list(bench.rows(row, [own(), *peers], named=args.peers is not None))
        if row.beside:
            found = with_ratios(found, rows, row.beside)
            said += [line] if (line := ratio_line(found, row.beside)) else []
        rows += found
        if args.json != "-":
            console.print(suite_table(found))
            if args.json:
                write_rows(args.json, rows)  # so far: a long run that is cut short keeps what it has
    if workload.along and any(row.time_ms is not None for row in rows):
        said += [crossing.text for crossing in crossings(rows, workload.along)]
    if args.json != "-":
        for line in said:
            console.print(line, markup=False)
    return rows


def _ladder(args: argparse.Namespace, bench: Bench, console: Console) -> list[BenchRow]:
    from tilewright.runtime.call_problem import target_of
    from tilewright.tuner.ladder import LENGTHS, ladder_rows, write_csv, write_plot

    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"--out {args.out} cannot be made: {error.strerror}; give another directory") from error
    rows = list(ladder_rows(bench, target_of(bench.device), lengths=args.lengths or LENGTHS))
    if args.json != "-":
        console.print(ladder_table(rows))
    write_csv(rows, args.out / "ladder.csv")
    missing = write_plot(rows, args.out / "ladder.png")
    plot = f"; {missing}" if missing else f" and {args.out / 'ladder.png'}"
    console.print(f"wrote {args.out / 'ladder.csv'}{plot}")
    return [row.bench for row in rows]


def suite_table(rows: Sequence[BenchRow]) -> Table:
    """The rows of one workload: times, and each one's speed against the best peer that computes the same function."""
    from rich.markup import escape
    from rich.table import Table

    best = best_peer(rows)
    ceiling = rows[0].ceiling_tflops
    told = "" if ceiling is None else f", ceiling {ceiling:.0f} TFLOP/s"
    table = Table(title=escape(f"{rows[0].workload} ({rows[0].device}{told})"), title_justify="left")
    table.add_column("implementation")
    for column in ("ms", "x best peer", "TFLOP/s", "% ceiling", "extra MiB", "max error"):
        table.add_column(column, justify="right")
    table.add_column("variant, or what failed", overflow="fold")
    for row in rows:
        table.add_row(
            row.implementation,
            figure(row.time_ms, ".3f"),
            _ratio(row, best),
            figure(row.tflops, ".3g"),
            figure(row.ceiling_percent, ".1f"),
            figure(row.extra_mib, ".1f"),
            figure(row.max_error, ".1e"),
            escape(row.error or row.variant or ""),
            style="red" if row.error else "bold" if row.implementation == "tilewright" else None,
        )
    return table


def best_peer(rows: Sequence[BenchRow]) -> float | None:
    """The fastest time in ms among the others that compute the same function; None where there is none."""
    times = [
        row.time_ms
        for row in rows
        if row.implementation != "tilewright" and row.time_ms is not None and not row.is_another_function
    ]
    return min(times, default=None)


def _ratio(row: BenchRow, best: float | None) -> str:
    if row.time_ms is None or best is None:
        return ""
    ratio = best / row.time_ms
    if row.implementation != "tilewright":
        return f"{ratio:.2f}"
    return f"[green]{ratio:.2f}[/]" if ratio >= 1 else f"[red]{ratio:.2f} LOSS[/]"


def ladder_table(rows: Sequence[LadderRow]) -> Table:
    """A line an implementation, a column a length, then what the kernel uses of the GPU."""
    from rich.markup import escape
    from rich.table import Table

    lengths = list(dict.fromkeys(row.seqlen for row in rows))
    table = Table(title=escape(f"ladder, milliseconds ({rows[0].bench.device})"), title_justify="left")
    table.add_column("implementation")
    for length in lengths:
        table.add_column(f"N={length}", justify="right")
    on_gpu = any(row.registers is not None for row in rows)
    for column in ("registers", "spills, B", "smem, B") if on_gpu else ():
        table.add_column(column, justify="right")
    notes: list[str] = []
    for name in dict.fromkeys(row.bench.implementation for row in rows):
        mine = {row.seqlen: row for row in rows if row.bench.implementation == name}
        last = list(mine.values())[-1]
        cells = [figure(mine[n].bench.time_ms, ".4f") if n in mine else "" for n in lengths]
        failed = dict.fromkeys(str(row.bench.error) for row in mine.values() if row.bench.error)
        notes += [f"{name}: {text}" for text in failed]
        label = f"{name} (another function)" if name == "sdpa_dense" else name
        used = (last.registers, last.local_bytes, last.smem_bytes) if on_gpu else ()
        table.add_row(label, *cells, *(figure(value, "d") for value in used))
    if notes:
        table.caption = escape("\n".join(notes))
        table.caption_justify = "left"
    return table


def figure(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise argparse.ArgumentTypeError(f"lengths must be integers of 1 or more with commas between, got {text!r}")
    return lengths


def write_rows(target: str, rows: Sequence[BenchRow]) -> None:
    text = json.dumps([row.to_dict() for row in rows], indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"--json {target} cannot be written: {error.strerror}; give another file") from error


def make_console(*, to_stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False)


def shown_status(console: Console) -> AbstractContextManager[Callable[[str], None]]:
    """What is being measured, as a line that goes away on a terminal, and as lines on stderr elsewhere."""
    if console.is_terminal:
        return _Spinner(console)
    return nullcontext(lambda text: print(text, file=sys.stderr, flush=True))


class _Spinner:
    def __init__(self, console: Console) -> None:
        self._status = console.status("")

    def __enter__(self) -> Callable[[str], None]:
        from rich.markup import escape

        self._status.__enter__()
        return lambda text: self._status.update(escape(text))

    def __exit__(self, *exception: Any) -> None:
        self._status.__exit__(*exception)
