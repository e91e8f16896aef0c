"""Which kernels choose where budgets differ: one, or two that share a call. Families and rules are a GPU's, the kernels
that run are the CPU's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.generator.abi import ARGUMENTS
from tilewright.generator.family import family_named
from tilewright.generator.problem import Problem
from tilewright.generator.space import default_variant, family_default
from tilewright.runtime import call_problem, dispatch, topk_shares, topk_stages
from tilewright.runtime.dispatch import Choice, Dispatcher
from tilewright.runtime.records import Winner
from tilewright.runtime.selection import SELECT_BLOCKS, Selection
from tilewright.runtime.winners import WinnerTable
from tilewright.tuner.topk_oracle import select_blocks_oracle
from tilewright.tuner.topk_own import TopkCall, own_parts

HEADS, SEQLEN, BLOCK_SIZE = 8, 520, 4
MIXED = (2, 4, 70, 24, 25, 64, 2, 16)

Runs = list[tuple[str, int, list[int]]]
"""Of each launch: the family it stands for, the largest budget, and the budgets."""


class Noted:
    """A CPU's kernel in place of one for a GPU, which notes its launches."""

    def __init__(self, real: Any, family: str, runs: Runs) -> None:
        self.real, self.family, self.runs = real, family, runs

    def workspace_bytes(self, values: Sequence[int | float]) -> int:
        return int(self.real.workspace_bytes(values))

    def launch(self, values: Sequence[int | float], touched: Mapping[str, tuple[Tensor, bool]]) -> None:
        numbers = dict(zip([argument.name for argument in ARGUMENTS[SELECT_BLOCKS]], values, strict=True))
        self.runs.append((self.family, int(numbers["top_blocks"]), touched["budgets"][0].tolist()))
        self.real.launch(values, touched)


class ForAnother(Dispatcher):
    """Chooses for the problems it is given, and runs the CPU's kernels. refused: families that cannot be built."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.asked = Runs(), 0
        self.real = Dispatcher()
        self.refused: set[str] = set()

    def choose(self, problem: Problem, device: torch.device | None = None) -> Choice:
        self.asked += 1
        return super().choose(problem, device)

    def kernel_for(self, problem: Problem, device: torch.device) -> tuple[Choice, Any]:
        choice = self.choose(problem, device)
        if choice.spec is None or choice.spec.family in self.refused:
            return Choice(problem, None, "fallback", "refused"), None
        real = self.real.kernel_for(replace(problem, target="cpu"), device)[1]
        return choice, Noted(real, choice.spec.family, self.runs)


def stand_in(target: str, monkeypatch: pytest.MonkeyPatch) -> ForAnother:
    """The process-wide dispatcher's stand-in for a target; two kernels pay from the first list on."""

    def problem(operation: str, query: Tensor, key: Tensor, selection: Selection) -> Problem:
        return replace(call_problem.stage_problem(operation, query, key, selection), target=target)

    one = ForAnother()
    monkeypatch.setattr(topk_stages, "DISPATCHER", one)
    monkeypatch.setattr(topk_shares, "WORTH_LISTS", 1)
    for module in (dispatch, topk_shares):
        monkeypatch.setattr(module, "stage_problem", problem)
    return one


@pytest.fixture
def winners(monkeypatch: pytest.MonkeyPatch) -> list[Winner]:
    """What was tuned: nothing, until a test says so."""
    tuned: list[Winner] = []
    monkeypatch.setattr(dispatch, "load_winners", lambda: WinnerTable(tuned))
    monkeypatch.setattr(dispatch.environment, "device_name", lambda target: "a GPU")
    return tuned


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, winners: list[Winner]) -> ForAnother:
    return stand_in("sm_90a", monkeypatch)


def inputs(seqlen: int = SEQLEN) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seqlen)
    query, key = (torch.randn((1, HEADS, seqlen, 64), generator=generator).bfloat16() for _ in range(2))
    return query, key


def choose(budgets: tuple[int, ...], seqlen: int = SEQLEN, **options: Any) -> tuple[Tensor, Tensor]:
    selection = Selection(BLOCK_SIZE, max(budgets), HEADS, **options)
    return topk_stages.choose_blocks(*inputs(seqlen), budgets, selection)


def masked(budgets: tuple[int, ...], above: int, most: int) -> list[int]:
    return [budget if above < budget <= most else 0 for budget in budgets]


def tuned_to(family: str, top: int) -> Winner:
    """The family's own default as the winner for lists of this width."""
    selection = Selection(BLOCK_SIZE, top, HEADS)
    problem = replace(call_problem.stage_problem(SELECT_BLOCKS, *inputs(), selection), target="sm_90a")
    spec = family_default(problem, family_named(family))
    assert spec is not None
    return Winner(problem=problem, spec=spec, time_us=9.0, default_time_us=9.0, device="a GPU", source="a test")


@pytest.mark.parametrize("options", [{}, {"causal": True, "sink_blocks": 1}], ids=["", "causal, a sink"])
def test_two_kernels_choose_what_one_would(hopper: ForAnother, options: dict[str, Any]) -> None:
    indices, counts = choose(MIXED, **options)
    assert hopper.runs == [
        ("select_mma", 70, masked(MIXED, 24, 70)),
        ("select_wgmma", 24, masked(MIXED, 0, 24)),
    ]
    hopper.refused.add("select_wgmma")
    hopper.reload()
    one = choose(MIXED, **options)
    assert hopper.runs[2:] == [("select_mma", 70, list(MIXED))]
    assert torch.equal(indices, one[0])
    assert torch.equal(counts, one[1])
    selection = Selection(BLOCK_SIZE, 70, HEADS, **options)
    want = select_blocks_oracle(*inputs(), torch.tensor(MIXED), selection)
    assert torch.equal(counts, want.counts)
    assert (indices == want.indices).float().mean() > 0.999, "but for scores as near as rounding"


@pytest.mark.parametrize(
    ("budgets", "family"),
    [
        ((16,) * HEADS, "select_wgmma"),
        ((2, 4, 8, 16, 24, 24, 2, 3), "select_wgmma"),
        ((64,) * HEADS, "select_mma"),
        ((25, 26, 64, 100, 25, 25, 25, 25), "select_mma"),
    ],
    ids=["even and narrow", "narrow", "even and wide", "wide"],
)
def test_where_one_family_takes_all_one_kernel_runs(budgets: tuple[int, ...], family: str, hopper: ForAnother) -> None:
    choose(budgets)
    assert hopper.runs == [(family, max(budgets), list(budgets))]


@pytest.mark.parametrize("target", ["cpu", "sm_80"])
def test_where_there_is_one_family_one_kernel_runs(
    target: str, monkeypatch: pytest.MonkeyPatch, winners: list[Winner]
) -> None:
    one = stand_in(target, monkeypatch)
    choose(MIXED)
    assert [(most, budgets) for _, most, budgets in one.runs] == [(70, list(MIXED))]
    assert one.asked == 1, "nobody was asked for narrower budgets"


def test_the_rules_of_families_say_who_is_narrow(hopper: ForAnother) -> None:
    """With fewer than 128 blocks of keys the narrow family pays for nobody."""
    choose(MIXED, seqlen=127 * BLOCK_SIZE)
    assert [family for family, _, _ in hopper.runs] == ["select_mma"]


def test_few_lists_are_not_shared_out(hopper: ForAnother, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = (2, 64, 2, 2, 2, 2, 2, 2)
    for limit, runs in ((SEQLEN + 1, 1), (SEQLEN, 2)):
        monkeypatch.setattr(topk_shares, "WORTH_LISTS", limit)
        hopper.reload()
        hopper.runs.clear()
        choose(budgets)
        assert len(hopper.runs) == runs


def test_tuned_winners_are_respected(hopper: ForAnother, winners: list[Winner]) -> None:
    # Narrow budgets too were faster by the family that takes wide ones.
    winners += [tuned_to("select_mma", top) for top in (70, 64, 25, 24, 16, 4, 2)]
    choose(MIXED)
    assert [family for family, _, _ in hopper.runs] == ["select_mma"]
    # A family that could take the widest budget, and was not the fastest, does not get the narrower ones.
    winners[:] = [tuned_to("select_mma", 20), tuned_to("select_wgmma", 4)]
    hopper.reload()
    hopper.runs.clear()
    choose((20, 4, 4, 4, 20, 4, 4, 4))
    assert [family for family, _, _ in hopper.runs] == ["select_mma"]
    # For the widest budget that the other family can take it was slower: it gets none.
    winners[:] = [tuned_to("select_mma", top) for top in (70, 24)] + [tuned_to("select_wgmma", 16)]
    hopper.reload()
    hopper.runs.clear()
    choose((70, 24, 16, 16, 70, 24, 16, 16))
    assert [family for family, _, _ in hopper.runs] == ["select_mma"]
    winners[1] = tuned_to("select_wgmma", 24)
    hopper.reload()
    hopper.runs.clear()
    choose((70, 24, 16, 16, 70, 24, 16, 16))
    assert [(family, most) for family, most, _ in hopper.runs] == [("select_mma", 70), ("select_wgmma", 24)]


def test_a_repeated_call_asks_nobody_until_a_reload(hopper: ForAnother) -> None:
    choose(MIXED)
    asked = hopper.asked
    for _ in range(3):
        choose(MIXED)
    assert hopper.asked == asked
    assert len(hopper.runs) == 8
    hopper.reload()
    choose(MIXED)
    assert hopper.asked > asked


def test_what_is_remembered_is_bounded(hopper: ForAnother, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_shares, "MAX_SHARED_OUT", 3)
    for least in range(1, 7):
        choose((least, *MIXED[1:]))
    assert len(topk_shares._shared_out) <= 3


def test_an_explanation_and_the_benchmark_tell_both_kernels(hopper: ForAnother) -> None:
    query, key = inputs()
    found = tw.explain_topk(query, key, key, block_size=BLOCK_SIZE, top_k=MIXED)
    assert found.select_blocks is not None
    assert found.select_few is not None
    assert found.select_blocks.kernel == default_variant(found.select_blocks.problem)
    assert found.select_few.kernel == default_variant(found.select_few.problem)
    call = TopkCall(query, key, key, Selection(BLOCK_SIZE, 70, HEADS), MIXED, 1.0)
    (setting,) = own_parts()["tilewright_stage1"].settings(call)
    for told in (found.select_blocks, found.select_few):
        assert told.kernel is not None
        assert told.kernel.name in setting.name
    hopper.runs.clear()
    setting.make().run()
    assert [family for family, _, _ in hopper.runs] == ["select_mma", "select_wgmma"]
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["choose:", "choose", "attend:"]
    assert "top_blocks(70)" in lines[0]
    assert lines[3].startswith("choose few: select_blocks")
    assert "top_blocks(24)" in lines[3]
    assert list(found.to_dict()) == ["select_blocks", "select_few", "attention"]
    even = tw.explain_topk(query, key, key, block_size=BLOCK_SIZE, top_k=16)
    assert even.select_few is None
    assert list(even.to_dict()) == ["select_blocks", "attention"]
