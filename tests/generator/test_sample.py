"""The pairwise sample: every legal pair, nothing illegal, the most telling kernels first."""

from __future__ import annotations

import itertools

import pytest

from tilewright.generator.family import family_named
from tilewright.generator.legality import legality
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.sample import ANY_FAMILY, PairwiseSample, most_of, pairs_of, pairwise_sample
from tilewright.generator.space import legal_variants
from tilewright.generator.variant import Kernel, kernel_of

TERMS: tuple[tuple[str, ...], ...] = ((), ("window", "stride"), ("and_bits",))
FAMILIES = [family_named(name) for name in ("forward_simt", "forward_wmma", "ladder")]


def problems(*archs: str, head_dims: tuple[int, ...] = (16, 256)) -> list[Problem]:
    return [
        Problem(dtype, head_dim, 1, 8, 8, 4096, 4096, arch, MaskClass(terms, " & ".join(terms) or "dense"))
        for arch in archs
        for dtype in ("float32", "bfloat16")
        for head_dim in head_dims
        for terms in TERMS
    ]


@pytest.fixture(scope="module")
def sample() -> PairwiseSample:
    return pairwise_sample(problems("sm_75", "sm_90a"), FAMILIES)


def test_every_legal_pair_is_in_it_and_no_other(sample: PairwiseSample) -> None:
    legal = set()
    for problem in problems("sm_75", "sm_90a"):
        for spec in legal_variants(problem, FAMILIES):
            legal |= pairs_of(kernel_of(problem, spec))
    assert sample.pairs == legal
    assert set().union(*(pairs_of(kernel) for kernel in sample.kernels)) == legal


def test_what_it_holds_is_legal_and_different(sample: PairwiseSample) -> None:
    assert all(legality(kernel) is None for kernel in sample.kernels)
    assert len(set(sample.kernels)) == len(sample.kernels)
    assert len(sample.kernels) < len(sample.pairs) / 8


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_every_head_dim_and_set_of_terms_is_there(family: str, sample: PairwiseSample) -> None:
    mine = [kernel for kernel in sample.kernels if kernel.spec.family == family]
    assert {kernel.head_dim for kernel in mine} == {16, 256}
    # A scan kernel is compiled for no terms.
    assert {kernel.mask_terms for kernel in mine if kernel.spec.mask_form != "scan"} == (
        set() if family == "ladder" else set(TERMS)
    )


def test_some_family_has_each_mask_form_with_each_terms_it_can_have(sample: PairwiseSample) -> None:
    shared = {choices for family, choices in sample.pairs if family == ANY_FAMILY}
    assert (("mask_form", "gather"), ("mask_terms", "window stride")) in shared
    assert (("mask_form", "list"), ("mask_terms", "and_bits")) in shared
    assert (("mask_form", "list"), ("mask_terms", "")) not in shared
    assert (("mask_form", "analytic"), ("mask_terms", "and_bits")) not in shared


def test_the_first_ones_cover_the_most(sample: PairwiseSample) -> None:
    covered = list(itertools.accumulate((pairs_of(k) for k in sample.kernels), lambda one, other: one | other))
    half = len(covered) // 2
    assert len(covered[half]) > 0.75 * len(sample.pairs)
    assert {kernel.spec.family for kernel in sample.kernels[:8]} >= {"forward_simt", "forward_wmma"}


def test_most_of_it_is_far_fewer_kernels_with_every_head_dim_and_kind_of_mask(sample: PairwiseSample) -> None:
    kernels = most_of(sample, 90)
    assert most_of(sample, 100) == sample.kernels
    assert set(kernels) < set(sample.kernels)
    assert len(kernels) < 0.75 * len(sample.kernels)
    covered = set().union(*(pairs_of(kernel) for kernel in kernels))
    assert 0.9 * len(sample.pairs) <= len(covered) < len(sample.pairs)
    assert {pair for pair in sample.pairs if pair[0] == ANY_FAMILY} <= covered

    def alone(kernels: tuple[Kernel, ...]) -> set[tuple[str, object]]:
        dims = {(kernel.spec.family, kernel.head_dim) for kernel in kernels}
        return dims | {(k.spec.family, k.mask_terms) for k in kernels if k.spec.mask_form != "scan"}

    assert alone(kernels) == alone(sample.kernels)


def test_it_is_the_same_every_time_and_another_for_another_seed() -> None:
    def kernels(seed: int) -> tuple[Kernel, ...]:
        return pairwise_sample(problems("sm_80", head_dims=(64,)), [family_named("forward_wmma")], seed).kernels

    assert kernels(0) == kernels(0)
    assert kernels(0) != kernels(1)


def test_a_family_that_may_run_none_of_the_problems_gives_nothing() -> None:
    wmma = family_named("forward_wmma")
    found = pairwise_sample([p for p in problems("sm_80") if p.dtype == "float32"], [wmma])
    assert found == PairwiseSample((), frozenset())
    assert pairwise_sample(problems("cpu"), FAMILIES) == PairwiseSample((), frozenset())
