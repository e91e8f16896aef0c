"""`tilewright sweep-topk`: block sizes and budgets on one's own activations, or on made ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.commands.bench import make_console, shown_status
from tilewright.generator.errors import InvalidInput, ToolMissing

if TYPE_CHECKING:
    from rich.table import Table

    from tilewright.tuner.topk_inputs import AttentionInputs
    from tilewright.tuner.topk_sweep import SweepResult

DESCRIPTION = """\
For each block size and budget: how much of dense attention's work attention over chosen blocks takes, how long, how
much of dense attention's softmax lies on the chosen tokens (mean, and what 99 % of the sampled queries exceed; "best"
is what the best blocks would have held), and how far the output is off (relative RMS). Points on a Pareto front are
marked: F of work and mass, T of time and error.

--input reads a safetensors file with tensors query, key and value, [batch, heads, tokens, head_dim] or without the
batch. --synthetic makes them, standard normal values and one of
  local    logits that fall with distance, a Gaussian 128 tokens wide
  sink     the first 4 tokens draw half of each query's mass
  needle   2 keys a query, anywhere, draw half of its mass (not with --causal: half of them would come later)
  mix      heads in turn of these three"""

EPILOG = """\
Examples:
  tilewright sweep-topk --synthetic mix --length 8192 --out sweeps
  tilewright sweep-topk --input layer15.safetensors --causal --blocks 32,64 --budgets 8,16,32 --sink-blocks 1"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `sweep-topk`."""
    parser = subparsers.add_parser(
        "sweep-topk",
        help="what block sizes and budgets of chosen blocks cost and keep",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", type=Path, metavar="FILE", help="a safetensors file with query, key and value")
    source.add_argument("--synthetic", metavar="KIND", help="local, sink, needle or mix")
    add = parser.add_argument
    add("--blocks", type=_counts, metavar="N,N", help="block sizes in tokens (default: 16,32,64,128)")
    add("--budgets", type=_counts, metavar="N,N", help="blocks a query takes (default: 4,8,16,32,64)")
    add("--length", type=_count, metavar="N", help="tokens: of the file the first N, of --synthetic (default: 4096)")
    add("--heads", type=_count, metavar="N", help="heads of --synthetic (default: 6)")
    add("--head-dim", type=_count, metavar="N", help="head_dim of --synthetic, a multiple of 16 (default: 64)")
    add("--causal", action="store_true", help="no query sees a later key; its own block is always in")
    add("--select", type=_count, default=1, metavar="N", help="consecutive queries that share a choice (default: 1)")
    add("--select-heads", choices=("query", "kv"), default="query", help="kv: heads of a key head share a choice")
    add("--sink-blocks", type=_number, default=0, metavar="N", help="first blocks that are always in (default: 0)")
    add("--window-blocks", type=_number, default=0, metavar="N", help="nearest blocks that are always in (default: 0)")
    add("--scale", type=float, metavar="X", help="multiplies query . key (default: head_dim ** -0.5)")
    add("--target", default="auto", metavar="TARGET", help="auto, cpu, cuda or cuda:INDEX (default: auto)")
    add(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="what tensors are converted to (default: the file's; for --synthetic float32, on a GPU bfloat16)",
    )
    add("--queries", type=_count, default=256, metavar="N", help="sampled for mass and error (default: 256)")
    add("--no-time", action="store_true", help="measure no time")
    add("--out", type=Path, metavar="DIR", help="write NAME.csv and NAME.svg there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Sweep; raises `InvalidInput` for what cannot be read or fit together."""
    import torch

    from tilewright.tuner.bench import bench_device
    from tilewright.tuner.topk_sweep import BLOCK_SIZES, BUDGETS, Choosing, sweep_topk

    device = bench_device(args.target)
    inputs = _inputs(args)
    default = inputs.query.dtype if args.input or device.type == "cpu" else torch.bfloat16
    inputs = inputs.to(device, getattr(torch, args.dtype) if args.dtype else default)
    if args.out is not None:
        _make_directory(args.out)
    choosing = Choosing(args.causal, args.select, args.select_heads, args.sink_blocks, args.window_blocks)
    console = make_console(to_stderr=False)
    with shown_status(console) as say:
        result = sweep_topk(
            inputs,
            choosing,
            block_sizes=args.blocks or BLOCK_SIZES,
            budgets=args.budgets or BUDGETS,
            queries=args.queries,
            timed=not args.no_time,
            say=say,
        )
    title = _title(inputs, args.causal, str(device))
    console.print(sweep_table(result, title))
    for reason in result.left_out:
        print(f"left out: {reason}", file=sys.stderr)
    if args.out is not None:
        _write(result, args.out, inputs.name, title)
    return 0


def _inputs(args: argparse.Namespace) -> AttentionInputs:
    from tilewright.generator.problem import check_head_dim
    from tilewright.tuner.topk_inputs import first_tokens, read_inputs, synthetic

    if args.input is not None:
        given = [f"--{name}" for name in ("heads", "head-dim") if getattr(args, name.replace("-", "_")) is not None]
        if given:
            raise InvalidInput(f"{', '.join(given)} is for --synthetic; the file has its own")
        inputs = read_inputs(args.input, args.scale)
        return inputs if args.length is None else first_tokens(inputs, args.length)
    head_dim = args.head_dim or 64
    check_head_dim(head_dim)
    return synthetic(
        args.synthetic, num_heads=args.heads or 6, seqlen=args.length or 4096, head_dim=head_dim, scale=args.scale
    )


def _title(inputs: AttentionInputs, causal: bool, device: str) -> str:
    from tilewright.runtime.environment import device_name

    _, heads, seqlen, head_dim = inputs.query.shape
    kv_heads = inputs.key.shape[1]
    shown = str(heads) if heads == kv_heads else f"{heads}/{kv_heads}"
    dtype = str(inputs.query.dtype).removeprefix("torch.")
    return f"{inputs.name}{', causal' if causal else ''}: H{shown} D{head_dim} N{seqlen} {dtype}, {device_name(device)}"


def sweep_table(result: SweepResult, title: str) -> Table:
    """A line a point; `x dense` is dense attention's time over the point's."""
    from rich.markup import escape
    from rich.table import Table

    dense = "" if result.dense_ms is None else f"; dense attention (SDPA) {result.dense_ms:.2f} ms"
    table = Table(title=escape(title + dense), title_justify="left")
    for column in ("block", "blocks a query", "of", "% dense FLOPs", "of it choosing", "ms", "x dense"):
        table.add_column(column, justify="right")
    for column in ("mass", "worst 1 %", "best", "error", "front"):
        table.add_column(column, justify="right")
    for point in result.points:
        faster = result.dense_ms / point.time_ms if result.dense_ms and point.time_ms else None
        table.add_row(
            str(point.block_size),
            str(point.top_k),
            str(point.num_blocks),
            f"{100 * point.dense_share:.2f}",
            f"{100 * point.choosing_share:.2f}",
            "" if point.time_ms is None else f"{point.time_ms:.2f}",
            "" if faster is None else f"{faster:.2f}",
            f"{point.mass_mean:.4f}",
            f"{point.mass_low:.4f}",
            f"{point.best_mass:.4f}",
            f"{point.error:.4f}",
            " ".join(front[0].upper() for front in point.fronts),
            style="bold" if point.fronts else None,
        )
    return table


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"--out {path} cannot be made: {error.strerror}; give another directory") from error


def _write(result: SweepResult, directory: Path, name: str, title: str) -> None:
    from tilewright.tuner.topk_sweep_files import write_csv, write_plot

    table, picture = directory / f"{name}.csv", directory / f"{name}.svg"
    try:
        write_csv(result, table)
        write_plot(result, picture, title)
    except OSError as error:
        raise InvalidInput(f"--out {directory} cannot be written to: {error.strerror}; give another") from error
    except ToolMissing as error:
        print(f"wrote {table}; no plot: {error}")
        return
    print(f"wrote {table} and {picture}")


def _count(text: str) -> int:
    number = _number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text!r}")
    return number


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(text)


def _counts(text: str) -> Sequence[int]:
    return tuple(_count(part) for part in text.split(","))
