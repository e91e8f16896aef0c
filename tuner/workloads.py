"""Workloads: named rows of attention calls to tune and to time, read from TOML files."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import DTYPES, Problem, check_head_dim
from tilewright.runtime.canonical import mask_class
from tilewright.runtime.masks import Mask
from tilewright.tuner.mask_text import MaskShape, parse_mask

TARGET_KINDS = ("cpu", "cuda")

AXES = ("length", "density")
"""What the rows of a workload may be a series along: seqlen_q, or the fraction of pairs that are active."""


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """One attention call: sizes in tokens and elements, the mask as text (see `mask_text.parse_mask`).

    num_kv_heads, seqlen_kv: 0 stands for num_heads, seqlen_q, and is replaced by them.
    targets: the kinds of device the row is meant for. beside: an earlier row whose time this one's is divided by, in a
    benchmark; empty for none.
    Raises `InvalidInput` that names the field, what it got and what is allowed.
    """

    name: str
    dtype: str
    head_dim: int
    num_heads: int
    seqlen_q: int
    batch: int = 1
    num_kv_heads: int = 0
    seqlen_kv: int = 0
    mask: str = "full()"
    seed: int = 0
    targets: tuple[str, ...] = TARGET_KINDS
    beside: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "seqlen_kv", self.seqlen_kv or self.seqlen_q)
        if self.dtype not in DTYPES:
            raise InvalidInput(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        check_head_dim(self.head_dim)
        for name in ("batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_kv"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise InvalidInput(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        unknown = [t for t in self.targets if t not in TARGET_KINDS]
        if unknown or not self.targets:
            raise InvalidInput(f"targets must be among {', '.join(TARGET_KINDS)}; got {', '.join(unknown) or 'none'}")

    def runs_on(self, target: str) -> bool:
        """Whether the row is meant for this architecture name or device kind."""
        return ("cpu" if target == "cpu" else "cuda") in self.targets

    def make_mask(self) -> Mask | None:
        """The row's mask, tensors on the CPU, the same on every machine; None where nothing is masked."""
        mask = parse_mask(self.mask, MaskShape(self.batch, self.num_heads, self.seqlen_q, self.seqlen_kv, self.seed))
        if mask is not None:
            mask.check(self.batch, self.num_heads, self.seqlen_q, self.seqlen_kv, torch.device("cpu"))
        return mask

    def problem(self, target: str) -> Problem:
        """The problem this row is on an architecture; the key its winner is stored under."""
        made = self.make_mask()
        kind = mask_class(made, self.batch, self.num_heads, self.seqlen_q, self.seqlen_kv)
        if target != "cpu" and made is not None and made.tensors:
            # A call on CUDA does not wait for the device to count pairs, so its key has no density either.
            kind = dataclasses.replace(kind, density=None)
        return Problem(
            dtype=self.dtype,
            head_dim=self.head_dim,
            batch=self.batch,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            seqlen_q=self.seqlen_q,
            seqlen_kv=self.seqlen_kv,
            target=target,
            mask=kind,
        )

    def make_inputs(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Mask | None]:
        """Query, key, value (standard normal, `[batch, heads, tokens, head_dim]`) and the mask, on `device`."""
        where = torch.device(device)
        generator = torch.Generator(where).manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)

        def normal(heads: int, tokens: int) -> torch.Tensor:
            size = (self.batch, heads, tokens, self.head_dim)
            return torch.randn(size, generator=generator, dtype=dtype, device=where)

        query = normal(self.num_heads, self.seqlen_q)
        key, value = normal(self.num_kv_heads, self.seqlen_kv), normal(self.num_kv_heads, self.seqlen_kv)
        made = self.make_mask()
        return query, key, value, None if made is None else made.to(where)


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of rows; `along` is one of `AXES` where they are a series, else empty."""

    name: str
    description: str
    rows: tuple[WorkloadRow, ...]
    along: str = ""

    def rows_for(self, target: str) -> tuple[WorkloadRow, ...]:
        """The rows meant for an architecture name or device kind; raises `InvalidInput` where there are none."""
        rows = tuple(row for row in self.rows if row.runs_on(target))
        if not rows:
            raise InvalidInput(f"workload {self.name} has no row for target {target}; give its rows targets = [...]")
        return rows


def shipped_workloads() -> tuple[str, ...]:
    """Names of the workloads that come with tilewright, sorted."""
    folder = resources.files("tilewright.tuner") / "workloads"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_workload(name_or_path: str) -> Workload:
    """A shipped workload by name, or a TOML file of one's own by path.

    Raises `InvalidInput` naming file, row and key: what was got, what is allowed.
    """
    shipped = shipped_workloads()
    if name_or_path in shipped:
        text = (resources.files("tilewright.tuner") / "workloads" / f"{name_or_path}.toml").read_text("utf-8")
        return parse_workload(text, f"{name_or_path}.toml")
    path = Path(name_or_path)
    if path.suffix != ".toml":
        raise InvalidInput(f"workload must be one of {', '.join(shipped)}, or a .toml file; got {name_or_path!r}")
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InvalidInput(f"workload file {path} cannot be read: {reason}") from error
    return parse_workload(text, str(path))


def parse_workload(text: str, source: str) -> Workload:
    """The workload that this TOML text describes; `source` is the file name that errors give."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{source}: not TOML: {error}") from error
    _known_keys(document, ("description", "along", "row"), source)
    description = document.get("description", "")
    if not isinstance(description, str):
        raise InvalidInput(f"{source}: description must be text; got {description!r}")
    along = document.get("along", "")
    if along not in ("", *AXES):
        raise InvalidInput(f"{source}: along must be {' or '.join(AXES)}; got {along!r}")
    tables = document.get("row", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise InvalidInput(f"{source}: a workload is a list of [[row]] tables; got none")
    rows = tuple(_row(table, f"{source}: row {index}") for index, table in enumerate(tables, 1))
    names = [row.name for row in rows]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InvalidInput(f"{source}: row names must differ; got {', '.join(repeated)} more than once")
    for index, row in enumerate(rows):
        if row.beside and row.beside not in names[:index]:
            where = f"{source}: row {index + 1} ({row.name})"
            allowed = "; ".join(names[:index]) or "there is none"
            raise InvalidInput(f"{where}: beside must name an earlier row ({allowed}); got {row.beside!r}")
    return Workload(Path(source).stem, description, rows, along)


_FIELDS = {field.name: field for field in dataclasses.fields(WorkloadRow)}
_TEXTS, _LISTS = ("name", "dtype", "mask", "beside"), ("targets",)


def _row(table: dict[str, Any], where: str) -> WorkloadRow:
    if isinstance(table.get("name"), str):
        where = f"{where} ({table['name']})"
    _known_keys(table, tuple(_FIELDS), where)
    for key, value in table.items():
        if key in _TEXTS:
            fits, allowed = isinstance(value, str) and value.strip() != "", "text"
        elif key in _LISTS:
            fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
            allowed = f"a list of {', '.join(TARGET_KINDS)}"
        else:
            least = 0 if key == "seed" else 1
            fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
            allowed = f"an integer of {least} or more"
        if not fits:
            raise InvalidInput(f"{where}: {key} must be {allowed}; got {value!r}")
    missing = [n for n, f in _FIELDS.items() if f.default is dataclasses.MISSING and n not in table]
    if missing:
        raise InvalidInput(f"{where}: {', '.join(missing)} missing; every row needs them")
    try:
        fields: dict[str, Any] = {key: tuple(value) if key in _LISTS else value for key, value in table.items()}
        row = WorkloadRow(**fields)
        row.make_mask()
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from error
    return row


def _known_keys(table: dict[str, Any], allowed: tuple[str, ...], where: str) -> None:
    unknown = [key for key in table if key not in allowed]
    if unknown:
        raise InvalidInput(f"{where}: unknown key {', '.join(unknown)}; allowed: {', '.join(allowed)}")
