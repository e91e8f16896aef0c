"""Timing on one device: warm-up, caches flushed between runs, medians, and an early stop for the clearly slow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

Run = Callable[[], object]

CPU_CACHE_LIMIT_BYTES = 64 << 20
"""Servers report last-level caches of hundreds of MiB, shared by cores that are not ours; flushing more than this
costs longer than most runs and changes no order between variants."""

TIMING_S = 0.5
"""How long one run is timed, unless told otherwise."""

SURVEY_S = 0.125
"""The same where a whole space is surveyed."""

SHORT_RUN_US = 20_000.0
"""An interruption can make a run shorter than this look ten times as long, but hardly a longer one."""

LIMIT_SAMPLES = 3
"""A run is clearly too slow when the fastest of this many samples is over the limit."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one run in microseconds, in the order taken; `stopped_early` when it was clearly over the limit."""

    median_us: float
    times_us: tuple[float, ...]
    stopped_early: bool = False


class Stopwatch:
    """Times single runs on one device, with its caches flushed before each."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        flush_bytes = 2 * cache_bytes(self.device)
        self._flush = torch.empty(max(1, flush_bytes // 4), dtype=torch.int32, device=self.device)

    def once(self, run: Run) -> float:
        """Microseconds of one run from flushed caches, by the device's own clock. Waits for the device."""
        return self.batch([run])[0]

    def batch(self, runs: Sequence[Run]) -> list[float]:
        """Microseconds of each run, in order, each from flushed caches. Waits for the device once, at the end."""
        return self._cuda_batch(runs) if self.device.type == "cuda" else [self._cpu_once(run) for run in runs]

    def _cpu_once(self, run: Run) -> float:
        self._flush.add_(1)
        start = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - start) / 1e3

    def _cuda_batch(self, runs: Sequence[Run]) -> list[float]:
        with torch.cuda.device(self.device):
            events = []
            for run in runs:
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                # The flush also keeps the device busy while the host queues the launch; twice, because one takes
                # about 25 us on a large GPU, and a launch from Python up to 30.
                self._flush.add_(1)
                self._flush.add_(1)
                start.record()
                run()
                stop.record()
                events.append((start, stop))
            torch.cuda.synchronize(self.device)
            return [start.elapsed_time(stop) * 1e3 for start, stop in events]


def cache_bytes(device: torch.device) -> int:
    """Size of the cache to flush: L2 of a GPU, the last level of a CPU (half of `CPU_CACHE_LIMIT_BYTES` at most)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return min(max(sizes, default=CPU_CACHE_LIMIT_BYTES // 2), CPU_CACHE_LIMIT_BYTES // 2)


def time_kernel(
    run: Run,
    device: torch.device | str,
    *,
    limit_us: float | None = None,
    min_rounds: int = 5,
    max_rounds: int = 50,
    budget_s: float = TIMING_S,
    stopwatch: Stopwatch | None = None,
) -> Timing:
    """Time `run` on `device`, which must be otherwise idle.

    One warm-up, then between `min_rounds` and `max_rounds` samples as long as `budget_s` lasts. With `limit_us`, stops
    after 3 samples (after one, where it took more than twice the limit) if even the fastest is over the limit.
    stopwatch: reused between calls, since its flush buffer is large. Errors of `run` pass through.
    """
    watch = stopwatch or Stopwatch(device)
    began = time.perf_counter()
    watch.once(run)
    times = [watch.once(run)]
    if limit_us is not None:
        if times[0] > 2 * limit_us:
            # Once more: a single sample that met an interruption must not throw a good variant out.
            times.append(watch.once(run))
        while len(times) < LIMIT_SAMPLES and min(times) <= 2 * limit_us:
            times.append(watch.once(run))
        if min(times) > limit_us:
            return Timing(statistics.median(times), tuple(times), stopped_early=True)
    each_s = max((time.perf_counter() - began) / (len(times) + 1), 1e-6)
    while len(times) < max_rounds:
        left_s = budget_s - (time.perf_counter() - began)
        rounds = max(min_rounds - len(times), int(left_s / each_s))
        if rounds <= 0:
            break
        times += watch.batch([run] * min(rounds, 8, max_rounds - len(times)))
    return Timing(statistics.median(times), tuple(times))


def time_once(run: Run, limit_us: float, watch: Stopwatch) -> Timing:
    """Time one call without a warm-up; stopped early where it takes longer than the limit, a short one twice."""
    times = [watch.once(run)]
    if limit_us < times[0] < SHORT_RUN_US:
        times.append(watch.once(run))
    return Timing(min(times), tuple(times), stopped_early=min(times) > limit_us)


def interleaved(
    runs: Sequence[Run], rounds: int, device: torch.device | str, *, stopwatch: Stopwatch | None = None
) -> list[list[float]]:
    """Microseconds, `rounds` of them for each run, taken in turn so that a drift of clocks meets all alike.

    The order rotates by one each round, so that no run always follows the same other.
    """
    watch = stopwatch or Stopwatch(device)
    for run in runs:
        watch.once(run)
    times: list[list[float]] = [[] for _ in runs]
    for round_index in range(rounds):
        order = [(round_index + i) % len(runs) for i in range(len(runs))]
        for index, time_us in zip(order, watch.batch([runs[i] for i in order]), strict=True):
            times[index].append(time_us)
    return times
