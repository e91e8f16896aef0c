"""`Problem`: what the caller asks for, before anything is said about how it runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from tilewright.generator.errors import InvalidInput

DTYPES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Element types and their sizes in bytes."""

MASK_TERMS: tuple[str, ...] = (
    "bound",
    "document",
    "window",
    "stride",
    "tokens",
    "or_blocks",
    "and_blocks",
    "and_bits",
)
"""The parts a canonical mask is made of. A (query, key) pair is active when

    bound & document & (window | stride | tokens | or_blocks) & and_blocks & and_bits

where a term that is absent does not restrict, and the bracket is absent when all four of its terms are.
"""

MASK_FORMS: tuple[str, ...] = ("analytic", "gather", "list", "bitmap", "scan", "selected")
"""How a kernel learns which tiles to visit; selected: from a list of blocks for each query."""

HEAD_DIM_MULTIPLE = 16
HEAD_DIM_MAX = 256


def digest_of(value: Any) -> str:
    """16 hex digits that name `value` (anything JSON can hold), the same on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class MaskClass:
    """What kind of mask a problem has, as far as the choice of a kernel depends on it.

    terms: the canonical terms present, in the order of `MASK_TERMS`.
    structure: the canonical mask in words, data left out: `sliding_window(32, 32) | global_stride(512)`.
    per_head, per_batch: whether the mask differs between heads, between batch entries.
    density: active pairs over all pairs, or None where reading it would have needed a host sync.
    """

    terms: tuple[str, ...] = ()
    structure: str = "dense"
    per_head: bool = False
    per_batch: bool = False
    density: float | None = 1.0

    def __post_init__(self) -> None:
        unknown = [t for t in self.terms if t not in MASK_TERMS]
        if unknown:
            raise InvalidInput(f"mask terms must be among {', '.join(MASK_TERMS)}; got {', '.join(unknown)}")
        object.__setattr__(self, "terms", tuple(t for t in MASK_TERMS if t in self.terms))


@dataclass(frozen=True, slots=True)
class Problem:
    """One call's shape: the key under which winners are stored and looked up.

    Lengths are in tokens, `head_dim` in elements; `target` is an architecture name (`cpu`, `sm_90a`, ...).
    Raises `InvalidInput` when a field cannot be: the message names the field, the value and what is allowed.
    """

    dtype: str
    head_dim: int
    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_kv: int
    target: str
    mask: MaskClass = field(default_factory=MaskClass)
    operation: str = "attention_forward"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidInput(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype}")
        check_head_dim(self.head_dim)
        for name in ("batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_kv"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise InvalidInput(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )

    @property
    def dtype_bytes(self) -> int:
        return DTYPES[self.dtype]

    @property
    def name(self) -> str:
        """A short readable name, for tables: `bf16 B1 H16/4 D64 N4096x8192 causal() sm_90a`.

        It begins with the operation where that is not attention_forward.
        """
        short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[self.dtype]
        heads = f"H{self.num_heads}" + ("" if self.num_heads == self.num_kv_heads else f"/{self.num_kv_heads}")
        lengths = f"N{self.seqlen_q}" + ("" if self.seqlen_q == self.seqlen_kv else f"x{self.seqlen_kv}")
        name = f"{short} B{self.batch} {heads} D{self.head_dim} {lengths} {self.mask.structure} {self.target}"
        return name if self.operation == "attention_forward" else f"{self.operation} {name}"

    def to_dict(self) -> dict[str, Any]:
        """Every field as JSON-ready values; `from_dict` takes it back."""
        values = dataclasses.asdict(self)
        values["mask"]["terms"] = list(self.mask.terms)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Problem:
        try:
            mask = dict(values["mask"])
            mask["terms"] = tuple(mask["terms"])
            return cls(**{**values, "mask": MaskClass(**mask)})
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"not a problem record: {error}") from error

    @property
    def digest(self) -> str:
        """The key of this problem in the store, computed from every field."""
        return digest_of(self.to_dict())


def check_head_dim(head_dim: int) -> None:
    """Raise `InvalidInput` unless kernels exist for this head dimension."""
    if not (0 < head_dim <= HEAD_DIM_MAX and head_dim % HEAD_DIM_MULTIPLE == 0):
        raise InvalidInput(
            f"head_dim must be a multiple of {HEAD_DIM_MULTIPLE} up to {HEAD_DIM_MAX}, got {head_dim}"
            "; pad the last dimension with zeros and pass scale=head_dim**-0.5 for the unpadded head_dim"
        )
