"""A real worker process, real compiled kernels, and compiled kernels that misbehave on purpose."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tilewright.generator.build import build
from tilewright.generator.errors import LaunchFailed, Outcome, TimedOut
from tilewright.generator.space import default_variant
from tilewright.generator.toolchain import cxx_compiler
from tilewright.generator.variant import Kernel, kernel_of
from tilewright.tuner import worker as tuner_worker
from tilewright.tuner.crew import Crew
from tilewright.tuner.worker import Worker, WorkerLost
from tilewright.tuner.workloads import WorkloadRow

pytestmark = pytest.mark.early

ROW = WorkloadRow("windowed", "float32", 32, 2, 300, mask="sliding_window(8, 8) | global_stride(64)")
PROBLEM = ROW.problem("cpu")


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return kernel_of(PROBLEM, default_variant(PROBLEM))


@pytest.fixture(scope="module")
def good(kernel: Kernel) -> Path:
    """The right kernel's library."""
    return build(kernel)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each misbehaving kernel's library by name, laid out as the build publishes libraries."""
    folder = tmp_path_factory.mktemp("faulty")
    source, library = Path(__file__).with_name("faulty_kernels.cpp"), folder / "all.so"
    include = sysconfig.get_path("include")
    command = [cxx_compiler().path, "-O1", "-std=c++17", "-shared", "-fPIC", f"-I{include}", source, "-o", library]
    subprocess.run(list(map(str, command)), check=True)
    names = [line[7:-1] for line in source.read_text().splitlines() if line.startswith("MODULE(")]
    paths = {}
    for name in names:
        paths[name] = folder / name / "kernel.so"
        paths[name].parent.mkdir()
        shutil.copy(library, paths[name])
        paths[name].with_name("manifest.json").write_text(json.dumps({"key": {"module": f"faulty_{name}"}}))
    return paths


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("cpu") as made:
        made.prepare(ROW)
        yield made


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)


def test_a_right_kernel_is_verified_and_timed(worker: Worker, kernel: Kernel, good: Path) -> None:
    measured = worker.measure(kernel, good)
    assert measured.outcome is Outcome.OK, measured.message
    assert measured.time_us is not None
    assert min(measured.times_us) <= measured.time_us <= max(measured.times_us)
    assert len(measured.times_us) >= 5
    assert measured.max_error is not None
    assert 0 < measured.max_error < 1e-2
    assert "17 cases within bounds; tuned shape: " in measured.message


def test_an_impossible_limit_stops_early(worker: Worker, kernel: Kernel, good: Path) -> None:
    measured = worker.measure(kernel, good, limit_us=0.001)
    assert measured.outcome is Outcome.OK
    assert measured.stopped_early
    assert len(measured.times_us) <= 3


def test_a_survey_checks_as_much_and_lets_the_slow_be(
    worker: Worker, kernel: Kernel, good: Path, faulty: dict[str, Path]
) -> None:
    measured = worker.survey(kernel, good, limit_us=1e9)
    assert measured.outcome is Outcome.OK, measured.message
    assert not measured.stopped_early
    assert len(measured.times_us) >= 5
    assert "17 cases within bounds; tuned shape: " in measured.message
    slow = worker.survey(kernel, good, limit_us=0.001)
    assert slow.outcome is Outcome.OK
    assert slow.stopped_early
    assert len(slow.times_us) <= 2
    assert slow.time_us == min(slow.times_us)
    assert slow.message == "17 cases within bounds; too slow to repeat"
    assert worker.survey(kernel, faulty["writes_zeros"]).outcome is Outcome.WRONG


@pytest.mark.parametrize(
    ("fault", "outcome", "message"),
    [
        ("segfault", Outcome.ILLEGAL, "SIGSEGV"),
        ("exits", Outcome.ILLEGAL, "exit code 3"),
        ("killed", Outcome.MEMORY, "SIGKILL"),
        ("hang", Outcome.TIMEOUT, "no answer within"),
        ("out_of_memory", Outcome.MEMORY, "error 2"),
        ("refuses", Outcome.LAUNCH, "error 9"),
        ("raises", Outcome.LAUNCH, "not the right number of arguments"),
        ("does_nothing", Outcome.WRONG, "never written"),
        ("writes_zeros", Outcome.WRONG, "case '"),
        ("changes_inputs", Outcome.WRONG, "inputs were changed"),
    ],
)
def test_a_misbehaving_kernel_is_an_outcome_and_the_next_one_works(
    fault: str,
    outcome: Outcome,
    message: str,
    worker: Worker,
    kernel: Kernel,
    good: Path,
    faulty: dict[str, Path],
) -> None:
    worker.measure(kernel, good)
    before = worker.pid
    assert before is not None
    measured = worker.measure(kernel, faulty[fault], timeout_s=0.5 if fault == "hang" else 60.0)
    assert measured.outcome is outcome, measured.message
    assert message in measured.message
    assert measured.time_us is None
    if outcome in (Outcome.WRONG, Outcome.LAUNCH) or fault == "out_of_memory":
        assert worker.pid == before  # these cost no new process
    else:
        assert not is_alive(before)
    after = worker.measure(kernel, good)
    assert after.outcome is Outcome.OK, after.message


def test_a_library_that_does_not_load_is_a_launch_failure(worker: Worker, kernel: Kernel, tmp_path: Path) -> None:
    broken = tmp_path / "kernel.so"
    broken.write_bytes(b"no library")
    measured = worker.measure(kernel, broken)
    assert measured.outcome is Outcome.LAUNCH
    assert "does not load" in measured.message


def test_kernels_are_compared_in_turn(worker: Worker, kernel: Kernel, good: Path) -> None:
    times = worker.compare([(kernel, good), (kernel, good)], rounds=4)
    assert [len(t) for t in times] == [4, 4]
    assert min(min(t) for t in times) > 0


def test_a_hang_among_finalists_says_so(worker: Worker, kernel: Kernel, good: Path, faulty: dict[str, Path]) -> None:
    with pytest.raises(TimedOut, match="no answer within"):
        worker.compare([(kernel, good), (kernel, faulty["hang"])], rounds=2, timeout_s=0.5)
    assert len(worker.compare([(kernel, good)], rounds=2)[0]) == 2


def test_the_winner_is_verified_at_its_shape(
    worker: Worker, kernel: Kernel, good: Path, faulty: dict[str, Path]
) -> None:
    report = worker.verify_at_shape(kernel, good)
    assert report.ok, report.message
    assert "of 300 query rows" in report.message
    report = worker.verify_at_shape(kernel, faulty["changes_inputs"])
    assert not report.ok
    assert worker.verify_at_shape(kernel, good).ok
    with pytest.raises(LaunchFailed, match="error 9"):
        worker.verify_at_shape(kernel, faulty["refuses"])


def test_pytorch_is_timed_beside(worker: Worker) -> None:
    times = worker.baselines()
    assert set(times) == {"sdpa_dense", "sdpa_masked"}
    assert min(times.values()) > 0


def test_rows_change_and_causal_rows_have_a_baseline_more(worker: Worker, kernel: Kernel, good: Path) -> None:
    worker.prepare(WorkloadRow("causal", "float32", 32, 2, 64, mask="causal()"))
    assert set(worker.baselines()) == {"sdpa_dense", "sdpa_causal", "sdpa_masked"}
    worker.prepare(WorkloadRow("dense", "float32", 32, 2, 64))
    assert set(worker.baselines()) == {"sdpa_dense"}
    worker.prepare(ROW)
    assert worker.measure(kernel, good).outcome is Outcome.OK


def test_a_worker_killed_from_outside_is_replaced(worker: Worker, kernel: Kernel, good: Path) -> None:
    worker.measure(kernel, good)
    for wait in (True, False):
        pid = worker.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert not wait or wait_until_gone(pid, 10)
        assert worker.measure(kernel, good).outcome is Outcome.OK
        assert worker.pid != pid


def test_nothing_can_be_measured_without_a_row_or_a_device(kernel: Kernel, good: Path) -> None:
    with Worker("cpu") as worker, pytest.raises(WorkerLost, match="call prepare first"):
        worker.measure(kernel, good)
    with Worker("cuda:97") as worker, pytest.raises(WorkerLost, match="no worker starts on cuda:97"):
        worker.prepare(ROW)


def test_the_end_of_a_crew_leaves_no_process(worker: Worker) -> None:
    crew = Crew(["cpu"])
    crew._workers["cpu"] = worker
    crew.take_up(ROW)
    with crew.lead() as leading:
        pid = leading.pid
    assert leading is worker
    assert pid is not None
    assert os.getpgid(pid) == pid
    crew.close()
    assert not is_alive(pid)
    assert worker.pid is None


def leave_workers(sender: Connection, kernel: Kernel, hang: Path) -> None:
    grace = "from tilewright.tuner import worker_process; worker_process.ALARM_GRACE_S = 1.0"
    tuner_worker._START = f"{grace}; {tuner_worker._START}"
    idle, busy = Worker("cpu"), Worker("cpu")
    for each in (idle, busy):
        each.prepare(ROW)
    sender.send([idle.pid, busy.pid])
    busy.measure(kernel, hang, timeout_s=2.0)


def test_workers_outlive_their_parent_only_briefly(kernel: Kernel, faulty: dict[str, Path]) -> None:
    """One that waits for a request, and one in a kernel that never returns."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    parent = fork.Process(target=leave_workers, args=(sender, kernel, faulty["hang"]))
    parent.start()
    workers = receiver.recv()
    time.sleep(0.5)
    assert [is_alive(pid) for pid in workers] == [True, True]
    parent.kill()
    parent.join()
    assert all(wait_until_gone(pid, 60) for pid in workers)
