"""The pool goes on whatever a build does: fail, hang, or die."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tilewright.generator import build_pool
from tilewright.generator.build import build
from tilewright.generator.build_pool import BuildPool
from tilewright.generator.build_worker import session_members
from tilewright.generator.errors import CompileFailed, IllegalVariant, InvalidInput, TimedOut, ToolMissing
from tilewright.generator.variant import Kernel, VariantSpec


def wait_for(condition, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.02)


def worker_pids(pool: BuildPool) -> list[int]:
    return [worker.process.pid for worker in pool._alive]


def test_failures_are_results_and_the_others_are_built(cache: Path, cpp_kernel) -> None:
    good = [cpp_kernel(f"// {i}\n") for i in range(3)]
    bad = cpp_kernel("int broken = no_such_name;\n")
    with BuildPool(2) as pool:
        results = list(pool.as_completed([good[0], bad, *good[1:]]))
        assert len(worker_pids(pool)) == 2
    built = [result for result in results if result.artifact is not None]
    assert len(built) == 3
    assert all(result.artifact.exists() and result.error is None and result.compile_s > 0 for result in built)
    (failed,) = (result for result in results if result.artifact is None)
    assert isinstance(failed.error, CompileFailed)
    assert "no_such_name" in failed.error.log
    assert failed.error.source_path is not None
    assert failed.error.source_path.read_text() == bad.sources["kernel.cpp"]


def test_what_is_built_already_takes_no_process(cache: Path, cpp_kernel) -> None:
    artifact = build(cpp_kernel())
    with BuildPool(1) as pool:
        assert pool.submit(cpp_kernel()).result().artifact == artifact
        assert worker_pids(pool) == []


def test_an_illegal_kernel_is_a_result_and_an_unknown_family_an_error(cache: Path) -> None:
    spec = VariantSpec.from_values("forward_cpu", {"mask_form": "analytic", "block_m": 7, "block_n": 7})
    illegal = Kernel("attention_forward", "float32", 64, (), spec, "cpu")
    unknown = Kernel("attention_forward", "float32", 64, (), VariantSpec("no_family", "analytic", 64, 64), "cpu")
    with BuildPool(1) as pool:
        assert isinstance(pool.submit(illegal).result().error, IllegalVariant)
        with pytest.raises(InvalidInput, match="no_family"):
            pool.submit(unknown).result()


def test_a_build_that_hangs_is_killed_with_its_compilers(cache: Path, cpp_kernel, slow_compiler) -> None:
    with BuildPool(1, timeout_s=30) as pool:
        assert pool.submit(cpp_kernel()).result().error is None
        slow_compiler.stop.touch()
        pool._timeout_s = 3.0
        future = pool.submit(cpp_kernel("// hangs\n"))
        wait_for(lambda: slow_compiler.compilations == 2, "the compile")
        (worker,) = worker_pids(pool)
        assert len(session_members(worker)) >= 3, "worker, ninja and compiler share the session"
        result = future.result()
        assert isinstance(result.error, TimedOut)
        assert result.artifact is None
        assert not session_members(worker)
        slow_compiler.stop.unlink()
        pool._timeout_s = 120.0
        again = pool.submit(cpp_kernel("// hangs\n")).result()
        assert again.error is None


def test_a_killed_worker_costs_its_kernel_alone(cache: Path, cpp_kernel, slow_compiler) -> None:
    slow_compiler.stop.touch()
    with BuildPool(1) as pool:
        future = pool.submit(cpp_kernel())
        wait_for(lambda: slow_compiler.compilations == 1, "the compile")
        (worker,) = worker_pids(pool)
        os.kill(worker, signal.SIGKILL)
        error = future.result().error
        assert isinstance(error, CompileFailed)
        assert "SIGKILL" in str(error)
        assert not session_members(worker), "the compiler ended with its worker"
        slow_compiler.stop.unlink()
        assert pool.submit(cpp_kernel()).result().error is None


def test_leaving_the_pool_ends_what_is_running(cache: Path, cpp_kernel, slow_compiler) -> None:
    slow_compiler.stop.touch()
    with BuildPool(1) as pool:
        running, queued = pool.submit(cpp_kernel()), pool.submit(cpp_kernel("// queued\n"))
        wait_for(lambda: slow_compiler.compilations == 1, "the compile")
        (worker,) = worker_pids(pool)
    assert running.done()
    assert queued.cancelled()
    assert not session_members(worker)


def test_no_compiler_is_an_error_of_the_machine(cache: Path, cpp_kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with BuildPool(1) as pool, pytest.raises(ToolMissing, match="no-such-compiler"):
        pool.submit(cpp_kernel()).result()


def test_jobs_are_capped_by_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_pool, "available_cores", lambda: 3)
    with BuildPool() as pool, BuildPool(2) as two, BuildPool(64) as many:
        assert (pool.jobs, two.jobs, many.jobs) == (3, 2, 3)
    with pytest.raises(InvalidInput, match="got 0"):
        BuildPool(0)


def test_cgroup_limits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/sys/fs/cgroup/cpu.max": "150000 100000\n",
        "/sys/fs/cgroup/memory.max": f"{8 << 30}\n",
        "/sys/fs/cgroup/memory.current": f"{3 << 30}\n",
        "/proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 67108864 kB\n",
    }
    monkeypatch.setattr(build_pool, "_read", lambda path: files.get(path, ""))
    assert build_pool.available_cores() == 1
    assert build_pool.available_memory_bytes() == 5 << 30
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert build_pool.available_memory_bytes() == 64 << 30
    files.clear()
    assert build_pool.available_memory_bytes() is None


@pytest.mark.parametrize(
    ("total_gib", "at_once"), [(0, 1), (1, 1), (5, 2), (None, 6)], ids=["none", "too-little", "two", "unknown"]
)
def test_memory_decides_how_many_run_at_once(total_gib: int | None, at_once: int) -> None:
    budget = build_pool._MemoryBudget(None if total_gib is None else total_gib << 30)
    release, lock = threading.Event(), threading.Lock()
    running: list[int] = []
    peaks: list[int] = []

    def job() -> None:
        with budget.share(2 << 30):
            with lock:
                running.append(1)
                peaks.append(len(running))
            release.wait(30)
            with lock:
                running.pop()

    threads = [threading.Thread(target=job) for _ in range(6)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(peaks) >= at_once, f"{at_once} jobs at once")
    release.set()
    for thread in threads:
        thread.join(30)
    assert len(peaks) == 6, "every job ran"
    assert max(peaks) == at_once
