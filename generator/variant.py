"""`VariantSpec`: how a problem is run; `Kernel`: the part of both that is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import MASK_FORMS, Problem, digest_of

AxisValue = int | bool | str

SHARED_AXES = ("mask_form", "block_m", "block_n")
"""The axes every family has, because masks are planned for them."""


@dataclass(frozen=True, slots=True)
class VariantSpec:
    """One point of a family's search space.

    family: the folder under `templates/`.
    mask_form: one of `MASK_FORMS`.
    block_m, block_n: the compute tile in query rows and KV rows (Br and Bc in the FlashAttention papers).
    axes: the family's other axes as (name, value), sorted by name.
    """

    family: str
    mask_form: str
    block_m: int
    block_n: int
    axes: tuple[tuple[str, AxisValue], ...] = ()

    def __post_init__(self) -> None:
        if self.mask_form not in MASK_FORMS:
            raise InvalidInput(f"mask_form must be one of {', '.join(MASK_FORMS)}; got {self.mask_form}")
        object.__setattr__(self, "axes", tuple(sorted((str(n), v) for n, v in self.axes)))

    @classmethod
    def from_values(cls, family: str, values: Mapping[str, AxisValue]) -> VariantSpec:
        """The spec of `family` with these axis values, shared axes among them."""
        missing = [a for a in SHARED_AXES if a not in values]
        if missing:
            raise InvalidInput(
                f"a variant of {family} needs {', '.join(missing)}; got {', '.join(values) or 'nothing'}"
            )
        rest = tuple((n, v) for n, v in values.items() if n not in SHARED_AXES)
        return cls(family, str(values["mask_form"]), int(values["block_m"]), int(values["block_n"]), rest)

    def values(self) -> dict[str, AxisValue]:
        """Every axis by name, the shared ones first."""
        return {"mask_form": self.mask_form, "block_m": self.block_m, "block_n": self.block_n, **dict(self.axes)}

    @property
    def name(self) -> str:
        """`forward_simt/gather 64x64 num_stages=2 num_warps=4`: short, readable, unique."""
        rest = " ".join(f"{n}={v}" for n, v in self.axes)
        return f"{self.family}/{self.mask_form} {self.block_m}x{self.block_n} {rest}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        return {"family": self.family, **self.values()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> VariantSpec:
        if "family" not in values:
            raise InvalidInput("not a variant record: family is missing")
        return cls.from_values(str(values["family"]), {n: v for n, v in values.items() if n != "family"})

    @property
    def digest(self) -> str:
        """The key of this variant in the store, computed from every field."""
        return digest_of(self.to_dict())


@dataclass(frozen=True, slots=True)
class Kernel:
    """What one compiled artifact is made from; lengths, strides and pointers are its run-time arguments."""

    operation: str
    dtype: str
    head_dim: int
    mask_terms: tuple[str, ...]
    spec: VariantSpec
    arch: str

    def to_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**values, "mask_terms": list(self.mask_terms), "spec": self.spec.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Kernel:
        try:
            return cls(
                **{**values, "mask_terms": tuple(values["mask_terms"]), "spec": VariantSpec.from_dict(values["spec"])}
            )
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"not a kernel record: {error}") from error


def kernel_of(problem: Problem, spec: VariantSpec) -> Kernel:
    """The kernel that runs `problem` as `spec` says.

    A `scan` kernel reads the whole mask from memory, so none of the mask's terms is compiled into it.
    """
    terms = () if spec.mask_form == "scan" else problem.mask.terms
    return Kernel(problem.operation, problem.dtype, problem.head_dim, terms, spec, problem.target)
