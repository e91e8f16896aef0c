"""The verification of the two stages: right kernels pass, and kernels that are wrong in one way each do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from topk_stubs import SelectedStub, SelectStub, Stub
from torch import Tensor

from tilewright.generator.errors import InvalidInput
from tilewright.generator.variant import VariantSpec
from tilewright.runtime.selection import Selection
from tilewright.tuner import topk_prepared
from tilewright.tuner.case_book import CaseBook
from tilewright.tuner.topk_cases import (
    EXACT,
    SELECT_HOST_SHAPES,
    SELECT_SHAPES,
    SELECTED_HOST_SHAPES,
    SELECTED_SHAPES,
    ChoiceShape,
)
from tilewright.tuner.topk_expected import expect_choice, judge_lists, verdict_on_lists
from tilewright.tuner.topk_oracle import select_blocks_oracle
from tilewright.tuner.verify import verify

CPU = torch.device("cpu")

CHOOSING = (
    ChoiceShape("normal", 1, 4, 2, 19, 70, 16, 3, query_group=3, shared=True, uneven=True, layout="padded"),
    ChoiceShape("more queries than keys", 1, 2, 2, 33, 21, 8, 2, layout="transposed"),
    ChoiceShape("integers", 1, 2, 1, 17, 65, 8, 5, sink_blocks=1, window_blocks=1, numbers="integers"),
    ChoiceShape("NaN", 1, 1, 1, 9, 65, 8, 9, numbers="nan_block"),
)
ATTENDING = (
    ChoiceShape("random", 1, 4, 2, 19, 70, 16, 3, query_group=3, shared=True, layout="padded"),
    ChoiceShape("outside", 1, 2, 2, 33, 65, 8, 4, lists="outside"),
    ChoiceShape("counting", 1, 2, 1, 17, 160, 16, 7, numbers="uniform_weights"),
    ChoiceShape("none", 1, 1, 1, 5, 65, 16, 2, lists="none"),
    ChoiceShape("same", 1, 1, 1, 9, 65, 16, 2, lists="same"),
)


@pytest.fixture(scope="module")
def choosing() -> CaseBook:
    return CaseBook(CPU, CHOOSING)


@pytest.fixture(scope="module")
def attending() -> CaseBook:
    return CaseBook(CPU, ATTENDING)


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_right_kernels_pass(dtype: str, causal: bool, choosing: CaseBook, attending: CaseBook) -> None:
    for stub, book in ((SelectStub(dtype, causal), choosing), (SelectedStub(dtype, causal), attending)):
        report = verify(stub, CPU, book=book)
        assert report.ok, report.message
        assert report.cases == len(book.shapes)
        assert report.worst_ratio < 0.8
        assert stub.launches == 2 * report.cases
        assert 0 <= report.rms_error <= report.max_error < 1


def test_every_case_of_a_host_is_passed_by_a_right_choice() -> None:
    report = verify(SelectStub("bfloat16", causal=True), CPU, book=CaseBook(CPU, "host"))
    assert report.ok, report.message
    assert report.cases == len(SELECT_HOST_SHAPES)


class OnePlaceLower(SelectStub):
    """Takes the second best in place of the best."""

    def rank(self, scores: Tensor, first: int, last: int, numbers: Mapping[str, Any]) -> Tensor:
        ranked = super().rank(scores, first, last, numbers)
        free = torch.where(ranked < torch.inf, ranked, -torch.inf)
        if int((free > -torch.inf).sum()) > int(numbers["list_width"]):
            ranked[free.argmax()] = torch.finfo(torch.float32).min
        return ranked


class TiesToTheHigher(SelectStub):
    """Of equal scores takes the last."""

    def rank(self, scores: Tensor, first: int, last: int, numbers: Mapping[str, Any]) -> Tensor:
        ranked = super().rank(scores, first, last, numbers)
        return torch.where(ranked.abs() < 1e9, ranked + torch.arange(len(ranked)) * 1e-4, ranked)


class HalfPrecision(SelectStub):
    """Scores in bfloat16."""

    def scores(self, asker: Tensor, blocks: Tensor) -> Tensor:
        return super().scores(asker, blocks).bfloat16().float()


class TakesNaN(SelectStub):
    """A score of NaN counts as high."""

    def scores(self, asker: Tensor, blocks: Tensor) -> Tensor:
        return super().scores(asker, blocks).nan_to_num(1e6)


class ForgetsSinks(SelectStub):
    """Nothing but a query's own block is always in."""

    def rank(self, scores: Tensor, first: int, last: int, numbers: Mapping[str, Any]) -> Tensor:
        return super().rank(scores, first, last, {**numbers, "sink_blocks": 0})


def _first_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """The first list with two entries or more, as a view."""
    counts, indices = tensors["counts"].flatten(), tensors["indices"].flatten(0, 2)
    found = (counts > 1).nonzero().flatten()
    return indices[int(found[0])] if len(found) else indices[0]


def _unsorted(numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    view = _first_of(tensors)
    view[:2] = view[:2].flip(0)


def _no_minus_one(numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    tensors["indices"][tensors["indices"] == -1] = -2


def _one_too_few(numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    counts = tensors["counts"]
    last = int(counts[0, 0, -1])
    tensors["indices"][0, 0, -1, last - 1] = -1
    counts[0, 0, -1] = last - 1


def _beside_indices(numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    view = tensors["indices"]
    view.as_strided((1,), (1,), view.storage_offset() + view.numel()).zero_()


def _beside_workspace(numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    view = tensors["workspace"]
    view.as_strided((1,), (1,), view.storage_offset() - 1).zero_()


def _query_changed(numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    tensors["query"][-1, -1, -1, -1] += 1


def _budgets_changed(numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    tensors["budgets"].fill_(1)


def _unwritten_count(numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    tensors["counts"][0, 0, 0] = 0x7FC0DEAD


def _lists_changed(numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    tensors["indices"][..., 0] += 1


WRONG_CHOICES: dict[str, tuple[Stub, str]] = {
    "the best one left out": (OnePlaceLower(), "higher by"),
    "ties to the higher index": (TiesToTheHigher(), "not the reference's"),
    "scores in bfloat16": (HalfPrecision(), "times what rounding explains"),
    "NaN is high": (TakesNaN(), "may not be"),
    "no sinks": (ForgetsSinks(), "always in are left out"),
    "causal, though it is not": (SelectStub(causal=True), "is chosen over one"),
    "descending": (SelectStub(spoil=_unsorted), "not greater than the entry before"),
    "a tail of -2": (SelectStub(spoil=_no_minus_one), "past a count are not -1"),
    "one too few": (SelectStub(spoil=_one_too_few), "counts are wrong"),
    "writes beside the lists": (SelectStub(spoil=_beside_indices), "beside the outputs or the workspace"),
    "writes beside its workspace": (SelectStub(spoil=_beside_workspace), "beside the outputs or the workspace"),
    "changes the query": (SelectStub(spoil=_query_changed), "inputs were changed"),
    "changes the budgets": (SelectStub(spoil=_budgets_changed), "inputs were changed"),
    "leaves a count unwritten": (SelectStub(spoil=_unwritten_count), "never written"),
}


@pytest.mark.parametrize("name", WRONG_CHOICES)
def test_a_wrong_choice_is_caught(name: str, choosing: CaseBook) -> None:
    stub, reason = WRONG_CHOICES[name]
    if name.startswith("causal"):
        stub.kernel = dataclasses.replace(stub.kernel, mask_terms=())
    report = verify(stub, CPU, book=choosing)
    assert not report.ok
    assert reason in report.message
    assert report.case in [shape.name for shape in CHOOSING]
    assert verify(SelectStub(), CPU, book=choosing).ok  # what it changed was put back


class ReadsPastTheCount(SelectedStub):
    """Takes one entry more than there is."""

    def compute(self, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        counts = (tensors["counts"] + 1).clamp(max=numbers["list_width"])
        super().compute(numbers, {**tensors, "counts": counts})


class WholeLastBlock(SelectedStub):
    """Misses the last key of a list."""

    def tokens(self, entries: Any, size: int, seqlen_kv: int, position: int, numbers: Mapping[str, Any]) -> list[int]:
        return super().tokens(entries, size, seqlen_kv, position, numbers)[:-1]


class NotCausal(SelectedStub):
    """Sees keys after a query."""

    def tokens(self, entries: Any, size: int, seqlen_kv: int, position: int, numbers: Mapping[str, Any]) -> list[int]:
        return super().tokens(entries, size, seqlen_kv, seqlen_kv, numbers)


class EverySecondTime(SelectedStub):
    """Another last bit in every second launch."""

    def compute(self, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().compute(numbers, tensors)
        if self.launches % 2 == 0:
            lse = tensors["lse"]
            lse.copy_(torch.nextafter(lse, torch.full_like(lse, torch.inf)))


def _unwritten_out(numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    from tilewright.tuner.layouts import poison

    poison(tensors["out"][:, :, -1:, -1:])


WRONG_ATTENTION: dict[str, tuple[Stub, str]] = {
    "reads past the count": (ReadsPastTheCount(), "lse|NaN"),
    "one key too few": (WholeLastBlock(), "lse"),
    "not causal": (NotCausal(causal=True), "lse|NaN"),
    "another answer the second time": (EverySecondTime(), "other bits"),
    "writes beside its workspace": (SelectedStub(spoil=_beside_workspace), "beside the outputs"),
    "partly written": (SelectedStub(spoil=_unwritten_out), "never written"),
    "changes the query": (SelectedStub(spoil=_query_changed), "inputs were changed"),
    "changes the lists": (SelectedStub(spoil=_lists_changed), "inputs were changed"),
}


@pytest.mark.parametrize("name", WRONG_ATTENTION)
def test_wrong_attention_is_caught(name: str, attending: CaseBook) -> None:
    stub, reason = WRONG_ATTENTION[name]
    report = verify(stub, CPU, book=attending)
    assert not report.ok
    assert any(text in report.message for text in reason.split("|"))
    assert verify(SelectedStub(causal=stub.causal), CPU, book=attending).ok


def test_a_swap_within_rounding_is_no_mistake() -> None:
    """Two blocks whose scores differ by less than float32 can tell: either may be taken, and a third may not."""
    query = torch.ones(1, 1, 1, 32)
    key = torch.ones(1, 1, 3, 32)
    key[0, 0, 1] += 2.0**-22
    key[0, 0, 2] -= 2.0**-8
    selection, budgets = Selection(1, 1, 1), torch.ones(1, dtype=torch.int32)
    expected = expect_choice(query, key, budgets, selection)
    assert select_blocks_oracle(query, key, budgets, selection).indices.item() == 1
    ratios = []
    for block in range(3):
        lists = torch.full((1, 1, 1, 1), block, dtype=torch.int32)
        verdict = verdict_on_lists(judge_lists(lists, torch.ones(1, 1, 1, dtype=torch.int32), expected).tolist())
        assert (verdict.reason is None) == (block < 2)
        ratios.append(verdict.ratio)
    assert 0 < ratios[0] < 1
    assert ratios[1] == 0
    assert ratios[2] > 100


def test_a_mean_that_may_be_rounded_either_way_widens_what_is_allowed() -> None:
    key = torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16)
    key[0, 0, :2, 0] = torch.tensor([1.0, 1.0 + 2.0**-7])  # the mean lies in the middle of two bfloat16 numbers
    key[0, 0, 2:, 0] = torch.tensor([1.0, 1.0])
    expected = expect_choice(
        torch.ones(1, 1, 1, 16).bfloat16(), key, torch.ones(1, dtype=torch.int32), Selection(2, 1, 1)
    )
    assert expected.blocks.doubt is not None
    assert expected.blocks.doubt[0, 0, :, 0].tolist() == [2.0**-7, 0]
    assert not expected.blocks.doubt[0, 0, :, 1:].any()


def test_kernels_get_the_cases_that_their_rules_allow(monkeypatch: pytest.MonkeyPatch, choosing: CaseBook) -> None:
    def reason(problem: Any, spec: VariantSpec) -> str | None:
        return "too many blocks" if "top_blocks(5)" in problem.mask.structure else None

    monkeypatch.setattr(topk_prepared, "unable_reason", reason)
    names = [prepared.name for prepared in choosing.cases_for(SelectStub().kernel)]
    assert names == [shape.name for shape in CHOOSING if shape.top != 5]
    monkeypatch.setattr(topk_prepared, "unable_reason", lambda problem, spec: "nothing")
    with pytest.raises(InvalidInput, match="no case of select_blocks suits"):
        choosing.cases_for(SelectStub().kernel)


def test_the_cases_are_adversarial() -> None:
    for shapes in (SELECT_SHAPES, SELECT_HOST_SHAPES, SELECTED_SHAPES, SELECTED_HOST_SHAPES):
        assert len({shape.name for shape in shapes}) == len(shapes)
        assert {16, 48, 64, 100, 256, 1, 3} <= {shape.block_size for shape in shapes}
        assert {1, 3, 64} <= {shape.query_group for shape in shapes}
        assert any(shape.seqlen_q > shape.seqlen_kv for shape in shapes)
        assert any(shape.seqlen_q < shape.seqlen_kv for shape in shapes)
        assert {shape.shared for shape in shapes if shape.num_heads > shape.num_kv_heads} == {True, False}
        layouts = {"packed", "transposed", "padded", "unaligned", "far_tokens", "far_heads"}
        assert {shape.layout for shape in shapes} == layouts
        for shape in shapes:
            if shape.numbers in EXACT:
                # Means of a power of two of integers are exact.
                lasts = (shape.seqlen_kv % shape.block_size, shape.seqlen_q % shape.query_group)
                assert all(number & (number - 1) == 0 for number in (shape.block_size, shape.query_group, *lasts))
    for shapes in (SELECT_SHAPES, SELECTED_SHAPES):
        lengths = {n for shape in shapes for n in (shape.seqlen_q, shape.seqlen_kv)}
        assert {1, 17, 127, 129, 1025} <= lengths
    assert {shape.numbers for shape in SELECT_SHAPES} >= EXACT
    assert {shape.lists for shape in SELECTED_SHAPES} == {shape.lists for shape in SELECTED_HOST_SHAPES}
    assert {shape.lists for shape in SELECTED_SHAPES} == {
        *("chosen", "random", "shuffled", "outside", "same", "none", "all")
    }
