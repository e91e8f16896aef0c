"""The suite `topk`: attention that chooses its own blocks, at many lengths, beside its peers and its own stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilewright.generator.errors import WrongResult
from tilewright.runtime.selection import Selection
from tilewright.tuner.bench import OWN, Bench, BenchRow, Measurement, brief, check
from tilewright.tuner.expected import expect, sample_rows
from tilewright.tuner.peers import Ready
from tilewright.tuner.topk_expected import Representatives, expect_choice, judge_lists, verdict_on_lists
from tilewright.tuner.topk_flops import Flops, topk_flops
from tilewright.tuner.topk_oracle import ListedPairs
from tilewright.tuner.topk_own import Lists, TopkCall, TopkPeer, TopkReady
from tilewright.tuner.topk_peers import chosen_by_pytorch
from tilewright.tuner.workloads import WorkloadRow

LENGTHS = {"cpu": (1024, 2048, 4096, 8192), "cuda": tuple(512 << step for step in range(9))}
"""Tokens: on a CPU up to the public measure's, on a GPU to 128k."""

HEADS, HEAD_DIM, BLOCK_SIZE, TOP_K = 8, 64, 64, 16

UNEVEN, EVEN = (2, 4, 8, 16, 32, 64, 4, 2), (16, 17, 16, 17, 16, 17, 16, 17)
"""Budgets of the heads, with one sum: as different heads may want them, and all alike but for what does not divide."""

BUDGETS_LENGTH = 32768
"""Budgets of single heads are measured at the greatest length up to this one."""

RUNS = 8
"""How often a setting is run at least, to check, to weigh and to time it; and time grows with the length or faster."""

UNEVEN_NAME, EVEN_NAME = "tilewright_uneven", "tilewright_even"


@dataclass(frozen=True, slots=True)
class TopkBenchRow(BenchRow):
    """One implementation at one length. `tflops` counts the chosen pairs, 4 head_dim operations each, of whoever.

    block_size, top_k: of the call; top_k is the mean of the heads' budgets. dense_share: the multiplications and
    additions that it makes, choosing included, over dense attention's. own_ratio: its time over tilewright's whole.
    launches: kernels that a call starts.
    """

    block_size: int | None = None
    top_k: float | None = None
    dense_share: float | None = None
    own_ratio: float | None = None
    launches: int | None = None


@dataclass(frozen=True, slots=True)
class TopkRow:
    """A call to time: `budgets` blocks for each head of standard normal inputs. tensors: heads and so on."""

    tensors: WorkloadRow
    budgets: tuple[int, ...]
    block_size: int = BLOCK_SIZE

    @property
    def name(self) -> str:
        return self.tensors.name

    @property
    def selection(self) -> Selection:
        num_blocks = -(-self.tensors.seqlen_kv // self.block_size)
        return Selection(self.block_size, min(max(self.budgets), num_blocks), self.tensors.num_heads)

    def call(self, device: torch.device) -> TopkCall:
        query, key, value, _ = self.tensors.make_inputs(device)
        selection = self.selection
        budgets = tuple(min(budget, selection.num_blocks(key.shape[2])) for budget in self.budgets)
        return TopkCall(query, key, value, selection, budgets, self.tensors.head_dim**-0.5)


def topk_rows(kind: str, lengths: Sequence[int] = ()) -> tuple[TopkRow, ...]:
    """The suite's rows on `cpu` or `cuda`, shortest first."""
    return tuple(
        TopkRow(_tensors(f"topk N{length}", kind, length), (TOP_K,) * HEADS) for length in lengths or LENGTHS[kind]
    )


def budget_rows(kind: str, lengths: Sequence[int] = ()) -> tuple[TopkRow, TopkRow] | None:
    """Uneven budgets and even ones of the same sum, in this order; None where all lengths are too short for them."""
    fit = [n for n in lengths or LENGTHS[kind] if max(UNEVEN) * BLOCK_SIZE <= n <= BUDGETS_LENGTH]
    if not fit:
        return None
    tensors = _tensors(f"topk N{max(fit)} budgets", kind, max(fit))
    return TopkRow(tensors, UNEVEN), TopkRow(tensors, EVEN)


def _tensors(name: str, kind: str, length: int) -> WorkloadRow:
    return WorkloadRow(name, "float32" if kind == "cpu" else "bfloat16", HEAD_DIM, HEADS, length)


def bench_row(
    bench: Bench,
    row: TopkRow,
    peers: Sequence[TopkPeer],
    *,
    named: frozenset[str] = frozenset(),
    earlier: Sequence[TopkBenchRow] = (),
) -> Iterator[TopkBenchRow]:
    """A row for each of the peers, in order, as they are measured; `Bench.rows` for this suite.

    named: peers that the user asked for; those that cannot answer are rows that say why, others are left out. Failures
    are rows with `error`. Ratios are to tilewright's row, where it came before. earlier: rows of shorter lengths, from
    which it is seen that a peer would take longer than `peer_seconds`, which its row then says.
    """
    tensors = row.tensors
    blank = TopkBenchRow(
        row.name,
        "",
        bench.device_name,
        seqlen_q=tensors.seqlen_q,
        seqlen_kv=tensors.seqlen_kv,
        ceiling_tflops=bench.ceiling(tensors.dtype),
        block_size=row.block_size,
        top_k=sum(row.budgets) / len(row.budgets),
    )
    try:
        call = row.call(bench.device)
        lists = None if call.is_dense else chosen_by_pytorch(call)  # whatever tilewright's own choice comes to
        flops = topk_flops(call.query, call.key, lists, call.selection)
        del lists
    except RuntimeError as error:  # no memory for this row; the next may be smaller
        bench.clean_up()
        text = f"the inputs cannot be made: {brief(error)}"
        yield from (dataclasses.replace(blank, implementation=peer.name, error=text) for peer in peers)
        return
    density = flops.attending / (4 * call.query.numel() * tensors.seqlen_kv)
    own_ms: float | None = None
    for peer in peers:
        nothing = dataclasses.replace(blank, implementation=peer.name, density=density)
        slow = _too_slow(bench, tensors.seqlen_q, peer, earlier)
        if slow is not None:
            yield dataclasses.replace(nothing, error=slow)
            continue
        try:
            reason = peer.unfit(call)
        except Exception as error:  # whatever a peer raises is its row's error
            reason = brief(error)
        if reason is not None:
            if peer.name in named:
                yield dataclasses.replace(nothing, error=reason)
            continue
        bench.started(row.name, peer.name)
        found = bench.measure(partial(peer.settings, call), partial(judge, call, peer), _out_bytes(call, peer))
        if isinstance(found, str):
            yield dataclasses.replace(nothing, error=found)
            continue
        if peer.name == OWN:
            own_ms = found.time_us / 1e3
        yield _measured(nothing, peer, found, flops, own_ms)


def _too_slow(bench: Bench, seqlen: int, peer: TopkPeer, earlier: Sequence[TopkBenchRow]) -> str | None:
    """Why a peer is not begun, if one setting alone would take longer than the limit of `bench`."""
    longest = max(
        (row for row in earlier if row.implementation == peer.name and row.time_ms is not None),
        key=lambda row: row.seqlen_q or 0,
        default=None,
    )
    if bench.peer_seconds is None or longest is None or peer.name == OWN:
        return None
    assert longest.time_ms is not None
    assert longest.seqlen_q is not None
    least = RUNS * longest.time_ms / 1e3 * seqlen / longest.seqlen_q
    if least <= bench.peer_seconds:
        return None
    return (
        f"left out: it took {longest.time_ms:.0f} ms at {longest.seqlen_q} tokens, so that checking and timing it would"
        f" take {least:.0f} s or more"
    )


def _measured(
    row: TopkBenchRow, peer: TopkPeer, found: Measurement, flops: Flops, own_ms: float | None
) -> TopkBenchRow:
    counted = flops.choosing if peer.computes == "choice" else flops.attending
    tflops, ceiling, time_ms = counted / found.time_us / 1e6, row.ceiling_tflops, found.time_us / 1e3
    return dataclasses.replace(
        row,
        time_ms=time_ms,
        tflops=tflops,
        ceiling_percent=None if ceiling is None else 100 * tflops / ceiling,
        extra_mib=None if found.extra_bytes is None else found.extra_bytes / 2**20,
        max_error=found.max_error,
        variant=found.variant,
        dense_share=_share(flops, peer),
        own_ratio=None if own_ms is None else time_ms / own_ms,
        launches=found.launches,
    )


def _share(flops: Flops, peer: TopkPeer) -> float:
    """What the implementation computes, over dense attention."""
    if peer.name == "naive":
        return (flops.choosing + flops.dense) / flops.dense
    parts = {
        "topk": flops.choosing + flops.attending,
        "choice": flops.choosing,
        "attention": flops.attending,
        "dense": flops.dense,
        "window": flops.attending,
    }
    return parts[peer.computes] / flops.dense


def _out_bytes(call: TopkCall, peer: TopkPeer) -> int:
    if peer.computes != "choice":
        return call.query.numel() * call.query.itemsize
    lists = call.query.shape[0] * call.selection.num_choosers * call.selection.num_groups(call.query.shape[2])
    return 4 * lists * (call.selection.list_width + 1)


def judge(call: TopkCall, peer: TopkPeer, ready: Ready) -> float | None:
    """The largest error of a prepared call's output over sampled queries; None of one that has none but lists.

    An output is held against fp64 over the blocks that the implementation chose itself, and that choice against fp64
    scores, so that of two blocks that score all but the same either is right. Raises `WrongResult`.
    """
    batch, num_heads, seqlen_q, head_dim = call.query.shape
    rows = sample_rows(batch, num_heads, seqlen_q, call.key.shape[2], head_dim, call.query.device.type)
    lists = ready.lists() if isinstance(ready, TopkReady) and ready.lists is not None else None
    if lists is not None:
        check_choice(call, lists, rows, is_rounded=peer.is_rounded)
    if peer.computes == "choice":
        return None
    if lists is not None:
        mask: Any = ListedPairs(*lists, call.selection)
    else:
        mask = call.window.mask if peer.computes == "window" else call.dense.mask
    return check(ready.run(), expect(call.query, call.key, call.value, mask, call.scale, rows))


def check_choice(call: TopkCall, lists: Lists, rows: Sequence[int], *, is_rounded: bool) -> None:
    """Raise `WrongResult` unless these query rows' groups chose as many blocks as they should, and the best ones.

    lists: entries in any order, -1 for none. is_rounded: scores may be off by a rounding to the tensors' dtype.
    """
    groups = sorted({row // call.selection.query_group for row in rows})
    budgets = torch.tensor(call.budgets, dtype=torch.int32, device=call.query.device)
    expected = expect_choice(call.query, call.key, budgets, call.selection, groups=groups)
    if is_rounded and call.query.dtype != torch.float32:
        means, doubt = expected.askers.means, expected.askers.doubt
        # A relative error of each product bounds that of their sum.
        rounding = torch.finfo(means.dtype).eps * means.abs().double()
        expected = dataclasses.replace(
            expected, askers=Representatives(means, rounding if doubt is None else doubt + rounding)
        )
    indices, counts = lists
    ascending = torch.where(indices < 0, call.num_blocks, indices).sort(dim=-1).values
    stats = judge_lists(torch.where(ascending == call.num_blocks, -1, ascending), counts, expected)
    reason = verdict_on_lists(stats.tolist()).reason
    if reason is not None:
        raise WrongResult(f"the choice is wrong: {reason}")
