"""What is sampled, in which order and when it stops; never how fast anything is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tilewright.tuner.timing import Stopwatch, cache_bytes, interleaved, time_kernel, time_once


class Scripted(Stopwatch):
    """A stopwatch that reads off given times, and still runs what it times."""

    def __init__(self, times_us: Sequence[float]) -> None:
        self._times = iter(times_us)

    def batch(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        for run in runs:
            run()
        return [next(self._times) for _ in runs]


def test_samples_are_taken_and_the_median_is_theirs() -> None:
    calls: list[int] = []
    timing = time_kernel(lambda: calls.append(1), "cpu", min_rounds=5, max_rounds=9, budget_s=10.0)
    assert len(timing.times_us) == 9
    assert len(calls) == 10  # one warm-up
    assert sorted(timing.times_us)[4] == timing.median_us
    assert min(timing.times_us) > 0
    assert not timing.stopped_early


def test_the_fewest_rounds_are_taken_even_without_time() -> None:
    assert len(time_kernel(lambda: None, "cpu", min_rounds=4, max_rounds=50, budget_s=0.0).times_us) == 4


@pytest.mark.parametrize(
    ("times", "samples", "stopped"),
    [
        pytest.param([9, 120, 130, 110], 3, True, id="over the limit in all three"),
        pytest.param([9, 120, 130, 90, *[95] * 9], 9, False, id="the third sample is below"),
        pytest.param([9, 900, 910], 2, True, id="twice more than double the limit"),
        pytest.param([9, 900, 90, *[95] * 9], 9, False, id="one interrupted sample"),
        pytest.param([900, 90, *[95] * 9], 9, False, id="the warm-up does not count"),
    ],
)
def test_clearly_slow_runs_stop_early(times: list[float], samples: int, stopped: bool) -> None:
    timing = time_kernel(lambda: None, "cpu", limit_us=100.0, max_rounds=9, budget_s=10.0, stopwatch=Scripted(times))
    assert timing.stopped_early is stopped
    assert timing.times_us == tuple(times[1 : 1 + samples])


@pytest.mark.parametrize(
    ("times", "samples", "stopped"),
    [
        pytest.param([99], 1, False, id="within the limit"),
        pytest.param([101, 120], 2, True, id="short and over the limit twice"),
        pytest.param([101, 99], 2, False, id="one interrupted call"),
        pytest.param([50_000], 1, True, id="long"),
    ],
)
def test_a_slow_run_is_called_no_more_than_it_takes_to_tell(times: list[float], samples: int, stopped: bool) -> None:
    timing = time_once(lambda: None, 100.0, Scripted(times))
    assert timing.stopped_early is stopped
    assert timing.times_us == tuple(times[:samples])
    assert timing.median_us == min(times)


def test_interleaved_runs_take_turns_and_the_order_rotates() -> None:
    order: list[str] = []
    runs = [lambda n=name: order.append(n) for name in "abc"]
    times = interleaved(runs, 3, "cpu", stopwatch=Scripted([0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert times == [[1, 6, 8], [2, 4, 9], [3, 5, 7]]


def test_an_error_of_the_run_passes_through() -> None:
    def fails() -> None:
        raise RuntimeError("the kernel's own")

    with pytest.raises(RuntimeError, match="the kernel's own"):
        time_kernel(fails, "cpu")


def test_the_flush_is_larger_than_the_cache_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.tuner.timing.CPU_CACHE_LIMIT_BYTES", 2**26)  # as it is outside of tests
    size = cache_bytes(torch.device("cpu"))
    assert 2**10 <= size <= 2**25
    assert Stopwatch("cpu")._flush.nbytes >= 2 * size - 4


@pytest.mark.gpu
def test_a_gpu_run_is_timed_by_its_own_clock() -> None:
    watch = Stopwatch("cuda")
    matrix = torch.randn(2048, 2048, device="cuda")
    timing = time_kernel(lambda: matrix @ matrix, "cuda", stopwatch=watch)
    assert len(timing.times_us) >= 5
    assert min(timing.times_us) > 0
    both = interleaved([lambda: matrix @ matrix, lambda: matrix + 1], 4, "cuda", stopwatch=watch)
    assert [len(t) for t in both] == [4, 4]
