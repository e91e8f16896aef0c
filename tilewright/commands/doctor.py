"""`tilewright doctor`: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tilewright.generator import toolchain
from tilewright.generator.build import build
from tilewright.generator.errors import InvalidInput, TilewrightError
from tilewright.generator.problem import Problem
from tilewright.generator.space import default_variant
from tilewright.generator.variant import kernel_of

State = Literal["ok", "absent", "broken"]

PIPE_WIDTH = 200
"""Columns of the table in a pipe or a file."""

DESCRIPTION = """\
Say what works on this machine (compiler, ninja, CUDA, GPU, caches, database) and what to do about the rest.

A kernel is really rendered, compiled and loaded for each target that could work, in a directory that is thrown away.
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: `absent` is not there and the cpu target needs it not, `broken` keeps it from working."""

    name: str
    state: State
    found: str
    advice: str = ""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="compiler, ninja, CUDA, GPU, caches, database: what works, what to do",
        description=DESCRIPTION,
        epilog="Exit codes: 0 the cpu target works, 1 it does not.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--db", metavar="URL", help="the database: a path or a SQLAlchemy URL")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look at everything and print it; gives 0 when kernels can be built and kept for the cpu target, else 1."""
    checks = examine(args.db)
    by_name = {check.name: check for check in checks}
    targets = {name: by_name[f"{name} target"].state == "ok" for name in ("cpu", "cuda")}
    works = targets["cpu"] and by_name["cache directory"].state == "ok"
    if args.json:
        print(
            json.dumps({"ok": works, "targets": targets, "checks": [dataclasses.asdict(c) for c in checks]}, indent=2)
        )
    else:
        _print_table(checks)
        if works:
            targets_text = "cpu and cuda" if targets["cuda"] else "cpu"
            print(f"Ready for {targets_text}. Next: tilewright tune")
        else:
            print("The cpu target does not work yet: see the lines marked broken.")
    return 0 if works else 1


def examine(db: str | None = None) -> list[Check]:
    """Every check, in the order in which a repair should go."""
    checks = [
        Check("python", "ok", f"{sys.version.split()[0]}, {toolchain.python_abi()}"),
        _headers(),
        _pytorch(),
        _tool("c++ compiler", lambda: _tool_text(toolchain.cxx_compiler()), "broken"),
        _tool("ninja", lambda: _tool_text(toolchain.ninja()), "broken"),
        _cache(),
        _tool("cpu target", lambda: _built("cpu"), "broken"),
        _nvcc(),
        _gpu(),
    ]
    checks.append(_cuda_target(checks[-2], checks[-1]))
    checks.append(_database(db))
    return checks


def _tool(name: str, look: Callable[[], str], otherwise: State) -> Check:
    """What `look` finds; its error becomes the finding, and the advice that follows the error's semicolon."""
    try:
        return Check(name, "ok", look())
    except TilewrightError as error:
        found, _, advice = str(error).partition("; ")
        return Check(name, otherwise, found, advice)
    except Exception as error:  # a doctor must not fall ill: whatever else goes wrong is a finding too
        return Check(name, "broken", f"{type(error).__name__}: {error}".splitlines()[0], "please report this")


def _tool_text(tool: toolchain.Tool) -> str:
    return f"{tool.version} at {tool.path}"


def _headers() -> Check:
    include = Path(sysconfig.get_path("include", scheme="posix_prefix"))
    if (include / "Python.h").exists():
        return Check("python headers", "ok", str(include / "Python.h"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    advice = f"install them (`apt install python{version}-dev`), or use a Python that has them"
    return Check("python headers", "broken", f"no {include / 'Python.h'}", advice)


def _pytorch() -> Check:
    import torch

    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return Check("pytorch", "ok", f"{torch.__version__}, {kind}")


def _cache() -> Check:
    def look() -> str:
        path = toolchain.cache_dir()
        with tempfile.NamedTemporaryFile(dir=path) as probe:
            probe.write(b"x" * 4096)
        kernels = sum(1 for _ in path.glob("kernels/*/kernel.so"))
        return f"{path}, {kernels} kernels"

    try:
        return _tool("cache directory", look, "broken")
    except OSError as error:
        found = f"{toolchain.cache_path()} cannot be written: {error.strerror}"
        return Check("cache directory", "broken", found, f"free some space or set {toolchain.CACHE_VARIABLE}")


def _built(target: str) -> str:
    """Build and load the default kernel of a small dense problem, in a cache of its own."""
    problem = Problem("float32", 64, 1, 1, 1, 128, 128, target)
    kernel = kernel_of(problem, default_variant(problem))
    with (
        tempfile.TemporaryDirectory(prefix="tilewright-doctor-") as directory,
        toolchain.environment({toolchain.CACHE_VARIABLE: directory}),
    ):
        started = time.perf_counter()
        build(kernel)
        return f"{kernel.spec.name} built and loaded in {time.perf_counter() - started:.1f} s"


def _nvcc() -> Check:
    import torch

    check = _tool("cuda toolkit", lambda: _toolkit_text(toolchain.cuda_toolkit()), "absent")
    if check.state != "ok" or torch.version.cuda is None:
        return check
    release = toolchain.cuda_toolkit().release
    if str(release[0]) != torch.version.cuda.split(".")[0]:
        found = f"{check.found}, but PyTorch is built for CUDA {torch.version.cuda}"
        return Check(
            check.name, "broken", found, f"install the CUDA {torch.version.cuda} toolkit and set CUDA_HOME to it"
        )
    return check


def _toolkit_text(toolkit: toolchain.CudaToolkit) -> str:
    return f"{toolkit.version} at {toolkit.home}"


def _gpu() -> Check:
    import torch

    from tilewright.generator.arch import arch_of_capability
    from tilewright.runtime.environment import nvidia_driver_version

    driver = nvidia_driver_version()
    if torch.version.cuda is None:
        found = "this PyTorch is built without CUDA" + (
            f", though there is an NVIDIA driver ({driver})" if driver else ""
        )
        return Check("gpu", "absent", found, "for GPU kernels install a CUDA build of PyTorch")
    if not torch.cuda.is_available():
        found = f"PyTorch finds no CUDA device (driver {driver or 'not loaded'})"
        return Check(
            "gpu", "absent", found, "for GPU kernels see that `nvidia-smi` works and CUDA_VISIBLE_DEVICES is right"
        )
    devices = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        try:
            arch = arch_of_capability(*capability).name
        except InvalidInput as error:
            found, _, advice = str(error).partition("; ")
            return Check("gpu", "absent", f"{torch.cuda.get_device_name(index)}: {found}", advice)
        devices.append(f"cuda:{index} {torch.cuda.get_device_name(index)} ({arch})")
    return Check("gpu", "ok", ", ".join(devices) + f", driver {driver or 'unknown'}")


def _cuda_target(nvcc: Check, gpu: Check) -> Check:
    import torch

    for need in (gpu, nvcc):
        if need.state == "absent":
            return Check("cuda target", "absent", f"needs the {need.name}: {need.found}")
    from tilewright.generator.arch import arch_of_capability

    def look() -> str:
        archs = {
            arch_of_capability(*torch.cuda.get_device_capability(i)).name for i in range(torch.cuda.device_count())
        }
        return "; ".join(f"{name}: {_built(name)}" for name in sorted(archs))

    return _tool("cuda target", look, "broken")


def _database(db: str | None) -> Check:
    def look() -> str:
        from tilewright.runtime.store import Store

        store = Store.open_existing(db)
        if store is None:
            return "none yet; `tilewright tune` makes it"
        with store:
            stats = store.stats()
        return f"{stats['database']}, {stats['measurements']} measurements, {stats['winners']} winners"

    return _tool("database", look, "broken")


def _print_table(checks: list[Check]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("check", "state", "found", "what to do"):
        table.add_column(column, overflow="fold")
    styles = {"ok": "green", "absent": "yellow", "broken": "bold red"}
    for check in checks:
        table.add_row(check.name, Text(check.state, styles[check.state]), Text(check.found), Text(check.advice))
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
