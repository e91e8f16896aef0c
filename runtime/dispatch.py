"""From a call to the kernel that answers it, and the reason why it is that one.

Look-up order: the winner tuned for exactly this problem, one of its shape bucket, the nearest tuned neighbour, the most
preferred family's default, PyTorch. Winners are those of this very device model only; one's own database goes before
what ships. What was found is kept, so that a repeated call costs one dictionary probe.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tilewright.generator.errors import InvalidInput, StoreError, TilewrightError, ToolMissing, VariantFailed
from tilewright.generator.problem import Problem
from tilewright.generator.variant import Kernel, VariantSpec, kernel_of
from tilewright.runtime import environment
from tilewright.runtime.call import check_strides, check_tensors, scale_of
from tilewright.runtime.call_problem import problem_of, stage_problem, tensors_key
from tilewright.runtime.canonical import canonical
from tilewright.runtime.fallback import fallback_attention
from tilewright.runtime.launch import LoadedKernel, current_stream
from tilewright.runtime.masks import Mask, from_spec
from tilewright.runtime.plans import MaskPlan, plan_for
from tilewright.runtime.records import Winner
from tilewright.runtime.selection import Selection
from tilewright.runtime.winners import Legal, Match, WinnerTable, shipped_winners

logger = logging.getLogger("tilewright")

Reason = Literal["exact", "bucket", "neighbour", "heuristic", "fallback"]

MAX_PREPARED = 256
"""Calls kept prepared; the oldest goes first."""

MAX_PREPARED_BYTES = 2 * 2**30
"""Device memory that the plans of prepared calls may hold together."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The dispatcher's answer to one problem.

    spec: the variant, or None for PyTorch. reason: how it was found. detail: the reason in words.
    tuned_time_us: what the winner took when it was tuned (on its own problem), None where nothing was measured.
    """

    problem: Problem
    spec: VariantSpec | None
    reason: Reason
    detail: str
    tuned_time_us: float | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call ready to be repeated: its choice and, unless PyTorch answers, the kernel and the mask's plan.

    mask keeps the caller's mask tensors alive, so that an address in the look-up key is never reused meanwhile.
    lse_like: one element seen as [B, Hq, Nq]: `empty_like` of it costs a third of `empty`.
    stream, ready: the CUDA stream that the plan was made on and when it is done; None where it holds no tensor.
    """

    choice: Choice
    mask: Mask | None
    loaded: LoadedKernel | None
    plan: MaskPlan | None
    lse_like: Tensor
    stream: int = 0
    ready: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of attention over chosen blocks, ready to be repeated; PyTorch answers where `loaded` is None."""

    choice: Choice
    loaded: LoadedKernel | None


class Dispatcher:
    """Chooses, builds and keeps kernels for this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._winners: WinnerTable | None = None
        self._prepared: dict[tuple[object, ...], Prepared] = {}
        self._prepared_bytes = 0
        self._stages: dict[tuple[object, ...], Stage] = {}
        self._kernels: dict[Kernel, LoadedKernel] = {}
        self._failed: dict[Kernel, str] = {}
        self._said: set[str] = set()
        self._captured: list[Prepared] = []

    def reload(self) -> None:
        """Read the winners anew, for instance after tuning in this process; built kernels are kept."""
        with self._lock:
            self._winners = None
            self._prepared.clear()
            self._prepared_bytes = 0
            self._stages.clear()
            self._failed.clear()

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """`out` and `lse` of a call; one that was prepared before is known to be a valid one."""
        prepared = self.prepare(query, key, value, mask)
        return self.run(prepared, query, key, value, scale_of(scale, query.shape[3]))

    def run(
        self, prepared: Prepared, query: Tensor, key: Tensor, value: Tensor, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        """`out` and `lse` of a call that `prepare` or `prepare_once` returned."""
        if prepared.loaded is None or prepared.plan is None:
            self.say_fallback(prepared.choice)
            return fallback_attention(query, key, value, prepared.mask, softmax_scale)
        if query.is_cuda:
            self._share_plan(prepared, prepared.plan, query.device)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = torch.empty_like(prepared.lse_like, memory_format=torch.contiguous_format)
        return prepared.loaded.run(query, key, value, prepared.plan, softmax_scale, out, lse)

    def prepare(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Prepared:
        """What `attend` would run: checked, chosen, built and planned now if it was not before."""
        try:
            look_up = call_key(query, key, value, mask)
            prepared = self._prepared.get(look_up) if look_up is not None else None
        except (AttributeError, TypeError):  # no tensors: the check says so in words
            look_up = prepared = None
        if prepared is None:
            check_tensors(query, key, value)
            return self._prepare(query, key, mask, look_up)
        check_strides(query, key, value)  # the one thing that a look-up does not settle
        return prepared

    def prepare_once(self, query: Tensor, key: Tensor, mask: Mask) -> Prepared:
        """The same for a checked call with a mask that no other call will have; it is not kept."""
        return self._prepare(query, key, mask, None)

    def stage(self, operation: str, query: Tensor, key: Tensor, selection: Selection) -> Stage:
        """What runs a stage of attention over chosen blocks: chosen and built now if it was not before.

        operation: `select_blocks` or `selected_attention`. The tensors are checked ones.
        """
        look_up = (operation, query.shape, key.shape, query.dtype, query.device, selection)
        found = self._stages.get(look_up)
        if found is not None:
            return found
        with self._lock:
            stage = Stage(*self.kernel_for(stage_problem(operation, query, key, selection), query.device))
            self._stages[look_up] = stage
            while len(self._stages) > MAX_PREPARED:
                del self._stages[next(iter(self._stages))]
        return stage

    def _share_plan(self, prepared: Prepared, plan: MaskPlan, device: torch.device) -> None:
        """Keep a plan valid for whoever reads it: a graph that is captured now, or a stream it was not made on."""
        if torch.cuda.is_current_stream_capturing():
            self._captured.append(prepared)  # replays read the plan long after this call was forgotten
        elif prepared.ready is not None and current_stream(device.index) != prepared.stream:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(prepared.ready)
            for tensor in plan.tensors:
                if tensor.is_cuda:
                    tensor.record_stream(stream)

    def choose(self, problem: Problem, device: torch.device | None = None) -> Choice:
        """The choice for a problem: nothing is built. device: where it will run, for the device model's name."""
        from tilewright.generator.family import family_named
        from tilewright.generator.space import default_variant, family_default, problem_reason

        spec: VariantSpec | None = None
        reason = ""
        try:
            spec = default_variant(problem)
        except TilewrightError as error:
            reason = str(error)

        def legal(known: VariantSpec) -> bool:
            return problem_reason(problem, known) is None

        def tells(winner: Winner) -> bool:
            """Where the default's family does not apply, nobody compared with it: few queries are not like many."""
            if spec is None or spec.family == winner.spec.family:
                return True
            return family_default(winner.problem, family_named(spec.family)) is not None

        match = self._find(problem, "cpu" if problem.target == "cpu" else str(device or "cuda"), legal, tells)
        if match is not None:
            return Choice(problem, match.winner.spec, match.reason, _match_text(match), match.winner.time_us)
        if spec is None:
            return Choice(problem, None, "fallback", reason)
        detail = f"nothing tuned is near; the default of family {spec.family}. Run `tilewright tune` to do better"
        return Choice(problem, spec, "heuristic", detail)

    def _find(self, problem: Problem, target: str, legal: Legal, tells: Callable[[Winner], bool]) -> Match | None:
        with self._lock:
            if self._winners is None:
                self._winners = load_winners()
            winners = self._winners
        if not len(winners):
            return None
        try:
            name = environment.device_name(target)
        except InvalidInput:
            return None
        return winners.find(problem, name, legal, tells)

    def _prepare(self, query: Tensor, key: Tensor, mask: Mask | None, look_up: tuple[object, ...] | None) -> Prepared:
        batch, num_heads, seqlen_q, _ = query.shape
        seqlen_kv = key.shape[2]
        if mask is not None:
            mask.check(batch, num_heads, seqlen_q, seqlen_kv, query.device)
        capturing = query.is_cuda and torch.cuda.is_current_stream_capturing()
        with self._lock:
            choice, loaded = self.kernel_for(problem_of(query, key, mask), query.device)
            plan = None
            if loaded is not None:
                plan = plan_for(
                    loaded.kernel,
                    canonical(mask, seqlen_q, seqlen_kv),
                    batch=batch,
                    num_heads=num_heads,
                    seqlen_q=seqlen_q,
                    seqlen_kv=seqlen_kv,
                    device=query.device,
                )
            lse_like = torch.empty(1, dtype=torch.float32, device=query.device).expand(batch, num_heads, seqlen_q)
            stream, ready = 0, None
            if query.is_cuda and not capturing and plan is not None and plan.tensors:
                stream = current_stream(query.device.index)
                ready = torch.cuda.current_stream(query.device).record_event()
            prepared = Prepared(choice, mask, loaded, plan, lse_like, stream, ready)
            # A plan made while a graph is captured holds values only once the graph has been replayed.
            if look_up is not None and not capturing:
                self._keep(look_up, prepared)
        return prepared

    def _keep(self, look_up: tuple[object, ...], prepared: Prepared) -> None:
        self._prepared[look_up] = prepared
        self._prepared_bytes += _plan_bytes(prepared)
        while len(self._prepared) > 1 and (
            len(self._prepared) > MAX_PREPARED or self._prepared_bytes > MAX_PREPARED_BYTES
        ):
            oldest = self._prepared.pop(next(iter(self._prepared)))
            self._prepared_bytes -= _plan_bytes(oldest)

    def kernel_for(self, problem: Problem, device: torch.device) -> tuple[Choice, LoadedKernel | None]:
        """The choice for a problem and its kernel, built now if it never was; None where PyTorch has to answer.

        Raises `InvalidInput` where it would have to be loaded while a CUDA graph is captured.
        """
        choice = self.choose(problem, device)
        if choice.spec is None:
            return choice, None
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        try:
            with self._lock:
                return choice, self._load(kernel_of(problem, choice.spec), capturing)
        except (ToolMissing, VariantFailed, InvalidInput) as error:
            if capturing and isinstance(error, InvalidInput):
                raise
            return Choice(problem, None, "fallback", f"{choice.spec.name} cannot be made here: {error}"), None

    def _load(self, kernel: Kernel, capturing: bool) -> LoadedKernel:
        loaded = self._kernels.get(kernel)
        if loaded is not None:
            return loaded
        if capturing:
            raise InvalidInput(
                f"{kernel.spec.name} is not loaded yet, and a CUDA graph is being captured; make this call once with "
                "these shapes before the capture"
            )
        if kernel in self._failed:
            raise ToolMissing(self._failed[kernel])
        from tilewright.generator.build import build, find_artifact
        from tilewright.generator.render import render

        rendered = render(kernel)
        try:
            path = find_artifact(rendered)
            if path is None:
                logger.warning("compiling %s for %s D%d (once)", kernel.spec.name, kernel.dtype, kernel.head_dim)
                path = build(rendered)
            loaded = LoadedKernel(path, kernel, rendered.module_name)
        except TilewrightError as error:
            self._failed[kernel] = str(error)
            raise
        self._kernels[kernel] = loaded
        return loaded

    def say_fallback(self, choice: Choice) -> None:
        """Tell the log, once, that PyTorch answers a problem, and why."""
        text = f"{choice.problem.name}: answered by PyTorch: {choice.detail}"
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)


def call_key(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> tuple[object, ...] | None:
    """What a prepared call is kept under; None for a mask whose tensors do not tell when they are written to."""
    call = tensors_key(query, key, value)
    if mask is None:
        return call
    if not mask.tensors:
        return (*call, mask.spec)
    if any(t.is_inference() for t in mask.tensors):
        return None
    return (*call, mask.spec, *((t.data_ptr(), t._version, t.shape, t.stride(), t.dtype) for t in mask.tensors))


def load_winners() -> WinnerTable:
    """One's own winners first, then those that ship. A database that cannot be read is told of and passed over."""
    own = []
    try:
        from tilewright.generator.toolchain import cache_path

        if (cache_path() / "tilewright.db").exists():
            from tilewright.runtime.store.database import Store

            store = Store.open_existing()
            if store is not None:
                with store:
                    own = store.winners(verified=True)
    except (StoreError, InvalidInput) as error:
        logger.warning("tuned winners are not used: %s", error)
    return WinnerTable([*own, *shipped_winners()])


def mask_from_operator(spec: str, tensors: list[Tensor]) -> Mask | None:
    """The mask that travelled through a torch operator as text and tensors; empty text is no mask."""
    return from_spec(spec, tensors) if spec else None


def _plan_bytes(prepared: Prepared) -> int:
    return prepared.plan.extra_bytes if prepared.plan is not None else 0


def _match_text(match: Match) -> str:
    if match.reason == "exact":
        return f"tuned for this problem ({match.winner.source})"
    tuned_for = match.winner.problem.name
    if match.reason == "bucket":
        return f"tuned for a problem of the same shape bucket: {tuned_for} ({match.winner.source})"
    return f"tuned for a neighbour at distance {match.distance:.2f}: {tuned_for} ({match.winner.source})"


DISPATCHER = Dispatcher()
"""The process-wide dispatcher."""
