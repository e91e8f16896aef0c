"""What may exist: one pure function that answers with a reason."""

from __future__ import annotations

from typing import Any

from tilewright.generator.arch import arch_named
from tilewright.generator.errors import InvalidInput
from tilewright.generator.expression import evaluate
from tilewright.generator.family import Family, family_named
from tilewright.generator.problem import DTYPES, check_head_dim
from tilewright.generator.variant import Kernel

ANALYTIC_TERMS = frozenset({"bound", "document", "window", "stride"})
GATHER_TERMS = ANALYTIC_TERMS | {"tokens"}


def derived_values(kernel: Kernel) -> dict[str, Any]:
    """Every name that a family's expressions may use: the axes, the kernel's and the architecture's own values, and the
    family's derived ones, each of which may use those before it.

    A GPU family derives `threads` (a block), `smem_bytes` (a block) and `registers` (a thread, an estimate).
    """
    family = family_named(kernel.spec.family)
    arch = arch_named(kernel.arch)
    names: dict[str, Any] = {
        **kernel.spec.values(),
        "dtype": kernel.dtype,
        "dtype_bytes": DTYPES[kernel.dtype],
        "head_dim": kernel.head_dim,
        "cp_async": arch.cp_async,
        "smem_limit_bytes": arch.smem_limit_bytes,
        "max_registers_per_thread": arch.max_registers_per_thread,
        "capability": 10 * arch.compute_capability[0] + arch.compute_capability[1] if arch.compute_capability else 0,
    }
    for name, expression in family.derived.items():
        names[name] = evaluate(expression, names)
    return names


def mask_form_reason(form: str, terms: tuple[str, ...]) -> str | None:
    """Why this mask form makes no sense for these mask terms; None when it does."""
    present = frozenset(terms)
    if form == "analytic" and not present <= ANALYTIC_TERMS:
        return f"mask form analytic has no closed form for {', '.join(sorted(present - ANALYTIC_TERMS))}"
    if form == "gather":
        if not present & {"stride", "tokens"}:
            return "mask form gather needs scattered keys (stride or tokens)"
        if not present <= GATHER_TERMS:
            return f"mask form gather cannot evaluate {', '.join(sorted(present - GATHER_TERMS))}"
    if form in ("list", "bitmap") and not present:
        return f"mask form {form} lists active tiles, and without a mask all are: use analytic"
    return None


def _family_reason(kernel: Kernel, family: Family) -> str | None:
    arch = arch_named(kernel.arch)
    if kernel.operation != family.operation:
        return f"family {family.name} computes {family.operation}, not {kernel.operation}"
    if family.instructions not in arch.instructions:
        return f"{arch.name} has no {family.instructions} instructions (it has {', '.join(arch.instructions)})"
    if kernel.dtype not in family.dtypes or kernel.dtype not in arch.dtypes:
        return f"family {family.name} on {arch.name} does not take {kernel.dtype} (it takes {', '.join(family.dtypes)})"
    if kernel.spec.mask_form not in family.mask_forms:
        return f"family {family.name} has no mask form {kernel.spec.mask_form} (it has {', '.join(family.mask_forms)})"
    values = kernel.spec.values()
    axes = {name for name in values if name != "mask_form"}
    if axes != set(family.axes):
        return f"family {family.name} has the axes {', '.join(family.axes)}; got {', '.join(sorted(axes))}"
    for axis, allowed in family.axes.items():
        if values[axis] not in allowed:
            return f"{axis} must be one of {', '.join(map(str, allowed))}; got {values[axis]}"
    return None


def legality(kernel: Kernel) -> str | None:
    """None when `kernel` may exist, else the one-line reason why not. Pure: it needs no device."""
    family = family_named(kernel.spec.family)
    arch = arch_named(kernel.arch)
    reason = _family_reason(kernel, family)
    if reason:
        return reason
    try:
        check_head_dim(kernel.head_dim)
    except InvalidInput as error:
        return str(error)
    # A scan kernel carries no terms: whether there is a mask to scan is the problem's matter, see space.py.
    if kernel.spec.mask_form != "scan":
        reason = mask_form_reason(kernel.spec.mask_form, kernel.mask_terms)
        if reason:
            return reason
    names = derived_values(kernel)
    for require, text in family.rules:
        if not evaluate(require, names):
            return text.format(**names)
    if arch.is_cpu:
        return None
    if names["threads"] > arch.max_threads_per_block:
        return f"{names['threads']} threads a block; {arch.name} allows {arch.max_threads_per_block}"
    if names["smem_bytes"] > arch.smem_limit_bytes:
        return f"{names['smem_bytes']} bytes of shared memory a block; {arch.name} allows {arch.smem_limit_bytes}"
    if names["registers"] > arch.max_registers_per_thread:
        return f"about {names['registers']} registers a thread; {arch.name} allows {arch.max_registers_per_thread}"
    if names["registers"] * names["threads"] > arch.registers_per_block:
        return (
            f"about {names['registers']} registers for each of {names['threads']} threads; "
            f"{arch.name} has {arch.registers_per_block} a block"
        )
    return None
