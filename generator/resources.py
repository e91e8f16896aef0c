"""What a kernel costs on its architecture, as its compiler reports it: no GPU and no CUDA build of PyTorch needed."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from tilewright.generator import toolchain
from tilewright.generator.arch import arch_named
from tilewright.generator.build import LOG, first_errors
from tilewright.generator.errors import CompileFailed, TimedOut
from tilewright.generator.legality import derived_values
from tilewright.generator.render import Rendered, render
from tilewright.generator.variant import Kernel


@dataclass(frozen=True, slots=True)
class ResourceReport:
    """Registers a thread, bytes a thread spilled, shared memory a block, and the seconds the compiler took.

    All but `seconds` are 0 on the CPU. Where a source has several kernels, each figure is the largest among them.
    """

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_bytes: int
    seconds: float


def compile_report(kernel: Kernel, out_dir: Path, *, timeout_s: float = 600.0) -> ResourceReport:
    """Render `kernel` into `out_dir`, compile it for its architecture there, and report what it uses.

    Raises `IllegalVariant`, `CompileFailed` (its log is also `out_dir/build.log`), `TimedOut`, `ToolMissing`.
    """
    report = compile_sources(render(kernel), out_dir, timeout_s=timeout_s)
    # ptxas sees static shared memory alone; what is asked for at launch is the family's own figure.
    planned = int(derived_values(kernel).get("smem_bytes", 0))
    if planned <= report.smem_bytes:
        return report
    return ResourceReport(report.registers, report.spill_store_bytes, report.spill_load_bytes, planned, report.seconds)


def compile_sources(rendered: Rendered, out_dir: Path, *, timeout_s: float = 600.0) -> ResourceReport:
    """The same for sources that are rendered already; `smem_bytes` is the static part alone."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, text in rendered.sources.items():
        (out_dir / name).write_text(text, encoding="utf-8")
    arch = arch_named(rendered.kernel.arch)
    flags = toolchain.build_flags(arch, rendered.language)
    if rendered.language == "cuda":
        toolkit = toolchain.cuda_toolkit()
        toolchain.check_nvcc_release(toolkit, arch)
        source = out_dir / "kernel.cu"
        command = [
            str(toolkit.path),
            "-cubin",
            "-Xptxas=-v",
            *flags,
            *toolchain.host_compiler_flags(),
            str(source),
            "-o",
            str(out_dir / "kernel.cubin"),
        ]
    else:
        source = out_dir / "kernel.cpp"
        python = f"-I{sysconfig.get_path('include', scheme='posix_prefix')}"
        compiler = str(toolchain.cxx_compiler().path)
        command = [compiler, "-c", "-fPIC", *flags, python, str(source), "-o", str(out_dir / "kernel.o")]
    started = time.perf_counter()
    code, log = run_compiler(command, timeout_s)
    seconds = time.perf_counter() - started
    if code:
        (out_dir / LOG).write_text(log)
        raise CompileFailed(f"{first_errors(log)}; full log: {out_dir / LOG}", log=log, source_path=source)
    return ResourceReport(*parse_ptxas(log), seconds=seconds)


def run_compiler(command: list[str], timeout_s: float, directory: Path | None = None) -> tuple[int, str]:
    """(exit code, output) of a compiler run in `directory`; what it started ends with it. Raises `TimedOut`."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=directory,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        # nvcc's own children (cicc, ptxas) would go on; they are in its process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimedOut(f"the compiler was killed after {timeout_s:g} s: {shlex.join(command)}") from error
        raise
    return process.returncode, output


def parse_ptxas(log: str) -> tuple[int, int, int, int]:
    """(registers, spill store bytes, spill load bytes, static shared memory bytes) from `ptxas -v`, else zeros."""
    patterns = (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads", r"(\d+) bytes smem")
    registers, stores, loads, smem = (max(map(int, re.findall(pattern, log)), default=0) for pattern in patterns)
    return registers, stores, loads, smem
