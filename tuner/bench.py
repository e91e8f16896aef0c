"""Benchmarks: tilewright beside its peers, on the same inputs, checked against the same oracle, timed the same way."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewright.generator.errors import InvalidInput, WrongResult
from tilewright.runtime.attention import attention, explain
from tilewright.runtime.environment import cuda_index, device_name
from tilewright.tuner.active_pairs import row_active_pairs
from tilewright.tuner.ceiling import matrix_ceiling
from tilewright.tuner.devices import measuring_alone
from tilewright.tuner.expected import Expected, expect, sample_rows
from tilewright.tuner.launches import kernel_launches
from tilewright.tuner.memory import peak_bytes
from tilewright.tuner.peers import Call, Peer, Ready, Setting, names_another_function
from tilewright.tuner.timing import Stopwatch, time_kernel
from tilewright.tuner.workloads import WorkloadRow

OWN = "tilewright"

ERROR_SLACK = 4.0
"""A peer rounds at other places than PyTorch's dense kernel, whose error the bounds come from; past this many times the
bound it computes something else."""

MIN_ROUNDS, MAX_ROUNDS = 3, 50


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One implementation on one workload; a figure is None where there is none.

    device: the hardware's name. time_ms: the median. tflops: over active pairs alone, 4 head_dim operations each,
    whatever the implementation computes. extra_mib: peak memory beyond inputs and output, what was built for the mask
    included. max_error: absolute, against fp64. variant: the kernel or setting that was fastest. error: why it failed.
    density: active pairs of all pairs. ceiling_tflops: what a matrix product of this dtype reached on the device in the
    same run; ceiling_percent: tflops of it. beside_ratio: time_ms over that of the row that the workload names.
    """

    workload: str
    implementation: str
    device: str
    time_ms: float | None = None
    tflops: float | None = None
    extra_mib: float | None = None
    max_error: float | None = None
    variant: str | None = None
    error: str | None = None
    seqlen_q: int | None = None
    seqlen_kv: int | None = None
    density: float | None = None
    ceiling_tflops: float | None = None
    ceiling_percent: float | None = None
    beside_ratio: float | None = None

    @property
    def is_another_function(self) -> bool:
        """Whether something else was timed: dense attention in place of the mask, or one stage of two."""
        return names_another_function(self.variant or "")

    def to_dict(self) -> dict[str, Any]:
        """The row as `bench --json` writes it."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The fastest setting of an implementation. launches: kernels of one call, where they were counted."""

    variant: str
    time_us: float
    extra_bytes: int | None
    max_error: float | None
    launches: int | None = None


def own() -> Peer:
    """tilewright itself, through the public call, as a peer among others."""

    def settings(call: Call) -> Iterator[Setting]:
        query, key, value, mask, scale = call.query, call.key, call.value, call.mask, call.scale
        told = explain(query, key, value, mask, scale=scale)
        name = f"PyTorch: {told.detail}" if told.kernel is None else told.kernel.name
        ready = Ready(lambda: attention(query, key, value, mask, scale=scale), told.plan_bytes)
        yield Setting(f"{name} ({told.reason})", lambda: ready)

    return Peer(OWN, lambda call: None, settings)


def bench_device(target: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:INDEX` means; `InvalidInput` where there is no such device."""
    if target == "auto":
        target = "cuda" if torch.cuda.is_available() else "cpu"
    if target == "cpu":
        return torch.device("cpu")
    if target == "cuda" or target.startswith("cuda:"):
        return torch.device("cuda", cuda_index(target))
    raise InvalidInput(f"target must be auto, cpu, cuda or cuda:INDEX; got {target!r}")


class Bench:
    """Times implementations on one device.

    device: where. started: told (workload, implementation) before each, for a progress line. peer_seconds: after so
    long on one row no further setting of an implementation is begun, and its variant says so; None for no limit.
    counts_launches: whether each measurement on a GPU says how many kernels a call starts.
    """

    def __init__(
        self,
        device: torch.device,
        started: Callable[[str, str], None] | None = None,
        *,
        peer_seconds: float | None = None,
        counts_launches: bool = False,
    ) -> None:
        self.device = device
        self.device_name = device_name(str(device))
        self.started = started or (lambda workload, implementation: None)
        self._stopwatch = Stopwatch(device)
        self.peer_seconds = peer_seconds
        self._counts_launches = counts_launches
        self._ceilings: dict[str, float | None] = {}

    def ceiling(self, dtype: str) -> float | None:
        """TFLOP/s of a matrix product of this dtype, measured once in a run; None where there is none to speak of."""
        if dtype not in self._ceilings:
            with measuring_alone(str(self.device)):
                self._ceilings[dtype] = matrix_ceiling(self.device, getattr(torch, dtype), self._stopwatch)
        return self._ceilings[dtype]

    def rows(self, row: WorkloadRow, peers: Sequence[Peer], *, named: bool = False) -> Iterator[BenchRow]:
        """A row for each of the peers on this workload, in order, as they are measured.

        named: the user asked for these very peers, so one that cannot answer the call is a row that says why; else it
        is left out. Failures are rows with `error`; nothing but Ctrl-C ends the run.
        """
        nothing = BenchRow(
            row.name,
            "",
            self.device_name,
            seqlen_q=row.seqlen_q,
            seqlen_kv=row.seqlen_kv,
            ceiling_tflops=self.ceiling(row.dtype),
        )
        try:
            query, key, value, mask = row.make_inputs(self.device)
            call = Call(query, key, value, mask, row.head_dim**-0.5)
            pairs = row_active_pairs(row, str(self.device))
        except RuntimeError as error:  # no memory for this row; the next may be smaller
            self.clean_up()
            text = f"the inputs cannot be made: {brief(error)}"
            yield from (dataclasses.replace(nothing, implementation=peer.name, error=text) for peer in peers)
            return
        density = pairs / (row.batch * row.num_heads * row.seqlen_q * row.seqlen_kv)
        expected: dict[str | None, Expected] = {}
        for peer in peers:
            blank = dataclasses.replace(nothing, implementation=peer.name, density=density)
            reason = peer.unfit(call)
            if reason is not None:
                if named:
                    yield dataclasses.replace(blank, error=reason)
                continue
            self.started(row.name, peer.name)
            try:
                computed = peer.computes(call)
                # The text says all: of masks with tensors there is none but the call's own.
                spec = None if computed is None else computed.spec
                if spec not in expected:
                    expected[spec] = self._expected(call, computed)
                judge = partial(_judge, expected[spec])
                found = self.measure(partial(peer.settings, call), judge, call.query.numel() * call.query.itemsize)
            except RuntimeError as error:  # without the right answer there is nothing to show
                self.clean_up()
                found = f"the fp64 answer cannot be made: {brief(error)}"
            if isinstance(found, str):
                yield dataclasses.replace(blank, error=found)
                continue
            tflops = 4.0 * row.head_dim * pairs / found.time_us / 1e6
            ceiling = blank.ceiling_tflops
            yield dataclasses.replace(
                blank,
                time_ms=found.time_us / 1e3,
                tflops=tflops,
                ceiling_percent=None if ceiling is None else 100 * tflops / ceiling,
                extra_mib=None if found.extra_bytes is None else found.extra_bytes / 2**20,
                max_error=found.max_error,
                variant=found.variant,
            )

    def measure(
        self, settings: Callable[[], Iterator[Setting]], judge: Callable[[Ready], float | None], out_bytes: int
    ) -> Measurement | str:
        """The fastest setting that is right, or why there is none: the last setting's failure.

        judge: the largest error of a prepared call, None where there is none to tell; raises where it is wrong.
        out_bytes: of the outputs, which a call's peak of memory does not count.
        """
        best: Measurement | None = None
        failure = "it has no setting for this call"
        began = time.monotonic()
        try:
            for tried, setting in enumerate(settings()):
                if tried and self.peer_seconds is not None and time.monotonic() - began > self.peer_seconds:
                    if best is not None:
                        best = dataclasses.replace(best, variant=f"{best.variant}, best of the first {tried}")
                    break
                try:
                    with torch.no_grad(), setting.context():
                        found = self._measure_setting(setting, judge, out_bytes, best)
                except Exception as error:  # whatever a peer raises is its row's error
                    failure = f"{setting.name}: {brief(error)}"
                    self.clean_up()
                    continue
                if best is None or found.time_us < best.time_us:
                    best = found
        except Exception as error:  # the same for what fails before a setting is there
            failure = brief(error)
            self.clean_up()
        return best or failure

    def _measure_setting(
        self, setting: Setting, judge: Callable[[Ready], float | None], out_bytes: int, best: Measurement | None
    ) -> Measurement:
        ready = setting.make()
        max_error = judge(ready)
        peak = peak_bytes(ready.run, self.device)
        extra = None if peak is None else ready.held_bytes + max(0, peak - out_bytes)
        with measuring_alone(str(self.device)):
            timing = time_kernel(
                ready.run,
                self.device,
                limit_us=None if best is None else best.time_us,
                min_rounds=MIN_ROUNDS,
                max_rounds=MAX_ROUNDS,
                stopwatch=self._stopwatch,
            )
        is_best = best is None or timing.median_us < best.time_us
        launches = kernel_launches(ready.run, self.device) if self._counts_launches and is_best else None
        return Measurement(setting.name, timing.median_us, extra, max_error, launches)

    def _expected(self, call: Call, mask: Any) -> Expected:
        batch, num_heads, seqlen_q, head_dim = call.query.shape
        rows = sample_rows(batch, num_heads, seqlen_q, call.key.shape[2], head_dim, self.device.type)
        return expect(call.query, call.key, call.value, mask, call.scale, rows)

    def clean_up(self) -> None:
        """Give back what a failure left behind."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _judge(expected: Expected, ready: Ready) -> float:
    return check(ready.run(), expected)


def check(out: Tensor, expected: Expected) -> float:
    """The largest absolute error over the rows of `expected` that have an active key.

    Rows without one are each implementation's own to define (PyTorch gives NaN). Raises `WrongResult` past
    `ERROR_SLACK` times the bound.
    """
    picked = out if expected.rows is None else out.index_select(2, expected.rows)
    if picked.shape != expected.out.shape:
        raise WrongResult(f"the output has shape {list(out.shape)}")
    filled = (expected.lse != -torch.inf).unsqueeze(-1)
    error = torch.where(filled, (picked.double() - expected.out).abs(), 0.0).nan_to_num(torch.inf, torch.inf)
    largest = float(error.amax()) if error.numel() else 0.0
    allowed = ERROR_SLACK * expected.max_bound
    if not largest <= allowed:
        raise WrongResult(f"wrong: the largest error is {largest:.3g}, at most {allowed:.3g} is allowed")
    return largest


def brief(error: Exception) -> str:
    """The error's type and its first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return text[:300] if isinstance(error, WrongResult) else f"{type(error).__name__}: {text[:300]}"
