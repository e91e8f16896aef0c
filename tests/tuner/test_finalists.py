"""Who wins, on made-up samples: the rule is pure."""

from __future__ import annotations

from tilewright.generator.variant import VariantSpec
from tilewright.tuner.finalists import Finalist, rank

DRIFT = (1.0, 1.3, 0.9, 1.1, 1.6, 1.0, 1.2)
"""A clock that changes over the rounds, for all finalists alike."""


def finalist(name: str, time_us: float, *, complexity: float = 5.0, standing: int = 2, jitter: float = 0.0) -> Finalist:
    signs = (1, -1, 1, -1, 0, 1, -1)
    times = tuple(time_us * drift * (1 + jitter * sign) for drift, sign in zip(DRIFT, signs, strict=True))
    return Finalist(VariantSpec(name, "list", 16, 16), times, complexity, standing)


def order(*finalists: Finalist) -> list[str]:
    return [entry.finalist.spec.family for entry in rank(finalists)]


def test_the_clearly_fastest_wins_however_complicated() -> None:
    fast = finalist("fast", 100, complexity=99)
    assert order(finalist("default", 110, standing=1), fast, finalist("old", 105, standing=0))[0] == "fast"


def test_within_the_noise_the_default_wins() -> None:
    assert order(finalist("fast", 100), finalist("default", 101, standing=1))[0] == "default"


def test_within_the_noise_the_winner_so_far_stays() -> None:
    fast, default = finalist("fast", 100, complexity=1), finalist("default", 101, standing=1)
    assert order(fast, default, finalist("old", 101.5, standing=0))[0] == "old"


def test_within_the_noise_the_simpler_wins() -> None:
    assert order(finalist("fast", 100, complexity=9), finalist("simple", 101.5, complexity=2)) == ["simple", "fast"]


def test_jitter_widens_the_noise() -> None:
    """6 % slower is a loss with steady samples, and none when the samples scatter by a fifth."""
    steady = order(finalist("fast", 100), finalist("default", 106, standing=1))
    assert steady[0] == "fast"
    shaky = order(finalist("fast", 100), finalist("default", 106, standing=1, jitter=0.2))
    assert shaky[0] == "default"


def test_a_drifting_clock_cancels_out() -> None:
    """The rounds differ by 60 %, the finalists by 5 %: that is still told apart."""
    ranked = rank([finalist("fast", 100), finalist("default", 105, standing=1)])
    assert ranked[0].finalist.spec.family == "fast"
    assert abs(ranked[1].slower - 0.05) < 1e-9
    assert not ranked[1].within_noise


def test_the_floor_can_be_wider() -> None:
    pair = [finalist("fast", 100), finalist("default", 104, standing=1)]
    assert rank(pair)[0].finalist.spec.family == "fast"
    assert rank(pair, floor=0.05)[0].finalist.spec.family == "default"


def test_without_samples_nobody_wins() -> None:
    assert rank([Finalist(VariantSpec("a", "list", 16, 16), (), 1.0)]) == []
