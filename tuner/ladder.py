"""The ladder: how each step, from one thread a query to gathered tiles on tensor cores, moves the same small call."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tilewright.generator.arch import arch_named
from tilewright.generator.build_pool import BuildPool, BuildResult
from tilewright.generator.errors import IllegalVariant, TilewrightError, ToolMissing
from tilewright.generator.family import family_named
from tilewright.generator.legality import derived_values
from tilewright.generator.problem import Problem
from tilewright.generator.render import render
from tilewright.generator.space import problem_reason
from tilewright.generator.variant import AxisValue, Kernel, VariantSpec, kernel_of
from tilewright.runtime.canonical import canonical
from tilewright.runtime.launch import LoadedKernel
from tilewright.runtime.plans import plan_for
from tilewright.tuner.bench import Bench, BenchRow
from tilewright.tuner.peers import Call, Peer, Ready, Setting, all_peers
from tilewright.tuner.plots import Line, draw
from tilewright.tuner.workloads import WorkloadRow

LENGTHS: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
MASK = "sliding_window(32, 32) | global_stride(512)"
HEAD_DIM = 64
PEERS = ("sdpa_dense", "sdpa_masked")


@dataclass(frozen=True, slots=True)
class Rung:
    """One step: a family, a mask form, and the axes in which the point differs from the family's default."""

    name: str
    family: str
    mask_form: str
    axes: tuple[tuple[str, AxisValue], ...] = ()
    dtype: str = "float32"

    def spec(self, problem: Problem) -> VariantSpec:
        """The variant: the first of the family's defaults that is legal with these axes; else `IllegalVariant`."""
        reasons = []
        for default in family_named(self.family).defaults:
            values = {"mask_form": self.mask_form, **default, **dict(self.axes)}
            spec = VariantSpec.from_values(self.family, values)
            reason = problem_reason(problem, spec)
            if reason is None:
                return spec
            reasons.append(reason)
        raise IllegalVariant(reasons[0])


def _axes(**axes: AxisValue) -> tuple[tuple[str, AxisValue], ...]:
    return tuple(axes.items())


# One row and two keys a lane, as near to online_softmax's mapping as the family goes: the list is what is new.
_FEW_A_LANE = _axes(block_m=16, block_n=32, num_warps=8, lanes_per_row=16, vector=2, num_stages=1, q_in_registers=False)
_SHARED_ROWS = _axes(block_m=64, block_n=32, num_warps=4, lanes_per_row=8, vector=4, q_in_registers=False)
_PLAIN_CPU = _axes(cached_panels=0, schedule="static")

CUDA_RUNGS: tuple[Rung, ...] = (
    Rung("naive", "ladder", "scan", _axes(rung="naive", block_m=128, block_n=1)),
    Rung("tiled_full_row", "ladder", "scan", _axes(rung="tiled_full_row", block_m=4, block_n=32)),
    Rung("online_softmax", "ladder", "scan", _axes(rung="online_softmax", block_m=8, block_n=32)),
    Rung("active_list", "forward_simt", "list", _FEW_A_LANE),
    Rung("thread_mapping", "forward_simt", "list", (*_SHARED_ROWS, ("num_stages", 1))),
    Rung("double_buffering", "forward_simt", "list", (*_SHARED_ROWS, ("num_stages", 2))),
    Rung("gather", "forward_simt", "gather", (*_SHARED_ROWS, ("num_stages", 2))),
    Rung("tensor_cores_fp16", "forward_wmma", "list", dtype="float16"),
    Rung("tensor_cores_gather_fp16", "forward_wmma", "gather", dtype="float16"),
)
CPU_RUNGS: tuple[Rung, ...] = (
    Rung("scan", "forward_cpu", "scan", _PLAIN_CPU),
    Rung("bitmap", "forward_cpu", "bitmap", _PLAIN_CPU),
    Rung("active_list", "forward_cpu", "list", _PLAIN_CPU),
    Rung("analytic", "forward_cpu", "analytic", _PLAIN_CPU),
    Rung("gather", "forward_cpu", "gather", _PLAIN_CPU),
    Rung("cached_panels", "forward_cpu", "gather", _axes(cached_panels=64, schedule="static")),
    Rung("dynamic_schedule", "forward_cpu", "gather", _axes(cached_panels=64, schedule="dynamic")),
)


@dataclass(frozen=True, slots=True)
class LadderRow:
    """One rung, or peer, at one length.

    registers, local_bytes: a thread; local memory is spills and arrays with computed indices. smem_bytes: a block. All
    None on the CPU and for peers.
    """

    seqlen: int
    bench: BenchRow
    registers: int | None = None
    local_bytes: int | None = None
    smem_bytes: int | None = None


@dataclass(slots=True)
class _Kernels:
    """The rungs' kernels, each built and loaded once, whatever the lengths."""

    built: dict[Kernel, BuildResult] = field(default_factory=dict)
    loaded: dict[Kernel, LoadedKernel] = field(default_factory=dict)

    def build(self, kernels: Sequence[Kernel]) -> None:
        with BuildPool() as pool:
            for result in pool.as_completed(dict.fromkeys(kernels)):
                self.built[result.kernel] = result

    def load(self, kernel: Kernel) -> LoadedKernel:
        if kernel not in self.loaded:
            result = self.built[kernel]
            if result.artifact is None:
                raise result.error or IllegalVariant("it was not built")
            self.loaded[kernel] = LoadedKernel(result.artifact, kernel, render(kernel).module_name)
        return self.loaded[kernel]


def ladder_rows(
    bench: Bench, arch: str, *, lengths: Sequence[int] = LENGTHS, rungs: Sequence[Rung] | None = None
) -> Iterator[LadderRow]:
    """Every rung and both PyTorch peers at every length, as they are measured.

    A rung that cannot run is a row with its reason. Raises `ToolMissing` where nothing can be built.
    """
    chosen = rungs or (CPU_RUNGS if arch == "cpu" else CUDA_RUNGS)
    kernels = _Kernels()
    wanted = []
    for length in lengths:
        for rung in chosen:
            problem = workload_row(length, rung.dtype).problem(arch)
            try:
                wanted.append(kernel_of(problem, rung.spec(problem)))
            except IllegalVariant:
                continue  # its row says so below
    kernels.build(wanted)
    peers = all_peers()
    for length in lengths:
        for rung in chosen:
            yield _rung_row(bench, arch, kernels, rung, workload_row(length, rung.dtype))
        for found in bench.rows(workload_row(length, "float32"), [peers[name] for name in PEERS]):
            yield LadderRow(length, found)


def workload_row(length: int, dtype: str) -> WorkloadRow:
    """The ladder's call at one length: one batch entry, one head."""
    return WorkloadRow(f"ladder N{length}", dtype, HEAD_DIM, 1, length, mask=MASK)


def _rung_row(bench: Bench, arch: str, kernels: _Kernels, rung: Rung, row: WorkloadRow) -> LadderRow:
    blank = LadderRow(row.seqlen_q, BenchRow(row.name, rung.name, bench.device_name))
    problem = row.problem(arch)
    try:
        kernel = kernel_of(problem, rung.spec(problem))
        _check_full_row(kernel, row.seqlen_kv)
        loaded = kernels.load(kernel)
        info = loaded.info()
    except TilewrightError as error:
        return dataclasses.replace(blank, bench=dataclasses.replace(blank.bench, error=str(error)))
    (found,) = bench.rows(row, [_peer_of(rung.name, loaded)])
    if arch == "cpu":
        return LadderRow(row.seqlen_q, found)
    return LadderRow(row.seqlen_q, found, info["registers"], info["local_bytes"], info["smem_bytes"])


def _check_full_row(kernel: Kernel, seqlen_kv: int) -> None:
    """Say in words what the kernel's launch would answer with a number."""
    values = derived_values(kernel)
    if values.get("rung") != "tiled_full_row":
        return
    needed, limit = values["smem_bytes"] + values["block_m"] * seqlen_kv * 4, arch_named(kernel.arch).smem_limit_bytes
    if needed > limit:
        raise IllegalVariant(
            f"{values['block_m']} full rows of {seqlen_kv} scores take {needed} bytes of shared memory with the tiles; "
            f"{kernel.arch} allows {limit} a block"
        )


def _peer_of(name: str, loaded: LoadedKernel) -> Peer:
    """A kernel as something to be benchmarked; its plan is built once, outside the timing."""
    spec = loaded.kernel.spec

    def settings(call: Call) -> Iterator[Setting]:
        batch, num_heads, seqlen_q, _ = call.query.shape
        seqlen_kv = call.key.shape[2]
        # naive takes its scores' memory from CUDA, behind the back of PyTorch's allocator, which is what is measured.
        is_naive = dict(spec.axes).get("rung") == "naive"
        scratch = 4 * batch * num_heads * seqlen_q * seqlen_kv if is_naive else 0

        def make() -> Ready:
            plan = plan_for(
                loaded.kernel,
                canonical(call.mask, seqlen_q, seqlen_kv),
                batch=batch,
                num_heads=num_heads,
                seqlen_q=seqlen_q,
                seqlen_kv=seqlen_kv,
                device=call.query.device,
            )

            def run() -> torch.Tensor:
                return loaded.run(call.query, call.key, call.value, plan, call.scale)[0]

            return Ready(run, plan.extra_bytes + scratch)

        yield Setting(spec.name, make)

    return Peer(name, lambda call: None, settings)


COLUMNS = (
    "seqlen", "implementation", "time_ms", "tflops", "extra_mib", "max_error",
    "registers", "local_bytes", "smem_bytes", "device", "variant", "error",
)  # fmt: skip


def write_csv(rows: Sequence[LadderRow], path: Path) -> None:
    """One line a row, with the columns of `COLUMNS`; empty where there is no figure."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            own = {name: getattr(row, name) for name in ("seqlen", "registers", "local_bytes", "smem_bytes")}
            writer.writerow({**row.bench.to_dict(), **own})


def write_plot(rows: Sequence[LadderRow], path: Path) -> str | None:
    """Time against length, a line an implementation, as a PNG; or why there is none."""
    lines = []
    for name in dict.fromkeys(row.bench.implementation for row in rows):
        points = {float(r.seqlen): r.bench.time_ms for r in rows if r.bench.implementation == name and r.bench.time_ms}
        if points:
            label = f"{name} (another function)" if name == "sdpa_dense" else name
            lines.append(Line(label, points, is_dashed=name in PEERS))
    title = f"{MASK}, D {HEAD_DIM}, one head; {rows[0].bench.device if rows else ''}"
    try:
        draw(lines, path, title=title, x_label="tokens", x_base=2)
    except ToolMissing as error:
        return f"no plot: {error}"
    return None
