"""Rows of workloads that choose blocks, or attend to chosen ones: their inputs and their calls."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from tilewright.runtime.launch import LoadedKernel
from tilewright.runtime.selected_launch import run_select, run_selected
from tilewright.runtime.selection import Selection
from tilewright.runtime.topk_call import Choosing, choosing_of
from tilewright.tuner import attention_outputs, topk_expected
from tilewright.tuner.attention_outputs import Fingerprints, examine_outputs, verdict_on_outputs
from tilewright.tuner.baselines import time_runs
from tilewright.tuner.expected import Expected, expect, sample_rows
from tilewright.tuner.guarded_workspace import GuardedWorkspace
from tilewright.tuner.layouts import place
from tilewright.tuner.operations import BoundCall, PreparedRow
from tilewright.tuner.topk_baselines import attend_runs, choose_by_pytorch
from tilewright.tuner.topk_expected import ExpectedChoice, examine_lists, expect_choice, verdict_on_lists
from tilewright.tuner.topk_oracle import ListedPairs
from tilewright.tuner.verdicts import VerifyReport, report_on_call

if TYPE_CHECKING:
    from tilewright.tuner.timing import Run, Stopwatch
    from tilewright.tuner.workloads import WorkloadRow

CASE = "tuned shape"


def choosing(row: WorkloadRow) -> Choosing:
    """How the row's call chooses, read as the public call reads its arguments. Raises `InvalidInput` as that does."""
    size = (row.batch, row.num_heads, row.seqlen_q, row.head_dim)
    kv_size = (row.batch, row.num_kv_heads, row.seqlen_kv, row.head_dim)
    query, key = (torch.empty(shape, dtype=getattr(torch, row.dtype), device="meta") for shape in (size, kv_size))
    return choosing_of(
        query,
        key,
        block_size=row.block_size,
        top_k=row.top_k,
        causal=row.causal,
        select=row.query_group,
        select_heads=row.select_heads,
        sink_blocks=row.sink_blocks,
        window_blocks=row.window_blocks,
    )


def selection_of(row: WorkloadRow) -> Selection:
    """What the row's kernels are told of the choice."""
    return choosing(row).selection(row.seqlen_q, row.seqlen_kv)


class ChoosingRow(PreparedRow):
    """query, key and value of a row, its selection, and the blocks that each chooser takes."""

    def __init__(self, row: WorkloadRow, device: torch.device) -> None:
        self._row, self.device = row, device
        self.selection = selection_of(row)
        self.renew()

    def renew(self) -> None:
        self.query, self.key, self.value = self._row.make_tensors(self.device)
        budgets = choosing(self._row).cut_budgets(self._row.seqlen_kv)
        self.budgets = torch.tensor(budgets, dtype=torch.int32, device=self.device)


class SelectRow(ChoosingRow):
    """A row of `select_blocks`."""

    def __init__(self, row: WorkloadRow, device: torch.device) -> None:
        super().__init__(row, device)
        self._sample: ExpectedChoice | None = None
        self._whole: ExpectedChoice | None = None

    def answer(self) -> None:
        self.expected(whole=False)

    def expected(self, whole: bool) -> ExpectedChoice:
        """The answer: for every group where they are few or, `whole`, on a GPU; else for a bounded sample of them."""
        groups = self.selection.num_groups(self.query.shape[2])
        if self._sample is None:
            sample = sample_rows(
                self.query.shape[0],
                self.selection.num_choosers,
                groups,
                self.selection.num_blocks(self.key.shape[2]),
                self.query.shape[3],
                self.device.type,
            )
            self._sample = expect_choice(self.query, self.key, self.budgets, self.selection, groups=sample)
        if not whole or self.device.type != "cuda":
            return self._sample
        if self._whole is None:
            self._whole = expect_choice(self.query, self.key, self.budgets, self.selection)
        return self._whole

    def bind(self, loaded: LoadedKernel) -> SelectCall:
        return SelectCall(loaded, self)

    def baselines(self, stopwatch: Stopwatch) -> dict[str, float]:
        run = partial(choose_by_pytorch, self.query, self.key, self.budgets, self.selection)
        return time_runs({"torch_topk": run}, stopwatch)


class SelectCall(BoundCall):
    """A kernel of `select_blocks` on a row's inputs."""

    def __init__(self, loaded: LoadedKernel, row: SelectRow) -> None:
        self._loaded, self._row = loaded, row
        groups = row.selection.num_groups(row.query.shape[2])
        self._lists = (row.query.shape[0], row.selection.num_choosers, groups)

    def check(self, *, whole: bool = False) -> VerifyReport:
        row = self._row
        expected = row.expected(whole)
        before = Fingerprints(row.query, row.key, row.budgets)
        indices = place((*self._lists, row.selection.list_width), "packed", torch.int32, row.device)
        counts = place(self._lists, "packed", torch.int32, row.device)
        guarded = GuardedWorkspace(self._loaded)
        call = partial(run_select, guarded, row.query, row.key, row.budgets, row.selection)
        stats = examine_lists(call, indices, counts, expected)
        stats[topk_expected.OUTSIDE] += guarded.written_beside()
        stats[topk_expected.CHANGED] = before.changed()
        every = self._lists[2]
        count = every if expected.groups is None else len(expected.groups)
        return report_on_call(CASE, verdict_on_lists(stats.tolist()), f"{count} of {every} groups of queries")

    def runner(self) -> Run:
        row = self._row
        indices = torch.empty((*self._lists, row.selection.list_width), dtype=torch.int32, device=row.device)
        counts = torch.empty(self._lists, dtype=torch.int32, device=row.device)
        return partial(run_select, self._loaded, row.query, row.key, row.budgets, row.selection, indices, counts)


class SelectedRow(ChoosingRow):
    """A row of `selected_attention`; the lists are those that PyTorch chooses on the row's inputs."""

    def __init__(self, row: WorkloadRow, device: torch.device) -> None:
        self._sample: Expected | None = None
        self._whole: Expected | None = None
        self.scale = row.head_dim**-0.5
        super().__init__(row, device)

    def renew(self) -> None:
        super().renew()
        self.indices, self.counts = choose_by_pytorch(self.query, self.key, self.budgets, self.selection)

    def answer(self) -> None:
        self.expected(whole=False)

    def expected(self, whole: bool) -> Expected:
        """The answer: of every query row where they are few or, `whole`, on a GPU; else of a bounded sample of them."""
        tensors = (self.query, self.key, self.value)
        pairs = ListedPairs(self.indices, self.counts, self.selection)
        batch, num_heads, seqlen_q, head_dim = self.query.shape
        if self._sample is None:
            rows = sample_rows(batch, num_heads, seqlen_q, self.key.shape[2], head_dim, self.device.type)
            self._sample = expect(*tensors, pairs, self.scale, rows)
            self._whole = self._sample if len(rows) == seqlen_q else None
        if not whole:
            return self._sample
        if self._whole is None and self.device.type == "cuda":
            self._whole = expect(*tensors, pairs, self.scale)
        return self._whole or self._sample

    def bind(self, loaded: LoadedKernel) -> SelectedCall:
        return SelectedCall(loaded, self)

    def baselines(self, stopwatch: Stopwatch) -> dict[str, float]:
        tensors = (self.query, self.key, self.value)
        return time_runs(attend_runs(*tensors, self.indices, self.counts, self.selection, self.scale), stopwatch)


class SelectedCall(BoundCall):
    """A kernel of `selected_attention` on a row's inputs."""

    def __init__(self, loaded: LoadedKernel, row: SelectedRow) -> None:
        self._loaded, self._row = loaded, row
        self._inputs = (row.query, row.key, row.value, row.indices, row.counts)

    def check(self, *, whole: bool = False) -> VerifyReport:
        row = self._row
        expected = row.expected(whole)
        before = Fingerprints(*self._inputs)
        out = place(tuple(row.query.shape), "packed", row.query.dtype, row.device)
        guarded = GuardedWorkspace(self._loaded)
        call = partial(run_selected, guarded, *self._inputs, row.selection, row.scale)
        stats = examine_outputs(call, out, expected)
        stats[attention_outputs.OUTSIDE] += guarded.written_beside()
        stats[attention_outputs.CHANGED] = before.changed()
        every = row.query.shape[2]
        count = every if expected.rows is None else len(expected.rows)
        return report_on_call(CASE, verdict_on_outputs(expected, stats.tolist()), f"{count} of {every} query rows")

    def runner(self) -> Run:
        row = self._row
        out = torch.empty_like(row.query, memory_format=torch.contiguous_format)
        lse = torch.empty(row.query.shape[:3], dtype=torch.float32, device=row.device)
        return partial(run_selected, self._loaded, *self._inputs, row.selection, row.scale, out, lse)
