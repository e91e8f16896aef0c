"""The CPU families of the two stages: defaults everywhere, reasons, and what they compute against fp64."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import Tensor

from tilewright.generator.build import build
from tilewright.generator.family import family_named
from tilewright.generator.problem import Problem
from tilewright.generator.render import render
from tilewright.generator.space import family_default, legal_variants, problem_reason
from tilewright.generator.variant import Kernel, VariantSpec, kernel_of
from tilewright.runtime.launch import LoadedKernel
from tilewright.runtime.selected_launch import run_select, run_selected
from tilewright.runtime.selection import SELECT_BLOCKS, SELECTED_ATTENTION, Selection

HEAD_DIM = 32
FAMILIES = {SELECT_BLOCKS: family_named("select_cpu"), SELECTED_ATTENTION: family_named("selected_cpu")}
ERRORS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
LARGEST = torch.finfo(torch.float32).max


def problem(operation: str, dtype: str = "float32", head_dim: int = 64, **changes: int) -> Problem:
    selection = Selection(**{"block_size": 64, "list_width": 16, "num_choosers": 8, "causal": True, **changes})  # type: ignore[arg-type]
    shape = {"batch": 1, "num_heads": 8, "num_kv_heads": 8, "seqlen_q": 4096, "seqlen_kv": 4096}
    return selection.problem(operation, dtype=dtype, head_dim=head_dim, target="cpu", **shape)


@cache
def loaded(operation: str, dtype: str, causal: bool, **axes: int | str) -> LoadedKernel:
    family = FAMILIES[operation]
    values = {"mask_form": "selected", **family.defaults[0], **axes}
    terms = ("bound",) if causal else ()
    kernel = Kernel(operation, dtype, HEAD_DIM, terms, VariantSpec.from_values(family.name, values), "cpu")
    return LoadedKernel(build(kernel), kernel, render(kernel).module_name)


@pytest.mark.parametrize("operation", list(FAMILIES))
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_there_is_a_default(operation: str, head_dim: int) -> None:
    for dtype in FAMILIES[operation].dtypes:
        for changes in ({}, {"block_size": 1, "query_group": 64}, {"causal": False, "block_size": 256}):
            asked = problem(operation, dtype, head_dim, **changes)
            spec = family_default(asked, FAMILIES[operation])
            assert spec is not None
            assert problem_reason(asked, spec) is None


def test_tens_of_variants_are_legal_and_the_default_looks_cheapest() -> None:
    for operation, family in FAMILIES.items():
        asked = problem(operation, query_group=64)
        legal = legal_variants(asked, [family])
        assert 30 <= len(legal) <= 120
        assert legal[0] == family_default(asked, family)


@pytest.mark.parametrize(
    ("operation", "axes", "reason"),
    [
        (SELECTED_ATTENTION, {"block_m": 96, "block_n": 128}, "a tile of 96 x 128 scores takes 49152 bytes"),
        (SELECTED_ATTENTION, {"loop": "query"}, "a chunk of the query loop is one group's rows"),
        (SELECTED_ATTENTION, {"schedule": "static"}, "the key loop's chunks are few"),
        (SELECTED_ATTENTION, {"loop": "query", "chunk": 512}, "lists that groups of 1 queries share fill no tile"),
        (SELECT_BLOCKS, {"block_m": 48, "block_n": 256}, "a tile of 48 x 256 scores and its pooled keys"),
    ],
)
def test_the_reason_is_given(operation: str, axes: dict[str, object], reason: str) -> None:
    family = FAMILIES[operation]
    values = {"mask_form": "selected", **family.defaults[0], **axes}
    answer = problem_reason(problem(operation), VariantSpec.from_values(family.name, values))  # type: ignore[arg-type]
    assert answer is not None
    assert answer.startswith(reason)


def test_small_blocks_and_large_groups_may_take_the_query_loop() -> None:
    family = FAMILIES[SELECTED_ATTENTION]
    for changes in ({"block_size": 8}, {"query_group": 16}):
        legal = legal_variants(problem(SELECTED_ATTENTION, **changes), [family])
        assert {dict(spec.axes)["loop"] for spec in legal} == {"key", "query"}


def test_sources_say_what_they_are() -> None:
    for operation, family in FAMILIES.items():
        asked = problem(operation)
        rendered = render(kernel_of(asked, legal_variants(asked, [family])[0]))
        lines = rendered.sources["kernel.cpp"].splitlines()
        assert rendered.digest in "\n".join(lines[:6])
        assert "constexpr bool CAUSAL = true;" in lines
        assert max(map(len, lines)) <= 130


@dataclass(frozen=True)
class Case:
    """Tensors of one call; whole: small whole numbers, whose scores are exact in float32."""

    seqlen_q: int
    seqlen_kv: int
    selection: Selection
    num_heads: int = 2
    num_kv_heads: int = 2
    batch: int = 1
    dtype: str = "float32"
    whole: bool = False
    logits: float = 1.0
    nan_query: int | None = None
    nan_key: int | None = None
    budgets: tuple[int, ...] = field(default=())

    def tensor(self, heads: int, tokens: int, seed: int) -> Tensor:
        """[batch, heads, tokens, HEAD_DIM] with gaps between tokens."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch, tokens, heads, HEAD_DIM + 16)
        normal = torch.randn(shape, generator=generator) * self.logits
        drawn = torch.randint(-2, 3, shape, generator=generator) * self.logits if self.whole else normal
        if self.logits > 1e20:
            drawn[..., 1:] = 0  # a score is one product: 0 or infinite
        return drawn.to(getattr(torch, self.dtype)).transpose(1, 2)[..., :HEAD_DIM]

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        query = self.tensor(self.num_heads, self.seqlen_q, 1)
        key, value = (self.tensor(self.num_kv_heads, self.seqlen_kv, seed) for seed in (2, 3))
        if self.nan_query is not None:
            query[0, 0, self.nan_query, 3] = torch.nan
        if self.nan_key is not None:
            key[0, 0, self.nan_key, 5] = torch.nan
        return query, key, value

    def budget(self) -> Tensor:
        selection = self.selection
        return torch.tensor(self.budgets or [selection.list_width] * selection.num_choosers, dtype=torch.int32)


def means(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    rows = [part.double().sum(-2).float() * (1.0 / torch.tensor(float(part.shape[-2]))) for part in parts]
    return torch.stack([row.to(dtype) for row in rows], -2).double()


def rankings(case: Case) -> tuple[Tensor, Tensor]:
    """fp64 scores [B, choosers, groups, num_blocks] of rounded representatives as they are compared, and how near two
    scores must be to change places where sums are float32.
    """
    query, key, _ = case.inputs()
    selection, size = case.selection, case.selection.block_size
    shared = query.unflatten(1, (selection.num_choosers, -1))
    groups = shared.split(selection.query_group, 3)
    pooled_q = means([group.flatten(2, 3) for group in groups], query.dtype)
    pooled_k = means(list(key.split(size, 2)), key.dtype)
    pooled_k = pooled_k.repeat_interleave(selection.num_choosers // case.num_kv_heads, 1)
    scores = pooled_q @ pooled_k.transpose(-1, -2)
    lengths = pooled_q.norm(dim=-1).unsqueeze(-1) * pooled_k.norm(dim=-1).unsqueeze(-2)
    near = (4 * HEAD_DIM * 2**-24 * lengths).nan_to_num(0).amax(-1, keepdim=True)
    scores = torch.where(scores.isnan() | (scores < -LARGEST), -torch.inf, scores.clamp(max=LARGEST))
    offset = case.seqlen_kv - case.seqlen_q
    first = torch.arange(0, case.seqlen_q, selection.query_group).unsqueeze(1)
    last = (first + selection.query_group).clamp(max=case.seqlen_q) - 1 + offset
    block = torch.arange(selection.num_blocks(case.seqlen_kv))
    allowed = block * size <= last if selection.causal else torch.ones(len(first), len(block), dtype=torch.bool)
    always = (block < selection.sink_blocks).expand_as(allowed)
    window = max(selection.window_blocks, int(selection.causal))
    if window:
        low = (first + offset).clamp(min=0) // size - (window - 1)
        high = last.div(size, rounding_mode="floor") + (0 if selection.causal else window - 1)
        always = always | ((block >= low) & (block <= high))
    return torch.where(allowed, torch.where(always, torch.inf, scores), -torch.inf), near


def as_sets(indices: Tensor, counts: Tensor, num_blocks: int) -> Tensor:
    """Which blocks lists hold: bool [..., num_blocks]; what is past a count or no block's number is none."""
    real = (torch.arange(indices.shape[-1]) < counts.unsqueeze(-1)) & (indices >= 0) & (indices < num_blocks)
    flags = torch.zeros((*counts.shape, num_blocks + 1), dtype=torch.bool)
    return flags.scatter_(-1, torch.where(real, indices, num_blocks).long(), True)[..., :num_blocks]


def chosen(case: Case, threads: int = 2, **axes: int | str) -> tuple[Tensor, Tensor]:
    """Lists of the kernel, into memory that held something else, and the same twice."""
    query, key, _ = case.inputs()
    selection = case.selection
    kernel = loaded(SELECT_BLOCKS, case.dtype, selection.causal, **axes)
    lists = (case.batch, selection.num_choosers, selection.num_groups(case.seqlen_q))
    indices = torch.full((*lists, selection.list_width), 10**6, dtype=torch.int32)
    counts = torch.full(lists, 10**6, dtype=torch.int32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run_select(kernel, query, key, case.budget(), selection, indices, counts)
        again = run_select(kernel, query, key, case.budget(), selection)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(again[0], indices)
    assert torch.equal(again[1], counts)
    return indices, counts


SELECT_CASES = {
    "ties": Case(129, 1025, Selection(16, 12, 2), whole=True),
    "one key a block": Case(17, 600, Selection(1, 30, 2), whole=True),
    "causal": Case(300, 300, Selection(64, 3, 2, 1, True), whole=True),
    "more queries than keys": Case(127, 65, Selection(16, 3, 2, 1, True), whole=True),
    "groups": Case(256, 512, Selection(16, 9, 2, 64, True, 1, 2), whole=True),
    "no window in reach": Case(300, 20, Selection(4, 3, 2, 2, False, 0, 2), whole=True),
    "sinks and window": Case(129, 1025, Selection(3, 40, 2, 3, False, 2, 3)),
    "everything": Case(17, 127, Selection(48, 3, 2)),
    "shared by heads": Case(65, 500, Selection(100, 3, 1, 3, True), num_heads=4, num_kv_heads=1, batch=2),
    "heads by themselves": Case(65, 500, Selection(16, 7, 4), num_heads=4, num_kv_heads=2, budgets=(7, 1, 3, 5)),
    "many blocks": Case(5, 4000, Selection(3, 50, 2)),
    "one query": Case(1, 1025, Selection(64, 5, 2, 1, True), batch=2),
    "one key": Case(17, 1, Selection(256, 1, 2)),
    "nan": Case(40, 500, Selection(16, 20, 2), nan_query=7, nan_key=100),
    "infinite": Case(40, 512, Selection(16, 20, 2), whole=True, logits=2.0**83),
    "float16": Case(129, 1025, Selection(64, 5, 2), dtype="float16"),
    "bfloat16 groups": Case(129, 1025, Selection(16, 9, 2, 3, True), dtype="bfloat16"),
}


@pytest.mark.parametrize("name", list(SELECT_CASES))
def test_the_highest_scores_are_chosen(name: str) -> None:
    case = SELECT_CASES[name]
    indices, counts = chosen(case)
    scores, near = rankings(case)
    wanted = torch.minimum((scores > -torch.inf).sum(-1), case.budget().view(1, -1, 1)).int()
    assert torch.equal(counts, wanted)
    places = torch.arange(indices.shape[-1])
    past = places >= counts.unsqueeze(-1)
    assert torch.equal(indices == -1, past)
    assert ((indices[..., 1:] > indices[..., :-1]) | past[..., 1:]).all()
    taken = as_sets(indices, counts, scores.shape[-1])
    order = scores.argsort(dim=-1, descending=True, stable=True)
    first = torch.zeros_like(taken).scatter_(-1, order, torch.arange(order.shape[-1]) < counts.unsqueeze(-1))
    if case.whole:
        assert torch.equal(taken, first)
    lowest = torch.where(taken, scores, torch.inf).amin(-1, keepdim=True)
    highest = torch.where(taken, -torch.inf, scores).amax(-1, keepdim=True)
    assert (lowest >= highest - near)[(taken != first).any(-1)].all()


def test_variants_and_threads_choose_alike() -> None:
    case = SELECT_CASES["ties"]
    other = chosen(case, threads=1, block_m=12, block_n=64, row_unroll=4, panel=32, schedule="static")
    for one, two in zip(chosen(case), other, strict=True):
        assert torch.equal(one, two)


def expected(case: Case, indices: Tensor, counts: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """fp64 output and lse over the listed blocks' keys."""
    query, key, value = case.inputs()
    selection = case.selection
    active = as_sets(indices, counts, selection.num_blocks(case.seqlen_kv))
    active = active.repeat_interleave(selection.block_size, -1)[..., : case.seqlen_kv]
    active = active.repeat_interleave(selection.query_group, 2)[:, :, : case.seqlen_q]
    active = active.repeat_interleave(case.num_heads // selection.num_choosers, 1)
    if selection.causal:
        position = torch.arange(case.seqlen_q) + case.seqlen_kv - case.seqlen_q
        active = active & (torch.arange(case.seqlen_kv) <= position.unsqueeze(1))
    key, value = (tensor.double().repeat_interleave(case.num_heads // case.num_kv_heads, 1) for tensor in (key, value))
    scores = torch.where(active, scale * (query.double() @ key.transpose(-1, -2)), -torch.inf)
    weights = torch.where(active.any(-1, keepdim=True), scores.softmax(-1), 0.0)
    return weights @ value, scores.logsumexp(-1)


def random_lists(case: Case) -> tuple[Tensor, Tensor]:
    """Lists with different counts, 0 among them, entries out of range and garbage past the counts."""
    selection = case.selection
    generator = torch.Generator().manual_seed(4)
    lists = (case.batch, selection.num_choosers, selection.num_groups(case.seqlen_q))
    num_blocks = selection.num_blocks(case.seqlen_kv)
    order = torch.rand((*lists, num_blocks), generator=generator).argsort(-1)[..., : selection.list_width]
    counts = torch.randint(0, order.shape[-1] + 1, lists, generator=generator, dtype=torch.int32)
    places = torch.arange(order.shape[-1])
    indices = torch.where(places < counts.unsqueeze(-1), order, num_blocks + 5).sort(-1).values.int()
    outside = torch.rand(indices.shape, generator=generator) < 0.1
    indices = torch.where(outside, torch.where(indices % 2 == 0, -7, num_blocks), indices)
    garbage = torch.randint(-(2**31), 2**31 - 1, indices.shape, generator=generator)
    return torch.where(places < counts.unsqueeze(-1), indices, garbage).int().contiguous(), counts


QUERY_LOOP = {"loop": "query", "chunk": 512}
SELECTED_CASES = {
    "one query a list": (Case(129, 1025, Selection(64, 8, 2)), {}),
    "one query a list, query loop": (Case(129, 300, Selection(3, 20, 2)), QUERY_LOOP),
    "causal": (Case(300, 300, Selection(16, 9, 2, 1, True)), {}),
    "causal groups": (Case(127, 129, Selection(48, 3, 2, 3, True)), {}),
    "more queries than keys": (Case(129, 17, Selection(3, 6, 2, 1, True)), {}),
    "groups that heads share": (Case(200, 400, Selection(100, 3, 1, 64), 3, 1, 2), {}),
    "groups that heads share, query loop": (Case(200, 400, Selection(100, 3, 1, 64), 3, 1, 2), QUERY_LOOP),
    "heads by themselves": (Case(65, 500, Selection(256, 2, 4), 4, 2), {}),
    "one key a block": (Case(17, 200, Selection(1, 50, 2)), QUERY_LOOP),
    "one query": (Case(1, 1025, Selection(64, 5, 2, 1, True)), {}),
    "one key": (Case(17, 1, Selection(64, 1, 2)), {}),
    "nan": (Case(40, 500, Selection(16, 8, 2), nan_query=7, nan_key=100), {}),
    "large logits": (Case(129, 500, Selection(16, 8, 2), logits=30.0), {}),
    "float16": (Case(129, 500, Selection(64, 5, 2, 1, True), dtype="float16"), {}),
    "bfloat16": (Case(129, 500, Selection(48, 5, 2, 3), dtype="bfloat16"), QUERY_LOOP),
}


@pytest.mark.parametrize("name", list(SELECTED_CASES))
def test_attention_is_over_the_listed_blocks(name: str) -> None:
    case, axes = SELECTED_CASES[name]
    query, key, value = case.inputs()
    indices, counts = random_lists(case)
    scale = HEAD_DIM**-0.5
    kernel = loaded(SELECTED_ATTENTION, case.dtype, case.selection.causal, **axes)
    out = torch.full((case.batch, case.seqlen_q, case.num_heads, HEAD_DIM), torch.nan, dtype=query.dtype).transpose(
        1, 2
    )
    lse = torch.full((case.batch, case.num_heads, case.seqlen_q), torch.nan)
    run_selected(kernel, query, key, value, indices, counts, case.selection, scale, out, lse)
    again = run_selected(kernel, query, key, value, indices, counts, case.selection, scale)
    assert torch.equal(again[0].nan_to_num(7), out.nan_to_num(7))
    assert torch.equal(again[1].nan_to_num(7), lse.nan_to_num(7))
    right_out, right_lse = expected(case, indices, counts, scale)
    assert torch.equal(out.isnan(), right_out.isnan())
    assert torch.equal(lse.isneginf(), right_lse.isneginf())
    error = (out.double() - right_out).nan_to_num(0).abs().max()
    assert error <= ERRORS[case.dtype] * case.logits * max(1.0, float(right_out.nan_to_num(0).abs().max()))
    finite = right_lse.isfinite()
    assert torch.allclose(lse.double()[finite], right_lse[finite], rtol=2e-5, atol=2e-5)
    assert not lse.isnan()[finite].any()


def test_threads_and_tiles_do_not_change_what_rows_get() -> None:
    case, _ = SELECTED_CASES["causal"]
    query, key, value = case.inputs()
    indices, counts = random_lists(case)
    before = torch.get_num_threads()
    results = []
    for threads, axes in ((2, {}), (1, {"block_m": 24, "row_unroll": 4, "panel": 32, "chunk": 2048, "block_n": 128})):
        torch.set_num_threads(threads)
        kernel = loaded(SELECTED_ATTENTION, case.dtype, True, **axes)
        results.append(run_selected(kernel, query, key, value, indices, counts, case.selection, 0.2))
    torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-6)
