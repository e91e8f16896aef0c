"""Strategies: what they propose, what they never propose, and whether TPE learns."""

from __future__ import annotations

import itertools

import pytest

from tilewright.generator.variant import VariantSpec
from tilewright.tuner.search import Exhaustive, OptunaTpe, axis_distance, diverse


def spec(form: str, block_m: int, block_n: int, family: str = "forward_a", **axes: int | bool | str) -> VariantSpec:
    return VariantSpec(family, form, block_m, block_n, tuple(axes.items()))


TILES = (16, 32, 64, 128)


def space() -> list[VariantSpec]:
    """Two families with different axes and with holes: 2*4*4*2 minus the tiles of 128x128, and 2*4."""
    wide = [
        spec(form, m, n, pack=pack)
        for form, m, n, pack in itertools.product(
            ("list", "analytic"), (16, 32, 64, 128), (16, 32, 64, 128), (False, True)
        )
        if m * n < 128 * 128
    ]
    narrow = [spec("scan", m, 32, family="forward_b", unroll=u) for m, u in itertools.product((16, 32), (1, 3, 4, 8))]
    return wide + narrow


def time_of(variant: VariantSpec) -> float | None:
    """A landscape with one optimum: list 64x32, packed; forward_b's scan is slow, and 16-wide keys fail."""
    if variant.family == "forward_b":
        return 5000.0
    if variant.block_n == 16:
        return None
    best = spec("list", 64, 32, pack=True)
    return 100.0 * 2.0 ** axis_distance(best, variant)


def strategies() -> list[Exhaustive | OptunaTpe]:
    return [Exhaustive(space()), OptunaTpe(space(), seed=3)]


@pytest.mark.parametrize("strategy", strategies(), ids=["exhaustive", "tpe"])
def test_every_candidate_is_proposed_exactly_once(strategy: Exhaustive | OptunaTpe) -> None:
    seen: list[VariantSpec] = []
    while batch := strategy.propose(7):
        assert len(batch) <= 7
        seen += batch
        for variant in batch:
            strategy.tell(variant, time_of(variant))
    assert len(seen) == len(set(seen))
    assert set(seen) == set(space())


@pytest.mark.parametrize("strategy", strategies(), ids=["exhaustive", "tpe"])
def test_what_the_store_knows_is_never_proposed(strategy: Exhaustive | OptunaTpe) -> None:
    known = space()[::3]
    for variant in known:
        strategy.tell(variant, time_of(variant))
        strategy.tell(variant, time_of(variant))  # a second report, say of another run, changes nothing
    proposed = strategy.propose(len(space()))
    assert set(proposed) == set(space()) - set(known)


def test_a_told_stranger_is_ignored() -> None:
    strategy = OptunaTpe(space(), seed=0)
    strategy.tell(spec("list", 256, 256, pack=True), 1.0)
    assert set(strategy.propose(1000)) == set(space())


def test_exhaustive_keeps_the_order() -> None:
    assert Exhaustive(space()).propose(5) == space()[:5]


def test_first_variants_come_first() -> None:
    first = [space()[40], space()[7], spec("list", 512, 512)]
    assert OptunaTpe(space(), first=first, seed=1).propose(3)[:2] == first[:2]


def test_tpe_is_reproducible() -> None:
    def run() -> list[VariantSpec]:
        strategy, order = OptunaTpe(space(), seed=5), []
        for _ in range(8):
            (variant,) = strategy.propose(1)
            strategy.tell(variant, time_of(variant))
            order.append(variant)
        return order

    assert run() == run()


def test_tpe_needs_fewer_trials_than_chance() -> None:
    """Over ten seeds the optimum of 68 points is found, on average, well before half of them were tried."""
    needed = []
    for seed in range(10):
        strategy = OptunaTpe(space(), seed=seed)
        for trial in range(1, len(space()) + 1):
            (variant,) = strategy.propose(1)
            strategy.tell(variant, time_of(variant))
            if time_of(variant) == 100.0:
                needed.append(trial)
                break
    assert len(needed) == 10
    assert sum(needed) / 10 < 25, needed


@pytest.mark.parametrize("seed", range(4))
def test_tpe_learns_from_an_earlier_run(seed: int) -> None:
    """Told a third of the landscape, without its optimum, the next six proposals hold a better variant."""
    strategy = OptunaTpe(space(), seed=seed)
    known = [v for v in space()[::3] if time_of(v) != 100.0]
    for variant in known:
        strategy.tell(variant, time_of(variant))
    proposed = []
    for _ in range(6):
        (variant,) = strategy.propose(1)
        strategy.tell(variant, time_of(variant))
        proposed.append(time_of(variant) or 5000.0)
    assert min(proposed) < min(time_of(v) or 5000.0 for v in known), proposed


def test_diverse_takes_every_mask_form_and_different_tiles() -> None:
    picked = diverse(space(), 6)
    assert len(set(picked)) == 6
    assert {v.mask_form for v in picked} == {"list", "analytic", "scan"}
    tiles = {(v.block_m, v.block_n) for v in picked if v.mask_form == "list"}
    assert len(tiles) == 2


def test_diverse_leaves_out_what_is_chosen_and_can_run_out() -> None:
    chosen = space()[:3]
    everything = diverse(space(), 1000, chosen)
    assert set(everything) == set(space()) - set(chosen)
