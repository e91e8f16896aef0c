"""The worker on a GPU: errors that stick to a CUDA context, endless kernels, and a right kernel after each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tilewright.generator.arch import arch_of_capability
from tilewright.generator.build import build
from tilewright.generator.errors import Outcome
from tilewright.generator.space import default_variant
from tilewright.generator.toolchain import cuda_toolkit
from tilewright.generator.variant import Kernel, kernel_of
from tilewright.tuner.worker import Worker
from tilewright.tuner.workloads import WorkloadRow

ROW = WorkloadRow("windowed", "float16", 64, 4, 1000, mask="sliding_window(32, 32) | global_stride(64)")


def compile_faulty(folder: Path, *flags: str) -> dict[str, Path]:
    """Each misbehaving kernel's library by name, laid out as the build publishes libraries."""
    source, library = Path(__file__).with_name("faulty_kernels.cu"), folder / "all.so"
    include = sysconfig.get_path("include")
    nvcc = [cuda_toolkit().path, "-std=c++17", "-shared", "-Xcompiler=-fPIC", f"-I{include}", *flags]
    subprocess.run([*map(str, nvcc), str(source), "-o", str(library)], check=True)
    paths = {}
    for name in (line[7:-1] for line in source.read_text().splitlines() if line.startswith("MODULE(")):
        paths[name] = folder / name / "kernel.so"
        paths[name].parent.mkdir()
        shutil.copy(library, paths[name])
        paths[name].with_name("manifest.json").write_text(json.dumps({"key": {"module": f"faulty_{name}"}}))
    return paths


@pytest.mark.nvcc
def test_the_misbehaving_kernels_compile(tmp_path: Path) -> None:
    assert set(compile_faulty(tmp_path, "-arch=sm_90")) == {
        "illegal_address",
        "hang",
        "too_many_threads",
        "does_nothing",
    }


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return compile_faulty(tmp_path_factory.mktemp("faulty"), "-arch=native")


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    problem = ROW.problem(arch_of_capability(*torch.cuda.get_device_capability()).name)
    return kernel_of(problem, default_variant(problem))


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("cuda:0") as made:
        made.prepare(ROW)
        yield made


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fault", "outcome", "message"),
    [
        ("illegal_address", Outcome.ILLEGAL, ""),
        ("hang", Outcome.TIMEOUT, "no answer within"),
        ("too_many_threads", Outcome.LAUNCH, "cudaErrorInvalid"),  # drivers differ: Configuration or Value
        ("does_nothing", Outcome.WRONG, "never written"),
    ],
)
def test_a_misbehaving_kernel_is_an_outcome_and_the_next_one_works(
    fault: str, outcome: Outcome, message: str, worker: Worker, kernel: Kernel, faulty: dict[str, Path]
) -> None:
    measured = worker.measure(kernel, faulty[fault], timeout_s=20.0)
    assert measured.outcome is outcome, measured.message
    assert message in measured.message
    after = worker.measure(kernel, build(kernel))
    assert after.outcome is Outcome.OK, after.message
    assert after.registers > 0


@pytest.mark.gpu
def test_every_row_of_the_tuned_shape_is_compared(worker: Worker, kernel: Kernel) -> None:
    report = worker.verify_at_shape(kernel, build(kernel))
    assert report.ok, report.message
    assert "1000 of 1000 query rows" in report.message


@pytest.mark.gpu
def test_pytorch_is_timed_beside(worker: Worker, kernel: Kernel) -> None:
    assert set(worker.baselines()) == {"sdpa_dense", "sdpa_masked"}
    artifact = build(kernel)
    assert [len(t) for t in worker.compare([(kernel, artifact), (kernel, artifact)], rounds=5)] == [5, 5]
