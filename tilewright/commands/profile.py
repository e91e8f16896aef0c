"""`tilewright profile`: one kernel on one call, for Nsight Compute, and the command that profiles it."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.generator.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from tilewright.generator.problem import Problem
    from tilewright.generator.variant import VariantSpec
    from tilewright.tuner.workloads import WorkloadRow

WARM_UPS = 2
"""Launches before the one that is profiled."""

DESCRIPTION = """\
Build one kernel, run it a few times on a workload's row, and print the command that profiles it with Nsight Compute (on
the CPU: with perf). The kernel is the dispatcher's choice unless --variant names another, as `tilewright db` and
`tilewright bench` print it.

example: tilewright profile --workload longformer --row "fp32, N8192\""""

_VARIANT = re.compile(r"(\w+)/(\w+) (\d+)x(\d+)((?: \w+=\w+)*)")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `profile`."""
    parser = subparsers.add_parser(
        "profile",
        help="run one kernel for Nsight Compute, and print the command",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--workload", default="quick", metavar="NAME|FILE", help="a shipped workload or a .toml file (default: quick)")
    add("--row", metavar="TEXT", help="the first row whose name contains this (default: the first for the target)")
    add("--variant", metavar="NAME", help="such as 'forward_simt/gather 64x32 num_stages=2 ...'")
    add("--target", default="auto", metavar="TARGET", help="auto, cpu, cuda or cuda:INDEX (default: auto)")
    add("--report", metavar="FILE", help="where the profiler writes (default: tilewright-profile)")
    add("--run-once", action="store_true", help="what the profiler runs: warm-ups, then the launch, and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the kernel and print the profiler's command. Raises what building and launching raise."""
    from tilewright.runtime.call_problem import target_of
    from tilewright.tuner.bench import bench_device

    device = bench_device(args.target)
    row = _row(args.workload, args.row, device.type)
    problem = row.problem(target_of(device))
    spec = variant_named(args.variant, problem) if args.variant else _dispatched(problem, device)
    time_us = _run_kernel(row, problem, spec, device, timed=not args.run_once)
    if args.run_once:
        return 0
    print(f"{problem.name}\n  {spec.name}: {time_us:.1f} us\n\n{profiler_command(args, row, spec, device.type)}")
    return 0


def _row(workload: str, text: str | None, target: str) -> WorkloadRow:
    from tilewright.tuner.workloads import load_workload

    rows = load_workload(workload).rows_for(target)
    found = next((row for row in rows if text is None or text in row.name), None)
    if found is None:
        names = "; ".join(row.name for row in rows)
        raise InvalidInput(f"no row of {workload} for {target} has {text!r} in its name; its rows: {names}")
    return found


def _dispatched(problem: Problem, device: torch.device) -> VariantSpec:
    from tilewright.runtime.dispatch import DISPATCHER

    choice = DISPATCHER.choose(problem, device)
    if choice.spec is None:
        raise InvalidInput(f"PyTorch would answer {problem.name}, so there is no kernel to profile: {choice.detail}")
    return choice.spec


def variant_named(name: str, problem: Problem) -> VariantSpec:
    """The variant whose `VariantSpec.name` this is; axes left out are the family's first default's of that mask form.

    Raises `InvalidInput` for text that is none, or a variant that is not legal for the problem.
    """
    from tilewright.generator.family import family_named
    from tilewright.generator.space import problem_reason
    from tilewright.generator.variant import AxisValue, VariantSpec

    found = _VARIANT.fullmatch(name.strip())
    if found is None:
        raise InvalidInput(f"--variant must be FAMILY/FORM MxN AXIS=VALUE ..., as variants are printed; got {name!r}")
    family = family_named(found[1])
    given = {"block_m": found[3], "block_n": found[4], **dict(part.split("=") for part in found[5].split())}
    form = found[2]
    default = next((each for each in family.defaults if each.get("mask_form", form) == form), family.defaults[0])
    values: dict[str, AxisValue] = {**default, "mask_form": form}
    for axis, text in given.items():
        allowed = {str(value): value for value in family.axes.get(axis, ())}
        if text not in allowed:
            raise InvalidInput(
                f"{axis} of {family.name} must be one of {', '.join(allowed)}; got {text}"
                if allowed
                else f"{family.name} has no axis {axis}; it has {', '.join(family.axes)}"
            )
        values[axis] = allowed[text]
    spec = VariantSpec.from_values(family.name, values)
    reason = problem_reason(problem, spec)
    if reason is not None:
        raise InvalidInput(f"{spec.name} cannot run {problem.name}: {reason}")
    return spec


def _run_kernel(
    row: WorkloadRow, problem: Problem, spec: VariantSpec, device: torch.device, *, timed: bool
) -> float | None:
    """Launch it `WARM_UPS` + 1 times; then, if asked, the median time in microseconds."""
    import torch

    from tilewright.generator.build import build
    from tilewright.generator.render import render
    from tilewright.generator.variant import kernel_of
    from tilewright.runtime.launch import LoadedKernel
    from tilewright.tuner.timing import time_kernel

    rendered = render(kernel_of(problem, spec))
    loaded = LoadedKernel(build(rendered), rendered.kernel, rendered.module_name)
    launch = row.asked_of.row(row, device).bind(loaded).runner()
    for _ in range(WARM_UPS + 1):
        launch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time_kernel(launch, device).median_us if timed else None


def profiler_command(args: argparse.Namespace, row: WorkloadRow, spec: VariantSpec, device_type: str) -> str:
    """What to type: Nsight Compute on a GPU, perf on the CPU.

    The clocks are left alone, since boost is what timings see; the launches before the profiled one are skipped.
    """
    ours = [sys.executable, "-m", "tilewright", "profile", "--run-once", "--target", args.target]
    workload = str(Path(args.workload).resolve()) if args.workload.endswith(".toml") else args.workload
    ours += ["--workload", workload, "--row", row.name, "--variant", spec.name]
    report = args.report or "tilewright-profile"
    if device_type == "cpu":
        return f"perf record -g -o {shlex.quote(report)} {shlex.join(ours)}"
    options = ["--kernel-name", "regex:attention|select_blocks", "--launch-skip", str(WARM_UPS), "--launch-count", "1"]
    return shlex.join(["ncu", *options, "--clock-control", "none", "--set", "full", "-f", "-o", report, *ours])
