"""`tilewright check`: execute generated CUDA kernels on this machine's CPU, with every memory access watched."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilewright.generator.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tilewright.generator.family import Family
    from tilewright.tuner.devices import TuningTarget
    from tilewright.tuner.host_check import CheckResult, Coverage

PIPE_WIDTH = 200
FAILED = 1

DESCRIPTION = """\
Execute CUDA kernels on this CPU, thread by thread, on adversarial cases: results are compared with fp64, and races,
accesses out of bounds, reads of what nobody wrote and diverging barriers are reported with the line of kernel.cu.
No GPU and no nvcc are needed. See docs/checking.md.

By default: a sample in which, for each family, every legal pair of values of its axes, dtypes and architectures occurs,
and every head dim and common kind of mask. --pairs 93 takes little more than half of it: the last kernels add a pair or
two each.

example: tilewright check --family forward_simt --arch sm_90a"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `check`."""
    parser = subparsers.add_parser(
        "check",
        help="execute CUDA kernels on the CPU and report races, bounds and wrong results",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--arch", action="append", metavar="ARCH", help="may be repeated (default: sm_75, sm_80, sm_90a)")
    add("--family", action="append", metavar="F", help="only this family; may be repeated")
    add("--pairs", type=float, default=100.0, metavar="PERCENT", help="of the pairs that must be in it (default: 100)")
    add("--variants", type=int, metavar="N", help="at most N kernels, those that cover the most")
    add("--sanitize", action="store_true", help="watched by AddressSanitizer and UBSan instead of by the runtime")
    add("--seed", type=int, default=0, metavar="S", help="another sample, and other orders of threads (default: 0)")
    add("--gpu", action="store_true", help="run each kernel on this machine's GPU too, and compare the two")
    add("--jobs", type=int, metavar="N", help="kernels at a time (default: one a core)")
    add("--time-limit", type=float, metavar="SECONDS", help="start no kernel after this; what is left out is a failure")
    add("--json", action="store_true", help="print JSON with every case's time instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check; 1 where a kernel fails or the time limit cut the sample short. Raises `InvalidInput`, `ToolMissing`."""
    from tilewright.generator.sample import most_of
    from tilewright.tuner.host_check import ARCHS, check_kernels, coverage, kernels_to_check

    if not 0 < args.pairs <= 100:
        raise InvalidInput(f"--pairs must be above 0 and at most 100 percent, got {args.pairs:g}")
    for option, least in (("variants", 1), ("jobs", 1), ("seed", 0), ("time_limit", 0)):
        value = getattr(args, option)
        if value is not None and value < least:
            raise InvalidInput(f"--{option.replace('_', '-')} must be {least} or more, got {value}")
    started = time.monotonic()
    gpu = _gpu(args) if args.gpu else None
    archs = tuple(dict.fromkeys(args.arch or ((gpu.arch,) if gpu else ARCHS)))
    sample = kernels_to_check(archs, _families(args.family, archs), seed=args.seed)
    kernels = most_of(sample, args.pairs)[: args.variants]
    results = []
    limit_s = None if args.time_limit is None else args.time_limit - (time.monotonic() - started)
    checks = check_kernels(
        kernels,
        jobs=args.jobs,
        sanitize=args.sanitize,
        seed=args.seed,
        time_limit_s=limit_s,
        gpu=gpu.devices[0] if gpu else None,
    )
    for result in checks:
        results.append(result)
        if sys.stderr.isatty():
            print(f"\r{len(results)}/{len(kernels)} kernels", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    found = coverage(results, sample)
    wall_s = time.monotonic() - started
    failed = [result for result in results if not result.ok]
    cut = len(results) < len(kernels)
    if args.json:
        print(json.dumps(_document(results, found, archs, args, len(kernels), wall_s), indent=1))
    else:
        _print(results, found, archs, len(kernels), wall_s)
    if cut:
        short = f"{len(kernels) - len(results)} of {len(kernels)} kernels and {len(found.missing)} pairs were left out"
        advice = "allow more time, or fewer kernels with --variants"
        print(f"tilewright: {short} by --time-limit {args.time_limit:g}; {advice}", file=sys.stderr)
    return FAILED if failed or (cut and args.variants is None) else 0


def _gpu(args: argparse.Namespace) -> TuningTarget:
    """The GPU that --gpu compares with; `InvalidInput` where there is none or the other options don't go with it."""
    from tilewright.tuner.devices import resolve_target

    target = resolve_target("cuda")
    if args.sanitize:
        raise InvalidInput("--gpu compares what the runtime executes, which --sanitize replaces; give one of them")
    if args.arch and set(args.arch) != {target.arch}:
        raise InvalidInput(f"--gpu compares kernels for the GPU here, {target.arch}; got --arch {' '.join(args.arch)}")
    return target


def _families(names: Sequence[str] | None, archs: Sequence[str]) -> list[Family]:
    """The families to check; `InvalidInput` lists the known ones where a name or an architecture is none."""
    from tilewright.generator.arch import arch_named, gpu_names
    from tilewright.generator.family import all_families, family_named
    from tilewright.tuner.host_check import cuda_families

    for arch in archs:
        if arch_named(arch).is_cpu:
            raise InvalidInput(
                f"--arch must be a GPU's, got {arch}; known: {', '.join(gpu_names())}"
                "; kernels for the CPU run as they are, see `tilewright verify --target cpu`"
            )
    known = [family.name for family in all_families().values() if family.language == "cuda"]
    fitting = cuda_families(archs)
    for name in names or ():
        if family_named(name).language != "cuda":
            raise InvalidInput(f"--family must be one of CUDA kernels, got {name}; known: {', '.join(known)}")
        if name not in [family.name for family in fitting]:
            raise InvalidInput(
                f"{name} needs {family_named(name).instructions} instructions, which none of {', '.join(archs)} has"
                "; give another --arch"
            )
    return [family for family in fitting if not names or family.name in names]


def _groups(results: Sequence[CheckResult]) -> dict[tuple[str, str], list[CheckResult]]:
    """The results by family and architecture."""
    groups: dict[tuple[str, str], list[CheckResult]] = {}
    for result in sorted(results, key=lambda r: (r.kernel.spec.family, r.kernel.arch)):
        groups.setdefault((result.kernel.spec.family, result.kernel.arch), []).append(result)
    return groups


def _print(results: Sequence[CheckResult], found: Coverage, archs: Sequence[str], count: int, wall_s: float) -> None:
    from rich.markup import escape

    console = _console()
    console.print(_table(results))
    for result in results:
        if not result.ok:
            console.print(f"[red]failed[/] {escape(_name(result))}", soft_wrap=True)
            console.print(f"  {escape(result.outcome)}: {escape(result.message)}", soft_wrap=True)
    right = sum(result.ok for result in results)
    text = f"{right} of {count} kernels right for {', '.join(archs)}; {found.covered} of {found.legal} legal pairs"
    console.print(f"{text}; {wall_s:.0f} s", soft_wrap=True)
    agreements = [result.agreement for result in results if result.agreement is not None]
    if agreements:
        worst = max(agreements, key=lambda agreement: agreement.ratio)
        cases, identical = sum(a.cases for a in agreements), sum(a.identical for a in agreements)
        text = f"host and GPU: {sum(a.ok for a in agreements)} of {len(agreements)} kernels agree over {cases} cases"
        text += f", {identical} bit for bit; at most {worst.ratio:.2g} of what is allowed ('{worst.case}')"
        console.print(text, soft_wrap=True)


def _table(results: Sequence[CheckResult]) -> Table:
    from rich.table import Table

    from tilewright.tuner.host_check import case_times

    table = Table()
    for column in ("family", "arch"):
        table.add_column(column, overflow="fold")
    for column in ("kernels", "cases", "failed", "median ms a case", "worst", "median s a build"):
        table.add_column(column, justify="right")
    for (family, arch), group in _groups(results).items():
        median, worst = case_times(group)
        failed = sum(not result.ok for result in group)
        table.add_row(
            family,
            arch,
            str(len(group)),
            str(sum(len(result.case_ms) for result in group)),
            f"[red]{failed}[/]" if failed else "0",
            f"{median:.0f}",
            f"{worst:.0f}",
            f"{statistics.median(result.build_s for result in group):.1f}",
        )
    return table


def _name(result: CheckResult) -> str:
    kernel = result.kernel
    return f"{kernel.spec.name} {kernel.dtype} D{kernel.head_dim} {kernel.arch} [{' '.join(kernel.mask_terms)}]"


def _document(
    results: Sequence[CheckResult],
    found: Coverage,
    archs: Sequence[str],
    args: argparse.Namespace,
    count: int,
    wall_s: float,
) -> dict[str, Any]:
    """Everything as JSON-ready values."""
    kernels = [
        {
            "kernel": result.kernel.to_dict(),
            "outcome": result.outcome.value,
            "message": result.message,
            "build_s": round(result.build_s, 3),
            "case_ms": {name: round(ms, 3) for name, ms in result.case_ms},
            "agreement": dataclasses.asdict(result.agreement) if result.agreement else None,
        }
        for result in results
    ]
    missing = [{"family": family, **dict(choices)} for family, choices in found.missing]
    return {
        "archs": list(archs),
        "seed": args.seed,
        "sanitize": args.sanitize,
        "kernels": kernels,
        "failed": sum(not result.ok for result in results),
        "left_out": count - len(results),
        "pairs": {"covered": found.covered, "legal": found.legal, "missing": missing},
        "wall_s": round(wall_s, 1),
    }


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
