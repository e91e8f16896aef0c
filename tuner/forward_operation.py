"""attention_forward as the tuner sees it: attention under a mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilewright.generator.arch import Arch
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.variant import Kernel
from tilewright.runtime.canonical import canonical, mask_class
from tilewright.runtime.plans import plan_for
from tilewright.tuner.baselines import time_baselines
from tilewright.tuner.cases import HOST_SHAPES, SHAPES, CaseShape, make_cases
from tilewright.tuner.expected import Expected, expect, sample_rows
from tilewright.tuner.forward_prepared import Runnable, prepare_case, verify_call
from tilewright.tuner.operations import BoundCall, Operation, Prepared, PreparedRow, Work
from tilewright.tuner.verdicts import VerifyReport

if TYPE_CHECKING:
    from tilewright.tuner.timing import Run, Stopwatch
    from tilewright.tuner.workloads import WorkloadRow

TERM_SETS: tuple[tuple[str, ...], ...] = (
    (),
    ("bound",),
    ("bound", "document"),
    ("window", "stride"),
    ("bound", "window", "tokens"),
    ("and_blocks",),
    ("bound", "and_blocks"),
    ("window", "or_blocks"),
    ("and_bits",),
)
"""Mask classes that calls commonly have: every term is in one of them."""

FORM_TERMS: tuple[tuple[str, ...], ...] = (("window", "stride"), ("bound", "and_blocks"))
"""Between them they suit every mask form."""

HEAD_DIMS = (64, 128)
"""Verified with every class of mask."""

OTHER_HEAD_DIMS = (16, 32, 96, 192, 256)
"""Verified with a causal mask: the smallest, the largest, and ones that are no power of two."""


QUERIES = ((4096, 32), (512, 32), (1, 32), (1, 1))
"""Queries and KV heads of 32 heads: many, some, one of each head, and one of heads that share a KV head."""


class ForwardCall(BoundCall):
    """A kernel on a row's inputs, the mask planned for it."""

    def __init__(self, loaded: Runnable, row: ForwardRow) -> None:
        self._loaded, self._row = loaded, row
        query, key, _ = row.inputs
        batch, num_heads, seqlen_q, _ = query.shape
        self._plan = plan_for(
            loaded.kernel,
            row.canonical,
            batch=batch,
            num_heads=num_heads,
            seqlen_q=seqlen_q,
            seqlen_kv=key.shape[2],
            device=query.device,
        )

    def check(self, *, whole: bool = False) -> VerifyReport:
        row = self._row
        return verify_call(self._loaded, *row.inputs, self._plan, row.scale, row.expected(whole))

    def runner(self) -> Run:
        query, key, value = self._row.inputs
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        loaded, plan, scale = self._loaded, self._plan, self._row.scale
        return lambda: loaded.run(query, key, value, plan, scale, out=out, lse=lse)


class ForwardRow(PreparedRow):
    """query, key, value and mask of a row, and the fp64 answer of a sample of its rows, or of all."""

    def __init__(self, row: WorkloadRow, device: torch.device) -> None:
        self._row, self._device = row, device
        self._sample: Expected | None = None
        self._whole: Expected | None = None
        self.scale = row.head_dim**-0.5
        self.renew()

    def renew(self) -> None:
        query, key, value, self.mask = self._row.make_inputs(self._device)
        self.inputs = (query, key, value)
        self.canonical = canonical(self.mask, query.shape[2], key.shape[2])

    def answer(self) -> None:
        self.expected(whole=False)

    def expected(self, whole: bool) -> Expected:
        """The answer: of every query row where they are few or, `whole`, on a GPU; else of a bounded sample of them."""
        query, key, _ = self.inputs
        if self._sample is None:
            batch, num_heads, seqlen_q, head_dim = query.shape
            rows = sample_rows(batch, num_heads, seqlen_q, key.shape[2], head_dim, self._device.type)
            self._sample = expect(*self.inputs, self.mask, self.scale, rows)
            self._whole = self._sample if len(rows) == seqlen_q else None
        if not whole:
            return self._sample
        if self._whole is None and self._device.type == "cuda":
            self._whole = expect(*self.inputs, self.mask, self.scale)
        return self._whole or self._sample

    def bind(self, loaded: Runnable) -> ForwardCall:
        return ForwardCall(loaded, self)

    def baselines(self, stopwatch: Stopwatch) -> dict[str, float]:
        return time_baselines(*self.inputs, self.mask, self.scale, stopwatch)


class ForwardOperation(Operation):
    """`softmax(scale * query @ key^T where active) @ value`."""

    name = "attention_forward"
    row_keys = frozenset({"mask"})
    shapes = SHAPES
    host_shapes = HOST_SHAPES

    def case_key(self, kernel: Kernel) -> Hashable:
        return kernel.dtype, kernel.head_dim, kernel.mask_terms, kernel.spec.mask_form == "scan"

    def prepare(self, kernel: Kernel, device: torch.device, shapes: Sequence[CaseShape]) -> list[Prepared]:
        form = kernel.spec.mask_form
        made = make_cases(kernel.dtype, kernel.head_dim, kernel.mask_terms, form, device, shapes)
        return [prepare_case(case) for case in made]

    def problems_to_verify(self, arch: Arch, dtype: str) -> Iterator[Problem]:
        for seqlen_q, num_kv_heads in QUERIES:
            for head_dim in HEAD_DIMS:
                for terms in TERM_SETS:
                    yield _problem(arch, dtype, head_dim, terms, seqlen_q, num_kv_heads)
            for head_dim in OTHER_HEAD_DIMS:
                yield _problem(arch, dtype, head_dim, ("bound",), seqlen_q, num_kv_heads)

    def forms_to_verify(self, arch: Arch, dtype: str) -> Iterator[Problem]:
        for seqlen_q, num_kv_heads in QUERIES:
            for terms in FORM_TERMS:
                yield _problem(arch, dtype, HEAD_DIMS[0], terms, seqlen_q, num_kv_heads)

    def check_row(self, row: WorkloadRow) -> None:
        row.make_mask()

    def problem(self, row: WorkloadRow, target: str) -> Problem:
        made = row.make_mask()
        kind = mask_class(made, row.batch, row.num_heads, row.seqlen_q, row.seqlen_kv)
        if target != "cpu" and made is not None and made.tensors:
            # A call on CUDA does not wait for the device to count pairs, so its key has no density either.
            kind = dataclasses.replace(kind, density=None)
        return Problem(
            dtype=row.dtype,
            head_dim=row.head_dim,
            batch=row.batch,
            num_heads=row.num_heads,
            num_kv_heads=row.num_kv_heads,
            seqlen_q=row.seqlen_q,
            seqlen_kv=row.seqlen_kv,
            target=target,
            mask=kind,
        )

    def identity(self, row: WorkloadRow) -> dict[str, Any]:
        return {"mask": row.mask, "seed": row.seed}

    def row(self, row: WorkloadRow, device: torch.device) -> ForwardRow:
        return ForwardRow(row, device)

    def work(self, row: WorkloadRow, device: str) -> Work:
        from tilewright.tuner.active_pairs import row_active_pairs

        pairs = row_active_pairs(row, device)
        every = row.batch * row.num_heads * row.seqlen_q * row.seqlen_kv
        return Work(4.0 * row.head_dim * pairs, pairs / every)

    def same_function(self, problem: Problem, baselines: Mapping[str, float]) -> dict[str, float]:
        # Dense attention beside a mask computes another function.
        return {name: time for name, time in baselines.items() if name != "sdpa_dense" or not problem.mask.terms}


def _problem(
    arch: Arch, dtype: str, head_dim: int, terms: tuple[str, ...], seqlen_q: int, num_kv_heads: int
) -> Problem:
    mask = MaskClass(terms, " & ".join(terms) or "dense")
    return Problem(dtype, head_dim, 1, 32, num_kv_heads, seqlen_q, 4096, arch.name, mask)


FORWARD = ForwardOperation()
