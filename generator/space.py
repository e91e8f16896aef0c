"""The legal variants of a problem, its default variant, and their order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.generator.arch import Arch, arch_named
from tilewright.generator.errors import IllegalVariant
from tilewright.generator.expression import evaluate, names_in
from tilewright.generator.family import Family, all_families, family_named
from tilewright.generator.legality import (
    derived_values,
    family_reason,
    given_values,
    legality,
    mask_form_reason,
    rules_of,
)
from tilewright.generator.problem import Problem
from tilewright.generator.variant import AxisValue, Kernel, VariantSpec, kernel_of

SCAN_LIMIT_PAIRS = 2**33
"""A scan kernel needs one byte a pair; past 8 GiB of mask it is not offered."""


def families_for(operation: str, arch: Arch, *, purpose: str = "main") -> list[Family]:
    """The families that compute `operation` with instructions `arch` has, most preferred first."""
    return [
        family
        for family in all_families().values()
        if family.operation == operation and family.instructions in arch.instructions and family.purpose == purpose
    ]


def _scan_reason(problem: Problem) -> str | None:
    if not problem.mask.terms:
        return "mask form scan reads a mask, and this problem has none: use analytic"
    heads = problem.num_heads if problem.mask.per_head else 1
    pairs = problem.seqlen_q * problem.seqlen_kv * heads * (problem.batch if problem.mask.per_batch else 1)
    if pairs > SCAN_LIMIT_PAIRS:
        return f"mask form scan would read a mask of {pairs} bytes; at most {SCAN_LIMIT_PAIRS} are allowed"
    return None


_CALL = re.compile(r"([a-z_]+)\((\d+)\)")


def problem_names(problem: Problem) -> dict[str, int]:
    """What rules for problems may use beside a kernel's names: sizes, the mask's calls of one number, such as
    `block_size(64)`, and whether `causal()` is one of its calls.
    """
    sizes = ("batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_kv")
    numbers = {name: int(number) for name, number in _CALL.findall(problem.mask.structure)}
    causal = int("causal()" in problem.mask.structure)
    return {**{name: getattr(problem, name) for name in sizes}, "causal": causal, **numbers}


def unable_reason(problem: Problem, spec: VariantSpec) -> str | None:
    """Why `spec` cannot run `problem`; None when it can. Adds to `legality` what depends on lengths."""
    reason = _scan_reason(problem) if spec.mask_form == "scan" else None
    reason = reason or legality(kernel_of(problem, spec))
    return reason or _broken(family_named(spec.family).problem_rules, problem, spec)


def problem_reason(problem: Problem, spec: VariantSpec) -> str | None:
    """Why `spec` may not run `problem`, because it cannot or because that never pays; None when it may."""
    return unable_reason(problem, spec) or _broken(family_named(spec.family).worth_rules, problem, spec)


def _broken(rules: Sequence[tuple[str, str]], problem: Problem, spec: VariantSpec) -> str | None:
    """The reason of the first of a family's rules for problems that does not hold."""
    if not rules:
        return None
    names = {**derived_values(kernel_of(problem, spec)), **problem_names(problem)}
    return next((text.format(**names) for require, text in rules if not evaluate(require, names)), None)


def complexity(kernel: Kernel) -> float:
    """How complicated `kernel` is; of two that run equally fast the simpler one wins."""
    return float(evaluate(family_named(kernel.spec.family).complexity, derived_values(kernel)))


@dataclass(slots=True)
class _Step:
    """An axis, and what can be evaluated as soon as it and those before it have values: a broken rule then rules out
    every point that they begin.
    """

    axis: str
    values: tuple[AxisValue, ...]
    derived: list[tuple[str, str]] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)


def _steps(family: Family, arch: Arch, axes: Mapping[str, tuple[AxisValue, ...]], given: Iterable[str]) -> list[_Step]:
    """A step an axis, in the order of `axes`."""
    steps = [_Step(axis, values) for axis, values in axes.items()]
    known_from = dict.fromkeys(given, 0) | {step.axis: number for number, step in enumerate(steps)}

    def first_step(expression: str) -> int:
        # An unknown name waits for the last step, where evaluating it is the error that it should be.
        return max((known_from.get(name, len(steps) - 1) for name in names_in(expression)), default=0)

    for name, expression in family.derived.items():
        known_from[name] = first_step(expression)
        steps[known_from[name]].derived.append((name, expression))
    for require, _ in rules_of(family, arch):
        steps[first_step(require)].rules.append(require)
    return steps


def _extended(steps: Sequence[_Step], names: dict[str, Any]) -> Iterator[None]:
    """Yield once for each way to give every step's axis a value without breaking a rule; `names` then holds it."""
    if not steps:
        yield
        return
    step, rest = steps[0], steps[1:]
    for value in step.values:
        names[step.axis] = value
        for name, expression in step.derived:
            names[name] = evaluate(expression, names)
        if all(evaluate(require, names) for require in step.rules):
            yield from _extended(rest, names)


def forms_for(problem: Problem, family: Family) -> tuple[str, ...]:
    """The family's mask forms that make sense for the problem's mask and lengths."""
    return tuple(
        form
        for form in family.mask_forms
        if not (_scan_reason(problem) if form == "scan" else mask_form_reason(form, problem.mask.terms))
    )


def legal_values(
    family: Family, target: str, dtype: str, head_dim: int, forms: Sequence[str]
) -> Iterator[Mapping[str, Any]]:
    """The axes and derived values of each point that breaks no rule, without trying every point there is.

    It is one mapping, which changes from point to point.
    """
    arch = arch_named(target)
    names = given_values(dtype, head_dim, arch)
    # The mask form comes last, so that what does not mention it is evaluated once for all of them.
    axes: dict[str, tuple[AxisValue, ...]] = {**family.axes, "mask_form": tuple(forms)}
    for _ in _extended(_steps(family, arch, axes, names), names):
        yield names


def _legal_with_cost(problem: Problem, family: Family) -> Iterator[tuple[float, VariantSpec]]:
    """What `problem_reason` has nothing against."""
    if family_reason(family, problem.operation, problem.dtype, arch_named(problem.target)):
        return
    forms = forms_for(problem, family)
    sizes, rules = problem_names(problem), family.problem_rules + family.worth_rules
    for names in legal_values(family, problem.target, problem.dtype, problem.head_dim, forms):
        if not all(evaluate(require, {**names, **sizes}) for require, _ in rules):
            continue
        spec = VariantSpec.from_values(family.name, {axis: names[axis] for axis in (*family.axes, "mask_form")})
        yield float(evaluate(family.cost, names)), spec


def legal_variants(problem: Problem, families: Iterable[Family] | None = None) -> list[VariantSpec]:
    """Every legal variant of `problem`, cheapest-looking first; of the main families unless others are given."""
    chosen = families_for(problem.operation, arch_named(problem.target)) if families is None else families
    legal = [found for family in chosen for found in _legal_with_cost(problem, family)]
    return [spec for _, spec in sorted(legal, key=lambda found: (found[0], found[1].name))]


def family_default(problem: Problem, family: Family) -> VariantSpec | None:
    """The first legal entry of the family's `defaults`, in the most preferred mask form that has one; else None."""
    return next((spec for form in family.mask_forms for spec in form_defaults(problem, family, form)), None)


def form_defaults(problem: Problem, family: Family, form: str) -> Iterator[VariantSpec]:
    """The legal entries of the family's `defaults` for one mask form, in their order."""
    for values in family.defaults:
        if values.get("mask_form", form) == form:
            spec = VariantSpec.from_values(family.name, {**values, "mask_form": form})
            if problem_reason(problem, spec) is None:
                yield spec


def default_variant(problem: Problem) -> VariantSpec:
    """What runs `problem` when nothing was tuned: the most preferred proven family's default that is legal.

    Raises `IllegalVariant` when no family has one; the message carries each family's reason.
    """
    families = [family for family in families_for(problem.operation, arch_named(problem.target)) if family.proven]
    for family in families:
        spec = family_default(problem, family)
        if spec is not None:
            return spec
    reasons = []
    for family in families:
        spec = VariantSpec.from_values(family.name, {"mask_form": family.mask_forms[0], **family.defaults[0]})
        reasons.append(f"{family.name}: {problem_reason(problem, spec)}")
    raise IllegalVariant(
        f"no kernel family can run {problem.name}: {'; '.join(reasons) or 'no family for this target'}"
    )
