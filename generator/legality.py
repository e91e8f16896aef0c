"""What may exist: one pure function that answers with a reason."""

from __future__ import annotations

from typing import Any

from tilewright.generator.abi import WITH_WORKSPACE
from tilewright.generator.arch import Arch, arch_named
from tilewright.generator.errors import InvalidInput
from tilewright.generator.expression import evaluate
from tilewright.generator.family import Family, family_named
from tilewright.generator.problem import DTYPES, check_head_dim
from tilewright.generator.variant import Kernel, VariantSpec

ANALYTIC_TERMS = frozenset({"bound", "document", "window", "stride"})
GATHER_TERMS = ANALYTIC_TERMS | {"tokens"}


GPU_LIMITS = (
    ("threads <= max_threads_per_block", "{threads} threads a block; {arch} allows {max_threads_per_block}"),
    (
        "smem_bytes <= smem_limit_bytes",
        "{smem_bytes} bytes of shared memory a block; {arch} allows {smem_limit_bytes}",
    ),
    (
        "registers <= max_registers_per_thread",
        "about {registers} registers a thread; {arch} allows {max_registers_per_thread}",
    ),
    (
        "registers * threads <= registers_per_block",
        "about {registers} registers for each of {threads} threads; {arch} has {registers_per_block} a block",
    ),
)
"""What every GPU family's derived values must keep to, written like the families' own rules."""


def rules_of(family: Family, arch: Arch) -> tuple[tuple[str, str], ...]:
    """(expression that must hold, reason when it does not): the family's own, then what `arch` allows a block."""
    return family.rules if arch.is_cpu else family.rules + GPU_LIMITS


def given_values(dtype: str, head_dim: int, arch: Arch) -> dict[str, Any]:
    """The names that a family's expressions may use whatever the variant: the kernel's and the architecture's."""
    return {
        "dtype": dtype,
        "dtype_bytes": DTYPES[dtype],
        "head_dim": head_dim,
        "cp_async": arch.cp_async,
        "smem_limit_bytes": arch.smem_limit_bytes,
        "max_registers_per_thread": arch.max_registers_per_thread,
        "registers_per_block": arch.registers_per_block,
        "max_threads_per_block": arch.max_threads_per_block,
        "capability": 10 * arch.compute_capability[0] + arch.compute_capability[1] if arch.compute_capability else 0,
    }


def derived_values(kernel: Kernel) -> dict[str, Any]:
    """Every name that a family's expressions may use: the axes, the kernel's and the architecture's own values, and the
    family's derived ones, each of which may use those before it.

    A GPU family derives `threads` (a block), `smem_bytes` (a block) and `registers` (a thread, an estimate).
    """
    names = {**kernel.spec.values(), **given_values(kernel.dtype, kernel.head_dim, arch_named(kernel.arch))}
    for name, expression in family_named(kernel.spec.family).derived.items():
        names[name] = evaluate(expression, names)
    return names


def has_workspace(kernel: Kernel) -> bool:
    """Whether a kernel's launches take scratch: its operation's do, or its family's of such variants."""
    if kernel.operation in WITH_WORKSPACE:
        return True
    asks = family_named(kernel.spec.family).workspace
    return asks if isinstance(asks, bool) else bool(evaluate(asks, derived_values(kernel)))


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
    if form == "selected" and not present <= {"bound"}:
        return (
            f"mask form selected has chosen blocks and may be causal; it cannot evaluate {', '.join(sorted(present))}"
        )
    if form in ("list", "bitmap") and not present:
        return f"mask form {form} lists active tiles, and without a mask all are: use analytic"
    return None


def family_reason(family: Family, operation: str, dtype: str, arch: Arch) -> str | None:
    """Why none of the family's variants computes `operation` on `dtype` there; None when some may."""
    if operation != family.operation:
        return f"family {family.name} computes {family.operation}, not {operation}"
    if family.instructions not in arch.instructions:
        return f"{arch.name} has no {family.instructions} instructions (it has {', '.join(arch.instructions)})"
    if dtype not in family.dtypes or dtype not in arch.dtypes:
        return f"family {family.name} on {arch.name} does not take {dtype} (it takes {', '.join(family.dtypes)})"
    return None


def _axes_reason(spec: VariantSpec, family: Family) -> str | None:
    if spec.mask_form not in family.mask_forms:
        return f"family {family.name} has no mask form {spec.mask_form} (it has {', '.join(family.mask_forms)})"
    values = spec.values()
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
    reason = family_reason(family, kernel.operation, kernel.dtype, arch) or _axes_reason(kernel.spec, family)
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
    for require, text in rules_of(family, arch):
        if not evaluate(require, names):
            return text.format(**names, arch=arch.name)
    return None
