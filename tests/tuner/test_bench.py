"""A benchmark's rows: whole, honest about failures, counted over active pairs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tilewright.generator.errors import InvalidInput, WrongResult
from tilewright.runtime import masks
from tilewright.tuner.active_pairs import active_pairs, row_active_pairs
from tilewright.tuner.bench import Bench, BenchRow, bench_device, check, own
from tilewright.tuner.ceiling import matmul_tflops, matrix_ceiling
from tilewright.tuner.expected import expect
from tilewright.tuner.memory import peak_bytes, tensor_bytes
from tilewright.tuner.peers import ANOTHER_FUNCTION, Call, Peer, Ready, Setting, all_peers
from tilewright.tuner.timing import Stopwatch
from tilewright.tuner.workloads import WorkloadRow

KEYS = {
    *("workload", "implementation", "device", "time_ms", "tflops", "extra_mib", "max_error", "variant", "error"),
    *("seqlen_q", "seqlen_kv", "density", "ceiling_tflops", "ceiling_percent", "beside_ratio"),
}
ROW = WorkloadRow("small", "float32", 32, 2, 96, mask="sliding_window(8, 8) | global_stride(32)")


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(torch.device("cpu"))


def _peer(*settings: Setting, unfit: str | None = None) -> Peer:
    return Peer("stub", lambda call: unfit, lambda call: iter(settings))


def _masked(call: Call) -> Tensor:
    assert call.mask is not None
    dense = call.mask.dense(1, 2, 96, 96)
    return torch.nn.functional.scaled_dot_product_attention(
        call.query, call.key, call.value, attn_mask=dense, scale=call.scale
    )


def test_rows_of_our_own_and_of_peers_have_every_figure(bench: Bench) -> None:
    peers = all_peers()
    rows = list(bench.rows(ROW, [own(), peers["sdpa_dense"], peers["sdpa_masked"]]))
    assert [row.implementation for row in rows] == ["tilewright", "sdpa_dense", "sdpa_masked"]
    for row in rows:
        values = row.to_dict()
        assert set(values) == KEYS
        assert row.error is None
        assert row.time_ms is not None
        assert row.time_ms > 0
        assert row.max_error is not None
        assert row.max_error < 1e-5
        # active pairs only, for the dense implementation too
        pairs = row_active_pairs(ROW, "cpu")
        assert row.tflops == pytest.approx(4 * 32 * pairs / row.time_ms / 1e9)
        assert (row.seqlen_q, row.seqlen_kv, row.density) == (96, 96, pairs / (2 * 96 * 96))
        assert row.ceiling_tflops is row.ceiling_percent is row.beside_ratio is None
    assert "forward_cpu/" in str(rows[0].variant)
    assert str(rows[1].variant).startswith(ANOTHER_FUNCTION)
    assert [row.is_another_function for row in rows] == [False, True, False]


def test_rates_are_told_as_a_percentage_of_a_matrix_product_s(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = matmul_tflops(torch.device("cpu"), torch.float32, Stopwatch("cpu"), 64)
    assert 0 < measured < 100
    for dtype in (torch.float32, torch.bfloat16):
        assert matrix_ceiling(torch.device("cpu"), dtype, Stopwatch("cpu")) is None
    ceilings: list[str] = []

    def ceiling(device: torch.device, dtype: torch.dtype, stopwatch: Stopwatch) -> float:
        ceilings.append(str(dtype))
        return measured

    monkeypatch.setattr("tilewright.tuner.bench.matrix_ceiling", ceiling)
    fresh = Bench(torch.device("cpu"))
    rows = [row for _ in range(2) for row in fresh.rows(ROW, [own(), _peer(unfit="no")], named=True)]
    assert ceilings == ["torch.float32"], "once in a run"
    assert [row.ceiling_tflops for row in rows] == [measured] * 4
    assert rows[1].ceiling_percent is None
    for row in rows[::2]:
        assert row.tflops is not None
        assert row.ceiling_percent == pytest.approx(100 * row.tflops / measured)


def test_a_peer_that_takes_too_long_begins_no_further_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def settings(call: Call) -> Iterator[Setting]:
        def make() -> Ready:
            nonlocal now
            now += 10
            out = _masked(call)
            return Ready(lambda: out)

        return iter([Setting(name, make) for name in ("first", "second", "third")])

    monkeypatch.setattr("tilewright.tuner.bench.time.monotonic", lambda: now)
    (row,) = Bench(torch.device("cpu"), peer_seconds=15).rows(ROW, [Peer("stub", lambda call: None, settings)])
    assert str(row.variant).endswith(", best of the first 2")
    assert now == 20
    (row,) = Bench(torch.device("cpu"), peer_seconds=1).rows(ROW, [Peer("stub", lambda call: None, settings)])
    assert row.variant == "first, best of the first 1"
    (row,) = Bench(torch.device("cpu")).rows(ROW, [Peer("stub", lambda call: None, settings)])
    assert row.variant in ("first", "second", "third")


def test_the_fastest_right_setting_counts(bench: Bench) -> None:
    def settings(call: Call) -> Iterator[Setting]:
        def slow() -> Tensor:
            torch.randn(1500, 1500) @ torch.randn(1500, 1500)
            return _masked(call)

        def broken() -> Ready:
            raise RuntimeError("no such tile\nand more")

        right = _masked(call)
        yield Setting("slow", lambda: Ready(slow))
        yield Setting("broken", broken)
        yield Setting("wrong", lambda: Ready(lambda: call.query))
        yield Setting("fast", lambda: Ready(lambda: right))

    (row,) = bench.rows(ROW, [Peer("stub", lambda call: None, settings)])
    assert row.variant == "fast"
    assert row.error is None


def test_a_peer_without_a_right_setting_is_a_row_with_its_failure(bench: Bench) -> None:
    def broken() -> Ready:
        raise RuntimeError("\nno such tile\nand more")

    def wrong() -> Ready:
        return Ready(lambda: torch.zeros(1, 2, 96, 32))

    def nan() -> Ready:
        return Ready(lambda: torch.full((1, 2, 96, 32), torch.nan))

    def rows(*makes: object) -> list[BenchRow]:
        return [row for make in makes for row in bench.rows(ROW, [_peer(Setting("only", make))])]  # type: ignore[arg-type]

    errors = [str(row.error) for row in rows(broken, wrong, nan)]
    assert errors[0] == "only: RuntimeError: no such tile"
    assert all(text.startswith("only: wrong: the largest error is") for text in errors[1:])

    def endless(call: Call) -> Iterator[Setting]:
        raise MemoryError("no room for the lists")
        yield

    (row,) = bench.rows(ROW, [Peer("stub", lambda call: None, endless)])
    assert row.error == "MemoryError: no room for the lists"
    assert row.time_ms is row.tflops is row.max_error is None


def test_a_peer_that_does_not_apply_is_a_row_only_when_named(bench: Bench) -> None:
    peer = _peer(unfit="it takes no mask")
    assert list(bench.rows(ROW, [peer])) == []
    (row,) = bench.rows(ROW, [peer], named=True)
    assert row.error == "it takes no mask"


def test_a_row_without_memory_for_its_inputs_does_not_end_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: object, **named: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "randn", no_memory)
        rows = list(bench.rows(ROW, [own(), _peer()]))
    assert [row.implementation for row in rows] == ["tilewright", "stub"]
    assert all("the inputs cannot be made: OutOfMemoryError: CUDA out of memory" in str(row.error) for row in rows)
    monkeypatch.setattr("tilewright.tuner.bench.expect", no_memory)
    (row,) = bench.rows(ROW, [_peer()])
    assert "the fp64 answer cannot be made" in str(row.error)


def test_rows_without_an_active_key_are_not_judged() -> None:
    query = torch.randn(1, 1, 4, 16)
    mask = masks.token_mask(torch.tensor([[True, False, True, True]] * 3 + [[False] * 4]))
    expected = expect(query, query, query, mask, 0.25)
    out = expected.out.float()
    out[:, :, 3] = torch.nan
    assert check(out, expected) < 1e-6
    out[:, :, 0] += 0.5
    with pytest.raises(WrongResult, match=r"largest error is 0\.5"):
        check(out, expected)
    with pytest.raises(WrongResult, match="shape"):
        check(out[:, :, :3], expected)


@pytest.mark.parametrize("seqlen_kv", [50, 130])
def test_active_pairs_are_counted_exactly(seqlen_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.tuner.active_pairs.CHUNK_PAIRS", 1000)  # many chunks
    active = torch.rand(3, 1, 5, -(-seqlen_kv // 16)) < 0.4
    mask = masks.causal() & (masks.block_mask(active, (16, 16)) | masks.global_stride(7))
    expected = mask.dense(3, 4, 70, seqlen_kv).expand(3, 4, 70, seqlen_kv).sum()
    assert active_pairs(mask, 3, 4, 70, seqlen_kv, "cpu") == expected
    assert active_pairs(None, 3, 4, 70, seqlen_kv, "cpu") == 3 * 4 * 70 * seqlen_kv


def test_the_peak_of_a_run_is_what_it_touches() -> None:
    def run() -> Tensor:
        torch.ones(16 << 20)  # 64 MiB, gone when the result is there
        return torch.ones(1 << 20)

    peak = peak_bytes(run, torch.device("cpu"))
    assert peak is not None
    assert 60 << 20 <= peak <= 80 << 20
    whole = torch.ones(100)
    assert tensor_bytes(whole, whole[10:], None, torch.ones(3)) == 412


def test_targets_are_named() -> None:
    assert bench_device("cpu") == torch.device("cpu")
    with pytest.raises(InvalidInput, match=r"auto, cpu, cuda or cuda:INDEX; got 'gpu'"):
        bench_device("gpu")
