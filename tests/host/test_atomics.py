"""Atomic operations and waits between blocks on the host: what runs must be right, and what nothing orders is named."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tilewright.tuner.report_lines import located

SOURCE = Path(__file__).with_name("atomics_probe.cu")
KERNELS = re.findall(r"^    \{(\w+(?:<\w+>)?), \d+(?:, true)?\},", SOURCE.read_text(), re.MULTILINE)
THREADS, BLOCKS = 64, 6
LAUNCH_FAILURE = 719
READ, WRITE_FIRST = 0, 2


class Memory:
    """What a launch of the probe is given: watched, and not to be read before it was written, the source aside."""

    def __init__(self, library: ctypes.CDLL, counters: int = 4) -> None:
        self.counters = torch.full((counters,), -1, dtype=torch.int32)
        self.partial = torch.full((BLOCKS * THREADS,), torch.nan)
        self.source = torch.arange(float(BLOCKS * THREADS))
        self.target = torch.full((BLOCKS * THREADS,), torch.nan)
        library.tilewright_host_forget()
        for name in ("counters", "partial", "source", "target"):
            self._watch(library, name, getattr(self, name), READ if name == "source" else WRITE_FIRST)

    @staticmethod
    def _watch(library: ctypes.CDLL, name: str, tensor: Tensor, access: int) -> None:
        one = ctypes.c_int64 * 1
        library.tilewright_host_watch(
            name.encode(),
            ctypes.c_void_p(tensor.data_ptr()),
            ctypes.c_int64(tensor.element_size()),
            1,
            one(tensor.numel()),
            one(1),
            access,
        )

    def pointers(self) -> list[ctypes.c_void_p]:
        tensors = (self.counters, self.partial, self.source, self.target)
        return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


@pytest.fixture(scope="module")
def library(host_library: Callable[[Path], Path]) -> ctypes.CDLL:
    library = ctypes.CDLL(str(host_library(SOURCE)))
    library.error_name.restype = ctypes.c_char_p
    return library


def launch(library: ctypes.CDLL, name: str, *, seed: int = 0, zeroed: bool = True) -> tuple[int, str, Memory]:
    memory = Memory(library)
    library.tilewright_host_seed(ctypes.c_uint64(seed))
    code = library.probe(KERNELS.index(name), int(zeroed), *memory.pointers())
    return code, located(library.error_name(code).decode(), Path(library._name)), memory


def kinds() -> Tensor:
    """How many threads there are of each thread's kind."""
    kind = torch.arange(THREADS) % 3
    return torch.bincount(kind)[kind].float()


RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "merged<NONE>": lambda source: source.view(-1, 2, THREADS)[:2].sum(1).view(-1),
    "passed_on<false>": lambda source: source.view(BLOCKS, THREADS)[:4].cumsum(0).view(-1),
    "all_meet<RIGHT>": lambda source: source.view(BLOCKS, THREADS)[[2, 0, 1]].reshape(-1),
    "all_meet<POLLED>": lambda source: source.view(BLOCKS, THREADS)[[2, 0, 1]].reshape(-1),
    "waited_within<false>": lambda source: torch.full((THREADS,), 3.0),
    "counted<ALL>": lambda source: kinds(),
    "counted_in_turn": lambda source: torch.where(torch.arange(THREADS) % 32 == 5, 13.0, 7.0),
    "through_global<false>": lambda source: source[:THREADS].flip(0),
}
"""Kernel, and what it makes of the source."""

UNACQUIRED = (
    r"race for byte \d+ of partial: this thread reads what thread \d+ of block \d wrote .* has acquired nothing"
)
SHARED = r"race for byte \d+ of shared memory: this thread (reads what .* added to|adds to what .* (wrote|read))"

FAULTS = [
    ("merged<NO_RELEASE>", UNACQUIRED, "the other's"),
    ("merged<NO_ACQUIRE>", UNACQUIRED, "the other's"),
    ("merged<NO_BARRIER_BEFORE>", UNACQUIRED, "the other's"),
    ("merged<NO_BARRIER_AFTER>", "race for byte 0 of shared memory", "*before"),
    ("merged<PLAIN_COUNTER>", "race for byte 0 of counters: this thread reads what thread 63 of block 0", "[pair]++"),
    ("passed_on<true>", "no other thread of block 0 of 4 can go on", "the wait"),
    ("all_meet<RELAXED>", UNACQUIRED, "the next one's"),
    ("all_meet<NOT_ACQUIRED>", UNACQUIRED, "the next one's"),
    ("all_meet<ONE_TOO_MANY>", "no thread of the 3 of 3 blocks that are not done can go on", "the wait"),
    ("waited_within<true>", "waits for a value that never comes", "the wait"),
    ("counted<NO_ZERO>", r"adds to byte \d+ of shared memory, which nobody wrote", "the count"),
    ("counted<NO_FIRST_BARRIER>", r"(race for|adds to) byte \d+ of shared memory", "the count|the start"),
    ("counted<NO_LAST_BARRIER>", SHARED, "counts[kind] + early|the count"),
    ("counted<READ_BEFORE>", SHARED, "counts[kind]|the count"),
    ("through_global<true>", r"(race for|reads) byte \d+ of partial", "args.partial["),
    (
        "written_by_two_blocks",
        r"byte \d+ of partial: this thread writes what thread \d+ of block 0 wrote",
        "written_by_two",
    ),
    ("out_of_bounds", "writes 4 bytes at byte -4 of counters", "args.counters - 1"),
    ("shared_as_global", "for global memory, on shared memory", "reinterpret_cast<unsigned*>(smem), 1u"),
    ("unaligned", "must be a multiple of 4 bytes", "+ 2), 1u"),
]
"""Kernel, what the report says, and texts of the lines one of which it names."""


def test_every_kernel_of_the_probe_is_right_or_has_its_report() -> None:
    assert {*RIGHT, *(name for name, _, _ in FAULTS)} == set(KERNELS)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_ordered_is_right(library: ctypes.CDLL, name: str, seed: int) -> None:
    code, report, memory = launch(library, name, seed=seed)
    assert code == 0, report
    expected = RIGHT[name](memory.source)
    assert torch.equal(memory.target[: expected.numel()], expected)
    if name == "counted<ALL>":
        places = memory.partial.view(BLOCKS, THREADS)[:3].isfinite().sum(1)
        assert places.tolist() == torch.bincount(torch.arange(THREADS) % 3).tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "message", "lines"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_what_nothing_orders_is_named(library: ctypes.CDLL, name: str, message: str, lines: str, seed: int) -> None:
    code, report, _ = launch(library, name, seed=seed)
    assert code == LAUNCH_FAILURE
    assert re.search(message, report), report
    source = SOURCE.read_text().splitlines()
    allowed = {number for number, line in enumerate(source, 1) if any(text in line for text in lines.split("|"))}
    assert set(map(int, re.findall(r"kernel\.cu:(\d+)", report))) & allowed, report
    code, report, _ = launch(library, "merged<NONE>", seed=seed)  # which knows nothing of it
    assert code == 0, report


def test_a_counter_must_have_been_written(library: ctypes.CDLL) -> None:
    code, report, _ = launch(library, "merged<NONE>", zeroed=False)
    assert code == LAUNCH_FAILURE
    assert "adds to byte 0 of counters, which nobody wrote" in report


def test_the_end_of_a_kernel_orders_everything(library: ctypes.CDLL) -> None:
    memory = Memory(library)
    code = library.probe_in_two(*memory.pointers())
    assert code == 0, library.error_name(code)
    assert torch.equal(memory.target[: 2 * THREADS], memory.source[:THREADS].flip(0).repeat(2))
    assert memory.counters[0] == THREADS
