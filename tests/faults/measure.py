"""Which of the seeded faults the adversarial cases show on a device: `python tests/faults/measure.py --device cuda`.

A GPU shows what goes wrong in its results, or traps; the host check also sees races, and accesses that happen to do no
harm. Both run the same kernels through the same cases, so that their tables can be compared. A GPU's needs nvcc.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # also where Python leaves out a script's own directory

import torch
from seeded import FAULTS, POINTS, Fault, Point, first_failure, patched_templates

from tilewright.generator.arch import arch_of_capability
from tilewright.generator.build_pool import BuildPool
from tilewright.generator.errors import IllegalAccess, VariantFailed
from tilewright.generator.host_build import build_host, is_host_artifact
from tilewright.generator.render import Rendered, render
from tilewright.generator.variant import Kernel
from tilewright.tuner import worker, worker_process
from tilewright.tuner.cases import HOST_SHAPES
from tilewright.tuner.host_check import worker_environment
from tilewright.tuner.host_kernel import HostKernel
from tilewright.tuner.verify import CaseBook

RUNS = 3
"""A race may show in one run and not in the next."""

TIMEOUT_S = 120.0

START = "import sys; from measure import serve; serve(int(sys.argv[1]), sys.argv[2])"

Key = tuple[str, Point]
"""A fault's name, or nothing for the templates as they are, and a kernel."""


class Session(worker_process.Session):
    """The side of a worker that runs kernels, one case at a time."""

    def first_failure(self, kernel: Kernel, artifact: Path, run: int) -> str | None:
        """See `seeded.first_failure`. run: on the host, threads run in another order in each."""
        self.host_book = self.host_book or CaseBook(self.device, HOST_SHAPES)
        if is_host_artifact(artifact):
            name = worker_process.module_name(kernel, artifact)
            return first_failure(HostKernel(artifact, kernel, name, seed=1000 * run), self.host_book)
        message = first_failure(self._load(kernel, artifact), self.host_book)
        if message and not self.is_healthy():
            raise IllegalAccess(message)  # an error, so that this process ends
        return message


def serve(fd: int, device: str) -> None:
    """What a worker's process runs here."""
    worker_process.Session = Session  # type: ignore[misc]
    worker_process.serve(fd, device)


class Worker(worker.Worker):
    """The parent's handle on a `Session`."""

    def _start(self) -> None:
        kept, worker._START = worker._START, START
        try:
            super()._start()
        finally:
            worker._START = kept

    def first_failure(self, kernel: Kernel, artifact: Path, run: int) -> str | None:
        """The first failure, a crash and a hang among them; None where every case passed."""
        try:
            message: str | None = self._request("first_failure", (kernel, artifact, run), TIMEOUT_S)
        except VariantFailed as error:
            return str(error) or type(error).__name__
        return message


def build_all(rendered: dict[Key, Rendered], on_host: bool) -> Iterator[tuple[Key, Path | VariantFailed]]:
    """(key, library, or why there is none) for each, in order, compiled side by side."""
    if on_host:
        with ThreadPoolExecutor(2) as threads:
            yield from zip(rendered, threads.map(build_host, rendered.values()), strict=True)
        return
    with BuildPool() as pool:
        futures = {key: pool.submit(one) for key, one in rendered.items()}
        for key, future in futures.items():
            built = future.result()
            yield key, built.artifact or built.error or VariantFailed("the compiler gave nothing")


def render_all(faults: list[Fault], arch: str, directory: Path) -> dict[Key, Rendered]:
    """Every kernel that is legal on `arch`: first without a fault, then with each of its faults."""
    templates: dict[str, Path | None] = {"": None}
    templates |= {fault.name: patched_templates(fault, directory / fault.name) for fault in faults}
    wanted: list[Key] = [("", point) for point in POINTS if any(point in fault.points for fault in faults)]
    wanted += [(fault.name, point) for fault in faults for point in fault.points]
    rendered = {}
    for name, point in wanted:
        try:
            rendered[name, point] = render(point.kernel(arch), templates[name])
        except LookupError as error:
            print(f"{name or 'no fault':26} {point.name}: left out, {error}")
    return rendered


def measure(device: str, faults: list[Fault], save: Path | None = None) -> list[dict[str, Any]]:
    """A row a kernel, printed and saved as it comes: how each run failed (None: it passed), or `not_compiled`."""
    on_host = device == "host"
    arch = "sm_90a" if on_host else arch_of_capability(*torch.cuda.get_device_capability(device)).name
    name = "host" if on_host else torch.cuda.get_device_name(device)
    environment = worker_environment(sanitize=False) if on_host else None
    rows: list[dict[str, Any]] = []
    print(f"{name}, {arch}, torch {torch.__version__}, the {len(HOST_SHAPES)} cases for the host, {RUNS} runs")
    with (
        tempfile.TemporaryDirectory() as directory,
        Worker("cpu" if on_host else device, environment=environment) as runner,
    ):
        rendered = render_all(faults, arch, Path(directory))
        # All libraries first: nothing runs beside a compiler, which would change how warps interleave.
        for (fault, point), built in list(build_all(rendered, on_host)):
            kernel = rendered[fault, point].kernel
            row: dict[str, Any] = {"fault": fault, "kernel": point.name, "variant": kernel.spec.name, "runs": []}
            if isinstance(built, VariantFailed):
                row["not_compiled"] = str(built)
            else:
                row["runs"] = [runner.first_failure(kernel, built, run) for run in range(RUNS if fault else 1)]
            rows.append(row)
            print(_line(row), flush=True)
            if save:
                save.write_text(json.dumps({"device": name, "arch": arch, "rows": rows}, indent=1) + "\n")
    print_summary(faults, rows)
    return rows


def print_summary(faults: list[Fault], rows: list[dict[str, Any]]) -> None:
    """A line for each fault. A kernel that fails without the fault as well tells nothing."""
    passing = [row["kernel"] for row in rows if not row["fault"] and row["runs"] == [None]]
    for fault in faults:
        told = [row["runs"] for row in rows if row["fault"] == fault.name and row["runs"] and row["kernel"] in passing]
        failed = [sum(message is not None for message in runs) for runs in told]
        verdict = "caught" if any(failed) else "not caught"
        print(f"{fault.name:26} {verdict}: {sum(failed)} of {RUNS * len(told)} runs, on {len(told)} kernels")


def _line(row: dict[str, Any]) -> str:
    # Without the kernel's name in the message, which the line begins with.
    failures = [re.sub(r"^(case '[^']*': )\S+/\S+ .*? for \w+ D\d+: ", r"\1", m) for m in row["runs"] if m]
    said = f"not compiled: {row['not_compiled']}" if "not_compiled" in row else (failures or ["passes"])[0]
    return f"{row['fault'] or 'no fault':26} {row['kernel']:48} {len(failures)} of {len(row['runs'])}  {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", required=True, help="host, cuda or cuda:N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name holds this")
    arguments = parser.parse_args()
    device = "cuda:0" if arguments.device == "cuda" else arguments.device
    faults = [fault for fault in FAULTS if arguments.only in fault.name]
    if device != "host" and not device.startswith("cuda"):
        parser.error(f"--device must be host, cuda or cuda:N; got {device}")
    if device != "host" and not torch.cuda.is_available():
        sys.exit(f"--device {device}: PyTorch finds no GPU here; take --device host")
    if not faults:
        sys.exit(f"--only {arguments.only}: no fault is called so; there are {', '.join(f.name for f in FAULTS)}")
    measure(device, faults, arguments.json)


if __name__ == "__main__":
    main()
