"""What every test may count on: a cache directory that is not the user's, and markers for what a machine may lack."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Before OpenMP is loaded, and for every process that a test starts: threads that wait for each other sleep. By default
# they spin, which on a machine with fewer cores than such threads takes several times as long as the work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Before it compiles anything, torch.compile tries out the vector instructions that the processor says it has: 6 s.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

sys.path.insert(0, str(Path(__file__).parent))

import brief_timing  # noqa: F401
import torch

from tilewright.generator import build_worker, toolchain
from tilewright.generator.build import publish
from tilewright.generator.build_pool import BuildPool
from tilewright.generator.errors import ToolMissing
from tilewright.generator.host_build import runtime_path

if TYPE_CHECKING:
    from tilewright.tuner.worker import Worker


def _has_nvcc() -> bool:
    try:
        toolchain.cuda_toolkit()
    except ToolMissing:
        return False
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and leave out what this machine cannot run and say so in the summary."""
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
    missing = {
        "nvcc": None if _has_nvcc() else "no nvcc",
        "gpu": None if torch.cuda.is_available() and _has_nvcc() else "no CUDA device with nvcc",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Leave what is there by now to later garbage collections: each would pass through all of PyTorch and every test,
    0.4 s, and a benchmark makes one for each setting that it measures.
    """
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Kernels that several tests build are built once a session, and never in the user's own cache."""
    cache = tmp_path_factory.mktemp("cache")
    if "PYTEST_XDIST_WORKER" in os.environ:
        # The processes of one run share the kernels, and neither database nor locks.
        for name in ("kernels", "host"):
            shared = tmp_path_factory.getbasetemp().parent / name
            shared.mkdir(mode=0o700, exist_ok=True)
            (cache / name).symlink_to(shared)
    patch = pytest.MonkeyPatch()
    # Read from the user's: what executes kernels on the host takes 15 s to compile, and `make check` has just done it.
    built = runtime_path()
    patch.setenv(toolchain.CACHE_VARIABLE, str(cache))
    if built.exists():
        publish(runtime_path(), lambda directory: Path(shutil.copy(built, directory / "copied.o")))


@pytest.fixture(scope="session")
def session_worker() -> Iterator[Callable[[str], Worker]]:
    """session_worker(device): a process that measures, the same one whenever it is asked for."""
    from tilewright.tuner.worker import Worker

    # Two threads would share their cores with the other tests' process.
    one_thread = {"OMP_NUM_THREADS": "1"}
    workers: dict[str, Worker] = {}
    yield lambda device: workers.setdefault(device, Worker(device, environment=one_thread))
    for worker in workers.values():
        worker.close()


@pytest.fixture(scope="session")
def idle_builders() -> Iterator[dict[str, list[build_worker.Worker]]]:
    """Processes that build kernels, by the cache directory that they build in, and have nothing to do."""
    idle: dict[str, list[build_worker.Worker]] = defaultdict(list)
    yield idle
    for builder in itertools.chain.from_iterable(idle.values()):
        builder.kill()


@pytest.fixture
def lasting_workers(
    session_worker: Callable[[str], Worker],
    idle_builders: dict[str, list[build_worker.Worker]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The processes that measure and build for one run in this process serve the next one too: each start imports
    PyTorch, 3 s.

    That a run's crew and its pool end theirs is seen in `tests/tuner/test_worker.py` and
    `tests/generator/test_build_pool.py`.
    """
    from tilewright.tuner import crew

    def last(ended: crew.Crew) -> None:
        ended._workers.clear()
        ended._prepared.clear()

    monkeypatch.setattr(crew, "Worker", session_worker)
    monkeypatch.setattr(crew.Crew, "close", last)

    take, close = BuildPool._take_worker, BuildPool.close

    def take_idle(pool: BuildPool) -> build_worker.Worker:
        idle = idle_builders[os.environ[toolchain.CACHE_VARIABLE]]
        while idle and pool._idle.empty():
            pool._alive.add(idle[-1])
            pool._idle.put(idle.pop())
        return take(pool)

    def keep_idle(pool: BuildPool) -> None:
        while not pool._idle.empty():
            builder = pool._idle.get()
            pool._alive.remove(builder)
            idle_builders[os.environ[toolchain.CACHE_VARIABLE]].append(builder)
        close(pool)

    monkeypatch.setattr(BuildPool, "_take_worker", take_idle)
    monkeypatch.setattr(BuildPool, "close", keep_idle)
