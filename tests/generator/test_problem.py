"""`Problem` and `VariantSpec`: keys that no field escapes, records that round-trip, refusals that say what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.variant import Kernel, VariantSpec, kernel_of

PROBLEM = Problem(
    dtype="float32",
    head_dim=64,
    batch=1,
    num_heads=8,
    num_kv_heads=2,
    seqlen_q=100,
    seqlen_kv=200,
    target="cpu",
    mask=MaskClass(("window", "stride"), "sliding_window(32, 32) | global_stride(512)", density=0.1),
)
SPEC = VariantSpec.from_values(
    "forward_cpu", {"mask_form": "gather", "block_m": 32, "block_n": 64, "panel": 16, "schedule": "static"}
)
OTHER: dict[str, Any] = {
    "dtype": "float16",
    "head_dim": 128,
    "batch": 2,
    "num_heads": 16,
    "num_kv_heads": 4,
    "seqlen_q": 101,
    "seqlen_kv": 201,
    "target": "sm_90a",
    "mask": MaskClass(("bound",), "causal()", density=0.5),
    "operation": "attention_backward",
}
OTHER_MASK: dict[str, Any] = {
    "terms": ("bound",),
    "structure": "causal()",
    "per_head": True,
    "per_batch": True,
    "density": None,
}
OTHER_SPEC: dict[str, Any] = {
    "family": "forward_simt",
    "mask_form": "list",
    "block_m": 64,
    "block_n": 128,
    "axes": (("panel", 32), ("schedule", "static")),
}


def test_every_field_of_a_problem_changes_its_key() -> None:
    assert set(OTHER) == {f.name for f in dataclasses.fields(Problem)}
    digests = {dataclasses.replace(PROBLEM, **{name: value}).digest for name, value in OTHER.items()}
    assert len(digests | {PROBLEM.digest}) == len(OTHER) + 1


def test_every_field_of_a_mask_class_changes_the_key() -> None:
    assert set(OTHER_MASK) == {f.name for f in dataclasses.fields(MaskClass)}
    masks = [dataclasses.replace(PROBLEM.mask, **{name: value}) for name, value in OTHER_MASK.items()]
    digests = {dataclasses.replace(PROBLEM, mask=mask).digest for mask in masks}
    assert len(digests | {PROBLEM.digest}) == len(OTHER_MASK) + 1


def test_every_field_of_a_variant_changes_its_key() -> None:
    assert set(OTHER_SPEC) == {f.name for f in dataclasses.fields(VariantSpec)}
    digests = {dataclasses.replace(SPEC, **{name: value}).digest for name, value in OTHER_SPEC.items()}
    assert len(digests | {SPEC.digest}) == len(OTHER_SPEC) + 1


def test_records_round_trip() -> None:
    kernel = kernel_of(PROBLEM, SPEC)
    assert Problem.from_dict(PROBLEM.to_dict()) == PROBLEM
    assert VariantSpec.from_dict(SPEC.to_dict()) == SPEC
    assert Kernel.from_dict(kernel.to_dict()) == kernel


def test_axes_and_terms_have_one_order() -> None:
    one = VariantSpec("f", "list", 1, 2, (("a", 1), ("b", 2)))
    assert one == VariantSpec("f", "list", 1, 2, (("b", 2), ("a", 1)))
    assert MaskClass(("stride", "window")) == MaskClass(("window", "stride"))


def test_lengths_are_not_part_of_a_kernel() -> None:
    longer = dataclasses.replace(PROBLEM, seqlen_q=5000, seqlen_kv=7000, batch=3, num_heads=32, num_kv_heads=32)
    assert kernel_of(longer, SPEC) == kernel_of(PROBLEM, SPEC)


def test_a_scan_kernel_carries_no_terms() -> None:
    assert kernel_of(PROBLEM, dataclasses.replace(SPEC, mask_form="scan")).mask_terms == ()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "float64"}, "dtype must be one of float32, float16, bfloat16; got float64"),
        ({"head_dim": 40}, "head_dim must be a multiple of 16 up to 256, got 40"),
        ({"head_dim": 272}, "head_dim must be a multiple of 16 up to 256, got 272"),
        ({"num_heads": 7}, "num_heads must be a multiple of num_kv_heads, got 7 and 2"),
        ({"seqlen_q": -1}, "seqlen_q must be 0 or more, got -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_field_that_cannot_be_is_refused_in_words(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        dataclasses.replace(PROBLEM, **change)


@pytest.mark.parametrize("record", [{}, {"family": "f"}, {"family": "f", "block_m": 1, "block_n": 1}])
def test_a_record_that_is_no_variant_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        VariantSpec.from_dict(record)


@pytest.mark.parametrize("drop", ["dtype", "mask"])
def test_a_record_that_is_no_problem_is_refused(drop: str) -> None:
    values = PROBLEM.to_dict()
    del values[drop]
    with pytest.raises(InvalidInput, match="not a problem record"):
        Problem.from_dict(values)
