"""Small kernels on the host, right and wrong: what runs must be right, and each fault must be named with its place."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tilewright.tuner.report_lines import located

SOURCE = Path(__file__).with_name("threads_probe.cu")
KERNELS = re.findall(r"^    \{(\w+), THREADS", SOURCE.read_text(), re.MULTILINE)
THREADS = 128
INVALID_VALUE, INVALID_CONFIGURATION, LAUNCH_FAILURE = 1, 9, 719


def lines_of(text: str) -> set[int]:
    """The lines of the probe that hold this text."""
    return {number for number, line in enumerate(SOURCE.read_text().splitlines(), 1) if text in line}


@pytest.fixture(scope="module")
def library(host_library: Callable[[Path], Path]) -> ctypes.CDLL:
    library = ctypes.CDLL(str(host_library(SOURCE)))
    library.error_name.restype = ctypes.c_char_p
    return library


def watch(library: ctypes.CDLL, name: str, tensor: Tensor, *, writable: bool) -> None:
    numbers = ctypes.c_int64 * tensor.dim()
    library.tilewright_host_watch(
        name.encode(),
        ctypes.c_void_p(tensor.data_ptr()),
        ctypes.c_int64(tensor.element_size()),
        tensor.dim(),
        numbers(*tensor.shape),
        numbers(*tensor.stride()),
        int(writable),
    )


def launch(
    library: ctypes.CDLL,
    name: str,
    source: Tensor,
    target: Tensor,
    *,
    size: int = THREADS,
    blocks: int = 1,
    threads: int = 0,
    smem_bytes: int = -1,
    seed: int = 0,
) -> tuple[int, str]:
    """(code, report) of one launch; threads 0 and smem_bytes -1: the kernel's own."""
    library.tilewright_host_forget()
    watch(library, "source", source, writable=False)
    watch(library, "target", target, writable=True)
    library.tilewright_host_seed(ctypes.c_uint64(seed))
    code = library.probe(
        KERNELS.index(name),
        blocks,
        threads,
        ctypes.c_long(smem_bytes),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_void_p(target.data_ptr()),
        size,
    )
    return code, library.error_name(code).decode()


def tensors(size: int = 2 * THREADS) -> tuple[Tensor, Tensor]:
    return torch.arange(float(size)), torch.full((size,), torch.nan)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("threads", "size"), [(32, 32), (128, 512), (1024, 3000)])
def test_barriers_shuffles_and_shared_memory(library: ctypes.CDLL, threads: int, size: int, seed: int) -> None:
    blocks = -(-size // threads)
    source, target = tensors(size)
    code, report = launch(
        library,
        "block_sum",
        source,
        target,
        size=size,
        blocks=blocks,
        threads=threads,
        smem_bytes=threads // 8,
        seed=seed,
    )
    assert code == 0, report
    for part, sums in zip(source.split(threads), target.split(threads), strict=True):
        assert torch.equal(sums, part.sum().expand_as(sums))


@pytest.mark.parametrize("size", [256, 200])
def test_asynchronous_copies_arrive_when_they_are_waited_for(library: ctypes.CDLL, size: int) -> None:
    source, target = tensors(size)
    code, report = launch(library, "copied", source, target, size=size)
    assert code == 0, report
    assert torch.equal(source, target)


@pytest.mark.parametrize("seed", range(4))
def test_lanes_with_different_masks_go_their_own_ways(library: ctypes.CDLL, seed: int) -> None:
    source, target = tensors(THREADS)
    code, report = launch(library, "two_masks", source, target, seed=seed)
    assert code == 0, report
    per_kind = source.view(4, 16, 2).sum(1, keepdim=True).expand(4, 16, 2).reshape(-1)
    assert torch.equal(target, per_kind)


FAULTS = [
    ("missing_barrier", "(race for|reads) byte .* of shared memory", "tile[THREADS - 1 - thread];  // another warp's"),
    (
        "missing_warp_barrier",
        r"race for byte \d+ of .*: this thread \w+ what thread \d+ \w+ at kernel.cu",
        "tile[thread",
    ),
    ("overwritten_too_soon", r"race for byte \d+ of .*: this thread \w+ what thread \d+ \w+ at kernel.cu", "tile["),
    ("barrier_for_some", r"96 .* wait in __syncthreads .* 32 .* left the kernel", "if (threadIdx.x < 96)"),
    ("two_barriers", "different barriers", "        __syncthreads();"),
    ("divergent_shuffle", r"64 .* wait in __shfl_xor_sync .* left the kernel", "< 16) value = __shfl_xor_sync"),
    ("divergent_warp", r"diverges: this lane is in \S+, lane \d+ in", "        __syncwarp();"),
    ("mask_without_self", "mask 0x0000ffff, which leaves out the lane", "__shfl_xor_sync(0x0000ffffu"),
    ("shuffle_from_outside", "lane 20, which the mask leaves out", "__shfl_sync(0x0000ffffu"),
    ("unwritten_shared", "reads byte 308 of shared memory, which nobody wrote", "= tile[threadIdx.x]"),
    ("past_shared", r"writes 4 bytes at byte \d+ of shared memory, which has 512", "(smem)[threadIdx.x + args.size]"),
    ("past_tensor", "reads 4 bytes at byte 512 of source, which spans 512 bytes", "args.from[threadIdx.x + 1]"),
    ("writes_input", "writes 4 bytes .* of source, which is only to be read", "const_cast<float*>(args.from)"),
    ("no_wait", "the asynchronous copy to it that thread .* has not been waited for", "args.to[thread] = tile[thread]"),
    ("no_barrier_after_wait", "(race for|reads) byte .* of shared memory", "args.to[thread] = tile[thread]"),
    ("misaligned", "must be a multiple of 16 bytes", "const float4 four"),
    ("past_local_array", "an index past the end of a local array", "values[args.size - 252]"),
    (
        "written_twice",
        r"race for byte \d+ of target: this thread writes what thread \d+ of block 0 wrote",
        "threadIdx.x / 2",
    ),
    ("int_overflow", "a product of signed integers overflows", "args.size * 16777217"),
]
"""Kernel, what the report says, and text of the lines one of which it names."""


def test_every_wrong_kernel_of_the_probe_has_its_report() -> None:
    assert {"block_sum", "copied", "two_masks", *(name for name, _, _ in FAULTS)} == set(KERNELS)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "message", "line"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_named_with_its_place(library: ctypes.CDLL, name: str, message: str, line: str, seed: int) -> None:
    source, target = tensors(THREADS if name == "past_tensor" else 2 * THREADS)
    size = 2 * THREADS if name in ("past_local_array", "int_overflow") else THREADS
    code, report = launch(library, name, source, target, size=size, seed=seed)
    assert code == LAUNCH_FAILURE
    report = located(report, Path(library._name))
    assert re.search(message, report), report
    assert "block 0" in report
    assert set(map(int, re.findall(r"kernel\.cu:(\d+)", report))) & lines_of(line), report
    assert library.error_name(0) == b"no error"
    code, report = launch(library, "copied", source, target, size=len(source), seed=seed)  # which knows nothing of it
    assert code == 0, report
    assert torch.equal(source, target)


def test_a_strided_tensor_is_its_elements_alone(library: ctypes.CDLL) -> None:
    whole, target = torch.arange(4.0 * THREADS), torch.full((2 * THREADS,), torch.nan)
    code, report = launch(library, "past_tensor", whole.view(2, -1)[:, :THREADS], target, size=THREADS)
    assert code == LAUNCH_FAILURE
    assert "at byte 512 of source, where no element of it lies" in report
    code, report = launch(library, "block_sum", whole[::2], target)
    assert code == LAUNCH_FAILURE
    assert "of source, where no element of it lies" in report


def test_memory_of_the_launch_is_watched_too(library: ctypes.CDLL) -> None:
    source, target = tensors(THREADS)

    def run(skipped: int) -> tuple[int, str]:
        library.tilewright_host_forget()
        watch(library, "source", source, writable=False)
        watch(library, "target", target, writable=True)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (source, target)]
        code = library.probe_memory(*pointers, skipped)
        return code, library.error_name(code).decode()

    assert run(-1) == (0, "no error")
    assert torch.equal(source, target)
    code, report = run(77)
    assert code == LAUNCH_FAILURE
    assert "reads byte 308 of memory that the launch allocated, which nobody wrote" in report


def test_shared_memory_must_be_asked_for(library: ctypes.CDLL) -> None:
    source, target = tensors()
    assert launch(library, "unwritten_shared", source, target, smem_bytes=49 * 1024) == (
        INVALID_VALUE,
        "invalid argument",
    )
    assert launch(library, "block_sum", source, target, threads=2048)[0] == INVALID_CONFIGURATION
    assert launch(library, "block_sum", source, target, blocks=0)[0] == INVALID_CONFIGURATION
