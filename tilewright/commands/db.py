"""`tilewright db`: look into the tuning database, and carry it between machines. Needs no compiler and no GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilewright.generator.errors import Outcome

if TYPE_CHECKING:
    from rich.table import Table

    from tilewright.runtime.store import Store
    from tilewright.runtime.store.connection import Database

PIPE_WIDTH = 240
"""Columns of a table that goes into a pipe or a file: wide enough that nothing is cut."""

DESCRIPTION = """\
Look into the tuning database, and carry what was measured between machines.

The database is one SQLite file in the cache directory unless --db names another: a path, or a SQLAlchemy URL such as
postgresql://user@host/name. None of these commands needs a compiler or a GPU, and only `import` writes."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `db` and its own subcommands."""
    parser = subparsers.add_parser(
        "db",
        help="look into the tuning database: list, show, best, stats, export, import, path",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--db", metavar="URL", help="the database: a path or a SQLAlchemy URL")
    shared.add_argument("--json", action="store_true", help="print JSON instead of a table")
    commands = parser.add_subparsers(dest="db_command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", parents=[shared])

    listing = command("list", "the latest measurements, newest first")
    listing.add_argument("--limit", type=_positive, default=50, metavar="N", help="how many (default: 50)")
    listing.add_argument("--outcome", choices=[str(o) for o in Outcome], help="only those that ended so")
    listing.add_argument("--device", metavar="NAME", help="only those of this device")
    listing.add_argument("--run", dest="run_id", metavar="ID", help="only those of this tuning run")
    show = command("show", "everything about one measurement, problem, variant or environment")
    show.add_argument("id", metavar="ID", help="the beginning of its ID, at least 4 hex digits")
    best = command("best", "the fastest variant of each problem, against the default and PyTorch")
    best.add_argument("--device", metavar="NAME", help="only on this device")
    best.add_argument("--target", metavar="ARCH", help="only for this target, such as cpu or sm_90a")
    command("stats", "how much was measured, how it ended and what it gained")
    export = command("export", "write measurements and winners as JSON lines")
    export.add_argument("file", metavar="FILE", help="where to; - is standard output")
    export.add_argument("--winners", action="store_true", help="only the winners, as results/<device>/ holds them")
    export.add_argument("--device", metavar="NAME", help="only those of this device")
    importing = command("import", "merge an export into the database; what is there already is skipped")
    importing.add_argument("file", metavar="FILE", help="an export; - is standard input")
    command("path", "where the database is")


def run(args: argparse.Namespace) -> int:
    """Carry out `tilewright db ...`; gives the exit code. Raises `TilewrightError` for what the caller prints."""
    commands: dict[str, Callable[[argparse.Namespace], None]] = {
        "list": _list,
        "show": _show,
        "best": _best,
        "stats": _stats,
        "export": _export,
        "import": _import,
        "path": _path,
    }
    commands[args.db_command](args)
    # Here, where the caller knows what to do about a reader that went away (`| head`), and not at exit.
    sys.stdout.flush()
    return 0


def _open(args: argparse.Namespace) -> Store | None:
    from tilewright.runtime.store import Store

    return Store.open_existing(args.db)


def _database(args: argparse.Namespace) -> Database:
    from tilewright.runtime.store.connection import Database
    from tilewright.runtime.store.database import default_path

    return Database(args.db if args.db is not None else str(default_path()))


def _where(args: argparse.Namespace) -> str:
    return _database(args).label


def _list(args: argparse.Namespace) -> None:
    store = _open(args)
    outcome = Outcome(args.outcome) if args.outcome else None
    found: list[Any] = []
    if store is not None:
        with store:
            found = store.measurements(
                outcome=outcome, device=args.device, run_id=args.run_id, newest_first=True, limit=args.limit
            )
    if args.json:
        _print_json([{**m.to_dict(), "label": m.label, "problem_name": m.problem.name} for m in found])
        return
    if not found:
        _print_nothing(args, "No measurement matches")
        return
    table = _table("ID", "outcome", "time µs:", "problem", "variant", "kind", "device", "when (UTC)")
    for m in found:
        when = m.created_at.strftime("%Y-%m-%d %H:%M:%S")
        _add(table, m.uid[:12], m.outcome, _us(m.time_us), m.problem.name, m.label, m.kind, m.environment.device, when)
    _print(table)


def _show(args: argparse.Namespace) -> None:
    from tilewright.generator.errors import InvalidInput

    store = _open(args)
    if store is None:
        raise InvalidInput(f"there is no database at {_where(args)} yet; run `tilewright tune`, or name one with --db")
    with store:
        found = store.show(args.id)
    if args.json:
        _print_json(found)
        return
    table = _table("field", "value")
    for name, value in _flat("", found):
        if value not in (None, ""):
            _add(table, name, value)
    _print(table)


def _best(args: argparse.Namespace) -> None:
    store = _open(args)
    found: list[Any] = []
    if store is not None:
        with store:
            found = store.best(device=args.device, target=args.target)
    if args.json:
        _print_json([b.to_dict() for b in found])
        return
    if not found:
        _print_nothing(args, "No problem was tuned")
        return
    table = _table("problem", "device", "best variant", "time µs:", "default:", "PyTorch:", "measured:", "state")
    for b in found:
        state = ("verified" if b.verified else "not verified") if b.final else "tuning not finished"
        default = _ratio(b.default_time_us, b.time_us)
        pytorch = _ratio(b.baseline_time_us, b.time_us) + (f" {b.baseline_name}" if b.baseline_name else "")
        _add(table, b.problem.name, b.device, b.spec.name, _us(b.time_us), default, pytorch, b.measured, state)
    _print(table)


def _stats(args: argparse.Namespace) -> None:
    store = _open(args)
    if store is None:
        found: dict[str, Any] = {"database": _where(args), "measurements": 0, "problems": 0, "winners": 0}
    else:
        with store:
            found = store.stats()
    if args.json:
        _print_json(found)
        return
    table = _table("what", "value:")
    for name, value in _flat("", found):
        _add(table, name, f"{value:.3g}" if isinstance(value, float) else value)
    _print(table)


def _export(args: argparse.Namespace) -> None:
    from tilewright.generator.errors import InvalidInput

    store = _open(args)
    if store is None:
        raise InvalidInput(f"there is no database at {_where(args)} yet, so nothing to export")
    with store:
        target = sys.stdout.buffer if args.file == "-" else args.file
        count = store.export(target, winners_only=args.winners, device=args.device)
    if args.json and args.file != "-":
        _print_json({"file": args.file, "lines": count})
    elif args.file != "-":
        print(f"Wrote {count} lines to {args.file}")


def _import(args: argparse.Namespace) -> None:
    from tilewright.runtime.store import Store

    with Store(args.db) as store:
        report = store.import_(sys.stdin.buffer if args.file == "-" else args.file)
        label = store.label
    if args.json:
        _print_json({"database": label, **dataclasses.asdict(report)})
        return
    print(
        f"Imported into {label}: {report.measurements_added} new measurements ({report.measurements_known} known), "
        f"{report.winners_added} new winners, {report.winners_replaced} replaced, {report.winners_kept} kept"
    )


def _path(args: argparse.Namespace) -> None:
    database = _database(args)
    if args.json:
        exists = database.path.exists() if database.path is not None else None
        _print_json({"database": database.label, "exists": exists})
    else:
        print(database.label)


def _positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if not 0 < value < 2**31:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return value


def _us(time_us: float | None) -> str:
    return "" if time_us is None else f"{time_us:,.1f}"


def _ratio(other_us: float | None, time_us: float) -> str:
    return "" if other_us is None else f"{other_us:,.1f} ({other_us / time_us:.2f}x)"


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    """Nested records as (dotted name, value) rows; a short list stays on one row."""
    if isinstance(value, dict):
        return [row for name, inner in value.items() for row in _flat(f"{prefix}.{name}" if prefix else name, inner)]
    if isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        return [(f"{prefix}[{n}]", "  ".join(str(v) for v in inner.values())) for n, inner in enumerate(value)]
    if isinstance(value, list):
        return [(prefix, ", ".join(str(inner) for inner in value))]
    return [(prefix, value)]


def _table(*columns: str) -> Table:
    """A table with these headings; one that ends in a colon is a column of numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.rstrip(":"), justify="right" if column.endswith(":") else "left", overflow="fold")
    return table


def _add(table: Table, *cells: object) -> None:
    from rich.text import Text

    # Cells may come from an imported file: no markup is read in them, and no terminal controls get through.
    table.add_row(*(Text(_printable("" if c is None else str(c))) for c in cells))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _print(table: Table) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _print_nothing(args: argparse.Namespace, what: str) -> None:
    print(f"{what} in {_where(args)}. `tilewright tune` measures, `tilewright db import FILE` merges an export.")
