"""What block sizes and budgets cost and keep, on given queries and keys: work, time, attention mass, output error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.generator.errors import InvalidInput
from tilewright.runtime import masks
from tilewright.runtime.selection import Selection
from tilewright.runtime.topk import select_blocks, topk_attention
from tilewright.runtime.topk_call import choosing_of
from tilewright.tuner.devices import measuring_alone
from tilewright.tuner.oracle import grouped_scores, oracle_rows
from tilewright.tuner.timing import Stopwatch, time_kernel
from tilewright.tuner.topk_flops import topk_flops
from tilewright.tuner.topk_inputs import AttentionInputs
from tilewright.tuner.topk_oracle import listed

WORST = 0.01
"""The share of queries with the least mass whose best one `mass_low` tells."""

BLOCK_SIZES, BUDGETS = (16, 32, 64, 128), (4, 8, 16, 32, 64)

MIN_ROUNDS, MAX_ROUNDS = 3, 20


@dataclass(frozen=True, slots=True)
class Choosing:
    """What all points share: arguments of `topk_attention` under their names there."""

    causal: bool = False
    select: int = 1
    select_heads: str = "query"
    sink_blocks: int = 0
    window_blocks: int = 0


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One block size with one budget.

    top_k: blocks a query takes, at most as many as there are. dense_share: multiplications and additions of both stages
    over dense attention's; choosing_share: of stage 1. time_ms: the whole call's median; None where it was not timed.
    mass_mean: the share of dense attention's softmax that lies on the chosen tokens, mean over the sampled queries of
    all heads; mass_low: what 99 % of them exceed. best_mass: the mean if the blocks of the greatest mass were chosen.
    error: the root of the mean squared difference to dense attention's output, over that output's.
    fronts: which Pareto fronts it is on: `flops` (dense_share against mass_mean), `time` (time_ms against error).
    """

    block_size: int
    top_k: int
    num_blocks: int
    dense_share: float
    choosing_share: float
    mass_mean: float
    mass_low: float
    best_mass: float
    error: float
    time_ms: float | None = None
    fronts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SweepResult:
    """points: by block size, then budget. dense_ms: dense `scaled_dot_product_attention`; None where it was not timed.
    left_out: budgets that the call refuses, with the reason.
    """

    points: tuple[SweepPoint, ...]
    dense_ms: float | None
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Measured:
    """A point on the way: its lists and outputs at the sampled queries."""

    block_size: int
    top_k: int
    selection: Selection
    dense_share: float
    choosing_share: float
    flags: Tensor
    out: Tensor
    time_ms: float | None


def sweep_topk(
    inputs: AttentionInputs,
    choosing: Choosing,
    *,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    budgets: Sequence[int] = BUDGETS,
    queries: int = 256,
    timed: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> SweepResult:
    """Every block size with every budget; where a budget is more than all blocks only the first such.

    queries: how many rows are sampled, evenly spread, for mass and error. Raises `InvalidInput` where no point is left.
    """
    device = inputs.query.device
    seqlen_q, seqlen_kv = inputs.query.shape[2], inputs.key.shape[2]
    rows = torch.linspace(0, seqlen_q - 1, min(queries, seqlen_q), device=device).round().long()
    stopwatch = Stopwatch(device) if timed else None
    measured, left_out = [], []
    with torch.no_grad():
        for block_size, top_k in _grid(block_sizes, budgets, seqlen_kv):
            say(f"{inputs.name}: block size {block_size}, {top_k} blocks")
            try:
                measured.append(_measure(inputs, choosing, block_size, top_k, rows, stopwatch))
            except InvalidInput as error:
                left_out.append(f"block size {block_size}, {top_k} blocks: {error}")
        if not measured:
            raise InvalidInput(f"no point of the sweep can be measured; {left_out[0]}")
        say(f"{inputs.name}: dense attention")
        dense_ms = None if stopwatch is None else _dense_ms(inputs, choosing, stopwatch)
        points = _judged(inputs, choosing, measured, rows)
    return SweepResult(marked(points), dense_ms, tuple(left_out))


def _grid(block_sizes: Sequence[int], budgets: Sequence[int], seqlen_kv: int) -> Iterator[tuple[int, int]]:
    for block_size in sorted(set(block_sizes)):
        num_blocks = -(-seqlen_kv // block_size)
        yield from ((block_size, budget) for budget in sorted({min(budget, num_blocks) for budget in budgets}))


def _measure(
    inputs: AttentionInputs,
    choosing: Choosing,
    block_size: int,
    top_k: int,
    rows: Tensor,
    stopwatch: Stopwatch | None,
) -> _Measured:
    query, key, value = inputs.query, inputs.key, inputs.value
    arguments = {**dataclasses.asdict(choosing), "block_size": block_size, "top_k": top_k}
    selection = choosing_of(query, key, **arguments).selection(query.shape[2], key.shape[2])
    lists = select_blocks(query, key, **arguments)
    run: Callable[[], Tensor] = partial(topk_attention, query, key, value, scale=inputs.scale, **arguments)
    out = run()
    num_blocks = selection.num_blocks(key.shape[2])
    flops = topk_flops(query, key, lists if top_k < num_blocks else None, selection)
    groups = rows // selection.query_group
    return _Measured(
        block_size,
        top_k,
        selection,
        flops.share,
        flops.choosing / flops.dense,
        listed(lists[0][:, :, groups], lists[1][:, :, groups], num_blocks),
        out[:, :, rows],
        None if stopwatch is None else _time_ms(run, stopwatch),
    )


def _time_ms(run: Callable[[], Tensor], stopwatch: Stopwatch) -> float:
    with measuring_alone(str(stopwatch.device)):
        rounds = {"min_rounds": MIN_ROUNDS, "max_rounds": MAX_ROUNDS}
        return time_kernel(run, stopwatch.device, stopwatch=stopwatch, **rounds).median_us / 1e3


def _dense_ms(inputs: AttentionInputs, choosing: Choosing, stopwatch: Stopwatch) -> float | None:
    query, key, value = inputs.query, inputs.key, inputs.value
    if choosing.causal and query.shape[2] != key.shape[2]:
        return None  # PyTorch's causal flag means another mask then
    grouped = query.shape[1] != key.shape[1]
    run = partial(
        F.scaled_dot_product_attention,
        *(query, key, value),
        is_causal=choosing.causal,
        scale=inputs.scale,
        enable_gqa=grouped,
    )
    return _time_ms(run, stopwatch)


def _judged(
    inputs: AttentionInputs, choosing: Choosing, measured: Sequence[_Measured], rows: Tensor
) -> list[SweepPoint]:
    """The points, with the mass on the chosen tokens of each and its error, head after head."""
    mask = masks.causal() if choosing.causal else None
    dense, _ = oracle_rows(inputs.query, inputs.key, inputs.value, mask, inputs.scale, rows.tolist())
    masses: list[list[tuple[Tensor, Tensor]]] = [[] for _ in measured]
    group = inputs.query.shape[1] // inputs.key.shape[1]
    for head in range(inputs.query.shape[1]):
        weights = _dense_weights(inputs, choosing, head, head // group, rows)
        for point, found in zip(measured, masses, strict=True):
            found.append(_block_masses(point, weights, head * point.flags.shape[1] // inputs.query.shape[1]))
    size = float(dense.square().mean().sqrt())
    points = []
    for point, found in zip(measured, masses, strict=True):
        mass, best = (torch.cat([pair[i].flatten() for pair in found]) for i in (0, 1))
        points.append(
            SweepPoint(
                block_size=point.block_size,
                top_k=point.top_k,
                num_blocks=point.flags.shape[3],
                dense_share=point.dense_share,
                choosing_share=point.choosing_share,
                mass_mean=float(mass.mean()),
                mass_low=float(mass.sort().values[int(WORST * len(mass))]),
                best_mass=float(best.mean()),
                error=float((point.out.double() - dense).square().mean().sqrt()) / size,
                time_ms=point.time_ms,
            )
        )
    return points


def _dense_weights(inputs: AttentionInputs, choosing: Choosing, head: int, kv_head: int, rows: Tensor) -> Tensor:
    """Dense attention's softmax of one query head at these rows, [B, rows, Nkv] in fp64; 0 where a row has no key."""
    query = inputs.query[:, head : head + 1, rows].double()
    scores = grouped_scores(query, inputs.key[:, kv_head : kv_head + 1].double())[:, 0] * inputs.scale
    if choosing.causal:
        tokens = torch.arange(scores.shape[2], device=scores.device)
        position = rows + scores.shape[2] - inputs.query.shape[2]
        scores = scores.masked_fill(tokens > position.unsqueeze(1), -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0)


def _block_masses(point: _Measured, weights: Tensor, chooser: int) -> tuple[Tensor, Tensor]:
    """The mass on the chosen blocks and on the best ones, each [B, rows]."""
    num_blocks, size = point.flags.shape[3], point.block_size
    padded = F.pad(weights, (0, num_blocks * size - weights.shape[2]))
    blocks = padded.view(*padded.shape[:2], num_blocks, size).sum(3)
    return (blocks * point.flags[:, chooser]).sum(2), blocks.topk(point.top_k, dim=2).values.sum(2)


def marked(points: Sequence[SweepPoint]) -> tuple[SweepPoint, ...]:
    """The points with `fronts`: on one are those that no other point beats in both figures, or in one at a tie."""
    flops = [(point.dense_share, -point.mass_mean) for point in points]
    times = [None if point.time_ms is None else (point.time_ms, point.error) for point in points]
    found = []
    for point, of_flops, of_time in zip(points, flops, times, strict=True):
        fronts = ["flops"] if not _is_beaten(of_flops, flops) else []
        if of_time is not None and not _is_beaten(of_time, [time for time in times if time is not None]):
            fronts.append("time")
        found.append(dataclasses.replace(point, fronts=tuple(fronts)))
    return tuple(found)


def _is_beaten(figures: tuple[float, float], others: Sequence[tuple[float, float]]) -> bool:
    return any(a <= figures[0] and b <= figures[1] and (a, b) != figures for a, b in others)
