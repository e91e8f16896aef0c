"""The legal variants of a problem, its default variant, and their order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from tilewright.generator.arch import Arch, arch_named
from tilewright.generator.errors import IllegalVariant
from tilewright.generator.expression import evaluate
from tilewright.generator.family import Family, all_families, family_named
from tilewright.generator.legality import derived_values, legality
from tilewright.generator.problem import Problem
from tilewright.generator.variant import Kernel, VariantSpec, kernel_of

SCAN_LIMIT_PAIRS = 2**33
"""A scan kernel needs one byte a pair; past 8 GiB of mask it is not offered."""


def families_for(operation: str, arch: Arch, *, purpose: str = "main") -> list[Family]:
    """The families that compute `operation` with instructions `arch` has, most preferred first."""
    return [
        family
        for family in all_families().values()
        if family.operation == operation and family.instructions in arch.instructions and family.purpose == purpose
    ]


def problem_reason(problem: Problem, spec: VariantSpec) -> str | None:
    """Why `spec` may not run `problem`; None when it may. Adds to `legality` what depends on lengths."""
    if spec.mask_form == "scan":
        if not problem.mask.terms:
            return "mask form scan reads a mask, and this problem has none: use analytic"
        heads = problem.num_heads if problem.mask.per_head else 1
        pairs = problem.seqlen_q * problem.seqlen_kv * heads * (problem.batch if problem.mask.per_batch else 1)
        if pairs > SCAN_LIMIT_PAIRS:
            return f"mask form scan would read a mask of {pairs} bytes; at most {SCAN_LIMIT_PAIRS} are allowed"
    return legality(kernel_of(problem, spec))


def _points(family: Family) -> Iterator[VariantSpec]:
    names = list(family.axes)
    for form in family.mask_forms:
        for values in itertools.product(*family.axes.values()):
            yield VariantSpec.from_values(family.name, {"mask_form": form, **dict(zip(names, values, strict=True))})


def cost(kernel: Kernel) -> float:
    """How expensive `kernel` looks before it is measured; only the order means anything."""
    return float(evaluate(family_named(kernel.spec.family).cost, derived_values(kernel)))


def complexity(kernel: Kernel) -> float:
    """How complicated `kernel` is; of two that run equally fast the simpler one wins."""
    return float(evaluate(family_named(kernel.spec.family).complexity, derived_values(kernel)))


def legal_variants(problem: Problem, families: Iterable[Family] | None = None) -> list[VariantSpec]:
    """Every legal variant of `problem`, cheapest-looking first; of the main families unless others are given."""
    chosen = families_for(problem.operation, arch_named(problem.target)) if families is None else families
    legal = [spec for family in chosen for spec in _points(family) if problem_reason(problem, spec) is None]
    return sorted(legal, key=lambda spec: (cost(kernel_of(problem, spec)), spec.name))


def family_default(problem: Problem, family: Family) -> VariantSpec | None:
    """The first legal entry of the family's `defaults`, in its preferred mask form; None when none is legal."""
    for values in family.defaults:
        for form in family.mask_forms:
            spec = VariantSpec.from_values(family.name, {"mask_form": form, **values})
            if problem_reason(problem, spec) is None:
                return spec
    return None


def default_variant(problem: Problem) -> VariantSpec:
    """What runs `problem` when nothing was tuned: the most preferred family's default that is legal.

    Raises `IllegalVariant` when no family has one; the message carries each family's reason.
    """
    families = families_for(problem.operation, arch_named(problem.target))
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
