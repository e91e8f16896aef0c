"""Local search: what lies nearest to the fastest so far, and now and then somewhere else."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tilewright.generator.variant import VariantSpec
from tilewright.tuner.search import Guided, axis_distance

CENTERS = 3
"""How many of the fastest have their neighbours tried; the fastest of all gets every second turn."""

ELSEWHERE = 0.125
"""The share of proposals drawn from what is left at random, so that no valley holds the search for ever."""


class Climb(Guided):
    """Steps from the fastest variants to their nearest neighbours (`axis_distance`), steepest descent with restarts.

    candidates, first: as `Guided`. seed: of what is drawn.
    """

    def __init__(self, candidates: Sequence[VariantSpec], *, first: Sequence[VariantSpec] = (), seed: int = 0) -> None:
        super().__init__(candidates, first)
        self._random = random.Random(seed)

    def choose(self, count: int) -> list[VariantSpec]:
        left, chosen = list(self.left), list[VariantSpec]()
        centers = self.fastest()[:CENTERS]
        # Ties go in a drawn order: all neighbours one step off look alike.
        self._random.shuffle(left)
        ranked = [iter(sorted(left, key=lambda spec: axis_distance(center, spec))) for center in centers]
        turn = 0
        while len(chosen) < count:
            if not ranked or self._random.random() < ELSEWHERE:
                source = iter(self._random.sample(left, len(left)))
            else:
                source = ranked[0] if turn % 2 == 0 else ranked[(turn // 2) % len(ranked)]
                turn += 1
            chosen.append(next(spec for spec in source if spec not in chosen))
        return chosen


class Shuffled(Guided):
    """Any of what is left, drawn: what other strategies must beat."""

    def __init__(self, candidates: Sequence[VariantSpec], *, first: Sequence[VariantSpec] = (), seed: int = 0) -> None:
        super().__init__(candidates, first)
        self._random = random.Random(seed)

    def choose(self, count: int) -> list[VariantSpec]:
        return self._random.sample(list(self.left), count)
