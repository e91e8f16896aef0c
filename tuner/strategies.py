"""Every search strategy by name, each made from the same start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.generator.errors import InvalidInput
from tilewright.generator.variant import VariantSpec
from tilewright.tuner.search import Exhaustive, OptunaTpe, Strategy, diverse
from tilewright.tuner.search_climb import Climb, Shuffled
from tilewright.tuner.search_model import GaussianSearch
from tilewright.tuner.search_race import Race


@dataclass(frozen=True, slots=True)
class Start:
    """What a search begins with.

    candidates: the legal variants, cheapest-looking first. first: the default and the winners of similar problems,
    those that are candidates, to be measured before any other. seeds: variants a model starts from, picked to differ.
    seed: of what is drawn.
    """

    candidates: Sequence[VariantSpec]
    first: Sequence[VariantSpec]
    seeds: int
    seed: int = 0

    def seeded(self) -> list[VariantSpec]:
        """`first`, then as many variants that differ as a model starts from."""
        return [*self.first, *diverse(self.candidates, self.seeds, self.first)]


STRATEGIES: dict[str, Callable[[Start], Strategy]] = {
    "tpe": lambda start: OptunaTpe(start.candidates, first=start.seeded(), seed=start.seed),
    "tpe-unseeded": lambda start: OptunaTpe(start.candidates, first=start.first, seed=start.seed),
    "gaussian": lambda start: GaussianSearch(start.candidates, first=start.seeded(), seed=start.seed),
    "climb": lambda start: Climb(start.candidates, first=start.seeded(), seed=start.seed),
    "race": lambda start: Race(start.candidates, first=start.first, seed=start.seed),
    "cheapest": lambda start: Exhaustive((*start.first, *start.candidates)),
    "random": lambda start: Shuffled(start.candidates, first=start.first, seed=start.seed),
}
"""All begin with the default; `tpe`, `gaussian` and `climb` go on with variants that differ."""


def strategy_named(name: str) -> Callable[[Start], Strategy]:
    """What makes the strategy called `name`; `InvalidInput` lists the known ones otherwise."""
    if name not in STRATEGIES:
        raise InvalidInput(f"strategy must be one of {', '.join(STRATEGIES)}; got {name!r}")
    return STRATEGIES[name]
