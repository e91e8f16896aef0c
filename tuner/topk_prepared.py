"""Cases of choosing blocks and of attending to listed ones, laid out on a device with their answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tilewright.generator.space import unable_reason
from tilewright.generator.variant import Kernel
from tilewright.runtime.launch import LoadedKernel
from tilewright.runtime.selected_launch import run_select, run_selected
from tilewright.runtime.selection import Selection
from tilewright.tuner import attention_outputs, topk_expected
from tilewright.tuner.attention_outputs import changed, examine_outputs, output_difference, verdict_on_outputs
from tilewright.tuner.expected import Expected, expect
from tilewright.tuner.guarded_workspace import GuardedWorkspace
from tilewright.tuner.layouts import Layout, Placed, place, size4
from tilewright.tuner.operations import Difference, FarRoom, Prepared
from tilewright.tuner.topk_cases import EXACT, ChoiceShape, generator_of, make_lists, make_tensors, unlisted_tokens
from tilewright.tuner.topk_expected import ExpectedChoice, examine_lists, expect_choice, judge_lists, verdict_on_lists
from tilewright.tuner.topk_oracle import ListedPairs
from tilewright.tuner.verdicts import Verdict


def case_fits(shape: ChoiceShape, selection: Selection, kernel: Kernel) -> bool:
    """Whether the kernel's family has no rule against a call of these sizes."""
    problem = selection.problem(
        kernel.operation,
        dtype=kernel.dtype,
        head_dim=kernel.head_dim,
        batch=shape.batch,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        seqlen_q=shape.seqlen_q,
        seqlen_kv=shape.seqlen_kv,
        target=kernel.arch,
    )
    return unable_reason(problem, kernel.spec) is None


@dataclass(frozen=True, slots=True)
class Inputs:
    """A case's tensors: those that a layout places, [B, H, N, D], and small contiguous ones.

    placed: None for the far layouts, placed at each run. small: laid out with room around them.
    """

    shape: ChoiceShape
    sources: tuple[Tensor, ...]
    small: tuple[Placed, ...]
    placed: tuple[Placed, ...] | None
    pristine: tuple[Tensor, ...]

    @classmethod
    def of(cls, shape: ChoiceShape, sources: Sequence[Tensor], small: Sequence[Tensor]) -> Inputs:
        """Lay them out."""
        flat = tuple(_laid_out(tensor, "packed") for tensor in small)
        placed = None
        if not shape.layout.startswith("far"):
            placed = tuple(_laid_out(tensor, shape.layout) for tensor in sources)
        pristine = tuple(one.buffer.clone() for one in (*(placed or ()), *flat))
        return cls(shape, tuple(sources), flat, placed, pristine)

    def take(self, far: FarRoom) -> tuple[list[Tensor], Placed] | None:
        """The views of the big tensors, and a place for an output of the first one's size; None without memory."""
        query = self.sources[0]
        if self.placed is not None:
            out = place(tuple(query.shape), self.shape.layout, query.dtype, query.device)
            return [one.view for one in self.placed], out
        buffer = far.buffer(query.dtype)
        if buffer is None:
            return None
        views = [buffer.cut(size4(tensor), self.shape.layout).copy_(tensor) for tensor in self.sources]
        out_view = buffer.cut(size4(query), self.shape.layout)
        return views, Placed(out_view, out_view)

    def changed(self, views: Sequence[Tensor]) -> Tensor:
        """How many elements are no longer what they were; views: as `take` gave them."""
        now = [one.buffer for one in (*(self.placed or ()), *self.small)]
        found = changed(now, self.pristine)
        return found if self.placed is not None else found + changed(views, self.sources)

    def restore(self) -> None:
        for one, good in zip((*(self.placed or ()), *self.small), self.pristine, strict=True):
            one.buffer.copy_(good)


def _laid_out(tensor: Tensor, layout: Layout) -> Placed:
    placed = place(tuple(tensor.shape), layout, tensor.dtype, tensor.device)
    placed.view.copy_(tensor)
    return placed


@dataclass(frozen=True, slots=True)
class SelectCase(Prepared):
    """A choice to make: the inputs are query, key and the budgets."""

    made_from: ChoiceShape
    selection: Selection
    inputs: Inputs
    expected: ExpectedChoice

    @classmethod
    def of(cls, shape: ChoiceShape, dtype: str, head_dim: int, causal: bool, device: torch.device) -> SelectCase:
        """The same numbers on every device."""
        query, key, _ = (t.to(device) for t in make_tensors(shape, dtype, head_dim, generator_of(shape)))
        selection = shape.selection(causal)
        inputs = Inputs.of(shape, (query, key), (shape.budgets(selection).to(device),))
        budgets = inputs.small[0].view
        expected = expect_choice(query, key, budgets, selection, exact=shape.numbers in EXACT)
        return cls(shape, selection, inputs, expected)

    @property
    def shape(self) -> ChoiceShape:
        return self.made_from

    def fits(self, kernel: Kernel) -> bool:
        return case_fits(self.shape, self.selection, kernel)

    def examine(self, loaded: LoadedKernel, far: FarRoom) -> Tensor | None:
        taken = self.inputs.take(far)
        if taken is None:
            return None
        (query, key), _ = taken
        guarded = GuardedWorkspace(loaded)
        call = partial(run_select, guarded, query, key, self.inputs.small[0].view, self.selection)
        indices, counts = self._outputs()
        stats = examine_lists(call, indices, counts, self.expected)
        stats[topk_expected.OUTSIDE] += guarded.written_beside()
        stats[topk_expected.CHANGED] = self.inputs.changed((query, key))
        return stats

    def _outputs(self) -> tuple[Placed, Placed]:
        size = self.lists
        device = self.inputs.sources[0].device
        indices = place((*size, self.selection.list_width), "packed", torch.int32, device)
        return indices, place(size, "packed", torch.int32, device)

    @property
    def lists(self) -> tuple[int, int, int]:
        """Batch entries, choosers and groups."""
        return self.shape.batch, self.selection.num_choosers, self.selection.num_groups(self.shape.seqlen_q)

    def verdict(self, stats: Sequence[float]) -> Verdict:
        return verdict_on_lists(stats)

    def restore(self) -> None:
        self.inputs.restore()

    def outputs(self, loaded: LoadedKernel) -> tuple[Tensor, ...]:
        assert self.inputs.placed is not None
        query, key = (one.view for one in self.inputs.placed)
        indices, counts = (one.view for one in self._outputs())
        return run_select(loaded, query, key, self.inputs.small[0].view, self.selection, indices, counts)

    def difference(self, ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> Difference:
        # Both may be right and differ, where scores are as near as rounding.
        identical = all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        verdict = self.verdict(judge_lists(theirs[0], theirs[1], self.expected).tolist())
        ratio = math.inf if verdict.reason and verdict.ratio <= 1 else verdict.ratio
        return Difference((verdict.max_error, 0.0), ratio, identical)


@dataclass(frozen=True, slots=True)
class SelectedCase(Prepared):
    """Attention over listed blocks: the inputs are query, key, value, and the lists with their counts."""

    made_from: ChoiceShape
    selection: Selection
    inputs: Inputs
    expected: Expected
    scale: float

    @classmethod
    def of(cls, shape: ChoiceShape, dtype: str, head_dim: int, causal: bool, device: torch.device) -> SelectedCase:
        """The same numbers on every device. Blocks that nobody lists hold NaN, which the answer knows nothing of."""
        generator = generator_of(shape)
        query, key, value = make_tensors(shape, dtype, head_dim, generator)
        selection = shape.selection(causal)
        indices, counts = make_lists(shape, selection, query, key, generator)
        unlisted = unlisted_tokens(indices, counts, selection, shape.num_kv_heads, shape.seqlen_kv)
        query, key, value, indices, counts, unlisted = (
            tensor.to(device) for tensor in (query, key, value, indices, counts, unlisted)
        )
        scale = head_dim**-0.5
        expected = expect(query, key, value, ListedPairs(indices, counts, selection), scale)
        hidden = (tensor.masked_fill(unlisted.unsqueeze(-1), torch.nan) for tensor in (key, value))
        inputs = Inputs.of(shape, (query, *hidden), (indices, counts))
        return cls(shape, selection, inputs, expected, scale)

    @property
    def shape(self) -> ChoiceShape:
        return self.made_from

    @property
    def _budgets(self) -> Sequence[int]:
        """Told to the kernel where they differ."""
        return self.shape.budgets(self.selection).tolist() if self.shape.uneven else ()

    def fits(self, kernel: Kernel) -> bool:
        return case_fits(self.shape, self.selection, kernel)

    def examine(self, loaded: LoadedKernel, far: FarRoom) -> Tensor | None:
        taken = self.inputs.take(far)
        if taken is None:
            return None
        views, out = taken
        query, key, value = views
        indices, counts = (one.view for one in self.inputs.small)
        guarded = GuardedWorkspace(loaded)
        call = partial(
            run_selected,
            guarded,
            *(query, key, value, indices, counts),
            self.selection,
            self.scale,
            budgets=self._budgets,
        )
        stats = examine_outputs(call, out, self.expected)
        stats[attention_outputs.OUTSIDE] += guarded.written_beside()
        stats[attention_outputs.CHANGED] = self.inputs.changed(views)
        return stats

    def verdict(self, stats: Sequence[float]) -> Verdict:
        return verdict_on_outputs(self.expected, stats)

    def restore(self) -> None:
        self.inputs.restore()

    def outputs(self, loaded: LoadedKernel) -> tuple[Tensor, ...]:
        assert self.inputs.placed is not None
        query, key, value = (one.view for one in self.inputs.placed)
        indices, counts = (one.view for one in self.inputs.small)
        out = place(tuple(query.shape), self.shape.layout, query.dtype, query.device).view
        lse = place(tuple(query.shape[:3]), "packed", torch.float32, query.device).view
        lists = (indices, counts, self.selection, self.scale)
        return run_selected(loaded, query, key, value, *lists, out, lse, budgets=self._budgets)

    def difference(self, ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> Difference:
        return output_difference(self.expected, ours, theirs)
