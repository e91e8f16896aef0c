"""`tilewright bench --suite topk`: attention that chooses its own blocks, by length, beside its peers."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.commands.bench import FAILED, figure, make_console, shown_status, write_rows
from tilewright.generator.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tilewright.tuner.bench import Bench
    from tilewright.tuner.topk_bench import TopkBenchRow, TopkRow
    from tilewright.tuner.topk_own import TopkPeer


def run_topk(args: argparse.Namespace) -> int:
    """Benchmark the suite; 1 where tilewright itself failed on a row."""
    from tilewright.tuner.bench import OWN, Bench, bench_device
    from tilewright.tuner.topk_bench import bench_row, budget_rows, topk_rows
    from tilewright.tuner.topk_own import own_parts
    from tilewright.tuner.topk_peers import all_topk_peers, topk_peers_named

    device = bench_device(args.target)
    own = own_parts()
    named = args.peers is not None
    others = topk_peers_named(args.peers) if named else [*list(own.values())[1:], *all_topk_peers().values()]
    wanted = topk_rows(device.type, args.lengths or ())
    budgets = budget_rows(device.type, args.lengths or ())
    names = [row.name for row in (*wanted, *(budgets or ()))]
    if not any(args.rows in name for name in names if args.rows) and args.rows:
        raise InvalidInput(f"no row of topk for {device.type} has {args.rows!r} in its name; rows: {', '.join(names)}")
    console = make_console(to_stderr=args.json == "-")
    found: list[TopkBenchRow] = []

    def tell(rows: Sequence[TopkBenchRow]) -> None:
        found.extend(rows)
        if args.json != "-":
            console.print(topk_table(rows))
        if args.json and args.json != "-":
            write_rows(args.json, found)  # so far: a long run that is cut short keeps what it has

    with shown_status(console) as say:
        bench = Bench(
            device,
            lambda workload, implementation: say(f"{workload}: {implementation}"),
            peer_seconds=args.peer_time,
            counts_launches=True,
        )
        asked = frozenset(peer.name for peer in others) if named else frozenset[str]()
        for row in wanted:
            if not args.rows or args.rows in row.name:
                tell(list(bench_row(bench, row, [own[OWN], *others], named=asked, earlier=found)))
        if budgets is not None and (not args.rows or args.rows in budgets[0].name):
            tell(budget_pair(bench, budgets, own[OWN]))
    if args.json != "-":
        _say_comparisons(console, found)
    elif args.json:
        write_rows(args.json, found)
    return FAILED if any(row.error for row in found if row.implementation == OWN) else 0


def budget_pair(bench: Bench, rows: tuple[TopkRow, TopkRow], own: TopkPeer) -> list[TopkBenchRow]:
    """Uneven budgets and even ones of the same sum, the first with its time over the second's as `beside_ratio`."""
    from tilewright.tuner.topk_bench import EVEN_NAME, UNEVEN_NAME, bench_row

    found = []
    for row, name in zip(rows, (UNEVEN_NAME, EVEN_NAME), strict=True):
        (measured,) = bench_row(bench, row, [own])
        found.append(dataclasses.replace(measured, implementation=name, own_ratio=None))
    uneven, even = found
    if uneven.time_ms and even.time_ms:
        uneven = dataclasses.replace(uneven, beside_ratio=uneven.time_ms / even.time_ms)
    return [uneven, even]


def topk_table(rows: Sequence[TopkBenchRow]) -> Table:
    """The rows of one length: times, each one's time over tilewright's, and the share of dense attention's work."""
    from rich.markup import escape
    from rich.table import Table

    first = rows[0]
    told = "" if first.ceiling_tflops is None else f", ceiling {first.ceiling_tflops:.0f} TFLOP/s"
    table = Table(title=escape(f"{first.workload} ({first.device}{told})"), title_justify="left")
    table.add_column("implementation")
    for column in ("ms", "x tilewright", "% dense FLOPs", "launches", "TFLOP/s", "extra MiB", "max error"):
        table.add_column(column, justify="right")
    table.add_column("variant, or what failed", overflow="fold")
    for row in rows:
        share = None if row.dense_share is None else 100 * row.dense_share
        table.add_row(
            row.implementation,
            figure(row.time_ms, ".3f"),
            figure(row.own_ratio, ".2f"),
            figure(share, ".2f"),
            figure(row.launches, "d"),
            figure(row.tflops, ".3g"),
            figure(row.extra_mib, ".1f"),
            figure(row.max_error, ".1e"),
            escape(row.error or row.variant or ""),
            style="red" if row.error else "bold" if row.implementation == "tilewright" else None,
        )
    return table


def _say_comparisons(console: Console, rows: Sequence[TopkBenchRow]) -> None:
    """Where tilewright passes each peer, and what uneven budgets cost."""
    from tilewright.tuner.comparison import crossings
    from tilewright.tuner.topk_bench import EVEN_NAME, UNEVEN_NAME

    compared = [row for row in rows if not row.implementation.startswith("tilewright_")]
    lines = [crossing.text for crossing in crossings(compared, "length")] if any(r.time_ms for r in compared) else []
    lines += [
        f"{row.workload}: {UNEVEN_NAME} takes {row.beside_ratio:.3f} times as long as {EVEN_NAME}"
        for row in rows
        if row.beside_ratio is not None
    ]
    for line in lines:
        console.print(line, markup=False)
