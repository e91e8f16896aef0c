"""`tilewright generate`: render, and compile, the kernels for any architecture, with or without that hardware."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.generator.errors import InvalidInput, VariantFailed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tilewright.generator.family import Family
    from tilewright.generator.problem import Problem
    from tilewright.generator.render import Rendered
    from tilewright.generator.resources import ResourceReport
    from tilewright.generator.variant import AxisValue

HEAD_DIMS = (64, 128)
MASKS = (
    "sliding_window(256, 256) | global_stride(512)",
    "causal()",
    "random_blocks(64, 64, density=0.1)",
    "full()",
)
"""What is generated unless --mask says otherwise: a mask for each mask form and the dense case."""

SEQLEN, HEADS = 4096, 8  # any: lengths and heads are arguments of a kernel
FEW_QUERIES = 4  # for families that are for few

PIPE_WIDTH = 200
FAILED = 1

DESCRIPTION = """\
Render kernels for an architecture and write their sources; with --compile, compile each with nvcc (or the C++ compiler
for cpu) and report registers, spills and shared memory. No GPU is needed.

By default: each family's default for every dtype, head dims 64 and 128 and four masks, and a sample in which every
value of every axis occurs. --all takes every legal variant, which is thousands.

example: tilewright generate --arch sm_120 --compile --out generated"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `generate`."""
    parser = subparsers.add_parser(
        "generate",
        help="render and compile the kernels for an architecture, GPU or not",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--arch", required=True, metavar="ARCH", help="cpu, sm_75, ..., sm_120")
    add("--compile", action="store_true", help="compile too; exit code 1 if any variant fails")
    add("--out", type=Path, metavar="DIR", help="where the sources go (default: generated/ARCH in the cache directory)")
    add("--family", action="append", metavar="F", help="only this family; may be repeated")
    add("--dtype", action="append", metavar="T", help="only this dtype; may be repeated")
    add("--head-dim", action="append", type=int, metavar="D", help="this head dim; may be repeated (default: 64, 128)")
    add("--mask", action="append", metavar="EXPR", help="this mask, such as 'causal()'; may be repeated")
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument("--limit", type=int, metavar="N", help="at most N variants")
    how_many.add_argument("--all", action="store_true", help="every legal variant")
    add("--jobs", type=int, metavar="N", help="compilers at a time (default: what cores and memory allow)")
    add("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Generated:
    """One variant: its source, where it lies, and what its compiler said; `report` and `error` None before that."""

    rendered: Rendered
    directory: Path
    report: ResourceReport | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; figures are None where nothing was compiled."""
        report = self.report
        return {
            **self.rendered.kernel.to_dict(),
            "digest": self.rendered.digest,
            "directory": str(self.directory),
            "registers": report.registers if report else None,
            "spill_store_bytes": report.spill_store_bytes if report else None,
            "spill_load_bytes": report.spill_load_bytes if report else None,
            "smem_bytes": report.smem_bytes if report else None,
            "seconds": round(report.seconds, 3) if report else None,
            "error": self.error,
        }


def run(args: argparse.Namespace) -> int:
    """Generate; 1 where a variant does not compile. Raises `InvalidInput` and `ToolMissing`."""
    from tilewright.generator.arch import arch_named
    from tilewright.generator.toolchain import cache_dir

    arch_named(args.arch)
    if args.limit is not None and args.limit < 1:
        raise InvalidInput(f"--limit must be 1 or more, got {args.limit}")
    console = _console()
    out: Path = args.out or cache_dir() / "generated" / args.arch
    rendered = list(_rendered(args))
    if not rendered:
        raise InvalidInput(
            f"no variant for {args.arch} is legal with these choices; leave out --family, --dtype or --mask"
        )
    try:
        results = [_written(one, out) for one in rendered]
    except OSError as error:
        raise InvalidInput(
            f"--out {out} cannot be written: {error.strerror or error}; give another directory"
        ) from error
    if args.compile:
        results = _compiled(results, args.arch, args.jobs, console)
    failed = [one for one in results if one.error is not None]
    spilling = [one for one in results if one.report and one.report.spill_store_bytes]
    if args.json:
        summary = {"arch": args.arch, "out": str(out), "variants": [one.to_dict() for one in results]}
        print(json.dumps({**summary, "failed": len(failed), "spilling": len(spilling)}, indent=1))
    else:
        console.print(_table(results, args.arch, compiled=args.compile))
        counts = f", {len(results) - len(failed)} compiled, {len(failed)} failed, {len(spilling)} spill"
        console.print(f"{len(results)} variants in {out}{counts if args.compile else ''}", soft_wrap=True)
    return FAILED if failed else 0


def _rendered(args: argparse.Namespace) -> Iterator[Rendered]:
    """The sources asked for, each kernel once: a scan kernel is the same for every mask."""
    from tilewright.generator.render import render
    from tilewright.generator.sample import covering_sample
    from tilewright.generator.space import family_default, legal_variants
    from tilewright.generator.variant import kernel_of

    families, problems = _families(args), _problems(args)
    specs = []
    if args.all:
        specs = [(problem, spec) for problem in problems for spec in legal_variants(problem, families)]
    else:
        for family in families:
            defaults = ((problem, family_default(problem, family)) for problem in problems)
            specs += [(problem, spec) for problem, spec in defaults if spec is not None]
        for family in families:
            seen: set[tuple[str, AxisValue]] = set()
            for problem in _one_a_dtype([problem for problem in problems if family_default(problem, family)]):
                for spec in covering_sample(problem, family):
                    # Some values are legal for some dtypes only, so each is asked; most add nothing.
                    if not seen.issuperset(spec.values().items()):
                        seen |= set(spec.values().items())
                        specs.append((problem, spec))
    kernels = dict.fromkeys(kernel_of(problem, spec) for problem, spec in specs)
    for kernel in list(kernels)[: args.limit]:
        yield render(kernel)


def _families(args: argparse.Namespace) -> list[Family]:
    from tilewright.generator.arch import arch_named
    from tilewright.generator.family import all_families, family_named

    chosen = [family_named(name) for name in args.family] if args.family else list(all_families().values())
    instructions = arch_named(args.arch).instructions
    fitting = [family for family in chosen if family.instructions in instructions]
    if not fitting:
        names = ", ".join(family.name for family in chosen)
        raise InvalidInput(
            f"{args.arch} has none of the instructions that {names} needs; it has {', '.join(instructions)}"
        )
    return fitting


def _problems(args: argparse.Namespace) -> list[Problem]:
    """One for each dtype, head dim and mask, the first mask's first: it allows the most mask forms; then few queries.

    Where no mask is asked for, those of chosen blocks too: for groups of queries first, which all their families take.
    """
    from tilewright.generator.arch import arch_named
    from tilewright.runtime.selection import SELECT_BLOCKS, SELECTED_ATTENTION
    from tilewright.tuner.workloads import WorkloadRow

    kinds = list(itertools.product(args.dtype or arch_named(args.arch).dtypes, args.head_dim or HEAD_DIMS))
    rows = [
        WorkloadRow("generated", dtype, head_dim, HEADS, SEQLEN, mask=mask)
        for mask in args.mask or MASKS
        for dtype, head_dim in kinds
    ]
    rows += [dataclasses.replace(row, num_kv_heads=1, seqlen_q=FEW_QUERIES, seqlen_kv=SEQLEN) for row in rows]
    if not args.mask:

        def chosen(operation: str, dtype: str, head_dim: int, group: int, *, causal: bool) -> WorkloadRow:
            row = WorkloadRow("generated", dtype, head_dim, HEADS, SEQLEN, operation=operation, block_size=64, top_k=16)
            return dataclasses.replace(row, causal=causal, query_group=group)

        rows += [
            chosen(operation, dtype, head_dim, group, causal=causal)
            for operation in (SELECT_BLOCKS, SELECTED_ATTENTION)
            for group in (64, 1)
            for causal in (True, False)
            for dtype, head_dim in kinds
        ]
    return [row.problem(args.arch) for row in rows]


def _one_a_dtype(problems: Sequence[Problem]) -> list[Problem]:
    return list({problem.dtype: problem for problem in reversed(problems)}.values())[::-1]


def _written(rendered: Rendered, out: Path) -> Generated:
    kernel = rendered.kernel
    name = f"{kernel.spec.mask_form}-{kernel.dtype}-d{kernel.head_dim}-{rendered.digest}"
    directory = out / kernel.spec.family / name
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in rendered.sources.items():
        (directory / file).write_text(text, encoding="utf-8")
    return Generated(rendered, directory)


def _compiled(results: Sequence[Generated], arch: str, jobs: int | None, console: Console) -> list[Generated]:
    """The same with what the compiler said of each, in the same order."""
    from tilewright.generator.build_pool import JOB_BYTES, available_cores, available_memory_bytes

    memory = available_memory_bytes()
    fitting = available_cores() if memory is None else memory // JOB_BYTES["cpp" if arch == "cpu" else "cuda"]
    workers = max(1, min(jobs or available_cores(), available_cores(), fitting))
    done: dict[str, Generated] = {}
    with ThreadPoolExecutor(workers) as pool, console.status("") as status:
        futures = [pool.submit(_compile, one) for one in results]
        try:
            for future in as_completed(futures):
                one = future.result()
                done[one.rendered.digest] = one
                status.update(f"compiled {len(done)} of {len(results)} for {arch}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [done[one.rendered.digest] for one in results]


def _compile(one: Generated) -> Generated:
    from tilewright.generator.resources import compile_report

    try:
        report = compile_report(one.rendered.kernel, one.directory)
    except VariantFailed as error:
        return Generated(one.rendered, one.directory, error=str(error))
    return Generated(one.rendered, one.directory, report)


def _table(results: Sequence[Generated], arch: str, *, compiled: bool) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"kernels for {arch}", title_justify="left")
    table.add_column("variant", overflow="fold")
    table.add_column("dtype")
    table.add_column("D", justify="right")
    table.add_column("mask terms")
    for column in ("registers", "spill st/ld, B", "smem, B", "s") if compiled else ("digest",):
        table.add_column(column, justify="right")
    for one in results:
        kernel, report = one.rendered.kernel, one.report
        cells = [escape(kernel.spec.name), kernel.dtype, str(kernel.head_dim), " ".join(kernel.mask_terms) or "-"]
        if not compiled:
            cells.append(one.rendered.digest)
        elif report is None:
            cells[0] += f"\n[red]{escape(one.error or '')}[/]"
        else:
            spills = f"{report.spill_store_bytes}/{report.spill_load_bytes}"
            spills = f"[yellow]{spills}[/]" if report.spill_store_bytes else spills
            cells += [str(report.registers), spills, str(report.smem_bytes), f"{report.seconds:.1f}"]
        table.add_row(*cells)
    return table


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
