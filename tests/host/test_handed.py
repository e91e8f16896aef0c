"""Values passed on through shared memory, and tiles read before the next bulk copy, on the host: right, or named."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tilewright.tuner.report_lines import located

SOURCE = Path(__file__).with_name("handed_probe.cu")
KERNELS = re.findall(r"^    (\w+<\w+>),", SOURCE.read_text(), re.MULTILINE)
ROUNDS, ROWS, COLUMNS = 5, 8, 64
LAUNCH_FAILURE = 719

UNFENCED = (
    r"this bulk copy writes byte \d+ of shared memory, which .* read by ordinary loads .*with no fence_proxy_async"
)

# Kernel, what its reports say, and texts of the lines one of which they name. Not each order of threads shows it.
FAULTS = [
    ("tiles<NO_FENCE>", UNFENCED, "the copy"),
    ("tiles<FENCED_EARLY>", UNFENCED, "the copy"),
    ("tiles<OTHERS_FENCE>", UNFENCED, "the copy"),
    ("tiles<ARRIVES_TWICE>", "arrival", "the arrival"),
    ("handed<NO_RELEASE>", r"race for byte 0 of shared memory", "the store|the wait"),
    ("handed<NO_ACQUIRE>", r"byte \d+ of shared memory", "the write|the read"),
    ("handed<NO_SYNCWARP>", r"(race for|reads) byte \d+ of shared memory", "the read"),
    ("handed<NEVER>", "waits for a value that never comes", "the wait"),
]


@pytest.fixture(scope="module")
def library(host_library: Callable[[Path], Path]) -> ctypes.CDLL:
    library = ctypes.CDLL(str(host_library(SOURCE)))
    library.error_name.restype = ctypes.c_char_p
    return library


def launch(library: ctypes.CDLL, name: str, seed: int) -> tuple[int, str, Tensor, Tensor]:
    source = torch.arange(ROUNDS * ROWS * COLUMNS, dtype=torch.int16).view(-1, COLUMNS)
    target = torch.full((32,), torch.nan)
    library.tilewright_host_forget()
    one = ctypes.c_int64 * 1
    for text, tensor, access in ((b"source", source, 0), (b"target", target, 2)):
        size, count = ctypes.c_int64(tensor.element_size()), one(tensor.numel())
        library.tilewright_host_watch(text, ctypes.c_void_p(tensor.data_ptr()), size, 1, count, one(1), access)
    library.tilewright_host_seed(ctypes.c_uint64(seed))
    code = library.probe(KERNELS.index(name), ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(target.data_ptr()))
    return code, located(library.error_name(code).decode(), Path(library._name)), source, target


def test_every_kernel_of_the_probe_is_right_or_has_its_report() -> None:
    assert {"tiles<NONE>", "handed<NONE>", *(name for name, _, _ in FAULTS)} == set(KERNELS)


@pytest.mark.parametrize("seed", range(6))
def test_a_tile_is_read_before_the_next_copy_to_it(library: ctypes.CDLL, seed: int) -> None:
    code, report, source, target = launch(library, "tiles<NONE>", seed)
    assert code == 0, report
    assert torch.equal(target, source.view(ROUNDS, ROWS, COLUMNS)[:, :2, :32].float().sum((0, 1)))


@pytest.mark.parametrize("seed", range(6))
def test_what_is_released_is_seen_by_who_acquires_it(library: ctypes.CDLL, seed: int) -> None:
    code, report, _, target = launch(library, "handed<NONE>", seed)
    assert code == 0, report
    assert torch.equal(target, (torch.arange(32) ^ 1).float())


@pytest.mark.parametrize(("name", "message", "lines"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_what_is_wrong_is_named(library: ctypes.CDLL, name: str, message: str, lines: str) -> None:
    reports = [
        report for code, report, *_ in (launch(library, name, seed) for seed in range(12)) if code == LAUNCH_FAILURE
    ]
    assert len(reports) >= 3
    source = SOURCE.read_text().splitlines()
    allowed = {number for number, line in enumerate(source, 1) if any(text in line for text in lines.split("|"))}
    for report in reports:
        assert re.search(message, report), report
        assert set(map(int, re.findall(r"kernel\.cu:(\d+)", report))) & allowed, report
    code, report, *_ = launch(library, "tiles<NONE>", 0)  # which knows nothing of it
    assert code == 0, report
