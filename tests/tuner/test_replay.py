"""Strategies replayed on a made-up record: real legal variants of a GPU problem, times from a formula."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tilewright.generator.errors import InvalidInput, Outcome
from tilewright.generator.space import default_variant, legal_variants
from tilewright.generator.variant import VariantSpec
from tilewright.tuner.effort import STRATEGY, effort_named
from tilewright.tuner.replay import Landscape, Needed, effort_with, landscape_of, read_landscape, replay
from tilewright.tuner.search import Strategy
from tilewright.tuner.strategies import STRATEGIES, Start, strategy_named
from tilewright.tuner.sweep_record import RecordWriter, SweepLine, SweepRecord
from tilewright.tuner.workloads import WorkloadRow

ROW = WorkloadRow("made up", "bfloat16", 128, 4, 1024, mask="causal()")
PROBLEM = ROW.problem("sm_80")
EVERY = pytest.mark.parametrize("name", list(STRATEGIES))


def effect(*parts: object, size: float) -> float:
    """Any number from -size to size, the same for the same parts."""
    return size * (zlib.crc32(repr(parts).encode()) / 2**31 - 1)


def time_of(spec: VariantSpec) -> float | None:
    """Families and mask forms differ most, then axes, then pairs of axes; a few variants fail."""
    if effect("fails", spec.name, size=1) > 0.95 and spec != default_variant(PROBLEM):
        return None
    axes = list(spec.values().items())
    log = effect(spec.family, size=1.0) + sum(effect(spec.family, axis, size=0.3) for axis in axes)
    pairs = [(one, other) for index, one in enumerate(axes) for other in axes[:index]]
    return 100 * math.exp(log + sum(effect(spec.family, pair, size=0.03) for pair in pairs))


def record() -> SweepRecord:
    legal, default = legal_variants(PROBLEM), default_variant(PROBLEM)
    lines = []
    for rank, spec in enumerate(legal):
        time = time_of(spec)
        lines.append(SweepLine(spec, rank, Outcome.OK if time else Outcome.COMPILE, time))
    # As measured: not in the order of their ranks.
    lines.sort(key=lambda line: zlib.crc32(line.spec.name.encode()))
    return SweepRecord({"row": ROW.name, "legal": str(len(legal)), "default": default.name}, tuple(lines))


@pytest.fixture(scope="module")
def landscape() -> Landscape:
    return landscape_of(record(), "made up")


def start(landscape: Landscape, seed: int = 0) -> Start:
    return Start(landscape.candidates, (landscape.default,), 7, seed)


def propose_all(strategy: Strategy, landscape: Landscape, batch: int, limit: int) -> list[VariantSpec]:
    order: list[VariantSpec] = []
    while len(order) < limit and (specs := strategy.propose(min(batch, limit - len(order)))):
        order += specs
        for spec in specs:
            strategy.tell(spec, landscape.times_us.get(spec))
    return order


def test_a_landscape_has_the_candidates_by_rank(landscape: Landscape, tmp_path: Path) -> None:
    assert list(landscape.candidates) == legal_variants(PROBLEM)
    assert 0 < len(landscape.times_us) < len(landscape.candidates), "some fail"
    assert landscape.best_us == min(time for spec in landscape.candidates if (time := time_of(spec)))
    assert landscape.near(0) == 1
    assert landscape.near(1e9) == len(landscape.times_us)
    whole = record()
    with RecordWriter(tmp_path / "r.csv", whole.about, whole.lines, landscape.candidates):
        pass
    again = read_landscape(tmp_path / "r.csv")
    assert again.candidates == landscape.candidates
    assert again.default == landscape.default
    assert again.times_us == pytest.approx(landscape.times_us, rel=1e-4)


def test_a_record_without_its_default_is_refused() -> None:
    whole = record()
    lines = tuple(line for line in whole.lines if line.spec.name != whole.about["default"])
    with pytest.raises(InvalidInput, match="lacks the default variant's time; go on with the sweep"):
        landscape_of(SweepRecord(whole.about, lines), "x.csv")


@EVERY
def test_every_candidate_is_proposed_once_and_the_default_first(name: str, landscape: Landscape) -> None:
    few = landscape.candidates[:40]
    order = propose_all(STRATEGIES[name](Start(few, (landscape.default,), 7)), landscape, 16, 1000)
    assert len(order) == len(set(order))
    assert set(order) == set(few)
    assert order[0] == landscape.default or landscape.default not in few


@EVERY
def test_the_same_seed_gives_the_same_search(name: str, landscape: Landscape) -> None:
    first, second = (propose_all(STRATEGIES[name](start(landscape, 3)), landscape, 8, 32) for _ in range(2))
    assert first == second


@EVERY
def test_what_was_told_before_is_not_proposed(name: str, landscape: Landscape) -> None:
    strategy = STRATEGIES[name](start(landscape))
    known = [landscape.default, *landscape.candidates[3:40:2]]
    for spec in known:
        strategy.tell(spec, landscape.times_us.get(spec))
        strategy.tell(spec, 1.0)  # a second report changes nothing
    strategy.tell(VariantSpec("forward_none", "list", 8, 8), 0.001)
    assert not set(strategy.propose(24)) & set(known)


@EVERY
def test_where_all_failed_so_far_a_search_goes_on(name: str, landscape: Landscape) -> None:
    strategy = STRATEGIES[name](start(landscape))
    for spec in landscape.candidates[:20]:
        strategy.tell(spec, None)
    assert len(set(strategy.propose(30))) == 30


@pytest.mark.parametrize("name", ["gaussian", "climb", "race"])
def test_what_learns_beats_chance(name: str, landscape: Landscape) -> None:
    """Within 5 % of the best for the median of five seeds, where a drawn order needs several times as many."""
    effort = effort_named("default")
    few = replay(landscape, name, STRATEGIES[name], effort, runs=5)
    drawn = replay(landscape, "random", STRATEGIES["random"], effort, runs=5)
    median, by_chance = few.median(few.near), drawn.median(drawn.near)
    assert median is not None
    assert by_chance is not None
    assert median < by_chance / 2, (few.near, drawn.near)


def test_the_model_needs_few_evaluations(landscape: Landscape) -> None:
    needed = replay(landscape, "gaussian", STRATEGIES["gaussian"], effort_named("default"), runs=5)
    median, worst = needed.median(needed.near), needed.worst(needed.near)
    assert median is not None
    assert worst is not None
    assert (median <= 40, worst <= 80) == (True, True), needed.near


SWEEPS = sorted((Path(__file__).parents[2] / "results" / "h200" / "sweeps").glob("*.csv"))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem[:2])
def test_what_the_tuner_uses_needs_few_evaluations_on_what_was_measured(path: Path) -> None:
    needed = replay(read_landscape(path), STRATEGY, STRATEGIES[STRATEGY], effort_named("default"), runs=5, limit=80)
    median, worst = needed.median(needed.near), needed.worst(needed.near)
    assert median is not None
    assert worst is not None, needed.near
    assert median <= 40, needed.near


def test_the_sweeps_are_there() -> None:
    assert [path.stem[:2] for path in SWEEPS] == ["w2", "w3", "w5", "w7"]


def test_counts_are_of_evaluations_in_the_order_of_measuring(landscape: Landscape) -> None:
    ranked = sorted(landscape.times_us, key=lambda spec: landscape.times_us[spec])
    slow, near, best = ranked[-1], ranked[1], ranked[0]
    within = landscape.times_us[near] / landscape.best_us - 1 + 1e-9

    class Fixed:
        def __init__(self) -> None:
            self.order = [slow, near, landscape.default, best, ranked[5]]

        def propose(self, count: int) -> list[VariantSpec]:
            taken, self.order = self.order[:count], self.order[count:]
            return taken

        def tell(self, spec: VariantSpec, time_us: float | None) -> None:
            assert time_us == landscape.times_us.get(spec)

    def run(batch: int, limit: int | None = None) -> Needed:
        make: Callable[[Start], Strategy] = lambda start: Fixed()  # noqa: E731
        effort = effort_with(effort_named("quick"), batch, None)
        return replay(landscape, "fixed", make, effort, runs=2, limit=limit, within=within)

    assert landscape.near(within) == 2
    assert (run(1).near, run(1).best) == ((2, 2), (4, 4))
    # Of a batch of three the default is measured first.
    assert (run(3).near, run(3).best) == ((3, 3), (4, 4))
    cut = run(1, limit=3)
    assert (cut.near, cut.best) == ((2, 2), (None, None))
    assert (cut.median(cut.near), cut.worst(cut.near), cut.median(cut.best), cut.worst(cut.best)) == (2, 2, None, None)


def test_the_tuner_uses_one_of_them() -> None:
    assert strategy_named(STRATEGY) is STRATEGIES[STRATEGY]
    with pytest.raises(InvalidInput, match=r"strategy must be one of tpe, .*; got 'luck'"):
        strategy_named("luck")
