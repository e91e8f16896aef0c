"""Every default and every shipped winner was verified on a GPU, and the records tell the truth about it."""

from __future__ import annotations

import dataclasses
from importlib import resources
from pathlib import Path

import pytest

from tilewright.generator.arch import arch_named
from tilewright.generator.errors import InvalidInput
from tilewright.generator.family import all_families
from tilewright.generator.problem import MASK_TERMS
from tilewright.generator.render import render
from tilewright.tuner.forward_operation import TERM_SETS
from tilewright.tuner.verified import (
    Verified,
    kernels_to_verify,
    missing,
    read_verified,
    verified_path,
    verify_kernels,
    write_verified,
)


def shipped(device: str) -> dict[str, Verified]:
    return read_verified(verified_path(Path(str(resources.files("tilewright.results"))), device))


def test_defaults_and_shipped_winners_were_verified_on_a_gpu() -> None:
    absent = missing("sm_90a", shipped("NVIDIA H200"))
    names = [f"{k.spec.name} {k.dtype} D{k.head_dim} {' '.join(k.mask_terms)}" for k in absent]
    assert not names, f"run `tilewright verify --missing --out results` on the GPU; never verified: {names[:5]}"


def test_a_records_digest_is_that_of_a_kernel_with_sane_errors() -> None:
    records = shipped("NVIDIA H200")
    assert records
    for digest, record in records.items():
        assert record.digest == digest
        assert 0 <= record.rms_error <= record.max_error < 1


def test_every_term_is_in_a_class_that_is_verified() -> None:
    assert {term for terms in TERM_SETS for term in terms} == set(MASK_TERMS)


@pytest.mark.parametrize("arch", ["cpu", "sm_75", "sm_90a"])
def test_the_list_covers_every_family_dtype_and_form(arch: str) -> None:
    kernels = kernels_to_verify(arch_named(arch))
    assert len(kernels) == len(set(kernels))
    assert {kernel.spec.family for kernel in kernels} == {
        family.name
        for family in all_families().values()
        if family.proven and family.instructions in arch_named(arch).instructions
    }
    forward = {kernel.spec.mask_form for kernel in kernels if kernel.operation == "attention_forward"}
    assert forward == {"analytic", "gather", "list", "bitmap", "scan"}


@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_90a"])
@pytest.mark.parametrize("operation", ["select_blocks", "selected_attention"])
def test_the_list_covers_choices_of_every_head_dim_causal_and_not(operation: str, arch: str) -> None:
    kernels = [kernel for kernel in kernels_to_verify(arch_named(arch)) if kernel.operation == operation]
    for dtype in {kernel.dtype for kernel in kernels}:
        found = {(kernel.head_dim, kernel.mask_terms) for kernel in kernels if kernel.dtype == dtype}
        assert found >= {(64, ()), (64, ("bound",)), (128, ()), (128, ("bound",)), (16, ("bound",)), (256, ("bound",))}
    assert {kernel.dtype for kernel in kernels} >= {"float16", "bfloat16"}


def test_a_changed_kernel_counts_as_never_verified(tmp_path: Path) -> None:
    kernels = kernels_to_verify(arch_named("cpu"))
    records = [Verified(render(k).digest, k, 1e-6, 1e-7, "2026-01-01") for k in kernels]
    path = verified_path(tmp_path, "A CPU (64 cores)")
    assert path.name == "a-cpu-64-cores.json"
    write_verified(path, "A CPU (64 cores)", records[1:])
    assert missing("cpu", read_verified(path)) == [kernels[0]]
    changed = dataclasses.replace(records[0], max_error=2e-6)
    write_verified(path, "A CPU (64 cores)", [records[0], changed])
    assert missing("cpu", read_verified(path)) == []
    assert read_verified(path)[changed.digest] == changed


def test_records_of_sources_that_are_no_longer_rendered_are_dropped(tmp_path: Path) -> None:
    kernels = kernels_to_verify(arch_named("cpu"))[:2]
    now = Verified(render(kernels[0]).digest, kernels[0], 1e-6, 1e-7, "2026-01-01")
    before = Verified("0" * 16, kernels[1], 1e-6, 1e-7, "2025-01-01")
    path = tmp_path / "x.json"
    write_verified(path, "A CPU", [now, before])
    assert read_verified(path) == {now.digest: now}


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"kernels": [')
    with pytest.raises(InvalidInput, match="not a list of verified kernels"):
        read_verified(path)


def test_verifying_really_runs_the_kernel() -> None:
    kernel = kernels_to_verify(arch_named("cpu"))[3]
    (verdict,) = verify_kernels([kernel], "cpu", jobs=1)
    assert verdict.verified is not None, verdict.message
    assert verdict.verified.digest == render(kernel).digest
    assert 0 < verdict.verified.max_error < 1e-3
