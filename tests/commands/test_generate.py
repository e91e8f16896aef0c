"""`tilewright generate`: every source where it is said to be, compiled where asked, a failure never silent."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from tilewright.cli import main
from tilewright.generator.arch import all_archs, arch_named
from tilewright.generator.family import all_families
from tilewright.generator.legality import legality
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.sample import covering_sample
from tilewright.generator.space import families_for, family_default, problem_reason
from tilewright.generator.variant import Kernel


def _generate(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, object]:
    assert main(["generate", "--json", *arguments]) == code
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def _variants(document: dict[str, object]) -> list[dict[str, object]]:
    variants = document["variants"]
    assert isinstance(variants, list)
    return variants


@pytest.mark.parametrize("arch", ["cpu", "sm_75", "sm_120"])
def test_sources_are_written_for_machines_without_that_hardware(
    arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = _generate(capsys, "--arch", arch, "--out", str(tmp_path), "--head-dim", "64")
    variants = _variants(document)
    assert len({variant["digest"] for variant in variants}) == len(variants)
    spoken = {family.name for family in all_families().values() if family.instructions in arch_named(arch).instructions}
    assert {variant["spec"]["family"] for variant in variants} == spoken  # type: ignore[index]
    fields = ("operation", "dtype", "head_dim", "mask_terms", "spec", "arch")
    for variant in variants:
        assert legality(Kernel.from_dict({name: variant[name] for name in fields})) is None
        directory = Path(str(variant["directory"]))
        source = directory / ("kernel.cpp" if arch == "cpu" else "kernel.cu")
        assert str(variant["digest"]) in source.read_text()
        assert variant["registers"] is None
        assert variant["error"] is None


def test_choices_narrow_what_is_generated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--arch", "sm_90a", "--out", str(tmp_path), "--family", "forward_simt", "--dtype", "float16"]
    document = _generate(capsys, *arguments, "--head-dim", "96", "--mask", "causal()", "--limit", "3")
    variants = _variants(document)
    assert len(variants) == 3
    for variant in variants:
        assert (variant["dtype"], variant["head_dim"]) == ("float16", 96)
        assert variant["mask_terms"] in (["bound"], [])


def test_all_means_every_legal_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--arch", "sm_90a", "--out", str(tmp_path), "--family", "ladder", "--dtype", "float32"]
    document = _generate(capsys, *arguments, "--head-dim", "64", "--all")
    rungs = [variant["spec"]["rung"] for variant in _variants(document)]  # type: ignore[index]
    # 3 heights and 2 widths for each of the tiled ones
    assert sorted(rungs) == ["naive", *["online_softmax"] * 6, *["tiled_full_row"] * 6]


def test_compiling_reports_what_kernels_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--arch", "cpu", "--out", str(tmp_path), "--dtype", "float32", "--head-dim", "64", "--limit", "2"]
    document = _generate(capsys, *arguments, "--compile")
    for variant in _variants(document):
        assert float(str(variant["seconds"])) > 0
        assert (Path(str(variant["directory"])) / "kernel.o").exists()
    assert main(["generate", *arguments]) == 0
    assert "2 variants in" in capsys.readouterr().out


@pytest.mark.nvcc
def test_compiling_for_a_gpu_needs_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--arch", "sm_120", "--out", str(tmp_path), "--family", "ladder", "--limit", "1", "--compile"]
    (variant,) = _variants(_generate(capsys, *arguments))
    assert int(str(variant["registers"])) > 0
    assert int(str(variant["smem_bytes"])) > 0
    assert main(["generate", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "registers" in printed
    assert "1 compiled, 0 failed, 0 spill" in printed


def test_a_variant_that_does_not_compile_is_shown_and_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) echo broken 1.0 ;; *) echo "k.cpp:1: error: no" >&2; exit 1 ;; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    arguments = ["--arch", "cpu", "--out", str(tmp_path / "out"), "--limit", "2", "--compile"]
    document = _generate(capsys, *arguments, code=1)
    assert document["failed"] == 2
    assert all("error: no" in str(variant["error"]) for variant in _variants(document))
    assert main(["generate", *arguments]) == 1
    printed = capsys.readouterr().out
    assert "error: no" in printed
    assert "0 compiled, 2 failed" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_99"], "unknown architecture 'sm_99'; known: cpu, sm_75"),
        (["--arch", "cpu", "--family", "forward_simt"], "cpu has none of the instructions that forward_simt needs"),
        (["--arch", "cpu", "--family", "nonesuch"], "unknown kernel family 'nonesuch'"),
        (["--arch", "cpu", "--dtype", "float64"], "dtype must be one of float32"),
        (["--arch", "cpu", "--head-dim", "40"], "head_dim must be a multiple of 16"),
        (["--arch", "cpu", "--mask", "causel()"], "mask must be calls of"),
        (["--arch", "cpu", "--limit", "0"], "--limit must be 1 or more"),
        (["--arch", "cpu", "--out", "/proc/nothing"], "--out /proc/nothing cannot be written"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert message in complaint
    assert complaint.count("\n") == 1


@pytest.mark.parametrize("arch", ["cpu", "sm_75", "sm_90a"])
def test_a_covering_sample_is_legal_and_meets_every_value(arch: str) -> None:
    mask = MaskClass(("window", "stride"), "sliding_window(32, 32) | global_stride(512)")
    purposes = ("main", "ladder")
    for family in (f for p in purposes for f in families_for("attention_forward", all_archs()[arch], purpose=p)):
        met: set[tuple[str, object]] = set()
        for dtype, head_dim in itertools.product(family.dtypes, (64, 128)):
            problem = Problem(dtype, head_dim, 1, 8, 8, 4096, 4096, arch, mask)
            few = dataclasses.replace(problem, num_heads=32, num_kv_heads=1, seqlen_q=1)
            problem = problem if family_default(problem, family) is not None else few
            sample = covering_sample(problem, family)
            assert len(sample) == len(set(sample))
            assert all(problem_reason(problem, spec) is None for spec in sample)
            met |= {item for spec in sample for item in spec.values().items()}
        wanted = {("mask_form", form) for form in family.mask_forms}
        wanted |= {(axis, value) for axis, values in family.axes.items() for value in values}
        # Some values cannot be had there at all: three stages without cp.async, tiles that do not fit, what only
        # sm_75 still tries.
        assert len(wanted - met) <= (4 if arch == "sm_75" else 2), (family.name, wanted - met)
