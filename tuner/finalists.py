"""Who wins: the fastest, or within the noise what is there already, or is simplest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tilewright.generator.variant import VariantSpec

NOISE_FLOOR = 0.02
"""Two variants closer than this fraction count as equal, however steady their samples look: the same binary, timed in
two processes on one machine, differs by as much (clocks, page placement)."""


@dataclass(frozen=True, slots=True)
class Finalist:
    """One variant of the final comparison.

    times_us: one sample a round, in the rounds that all finalists share. complexity: the family's own figure.
    standing: 0 for the variant that is the winner so far, 1 for the default, 2 for any other; lower is kept.
    """

    spec: VariantSpec
    times_us: tuple[float, ...]
    complexity: float
    standing: int = 2

    @property
    def time_us(self) -> float:
        """The median of the samples."""
        return median(self.times_us)


@dataclass(frozen=True, slots=True)
class Ranked:
    """A finalist and where it stands: how much slower than the fastest, and how much of that may be noise."""

    finalist: Finalist
    slower: float
    noise: float

    @property
    def within_noise(self) -> bool:
        return self.slower <= self.noise


def rank(finalists: Sequence[Finalist], floor: float = NOISE_FLOOR) -> list[Ranked]:
    """The finalists, the winner first.

    Those that cannot be told from the fastest come first: among them the winner so far, then the default, then by
    complexity. The rest follow by time. Finalists without samples are left out. floor: the least fraction that counts.

    Samples of one round are compared with each other, so that a clock that drifts over the rounds cancels out.
    """
    timed = [finalist for finalist in finalists if finalist.times_us]
    if not timed:
        return []
    fastest = min(timed, key=lambda finalist: finalist.time_us)
    ranked = [Ranked(finalist, *_slower(finalist, fastest, floor)) for finalist in timed]

    def order(entry: Ranked) -> tuple[float, ...]:
        finalist = entry.finalist
        if entry.within_noise:
            return (0, finalist.standing, finalist.complexity, finalist.time_us)
        return (1, finalist.time_us)

    return sorted(ranked, key=order)


def _slower(finalist: Finalist, fastest: Finalist, floor: float) -> tuple[float, float]:
    """By which fraction `finalist` is slower than `fastest`, and the noise of that figure."""
    ratios = [mine / best for mine, best in zip(finalist.times_us, fastest.times_us, strict=False)]
    middle = median(ratios)
    spread = 1.4826 * median(abs(ratio - middle) for ratio in ratios)
    # Two standard errors of a median of normal samples.
    noise = 2 * 1.2533 * spread / math.sqrt(len(ratios))
    return max(0.0, middle - 1), max(floor, noise)
