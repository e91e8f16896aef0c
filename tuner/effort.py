"""How much of a search space is measured, and by which strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.generator.errors import InvalidInput
from tilewright.generator.variant import VariantSpec
from tilewright.tuner.search import Exhaustive, Strategy
from tilewright.tuner.strategies import Start, strategy_named

STRATEGY = "gaussian"
"""What searches a space that is not measured whole: it needed few evaluations on every sweep of an H200, from bad
starts too (docs/tuning.md, replays)."""


@dataclass(frozen=True, slots=True)
class Effort:
    """One level of `--effort`.

    trials: variants measured for a problem when there are more than `exhaustive_up_to`; at most that many are all
    measured. batch: variants built before they are measured. seeds: variants the model starts from, picked to differ.
    finalists: how many are measured once more, interleaved, beside the default.
    """

    name: str
    trials: int
    exhaustive_up_to: int
    batch: int
    seeds: int
    finalists: int

    def budget(self, candidates: int) -> int:
        """How many of this many legal variants are measured."""
        return candidates if candidates <= self.exhaustive_up_to else self.trials


EFFORTS: dict[str, Effort] = {
    effort.name: effort
    for effort in (
        Effort("quick", trials=13, exhaustive_up_to=13, batch=7, seeds=5, finalists=3),
        Effort("default", trials=60, exhaustive_up_to=60, batch=16, seeds=15, finalists=4),
        Effort("full", trials=300, exhaustive_up_to=400, batch=32, seeds=30, finalists=6),
    )
}
"""Quick is the default variant and a dozen others; full is everything, or three hundred where that is too much."""


def effort_named(name: str) -> Effort:
    """The effort called `name`; `InvalidInput` lists the known ones otherwise."""
    if name not in EFFORTS:
        raise InvalidInput(f"effort must be one of {', '.join(EFFORTS)}; got {name!r}")
    return EFFORTS[name]


def strategy_for(
    effort: Effort,
    candidates: Sequence[VariantSpec],
    default: VariantSpec,
    warm: Sequence[VariantSpec] = (),
    *,
    seed: int = 0,
) -> Strategy:
    """The strategy over `candidates` (cheapest-looking first): the default first, then the warm-start variants."""
    first = [spec for spec in dict.fromkeys((default, *warm)) if spec in set(candidates)]
    if len(candidates) <= effort.exhaustive_up_to:
        return Exhaustive((*first, *candidates))
    return strategy_named(STRATEGY)(Start(candidates, first, effort.seeds, seed))
