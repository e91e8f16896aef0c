"""The suite `topk`: every implementation judged by its own choice, every figure of a row, work counted exactly."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tilewright.generator.errors import InvalidInput, WrongResult
from tilewright.runtime.selection import Selection
from tilewright.tuner.bench import Bench
from tilewright.tuner.launches import kernel_launches
from tilewright.tuner.peers import ANOTHER, Setting, names_another_function
from tilewright.tuner.topk_bench import (
    EVEN,
    LENGTHS,
    UNEVEN,
    TopkBenchRow,
    TopkRow,
    bench_row,
    budget_rows,
    check_choice,
    judge,
    topk_rows,
)
from tilewright.tuner.topk_flops import chosen_pairs, topk_flops
from tilewright.tuner.topk_oracle import ListedPairs, select_blocks_oracle
from tilewright.tuner.topk_own import TopkCall, TopkPeer, TopkReady, own_parts
from tilewright.tuner.topk_peers import all_topk_peers, topk_peers_named
from tilewright.tuner.workloads import WorkloadRow

ROW = TopkRow(WorkloadRow("small", "float32", 32, 2, 200), (3, 3), block_size=16)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(torch.device("cpu"), counts_launches=True)


def make_call(
    seqlen: int = 100,
    heads: tuple[int, int] = (2, 2),
    budgets: tuple[int, ...] = (2, 2),
    *,
    causal: bool = False,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
) -> TopkCall:
    generator = torch.Generator().manual_seed(seqlen)
    query, key, value = (
        torch.randn(2, count, seqlen, 32, generator=generator).to(dtype) for count in (heads[0], heads[1], heads[1])
    )
    selection = Selection(block_size, max(budgets), heads[0], causal=causal)
    return TopkCall(query, key, value, selection, budgets, 0.2)


CALLS = {
    "even": {},
    "ragged, causal": {"seqlen": 101, "causal": True},
    "budgets": {"seqlen": 90, "budgets": (1, 4)},
    "shared keys, causal, budgets": {"heads": (4, 2), "budgets": (1, 2, 3, 4), "causal": True},
    "16 bits": {"dtype": torch.bfloat16, "budgets": (3, 3)},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("peer_name", ["tilewright", "tilewright_stage1", "unfused", "naive"])
def test_every_implementation_computes_what_it_says(name: str, peer_name: str) -> None:
    call = make_call(**CALLS[name])  # type: ignore[arg-type]
    peer = {**own_parts(), **all_topk_peers()}[peer_name]
    assert peer.unfit(call) is None
    settings = list(peer.settings(call))
    assert len({setting.name for setting in settings}) == len(settings) >= 1
    for setting in settings:
        ready = setting.make()
        assert isinstance(ready, TopkReady)
        error = judge(call, peer, ready)
        if peer.computes == "choice":
            assert error is None
        else:
            assert error is not None
            assert error < (2e-2 if call.query.dtype == torch.bfloat16 else 1e-5)


def _stub(call: TopkCall, lists: tuple[Tensor, Tensor], out: Tensor, *, is_rounded: bool = False) -> float | None:
    peer = TopkPeer("stub", "topk", lambda call: None, lambda call: iter(()), is_rounded=is_rounded)
    return judge(call, peer, TopkReady(lambda: out, 0, lambda: lists))


def test_a_wrong_choice_and_a_wrong_output_are_seen() -> None:
    call = make_call(seqlen=160)
    part = own_parts()["tilewright"]
    (setting,) = part.settings(call)
    out, (indices, counts) = setting.make().run(), call.choose()
    assert _stub(call, (indices, counts), out) is not None
    assert _stub(call, (indices.flip(3), counts), out) is not None, "in any order"

    other = indices.clone()
    worst = select_blocks_oracle(call.query, call.key, torch.tensor([2, 2]), call.selection).scores.argmin(-1)
    other[0, 0, 5, 0] = worst[0, 0, 5]
    with pytest.raises(WrongResult, match="the choice is wrong: a block is chosen over one whose score is higher"):
        _stub(call, (other, counts), out)
    with pytest.raises(WrongResult, match="a block is chosen over"):
        _stub(call, (other, counts), out, is_rounded=True)
    fewer = indices.clone()
    fewer[0, 0, 5, 1] = -1
    with pytest.raises(WrongResult, match="the choice is wrong"):
        _stub(call, (fewer, counts), out)
    off = out.clone()
    off[1, 1, 7] += 0.5
    with pytest.raises(WrongResult, match=r"largest error is 0\.5"):
        _stub(call, (indices, counts), off)


def test_only_an_implementation_that_ranks_rounded_scores_may_be_a_rounding_off() -> None:
    call = make_call(seqlen=64, heads=(1, 1), budgets=(1,), dtype=torch.bfloat16)
    # Two blocks whose scores for every query differ by a third of a rounding to bfloat16.
    call.query[:], call.key[:] = 0.0, 0.0
    call.query[..., :2] = 1.0
    call.key[:, :, 16:32, 0], call.key[:, :, 32:48, 0] = 4.0, 4.0
    call.key[:, :, 32:48, 1] = 0.01
    lists = torch.full((2, 1, 64, 1), 1, dtype=torch.int32), torch.ones(2, 1, 64, dtype=torch.int32)
    rows = list(range(64))
    check_choice(call, lists, rows, is_rounded=True)
    with pytest.raises(WrongResult, match="a block is chosen over"):
        check_choice(call, lists, rows, is_rounded=False)
    with pytest.raises(WrongResult, match="a block is chosen over"):
        check_choice(call, (lists[0] * 0, lists[1]), rows, is_rounded=True)


def test_a_row_has_every_figure(bench: Bench) -> None:
    names = ["tilewright", "tilewright_stage1", "tilewright_stage2", "unfused", "naive", "sdpa_dense"]
    known = {**own_parts(), **all_topk_peers()}
    rows = {row.implementation: row for row in bench_row(bench, ROW, [known[name] for name in names])}
    assert list(rows) == names
    flops = 4 * 32 * 2 * 200 * 200
    choosing = (2 * 32 * 2 * 200 * 13 + 2 * 200 * 32) / flops
    own = rows["tilewright"]
    for row in rows.values():
        assert row.error is None
        assert row.time_ms is not None
        assert own.time_ms is not None
        assert row.own_ratio == pytest.approx(row.time_ms / own.time_ms)
        assert (row.seqlen_q, row.seqlen_kv, row.block_size, row.top_k, row.launches) == (200, 200, 16, 3, None)
        assert row.density == own.density
    # The last block has 8 tokens: a query takes 48 keys, or 40 where that one is in.
    assert own.density is not None
    assert 40 / 200 < own.density < 48 / 200
    shares = {name: row.dense_share for name, row in rows.items()}
    assert shares == pytest.approx(
        {
            "tilewright": choosing + own.density,
            "tilewright_stage1": choosing,
            "tilewright_stage2": own.density,
            "unfused": choosing + own.density,
            "naive": 1 + choosing,
            "sdpa_dense": 1.0,
        }
    )
    marked = [name for name, row in rows.items() if row.is_another_function]
    assert marked == ["tilewright_stage1", "tilewright_stage2", "sdpa_dense"]
    assert rows["tilewright_stage1"].max_error is None
    assert all(rows[name].max_error is not None for name in names if name != "tilewright_stage1")


def test_where_every_block_is_taken_dense_attention_is_the_function(bench: Bench) -> None:
    row = dataclasses.replace(ROW, budgets=(13, 20))
    everyone = [*own_parts().values(), *all_topk_peers().values()]
    rows = list(bench_row(bench, row, everyone))
    assert {r.implementation for r in rows} == {"tilewright", "sdpa_flash", "sdpa_dense"}
    assert all(r.dense_share == 1 and r.density == 1 and not r.is_another_function for r in rows)
    (told,) = bench_row(bench, row, [everyone[1]], named=frozenset({"tilewright_stage1"}))
    assert told.error == "the budgets take every block, so nothing is chosen"


def test_failures_are_rows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: TopkCall) -> Iterator[Setting]:
        raise ValueError("no such tile")
        yield

    def unfit(call: TopkCall) -> str | None:
        raise RuntimeError("no device")

    peers = [
        TopkPeer("stub", "topk", lambda call: None, broken),
        TopkPeer("other", "topk", unfit, broken),
    ]
    rows = list(bench_row(bench, ROW, peers, named=frozenset({"other"})))
    assert [row.error for row in rows] == ["ValueError: no such tile", "RuntimeError: no device"]

    def no_memory(*arguments: object, **named: object) -> Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 9 TiB")

    monkeypatch.setattr(torch, "randn", no_memory)
    (row,) = bench_row(bench, ROW, peers[:1])
    assert "the inputs cannot be made: OutOfMemoryError" in str(row.error)


def test_a_peer_that_would_take_too_long_is_not_begun() -> None:
    def settings(call: TopkCall) -> Iterator[Setting]:
        yield Setting("right", lambda: TopkReady(lambda: call.query))

    slow = TopkPeer("slow", "dense", lambda call: None, settings)
    own = dataclasses.replace(slow, name="tilewright")
    bench = Bench(torch.device("cpu"), peer_seconds=10)
    earlier = [
        TopkBenchRow("N50", name, "CPU", time_ms, seqlen_q=length)
        for name in ("slow", "tilewright")
        for length, time_ms in ((50, 2.0), (100, 700.0), (150, None))
    ]
    rows = list(bench_row(bench, ROW, [own, slow], earlier=earlier))
    assert "left out" not in str(rows[0].error)
    assert rows[1].error == (
        "left out: it took 700 ms at 100 tokens, so that checking and timing it would take 11 s or more"
    )
    (begun,) = bench_row(bench, ROW, [slow], earlier=earlier[:1])
    assert str(begun.error).startswith("right: wrong: ")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_kv", "group", "choosers"), [(50, 50, 1, 4), (37, 90, 8, 2), (90, 37, 8, 4), (1, 64, 3, 2)]
)
def test_work_is_counted_from_the_pairs_themselves(
    seqlen_q: int, seqlen_kv: int, group: int, choosers: int, causal: bool
) -> None:
    query, key = torch.randn(2, 4, seqlen_q, 16), torch.randn(2, 2, seqlen_kv, 16)
    selection = Selection(12, 4, choosers, group, causal=causal)
    choice = select_blocks_oracle(query, key, torch.tensor([4, 3, 4, 2])[:choosers], selection)
    indices = torch.where(choice.indices < 0, 99, choice.indices)  # past a count anything may be
    pairs = ListedPairs(choice.indices, choice.counts, selection).dense(2, 4, seqlen_q, seqlen_kv).sum()
    assert chosen_pairs(indices, choice.counts, selection, seqlen_q, seqlen_kv) * (4 // choosers) == pairs
    flops = topk_flops(query, key, (indices, choice.counts), selection)
    position = torch.arange(seqlen_q).unsqueeze(1) + seqlen_kv - seqlen_q
    seen = torch.arange(seqlen_kv) <= position if causal else torch.ones(seqlen_q, seqlen_kv)
    assert flops.dense == 4 * 16 * 8 * seen.sum()
    assert flops.attending == 4 * 16 * pairs
    last = torch.tensor([min((g + 1) * group, seqlen_q) - 1 for g in range(selection.num_groups(seqlen_q))])
    starts = torch.arange(0, seqlen_kv, 12)
    scored = (starts <= last.unsqueeze(1) + seqlen_kv - seqlen_q).sum() if causal else len(last) * len(starts)
    averaged = key.numel() + (query.numel() if group > 1 or choosers != 4 else 0)
    assert flops.choosing == 2 * 16 * 2 * choosers * scored + averaged
    assert topk_flops(query, key, None, selection).share == 1


def test_rows_are_the_public_measure_s() -> None:
    rows = topk_rows("cuda")
    assert [row.tensors.seqlen_q for row in rows] == [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
    assert {(r.tensors.dtype, r.tensors.batch, r.tensors.num_heads, r.tensors.head_dim) for r in rows} == {
        ("bfloat16", 1, 8, 64)
    }
    assert {(row.block_size, row.budgets) for row in rows} == {(64, (16,) * 8)}
    cpu = topk_rows("cpu")
    assert (max(LENGTHS["cpu"]), cpu[-1].tensors.seqlen_q, cpu[-1].tensors.dtype) == (8192, 8192, "float32")
    assert sum(UNEVEN) == sum(EVEN) == 132
    pair = budget_rows("cuda")
    assert pair is not None
    assert [row.name for row in pair] == ["topk N32768 budgets"] * 2
    assert budget_rows("cpu", (1024, 2048)) is None, "64 blocks do not fit"


def test_variants_that_name_another_function_are_known() -> None:
    for text in (f"dense: {ANOTHER}", f"window: {ANOTHER}, 64x64", f"stage 1 alone: {ANOTHER}, select_cpu/selected"):
        assert names_another_function(text)
    for text in ("", "64x64, window", "full", f"64x64, not: {ANOTHER}"):
        assert not names_another_function(text)


def test_peers_are_named() -> None:
    assert [peer.name for peer in topk_peers_named("sdpa_dense, tilewright_stage2")] == [
        "sdpa_dense",
        "tilewright_stage2",
    ]
    assert topk_peers_named("none") == []
    with pytest.raises(InvalidInput, match=r"peers must be among tilewright_stage1, .*flex_window, or none; got flax"):
        topk_peers_named("flax")


def test_a_call_on_the_cpu_starts_no_kernels() -> None:
    assert kernel_launches(lambda: torch.ones(3), torch.device("cpu")) is None


INTERPRETED = """
import torch
from tilewright.tuner.topk_triton import one_query_attention
torch.manual_seed(0)
for causal in (False, True):
    query, key, value = torch.randn(2, 4, 9, 32), torch.randn(2, 2, 30, 32), torch.randn(2, 2, 30, 32)
    lists = torch.rand(2, 4, 9, 3).argsort(-1).int()
    lists[..., 2] = -1
    lists[0, 0, 0] = -1
    out = one_query_attention(
        query, key, value, lists, block_size=12, causal=causal, scale=0.2, keys_at_once=8, num_warps=1
    )
    blocks = torch.zeros(2, 4, 9, 4, dtype=torch.bool).scatter_(3, (lists % 4).long(), True)
    mask = blocks[..., :3].repeat_interleave(12, 3)[..., :30]
    if causal:
        mask &= torch.arange(30) <= torch.arange(9)[:, None] + 21
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = (query @ key.mT * 0.2).masked_fill(~mask, -torch.inf)
    expected = scores.softmax(-1).nan_to_num(0) @ value
    assert (out - expected).abs().max() < 1e-5, (out - expected).abs().max()
"""


def test_the_triton_kernel_is_right_under_triton_s_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
