"""The decode family of the CPU: default of few queries, packed and split calls against fp64, always the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from tilewright.generator.build import build
from tilewright.generator.family import family_named
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.render import render
from tilewright.generator.space import default_variant, legal_variants, problem_reason
from tilewright.generator.variant import Kernel, VariantSpec
from tilewright.runtime import masks
from tilewright.runtime.canonical import canonical
from tilewright.runtime.launch import LoadedKernel
from tilewright.runtime.masks import Mask
from tilewright.runtime.plans import MaskPlan, plan_for
from tilewright.tuner.expected import expect
from tilewright.tuner.verify import verify, verify_call

FAMILY = family_named("forward_decode_cpu")
MASKS: tuple[tuple[str, ...], ...] = ((), ("bound",), ("window", "tokens"), ("window", "stride"), ("and_blocks",))


def problem(
    *,
    dtype: str = "float32",
    head_dim: int = 64,
    heads: tuple[int, int] = (8, 2),
    seqlen_q: int = 1,
    seqlen_kv: int = 16384,
    terms: tuple[str, ...] = (),
) -> Problem:
    mask = MaskClass(terms, " & ".join(terms) or "dense")
    return Problem(dtype, head_dim, 1, *heads, seqlen_q, seqlen_kv, "cpu", mask)


def test_few_queries_get_it_whatever_the_head_dim_and_mask() -> None:
    for dtype, head_dim, terms in itertools.product(FAMILY.dtypes, range(16, 257, 16), MASKS):
        assert default_variant(problem(dtype=dtype, head_dim=head_dim, terms=terms)).family == FAMILY.name


@pytest.mark.parametrize(
    ("heads", "seqlen_q", "seqlen_kv", "reason"),
    [
        ((8, 2), 8, 64, None),
        ((8, 8), 16, 4096, None),
        ((32, 1), 1, 4096, None),
        ((8, 2), 9, 4096, "more than 32 rows a KV head"),
        ((33, 1), 1, 4096, "more than 32 rows a KV head"),
        ((8, 8), 17, 4096, "17 queries of a head fill tiles of their own"),
        ((8, 8), 1, 63, "63 keys are too few"),
    ],
)
def test_who_gets_it(heads: tuple[int, int], seqlen_q: int, seqlen_kv: int, reason: str | None) -> None:
    asked = problem(heads=heads, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    assert (default_variant(asked).family == FAMILY.name) is (reason is None)
    answer = problem_reason(asked, default_variant(problem()))
    assert answer is None if reason is None else reason in str(answer)


def test_all_its_variants_can_be_measured() -> None:
    legal = legal_variants(problem(), [FAMILY])
    assert legal[0] == default_variant(problem())
    assert {spec.block_n for spec in legal} == {64, 128, 256}


@cache
def loaded(dtype: str, head_dim: int, terms: tuple[str, ...], form: str, block_n: int) -> LoadedKernel:
    kernel = Kernel("attention_forward", dtype, head_dim, terms, VariantSpec(FAMILY.name, form, 32, block_n), "cpu")
    return LoadedKernel(build(kernel), kernel, render(kernel).module_name)


def per_head_blocks(heads: int, seqlen_kv: int) -> Mask:
    active = torch.rand(1, heads, 1, -(-seqlen_kv // 64), generator=torch.Generator().manual_seed(3)) < 0.5
    active[:, 1] = False  # a head without an active key
    return masks.block_mask(active, (64, 64))


@dataclass(frozen=True)
class Case:
    """One call; form and tile of the kernel."""

    heads: tuple[int, int]
    seqlen_q: int
    seqlen_kv: int
    mask: Mask | None = None
    form: str = "analytic"
    dtype: str = "float32"
    head_dim: int = 64
    block_n: int = 128
    batch: int = 1

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Heads beside each other in memory, so that a key's neighbour is another head's."""
        generator = torch.Generator().manual_seed(7)
        sizes = ((self.heads[0], self.seqlen_q), (self.heads[1], self.seqlen_kv), (self.heads[1], self.seqlen_kv))
        query, key, value = (
            torch.randn(self.batch, n, h, self.head_dim, generator=generator).to(getattr(torch, self.dtype))
            for h, n in sizes
        )
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def kernel(self) -> tuple[LoadedKernel, MaskPlan]:
        mask = canonical(self.mask, self.seqlen_q, self.seqlen_kv)
        kernel = loaded(self.dtype, self.head_dim, mask.terms, self.form, self.block_n)
        lengths = {"seqlen_q": self.seqlen_q, "seqlen_kv": self.seqlen_kv}
        return kernel, plan_for(kernel.kernel, mask, batch=self.batch, num_heads=self.heads[0], device="cpu", **lengths)


WINDOW = masks.sliding_window(1500, 0)
CASES = {
    "one query, packed and split": Case((8, 2), 1, 5003),
    "7 rows of one KV head": Case((7, 1), 1, 2311, dtype="bfloat16", head_dim=80, block_n=256),
    "4 queries, causal": Case((8, 2), 4, 3001, masks.causal(), block_n=64, batch=2),
    "32 rows, wide heads": Case((32, 4), 4, 1999, masks.causal(), dtype="float16", head_dim=256),
    "33 rows: a head at a time": Case((33, 1), 1, 1100),
    "more queries than a tile": Case((2, 1), 40, 1300, masks.causal()),
    "one head, split": Case((1, 1), 1, 9001, head_dim=16),
    "window": Case((6, 2), 2, 6001, WINDOW, head_dim=96),
    "window and strided keys": Case((6, 2), 2, 6001, WINDOW | masks.global_stride(5), "gather"),
    "window and strided keys, not gathered": Case((6, 2), 2, 6001, WINDOW | masks.global_stride(700)),
    "masks differ between heads, one is empty": Case((6, 2), 3, 4001, per_head_blocks(6, 4001), "list"),
    "rows before the first key": Case((4, 2), 16, 7, masks.causal()),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_the_oracle(name: str) -> None:
    case = CASES[name]
    kernel, plan = case.kernel()
    query, key, value = case.inputs()
    scale = 1.7 * case.head_dim**-0.5
    report = verify_call(kernel, query, key, value, plan, scale, expect(query, key, value, case.mask, scale), name)
    assert report.ok, report.message


@pytest.mark.parametrize(
    ("dtype", "head_dim", "terms", "form"),
    [("float32", 64, (), "analytic"), ("bfloat16", 48, ("bound", "window", "tokens"), "gather")],
    ids=lambda value: (" ".join(value) or "dense") if isinstance(value, tuple) else str(value),
)
def test_every_adversarial_case(dtype: str, head_dim: int, terms: tuple[str, ...], form: str) -> None:
    report = verify(loaded(dtype, head_dim, terms, form, 128), "cpu")
    assert report.ok, report.message


@pytest.fixture
def threads() -> Iterator[None]:
    """The number of threads is put back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["one query, packed and split", "4 queries, causal", "window and strided keys"])
def test_the_bits_are_the_same_whatever_the_threads(name: str) -> None:
    case = CASES[name]
    kernel, plan = case.kernel()
    query, key, value = case.inputs()
    right = kernel.run(query, key, value, plan, 0.2)
    for number in (1, 2, 3, 7, 2, 2, 2):
        torch.set_num_threads(number)
        again = kernel.run(query, key, value, plan, 0.2)
        assert torch.equal(right[0], again[0]), number
        assert torch.equal(right[1], again[1]), number
