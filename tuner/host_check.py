"""Runs CUDA kernels on this machine's CPU through adversarial cases, many at a time: the check that needs no GPU."""

from __future__ import annotations

import itertools
import os
import queue
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tilewright.generator.arch import Arch, arch_named
from tilewright.generator.build import build
from tilewright.generator.build_pool import BuildPool, available_cores
from tilewright.generator.errors import InvalidInput, Outcome, VariantFailed
from tilewright.generator.family import Family, all_families
from tilewright.generator.host_build import build_host, sanitizer_libraries
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.render import render
from tilewright.generator.sample import PairwiseSample, Target, pairs_of, pairwise_sample
from tilewright.generator.variant import Kernel
from tilewright.tuner.agreement import Agreement
from tilewright.tuner.operations import Operation, all_operations
from tilewright.tuner.worker import Worker

ARCHS = ("sm_75", "sm_80", "sm_90a")
"""Without cp.async, with it, and with the most shared memory: what the templates tell apart so far."""

HEAD_DIMS = (16, 32, 48, 64, 80, 128, 256)

TIMEOUT_S = 120.0
"""For all cases of one kernel, which take about a second; under AddressSanitizer a few."""

KERNELS_A_PROCESS = 30
"""Libraries stay loaded, each with its stacks in hundreds of mappings, of blocks that run all at once in thousands; Linux
allows a process 65530."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What came of one kernel.

    message: why it failed, else what was checked. case_ms: milliseconds of each case by name, both its launches.
    agreement: how far the GPU was off the host, where both ran.
    build_s: seconds; next to nothing where the library was there already.
    """

    kernel: Kernel
    outcome: Outcome
    message: str
    build_s: float
    case_ms: tuple[tuple[str, float], ...] = field(default=(), repr=False)
    agreement: Agreement | None = None

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many of the legal pairs of choices a kernel that was checked has, and which none has."""

    covered: int
    legal: int
    missing: tuple[Target, ...]


def cuda_families(archs: Sequence[str]) -> list[Family]:
    """The families with a kernel.cu that one of these architectures has the instructions for."""
    instructions = {name for arch in archs for name in arch_named(arch).instructions}
    return [f for f in all_families().values() if f.language == "cuda" and f.instructions in instructions]


def kernels_to_check(
    archs: Sequence[str] = ARCHS, families: Sequence[Family] | None = None, *, seed: int = 0
) -> PairwiseSample:
    """A pairwise sample of what can be legal on these architectures, over every operation, dtype and common mask.

    seed: another one gives another sample.
    """
    problems = [
        problem
        for operation in all_operations()
        for arch in map(arch_named, archs)
        for dtype in arch.dtypes
        for problem in _problems(operation, arch, dtype)
    ]
    return pairwise_sample(problems, cuda_families(archs) if families is None else families, seed=seed)


def _problems(operation: Operation, arch: Arch, dtype: str) -> Iterator[Problem]:
    """Every head dim with every set of mask terms that the operation's defaults are verified with."""
    common = dict.fromkeys(problem.mask.terms for problem in operation.problems_to_verify(arch, dtype))
    for head_dim in HEAD_DIMS:
        for terms in common:
            mask = MaskClass(terms, " & ".join(terms) or "dense")
            yield Problem(dtype, head_dim, 1, 8, 8, 4096, 4096, arch.name, mask, operation.name)


def worker_environment(sanitize: bool) -> dict[str, str]:
    """What a worker that executes kernels on the host needs: one thread each, and AddressSanitizer where asked for."""
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if sanitize:
        environment["LD_PRELOAD"] = os.pathsep.join(map(str, sanitizer_libraries()))
        # Python's own leaks and torch's duplicate symbols are not what is looked for.
        environment["ASAN_OPTIONS"] = (
            "detect_leaks=0:detect_odr_violation=0:abort_on_error=1:allocator_may_return_null=1"
        )
        environment["UBSAN_OPTIONS"] = "print_stacktrace=1:abort_on_error=1"
    return environment


def check_kernels(
    kernels: Iterable[Kernel],
    *,
    jobs: int | None = None,
    sanitize: bool = False,
    seed: int = 0,
    time_limit_s: float | None = None,
    timeout_s: float = TIMEOUT_S,
    gpu: str | None = None,
) -> Iterator[CheckResult]:
    """Build each kernel for the host and run it through its cases; results come as they are done.

    jobs: how many at a time, by default one a core. seed: see `HostKernel`. time_limit_s: seconds after which no other
    kernel is started. timeout_s: seconds for the cases of one kernel. gpu: a device, such as `cuda:0`, that runs each
    kernel too; what it gives must then agree with the host.
    What is a kernel's fault is its result; `ToolMissing`, `InvalidInput` and `WorkerLost` are raised.
    """
    if jobs is not None and jobs < 1:
        raise InvalidInput(f"jobs must be 1 or more, got {jobs}; leave it out for one a core")
    kernels = list(kernels)
    if gpu:
        # Before anything runs: within one process builds for a GPU take turns.
        with BuildPool(jobs) as pool:
            for _ in pool.as_completed(kernels):
                pass  # what fails to build fails again, with its reason, where the kernel is checked
    environment = worker_environment(sanitize)
    waiting: queue.SimpleQueue[Kernel] = queue.SimpleQueue()
    for kernel in kernels:
        waiting.put(kernel)
    count = min(jobs or available_cores(), max(1, waiting.qsize()))
    workers = [Worker(gpu or "cpu", environment=environment) for _ in range(count)]
    done: queue.SimpleQueue[CheckResult | BaseException | None] = queue.SimpleQueue()
    stopped = threading.Event()
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s

    def serve(worker: Worker) -> None:
        try:
            for number in itertools.count(1):
                if stopped.is_set() or (deadline is not None and time.monotonic() >= deadline):
                    break
                done.put(_check(waiting.get_nowait(), worker, sanitize, seed, timeout_s, gpu))
                if number % KERNELS_A_PROCESS == 0:
                    worker.close()
            done.put(None)
        except queue.Empty:
            done.put(None)
        except BaseException as error:
            done.put(error)
        finally:
            worker.close()

    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    running = count
    try:
        while running:
            item = done.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        # Left early, by an error or Ctrl-C: what runs now ends with its worker, and nothing follows it.
        stopped.set()
        while any(thread.is_alive() for thread in threads):
            for thread, worker in zip(threads, workers, strict=True):
                worker.kill()
                thread.join(0.05)


def _check(kernel: Kernel, worker: Worker, sanitize: bool, seed: int, timeout_s: float, gpu: str | None) -> CheckResult:
    started = time.perf_counter()
    build_s = 0.0
    try:
        artifact = build_host(render(kernel), sanitize=sanitize)
        build_s = time.perf_counter() - started
        found = worker.check(kernel, artifact, seed, timeout_s)
        agreement = worker.agree(kernel, artifact, build(kernel), timeout_s) if gpu and found.report.ok else None
    except VariantFailed as error:
        return CheckResult(kernel, error.outcome, str(error), build_s or time.perf_counter() - started)
    outcome, message = Outcome.OK if found.report.ok else Outcome.WRONG, found.report.message
    if agreement is not None and not agreement.ok:
        outcome = Outcome.WRONG
        message = f"case '{agreement.case}': the GPU is off the host by {agreement.ratio:.3g} times what is allowed"
    return CheckResult(kernel, outcome, message, build_s, found.case_ms, agreement)


def coverage(results: Iterable[CheckResult], sample: PairwiseSample) -> Coverage:
    """Which of the sample's legal pairs the kernels that were checked have, whatever came of them."""
    met = {pair for result in results for pair in pairs_of(result.kernel)} & sample.pairs
    return Coverage(len(met), len(sample.pairs), tuple(sorted(sample.pairs - met, key=str)))


def case_times(results: Iterable[CheckResult]) -> tuple[float, float]:
    """Median and worst milliseconds of a case over the results; 0 where none ran to its end."""
    times = [ms for result in results for _, ms in result.case_ms]
    return (statistics.median(times), max(times)) if times else (0.0, 0.0)
