"""Choosing blocks, and attending to chosen ones, as the tuner sees them: `select_blocks` and `selected_attention`."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from tilewright.generator.arch import Arch
from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import Problem
from tilewright.generator.variant import Kernel
from tilewright.runtime.selection import SELECT_BLOCKS, SELECTED_ATTENTION, Selection
from tilewright.tuner.operations import Operation, Prepared, PreparedRow, Work
from tilewright.tuner.topk_cases import (
    SELECT_HOST_SHAPES,
    SELECT_SHAPES,
    SELECTED_HOST_SHAPES,
    SELECTED_SHAPES,
    ChoiceShape,
)
from tilewright.tuner.topk_oracle import allowed_blocks
from tilewright.tuner.topk_prepared import SelectCase, SelectedCase
from tilewright.tuner.topk_rows import SelectedRow, SelectRow, selection_of

if TYPE_CHECKING:
    from tilewright.tuner.workloads import WorkloadRow

VERIFIED_HEAD_DIMS = (64, 128)
"""Verified with every common choice, causal and not."""

OTHER_HEAD_DIMS = (16, 32, 96, 192, 256)
"""Verified with the first of them, causal: the smallest, the largest, and ones that are no power of two."""

COMMON_CHOICES: tuple[tuple[int, int, int, int], ...] = (
    (64, 16, 1, 1),
    (64, 16, 1, 4),
    (64, 16, 16, 4),
    (64, 16, 64, 1),
    (16, 64, 1, 1),
    (32, 32, 1, 1),
    (128, 8, 1, 1),
    (256, 8, 1, 1),
    (48, 16, 1, 1),
    (100, 16, 3, 1),
)
"""Block sizes, blocks taken, queries and heads that share a choice: a family's rules may ask for another default."""

COMMON_LENGTHS = (2048, 4096, 32768)
"""Queries and keys of those: short and long calls may ask for other families' defaults."""

LIST_WIDTHS = (16, 26, 48, 128, 240, 400)
"""Blocks taken that ask for another default at `VERIFIED_HEAD_DIMS`, whatever the length."""


class ChoiceOperation(Operation):
    """What the two stages have in common."""

    row_keys = frozenset(
        ("block_size", "top_k", "causal", "query_group", "select_heads", "sink_blocks", "window_blocks")
    )

    def case_key(self, kernel: Kernel) -> Hashable:
        return kernel.dtype, kernel.head_dim, kernel.mask_terms

    def prepare(self, kernel: Kernel, device: torch.device, shapes: Sequence[ChoiceShape]) -> list[Prepared]:
        if not set(kernel.mask_terms) <= {"bound"}:
            raise InvalidInput(
                f"{self.name} is causal (the mask term bound) or not (none); got {', '.join(kernel.mask_terms)}"
            )
        causal = "bound" in kernel.mask_terms
        return [self.case(shape, kernel.dtype, kernel.head_dim, causal, device) for shape in shapes]

    @abstractmethod
    def case(self, shape: ChoiceShape, dtype: str, head_dim: int, causal: bool, device: torch.device) -> Prepared:
        """One case, laid out with its answer."""

    def problems_to_verify(self, arch: Arch, dtype: str) -> Iterator[Problem]:
        for head_dim in VERIFIED_HEAD_DIMS:
            for choice, causal, seqlen in itertools.product(COMMON_CHOICES, (False, True), COMMON_LENGTHS):
                yield self._problem(choice, causal, arch, dtype, head_dim, seqlen, seqlen)
        for head_dim in OTHER_HEAD_DIMS:
            yield self._problem(COMMON_CHOICES[0], True, arch, dtype, head_dim)
        for width, group, heads in itertools.product(LIST_WIDTHS, (1, 64), (1, 8)):
            for head_dim, seqlen_q in itertools.product(VERIFIED_HEAD_DIMS, (1, 64, 32768)):
                choice = (64, width, group, heads)
                yield self._problem(choice, False, arch, dtype, head_dim, seqlen_q, 32768)

    def forms_to_verify(self, arch: Arch, dtype: str) -> Iterator[Problem]:
        return iter(())  # there is one form

    def _problem(
        self,
        choice: tuple[int, int, int, int],
        causal: bool,
        arch: Arch,
        dtype: str,
        head_dim: int,
        seqlen_q: int = 4096,
        seqlen_kv: int = 4096,
    ) -> Problem:
        block_size, list_width, query_group, heads = choice
        return Selection(block_size, list_width, 8 // heads, query_group, causal).problem(
            self.name,
            dtype=dtype,
            head_dim=head_dim,
            batch=1,
            num_heads=8,
            num_kv_heads=8 // heads,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            target=arch.name,
        )

    def check_row(self, row: WorkloadRow) -> None:
        selection_of(row)

    def problem(self, row: WorkloadRow, target: str) -> Problem:
        return selection_of(row).problem(
            self.name,
            dtype=row.dtype,
            head_dim=row.head_dim,
            batch=row.batch,
            num_heads=row.num_heads,
            num_kv_heads=row.num_kv_heads,
            seqlen_q=row.seqlen_q,
            seqlen_kv=row.seqlen_kv,
            target=target,
        )

    def identity(self, row: WorkloadRow) -> dict[str, Any]:
        return {
            "top_k": row.top_k,
            "select_heads": row.select_heads,
            "sink_blocks": row.sink_blocks,
            "window_blocks": row.window_blocks,
            "seed": row.seed,
        }

    def same_function(self, problem: Problem, baselines: Mapping[str, float]) -> dict[str, float]:
        return {name: time for name, time in baselines.items() if name != "sdpa_dense"}


class SelectOperation(ChoiceOperation):
    """Which blocks of keys each group of queries takes; see `topk_oracle.select_blocks_oracle`."""

    name = SELECT_BLOCKS
    shapes = SELECT_SHAPES
    host_shapes = SELECT_HOST_SHAPES

    def case(self, shape: ChoiceShape, dtype: str, head_dim: int, causal: bool, device: torch.device) -> SelectCase:
        return SelectCase.of(shape, dtype, head_dim, causal, device)

    def row(self, row: WorkloadRow, device: torch.device) -> PreparedRow:
        return SelectRow(row, device)

    def work(self, row: WorkloadRow, device: str) -> Work:
        selection = selection_of(row)
        scored = selection.num_groups(row.seqlen_q) * selection.num_blocks(row.seqlen_kv)
        if selection.causal:
            # By the last block that a group may take.
            scored = 0
            for numbers in torch.split(torch.arange(selection.num_groups(row.seqlen_q)), 2**12):
                scored += int(allowed_blocks(selection, row.seqlen_q, row.seqlen_kv, numbers)[0].sum())
        scored *= row.batch * selection.num_choosers
        return Work(2.0 * row.head_dim * scored, scored / _pairs(row))


class SelectedOperation(ChoiceOperation):
    """Attention over listed blocks; see `topk_oracle.selected_attention_oracle`."""

    name = SELECTED_ATTENTION
    shapes = SELECTED_SHAPES
    host_shapes = SELECTED_HOST_SHAPES

    def case(self, shape: ChoiceShape, dtype: str, head_dim: int, causal: bool, device: torch.device) -> SelectedCase:
        return SelectedCase.of(shape, dtype, head_dim, causal, device)

    def row(self, row: WorkloadRow, device: torch.device) -> PreparedRow:
        return SelectedRow(row, device)

    def work(self, row: WorkloadRow, device: str) -> Work:
        pairs = _listed_pairs(row, device)
        return Work(4.0 * row.head_dim * pairs, pairs / _pairs(row))


def _pairs(row: WorkloadRow) -> int:
    return row.batch * row.num_heads * row.seqlen_q * row.seqlen_kv


@lru_cache(maxsize=64)
def _listed_pairs(row: WorkloadRow, device: str) -> int:
    """Pairs of queries and keys that the row's lists leave, over all heads; counted once in a process."""
    made = SelectedRow(row, torch.device(device))
    size, group = made.selection.block_size, made.selection.query_group
    places = torch.arange(made.selection.list_width, device=made.device)
    total = 0
    for rows in torch.split(torch.arange(row.seqlen_q, device=made.device), 2**14):
        groups = rows // group
        starts = made.indices[:, :, groups].long() * size
        stops = (starts + size).clamp(max=row.seqlen_kv)
        if made.selection.causal:
            stops = torch.minimum(stops, (rows + row.seqlen_kv - row.seqlen_q + 1).unsqueeze(1))
        tokens = (stops - starts).clamp(min=0)
        total += int(torch.where(places < made.counts[:, :, groups].unsqueeze(3), tokens, 0).sum())
    return total * (row.num_heads // made.selection.num_choosers)


SELECT = SelectOperation()
SELECTED = SelectedOperation()
