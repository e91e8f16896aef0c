"""A few variants that stand for a whole space: every value of every axis at least once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tilewright.generator.family import Family
from tilewright.generator.problem import Problem
from tilewright.generator.space import family_default, problem_reason
from tilewright.generator.variant import AxisValue, VariantSpec

MAX_OTHER_CHANGES = 2
"""How many other axes may move so that a value of one axis becomes legal."""


def covering_sample(problem: Problem, family: Family) -> list[VariantSpec]:
    """The family's default for `problem`, then for each axis value not met so far the legal variant nearest to it.

    Mask forms count as an axis. A value that no variant near the default has legally is left out. Empty where the
    family has no default for the problem.
    """
    start = family_default(problem, family)
    if start is None:
        return []
    axes: dict[str, tuple[AxisValue, ...]] = {"mask_form": family.mask_forms, **family.axes}
    chosen, covered = [start], set(start.values().items())
    for axis, values in axes.items():
        for value in values:
            if (axis, value) in covered:
                continue
            spec = next(_legal_near(problem, family, start, (axis, value), axes), None)
            if spec is not None:
                chosen.append(spec)
                covered |= set(spec.values().items())
    return chosen


def _legal_near(
    problem: Problem,
    family: Family,
    start: VariantSpec,
    wanted: tuple[str, AxisValue],
    axes: dict[str, tuple[AxisValue, ...]],
) -> Iterator[VariantSpec]:
    """Legal variants with the wanted axis value, those that differ least from `start` first."""
    base = {**start.values(), wanted[0]: wanted[1]}
    others = [axis for axis in axes if axis != wanted[0]]
    for count in range(MAX_OTHER_CHANGES + 1):
        for moved in itertools.combinations(others, count):
            for values in itertools.product(*(axes[axis] for axis in moved)):
                spec = VariantSpec.from_values(family.name, {**base, **dict(zip(moved, values, strict=True))})
                if problem_reason(problem, spec) is None:
                    yield spec
