"""A race of mask forms: each family and form is a lane, and the fast lanes get the turns."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from tilewright.generator.variant import VariantSpec
from tilewright.tuner.search import Guided, axis_distance

HEADS = 2
"""Variants of each lane that are measured before it can drop behind."""

BEHIND = 2.0
"""A lane whose best is this many times slower than the best of all gets no more turns while another is nearer."""


class Race(Guided):
    """Two variants of each lane, then neighbours of each lane's best, in turns by how near that is to the best of all.

    A lane is a family with a mask form: between lanes times differ by their loops and skipped work, within one by tiles
    and pipelines. candidates, first: as `Guided`. seed: of ties.
    """

    def __init__(self, candidates: Sequence[VariantSpec], *, first: Sequence[VariantSpec] = (), seed: int = 0) -> None:
        super().__init__(candidates, first)
        self._random = random.Random(seed)

    def choose(self, count: int) -> list[VariantSpec]:
        lanes: dict[tuple[str, str], list[VariantSpec]] = {}
        for spec in self.left:
            lanes.setdefault((spec.family, spec.mask_form), []).append(spec)
        fastest = self.fastest()
        best_us = self.times[fastest[0]] if fastest else math.inf
        best = {lane: next((spec for spec in fastest if _lane(spec) == lane), None) for lane in lanes}
        tried = {lane: sum(_lane(spec) == lane for spec in (*self.times, *self.waiting)) for lane in lanes}
        for lane, members in lanes.items():
            self._order(members, best[lane])
        chosen: list[VariantSpec] = []
        given = dict.fromkeys(lanes, 0)

        def standing(lane: tuple[str, str]) -> tuple[float, ...]:
            """Smallest goes next."""
            if tried[lane] + given[lane] < HEADS:
                return (0, tried[lane] + given[lane], 0)
            behind = self.times[leader] / best_us if (leader := best[lane]) is not None else math.inf
            if behind > BEHIND:
                return (2, behind, given[lane])
            # A lane 10 % behind gets about half of the first one's turns.
            return (1, (given[lane] + 1) * behind**7, 0)

        while len(chosen) < count:
            lane = min((lane for lane, members in lanes.items() if members), key=standing)
            chosen.append(lanes[lane].pop(0))
            given[lane] += 1
        return chosen

    def _order(self, members: list[VariantSpec], leader: VariantSpec | None) -> None:
        if leader is not None:
            self._random.shuffle(members)
            members.sort(key=lambda spec: axis_distance(leader, spec))


def _lane(spec: VariantSpec) -> tuple[str, str]:
    return spec.family, spec.mask_form
