"""The ladder's rungs exist on every architecture, run, and are written down."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from tilewright.generator.arch import all_archs
from tilewright.generator.errors import IllegalVariant
from tilewright.generator.family import family_named
from tilewright.generator.resources import compile_report
from tilewright.generator.variant import Kernel, kernel_of
from tilewright.tuner import ladder
from tilewright.tuner.bench import Bench, BenchRow
from tilewright.tuner.ladder import CPU_RUNGS, CUDA_RUNGS, LENGTHS, LadderRow, Rung, ladder_rows, workload_row


def _kernel(rung: Rung, arch: str, length: int = 1024, dtype: str | None = None) -> Kernel:
    problem = workload_row(length, dtype or rung.dtype).problem(arch)
    return kernel_of(problem, rung.spec(problem))


@pytest.mark.parametrize("arch", all_archs())
def test_every_rung_is_one_legal_kernel_at_every_length(arch: str) -> None:
    for rung in CPU_RUNGS if arch == "cpu" else CUDA_RUNGS:
        kernels = {_kernel(rung, arch, length) for length in LENGTHS}
        assert len(kernels) == 1, rung.name
        assert next(iter(kernels)).spec.mask_form == rung.mask_form


def test_a_rung_that_is_not_legal_says_why() -> None:
    with pytest.raises(IllegalVariant, match="naive gives each of its 128 threads one query row"):
        _kernel(Rung("odd", "ladder", "scan", (("rung", "naive"), ("block_m", 8), ("block_n", 32))), "sm_90a")


def test_the_ladder_is_never_dispatched() -> None:
    assert family_named("ladder").purpose == "ladder"


def test_a_full_row_that_does_not_fit_is_told_in_words() -> None:
    tiled = next(rung for rung in CUDA_RUNGS if rung.name == "tiled_full_row")
    ladder._check_full_row(_kernel(tiled, "sm_90a"), 8192)
    with pytest.raises(IllegalVariant, match=r"4 full rows of 8192 scores take .* sm_75 allows 65536 a block"):
        ladder._check_full_row(_kernel(tiled, "sm_75"), 8192)


def test_rungs_run_beside_pytorch_and_are_written_down(tmp_path: Path) -> None:
    missing = Rung("missing", "forward_cpu", "gather", (("cached_panels", 7),))
    rungs = [CPU_RUNGS[0], CPU_RUNGS[4], missing]
    rows = list(ladder_rows(Bench(torch.device("cpu")), "cpu", lengths=(64, 600), rungs=rungs))
    names = ["scan", "gather", "missing", "sdpa_dense", "sdpa_masked"]
    assert [(row.seqlen, row.bench.implementation) for row in rows] == [(n, name) for n in (64, 600) for name in names]
    for row in rows:
        if row.bench.implementation == "missing":
            assert "cached_panels must be one of" in str(row.bench.error)
        else:
            assert row.bench.error is None
            assert row.bench.time_ms is not None
    ladder.write_csv(rows, tmp_path / "ladder.csv")
    with (tmp_path / "ladder.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [line["implementation"] for line in written] == names * 2
    assert float(written[0]["time_ms"]) == rows[0].bench.time_ms
    assert written[2]["time_ms"] == ""


def test_the_plot_is_a_picture_or_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        LadderRow(64, BenchRow("ladder N64", "scan", "Test CPU", time_ms=1.0)),
        LadderRow(64, BenchRow("ladder N64", "naive", "Test CPU", error="does not fit")),
        LadderRow(128, BenchRow("ladder N128", "scan", "Test CPU", time_ms=2.0)),
    ]
    pytest.importorskip("matplotlib")
    assert ladder.write_plot(rows, tmp_path / "ladder.png") is None
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert "matplotlib is not installed" in str(ladder.write_plot(rows, tmp_path / "none.png"))
    assert not (tmp_path / "none.png").exists()


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
@pytest.mark.parametrize(
    ("rung", "dtype"), [("naive", "float32"), ("tiled_full_row", "float16"), ("online_softmax", "bfloat16")]
)
def test_rungs_of_their_own_compile_without_spills(rung: str, dtype: str, arch: str, tmp_path: Path) -> None:
    found = next(r for r in CUDA_RUNGS if r.name == rung)
    report = compile_report(_kernel(found, arch, dtype=dtype), tmp_path)
    assert 0 < report.registers <= 255
    assert report.spill_store_bytes == 0
