"""A few variants that stand for a whole space: every value of every axis at least once, or every pair of some."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilewright.generator.arch import arch_named
from tilewright.generator.family import Family
from tilewright.generator.legality import family_reason, mask_form_reason
from tilewright.generator.problem import Problem
from tilewright.generator.space import axes_of, family_default, first_legal, problem_reason
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


CANDIDATES = 12
"""Kernels that are made for each one chosen; more give a slightly shorter sample."""

Choice = tuple[str, AxisValue]
"""An axis, or `dtype`, `head_dim`, `mask_terms`, `arch`, and its value; mask terms as text."""

Target = tuple[str, tuple[Choice, ...]]
"""A family, or `ANY_FAMILY`, and one or two choices that some kernel of the sample should have."""

ANY_FAMILY = "*"

SHARED_PAIR = ("mask_form", "mask_terms")
"""What decides which code of the shared stages a kernel runs: each legal pair is in some family's kernel."""

_FIXED = ("arch", "dtype", "head_dim", "mask_terms")
"""What a problem decides about its kernels."""

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
    allowed. Deterministic. Pairs that no problem has a legal variant for are left out, after trying all of them.
    """
    spaces = {family.name: _FamilySpace(family, problems) for family in families}
    pairs = [target for space in spaces.values() for target in space.pairs()]
    pairs += dict.fromkeys(target for space in spaces.values() for target in space.shared_pairs())
    singles = [target for space in spaces.values() for target in space.singles()]
    generator = random.Random(seed)
    missing = dict.fromkeys(pairs + singles)
    impossible: set[Target] = set()
    chosen: list[Kernel] = []
    while missing:
        wanted = _Wanted(missing, generator)
        candidates = []
        for target in generator.sample(list(missing), min(CANDIDATES, len(missing))):
            asked = list(spaces.values()) if target[0] == ANY_FAMILY else [spaces[target[0]]]
            generator.shuffle(asked)
            kernel = next((k for space in asked if (k := space.kernel_with(target[1], wanted))), None)
            if kernel is None:
                impossible.add(target)
                del missing[target]
            else:
                candidates.append(kernel)
        if candidates:
            best = max(candidates, key=lambda kernel: len(_met(kernel) & missing.keys()))
            chosen.append(best)
            for target in _met(best):
                missing.pop(target, None)
    return PairwiseSample(tuple(chosen), frozenset(pairs) - impossible)


def _choices(kernel: Kernel) -> dict[str, AxisValue]:
    """What was chosen for a kernel, in an order that is the same for all of a family's."""
    choices = {"arch": kernel.arch, "dtype": kernel.dtype, "head_dim": kernel.head_dim, **kernel.spec.values()}
    # A scan kernel has no terms of its own, which is not the same as serving calls without a mask.
    return choices if kernel.spec.mask_form == "scan" else {**choices, "mask_terms": " ".join(kernel.mask_terms)}


def _met(kernel: Kernel) -> frozenset[Target]:
    """Every target that `kernel` meets."""
    singles = ((kernel.spec.family, (choice,)) for choice in _choices(kernel).items())
    return pairs_of(kernel) | frozenset(singles)


class _Wanted:
    """Puts values in a random order, those rather first that more of the missing targets have."""

    def __init__(self, missing: Iterable[Target], generator: random.Random) -> None:
        self._generator = generator
        self._counts: dict[tuple[str, Choice], int] = {}
        for family, choices in missing:
            for choice in choices:
                self._counts[family, choice] = self._counts.get((family, choice), 0) + 1

    def ordered(self, family: str, axis: str, values: Sequence[AxisValue]) -> tuple[AxisValue, ...]:
        """All of the values; each is first as often as its weight is of all weights."""
        drawn = [(self._generator.random() ** (1 / self._weight(family, axis, value)), value) for value in values]
        return tuple(value for _, value in sorted(drawn, key=lambda pair: pair[0], reverse=True))

    def _weight(self, family: str, axis: str, value: AxisValue) -> float:
        choice = (axis, value)
        count = 1 + self._counts.get((family, choice), 0) + self._counts.get((ANY_FAMILY, choice), 0)
        # A small head dim shows the same as a large one and is checked faster.
        return count / int(value) if axis == "head_dim" else float(count)


class _FamilySpace:
    """A family's axes, and the problems it may run by what they fix of a kernel."""

    def __init__(self, family: Family, problems: Iterable[Problem]) -> None:
        self.family = family
        self.problems: dict[tuple[AxisValue, ...], Problem] = {}
        for problem in problems:
            if not family_reason(family, problem.operation, problem.dtype, arch_named(problem.target)):
                self.problems[_fixed_by(problem)] = problem
        fixed = (dict.fromkeys(values) for values in zip(*self.problems, strict=True))
        self.axes = axes_of(family)
        # In the order of _choices.
        names = ("mask_form", "block_m", "block_n", *sorted(family.axes.keys() - {"block_m", "block_n"}))
        self.values = {axis: tuple(v) for axis, v in zip(_FIXED, fixed, strict=False)}
        self.values |= {axis: self.axes[axis] for axis in names}

    def pairs(self) -> Iterator[Target]:
        """Every pair of values of two axes, legal or not."""
        paired = [axis for axis in self.values if axis not in _ONCE] if self.problems else []
        for one, other in itertools.combinations(paired, 2):
            for a, b in itertools.product(self.values[one], self.values[other]):
                yield self.family.name, ((one, a), (other, b))

    def shared_pairs(self) -> Iterator[Target]:
        """Every pair of values of `SHARED_PAIR`, as any family's."""
        one, other = SHARED_PAIR
        for a, b in itertools.product(self.values[one], self.values.get(other, ())):
            yield ANY_FAMILY, ((one, a), (other, b))

    def singles(self) -> Iterator[Target]:
        """Every value of an axis that is not paired."""
        for axis in _ONCE:
            yield from ((self.family.name, ((axis, value),)) for value in self.values.get(axis, ()))

    def kernel_with(self, choices: Iterable[Choice], wanted: _Wanted) -> Kernel | None:
        """A legal kernel with these choices, and of the rest rather what is wanted; None after trying everything."""
        asked = {axis: tuple(v for v in self.values.get(axis, ()) if v == value) for axis, value in choices}
        if "mask_terms" in asked:
            forms = asked.get("mask_form", self.family.mask_forms)
            asked["mask_form"] = tuple(form for form in forms if form != "scan")
        ordered = {a: wanted.ordered(self.family.name, a, asked.get(a, values)) for a, values in self.values.items()}
        # What is asked for comes first: what is fixed early rules out the rest early.
        axes = {a: ordered[a] for a in (*(a for a in self.axes if a in asked), *(a for a in self.axes if a not in asked))}
        tried: set[tuple[object, ...]] = set()
        for fixed in itertools.product(*(ordered.get(axis, ()) for axis in _FIXED)):
            problem = self.problems.get(fixed)
            if problem is None:
                continue
            forms = tuple(f for f in axes["mask_form"] if not mask_form_reason(str(f), problem.mask.terms))
            # Of a problem's mask, legality depends on the forms it allows, and for a scan on whether there is one.
            alike = (problem.target, problem.dtype, problem.head_dim, forms, problem.mask.terms == ())
            if alike not in tried:
                tried.add(alike)
                spec = first_legal(problem, self.family, axes)
                if spec is not None:
                    return kernel_of(problem, spec)
        return None


def _fixed_by(problem: Problem) -> tuple[AxisValue, ...]:
    """The values of `_FIXED`: what a problem decides about its kernels."""
    return problem.target, problem.dtype, problem.head_dim, " ".join(problem.mask.terms)
