"""A few variants that stand for a whole space: every value of every axis at least once, or every pair of some."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewright.generator.arch import arch_named
from tilewright.generator.family import Family
from tilewright.generator.legality import family_reason
from tilewright.generator.problem import Problem
from tilewright.generator.space import family_default, forms_for, legal_values, problem_reason
from tilewright.generator.variant import AxisValue, Kernel, VariantSpec, kernel_of

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


Choice = tuple[str, AxisValue]
"""An axis, or `dtype`, `head_dim`, `mask_terms`, `arch`, and its value; mask terms as text."""

Target = tuple[str, tuple[Choice, ...]]
"""A family, or `ANY_FAMILY`, and one or two choices that some kernel of the sample should have."""

ANY_FAMILY = "*"

SHARED_PAIR = ("mask_form", "mask_terms")
"""What decides which code of the shared stages a kernel runs: each legal pair is in some family's kernel."""

_ONCE = ("head_dim", "mask_terms")
"""Of these, each value is in one kernel of each family; of everything else, each pair of values."""


@dataclass(frozen=True, slots=True)
class PairwiseSample:
    """Kernels in the order in which they cover the most, and all pairs of choices that are legal."""

    kernels: tuple[Kernel, ...]
    pairs: frozenset[Target]


def pairs_of(kernel: Kernel) -> frozenset[Target]:
    """The pairs of choices that `kernel` has: of its axes, dtype and architecture as its family's, and the pair of
    `SHARED_PAIR` as any family's.
    """
    choices = _choices(kernel)
    paired = [choice for choice in choices.items() if choice[0] not in _ONCE]
    own = frozenset((kernel.spec.family, pair) for pair in itertools.combinations(paired, 2))
    shared = tuple((axis, choices[axis]) for axis in SHARED_PAIR if axis in choices)
    return own | {(ANY_FAMILY, shared)} if len(shared) == 2 else own


def pairwise_sample(problems: Sequence[Problem], families: Iterable[Family], seed: int = 0) -> PairwiseSample:
    """A greedy covering array: within each family every legal pair of values of its axes, dtypes and architectures and
    at least once every head dim and set of mask terms; over all families every legal pair of `SHARED_PAIR`.

    problems: the architectures, dtypes, head dims and mask terms to choose from, in any combination that is to be
    allowed. Each kernel is one of those that add the most; seed decides which. Deterministic.
    """
    spaces = [space for family in families if (space := _FamilySpace(family, problems)).size]
    pairs = frozenset(target for space in spaces for target in space.pairs())
    missing = {*pairs, *(target for space in spaces for target in space.singles())}
    generator = random.Random(seed)
    chosen: list[Kernel] = []
    while missing:
        best = max(spaces, key=lambda space: space.most(missing))
        chosen.append(best.draw(missing, generator))
        met = _met(chosen[-1]) & missing
        best.forget(met)
        missing -= met
    return PairwiseSample(tuple(chosen), pairs)


def most_of(sample: PairwiseSample, percent: float) -> tuple[Kernel, ...]:
    """The first kernels of the sample that have so many percent of its pairs, and of the later ones those that alone
    have a head dim, a set of mask terms or a pair of `SHARED_PAIR`. A sample's last kernels add a pair or two each.
    """
    met: set[Target] = set()
    chosen: list[Kernel] = []
    for kernel in sample.kernels:
        pairs = pairs_of(kernel) & sample.pairs
        needed = {target for target in _met(kernel) if target not in pairs or target[0] == ANY_FAMILY}
        if needed <= met and 100 * len(met & sample.pairs) >= percent * len(sample.pairs):
            continue
        chosen.append(kernel)
        met |= pairs | needed
    return tuple(chosen)


def _choices(kernel: Kernel) -> dict[str, AxisValue]:
    """What was chosen for a kernel, in an order that is the same for all of a family's."""
    choices = {"arch": kernel.arch, "dtype": kernel.dtype, "head_dim": kernel.head_dim, **kernel.spec.values()}
    # A scan kernel has no terms of its own, which is not the same as serving calls without a mask.
    return choices if kernel.spec.mask_form == "scan" else {**choices, "mask_terms": " ".join(kernel.mask_terms)}


def _met(kernel: Kernel) -> frozenset[Target]:
    """Every target that `kernel` meets."""
    singles = ((kernel.spec.family, (choice,)) for choice in _choices(kernel).items())
    return pairs_of(kernel) | frozenset(singles)


class _FamilySpace:
    """Every legal point of a family, mask terms aside, and how many of the missing targets each would add.

    Mask terms are paired with the mask form alone: they are chosen after the point.
    """

    def __init__(self, family: Family, problems: Iterable[Problem]) -> None:
        self.family = family
        groups: dict[tuple[str, str, int], list[Problem]] = {}
        for problem in problems:
            if not family_reason(family, problem.operation, problem.dtype, arch_named(problem.target)):
                groups.setdefault((problem.target, problem.dtype, problem.head_dim), []).append(problem)
        # In the order of _choices.
        others = sorted(family.axes.keys() - {"block_m", "block_n"})
        self._axes = ("arch", "dtype", "head_dim", "mask_form", "block_m", "block_n", *others)
        self._served: dict[tuple[AxisValue, ...], list[Problem]] = {}
        points: list[tuple[AxisValue, ...]] = []
        for (target, dtype, head_dim), group in groups.items():
            for problem in group:
                for form in forms_for(problem, family):
                    self._served.setdefault((target, dtype, head_dim, form), []).append(problem)
            forms = [form for form in family.mask_forms if (target, dtype, head_dim, form) in self._served]
            for names in legal_values(family, target, dtype, head_dim, forms):
                points.append((target, dtype, head_dim, *(names[axis] for axis in self._axes[3:])))
        self._points = points
        self.size = len(points)
        columns = dict(zip(self._axes, zip(*points, strict=True), strict=False))  # none where no point is legal
        self._values = {axis: list(dict.fromkeys(column)) for axis, column in columns.items()}
        self._codes = {axis: _codes(column) for axis, column in columns.items()}
        self._bases = list(dict.fromkeys(point[:4] for point in points))
        self._base = _codes([point[:4] for point in points])
        # Many bases serve the same sets of mask terms: what those add is counted once for all of them.
        served = [tuple(dict.fromkeys(self._of_terms(base, p) for p in self._served[base])) for base in self._bases]
        self._terms, self._terms_of_base = list(dict.fromkeys(served)), _codes(served)
        self._paired = [axis for axis in self._axes if axis not in _ONCE]
        self._adds = np.full(self.size, len(self._paired) * (len(self._paired) - 1) // 2)

    def pairs(self) -> Iterator[Target]:
        """Every pair of values of two axes that some point has, and every pair of `SHARED_PAIR`."""
        for one, other in itertools.combinations(self._paired, 2):
            values = self._values[other]
            for code in np.unique(self._codes[one] * len(values) + self._codes[other]).tolist():
                a, b = divmod(code, len(values))
                yield self.family.name, ((one, self._values[one][a]), (other, values[b]))
        for base in self._bases:
            yield from (target for p in self._served[base] for target in self._of_terms(base, p) if len(target[1]) == 2)

    def singles(self) -> Iterator[Target]:
        """Every head dim and every set of mask terms that some point has."""
        for base in self._bases:
            yield self._head_dim(base)
            yield from (target for p in self._served[base] for target in self._of_terms(base, p) if len(target[1]) == 1)

    def most(self, missing: set[Target]) -> int:
        """How many of the missing targets the best point adds."""
        return int(self._all_adds(missing).max())

    def draw(self, missing: set[Target], generator: random.Random) -> Kernel:
        """One of the kernels that add the most."""
        adds = self._all_adds(missing)
        best = np.flatnonzero(adds == adds.max()).tolist()
        # A small head dim shows the same as a large one and is checked faster.
        (row,) = generator.choices(best, weights=[1 / int(self._points[row][2]) for row in best])
        values = dict(zip(self._axes, self._points[row], strict=True))
        problems = self._served[self._points[row][:4]]
        most = max(self._added_by(self._points[row], problem, missing) for problem in problems)
        problem = generator.choice([p for p in problems if self._added_by(self._points[row], p, missing) == most])
        spec = VariantSpec.from_values(self.family.name, {axis: values[axis] for axis in self._axes[3:]})
        return kernel_of(problem, spec)

    def forget(self, met: Iterable[Target]) -> None:
        """Count these targets no longer, now that a kernel has them."""
        for family, choices in met:
            if family == self.family.name and len(choices) == 2:
                both = [self._codes[axis] == self._values[axis].index(value) for axis, value in choices]
                self._adds -= both[0] & both[1]

    def _all_adds(self, missing: set[Target]) -> NDArray[np.int64]:
        """For each point, how many of the missing targets it adds with the best of its sets of mask terms."""
        of_terms = np.array([max(_count(targets, missing) for targets in choices) for choices in self._terms])
        of_head_dim = np.array([self._head_dim(base) in missing for base in self._bases], dtype=np.int64)
        found: NDArray[np.int64] = self._adds + (of_terms[self._terms_of_base] + of_head_dim)[self._base]
        return found

    def _head_dim(self, point: tuple[AxisValue, ...]) -> Target:
        return self.family.name, (("head_dim", point[2]),)

    def _added_by(self, point: tuple[AxisValue, ...], problem: Problem, missing: set[Target]) -> int:
        return _count(self._of_terms(point, problem), missing)

    def _of_terms(self, point: tuple[AxisValue, ...], problem: Problem) -> tuple[Target, ...]:
        """The targets that the problem's mask terms meet at a point: none with a scan, whose kernel has no terms."""
        if point[3] == "scan":
            return ()
        terms = ("mask_terms", " ".join(problem.mask.terms))
        return (self.family.name, (terms,)), (ANY_FAMILY, (("mask_form", point[3]), terms))


def _count(targets: Iterable[Target], missing: set[Target]) -> int:
    return sum(target in missing for target in targets)


def _codes(column: Sequence[object]) -> NDArray[np.int64]:
    """Each value's number among the different ones, in the order in which they first occur."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(column))}
    return np.array([numbers[value] for value in column], dtype=np.int64)
