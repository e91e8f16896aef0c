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
from tilewright.runtime.masks import Mask
from tilewright.tuner.mask_text import MaskShape, parse_mask
from tilewright.tuner.operations import Operation, all_operations, operation_named

TARGET_KINDS = ("cpu", "cuda")

AXES = ("length", "density")
"""What the rows of a workload may be a series along: seqlen_q, or the fraction of pairs that are active."""


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """One call of an operation, attention_forward unless it says so: sizes in tokens and elements.

    num_kv_heads, seqlen_kv: 0 stands for num_heads, seqlen_q, and is replaced by them.
    targets: the kinds of device the row is meant for. beside: an earlier row whose time this one's is divided by, in a
    benchmark; empty for none. mask: as text (see `mask_text.parse_mask`). block_size to window_blocks: as the arguments
    of `tilewright.select_blocks`, query_group for `select`, 1 where each query chooses; top_k: blocks, of each chooser
    where it is a tuple.
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
    operation: str = "attention_forward"
    block_size: int = 64
    top_k: int | tuple[int, ...] = 16
    causal: bool = False
    query_group: int = 1
    select_heads: str = "query"
    sink_blocks: int = 0
    window_blocks: int = 0

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
        own = self.asked_of.row_keys
        for name in {key for operation in all_operations() for key in operation.row_keys - own}:
            if getattr(self, name) != _FIELDS[name].default:
                takers = [operation.name for operation in all_operations() if name in operation.row_keys]
                raise InvalidInput(f"{name} is for rows of {' and '.join(takers)}; this one is of {self.operation}")

    @property
    def asked_of(self) -> Operation:
        """The operation that the row is a call of."""
        return operation_named(self.operation)

    def runs_on(self, target: str) -> bool:
        """Whether the row is meant for this architecture name or device kind."""
        return ("cpu" if target == "cpu" else "cuda") in self.targets

    def make_mask(self) -> Mask | None:
        """The row's mask, tensors on the CPU, the same on every machine; None where nothing is masked.

        Raises `InvalidInput` for a row that chooses blocks instead.
        """
        if "mask" not in self.asked_of.row_keys:
            raise InvalidInput(f"row {self.name} is of {self.operation}, which has no mask")
        mask = parse_mask(self.mask, MaskShape(self.batch, self.num_heads, self.seqlen_q, self.seqlen_kv, self.seed))
        if mask is not None:
            mask.check(self.batch, self.num_heads, self.seqlen_q, self.seqlen_kv, torch.device("cpu"))
        return mask

    def problem(self, target: str) -> Problem:
        """The problem this row is on an architecture; the key its winner is stored under."""
        return self.asked_of.problem(self, target)

    def make_tensors(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key, value: standard normal, `[batch, heads, tokens, head_dim]`, on `device`."""
        where = torch.device(device)
        generator = torch.Generator(where).manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)

        def normal(heads: int, tokens: int) -> torch.Tensor:
            size = (self.batch, heads, tokens, self.head_dim)
            return torch.randn(size, generator=generator, dtype=dtype, device=where)

        query = normal(self.num_heads, self.seqlen_q)
        return query, normal(self.num_kv_heads, self.seqlen_kv), normal(self.num_kv_heads, self.seqlen_kv)

    def make_inputs(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Mask | None]:
        """`make_tensors` and the mask, on `device`."""
        query, key, value = self.make_tensors(device)
        made = self.make_mask()
        return query, key, value, None if made is None else made.to(query.device)


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
_TEXTS = ("name", "dtype", "mask", "beside", "operation", "select_heads")
_FROM_NOTHING = ("seed", "sink_blocks", "window_blocks")


def _row(table: dict[str, Any], where: str) -> WorkloadRow:
    if isinstance(table.get("name"), str):
        where = f"{where} ({table['name']})"
    _known_keys(table, tuple(_FIELDS), where)
    for key, value in table.items():
        fits, allowed = _fits(key, value)
        if not fits:
            raise InvalidInput(f"{where}: {key} must be {allowed}; got {value!r}")
    missing = [n for n, f in _FIELDS.items() if f.default is dataclasses.MISSING and n not in table]
    if missing:
        raise InvalidInput(f"{where}: {', '.join(missing)} missing; every row needs them")
    try:
        fields: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in table.items()}
        row = WorkloadRow(**fields)
        row.asked_of.check_row(row)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from error
    return row


def _fits(key: str, value: object) -> tuple[bool, str]:
    """Whether a key's value is of the right kind, and what is."""
    if key in _TEXTS:
        return isinstance(value, str) and value.strip() != "", "text"
    if key == "targets":
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return fits, f"a list of {', '.join(TARGET_KINDS)}"
    if key == "causal":
        return isinstance(value, bool), "true or false"
    least = 0 if key in _FROM_NOTHING else 1
    numbers = value if key == "top_k" and isinstance(value, list) else [value]
    fits = all(isinstance(n, int) and not isinstance(n, bool) and n >= least for n in numbers)
    return fits, f"an integer of {least} or more" + (", or a list of them" if key == "top_k" else "")


def _known_keys(table: dict[str, Any], allowed: tuple[str, ...], where: str) -> None:
    unknown = [key for key in table if key not in allowed]
    if unknown:
        raise InvalidInput(f"{where}: unknown key {', '.join(unknown)}; allowed: {', '.join(allowed)}")
