"""How much memory one call takes beyond what was there before it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

_RESET_PEAK = "5"  # written to /proc/self/clear_refs: VmHWM starts anew (man 5 proc)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that `run` takes at its peak above what is allocated now, its result included; None where unknown.

    On a GPU it is what PyTorch's allocator hands out; on the CPU it is the process's resident memory, read from Linux,
    so it is exact to a few pages and counts workspaces that kernels allocate themselves.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        torch.cuda.synchronize(device)
        del result
        return int(torch.cuda.max_memory_allocated(device)) - int(before)
    return _resident_peak(run)


def tensor_bytes(*tensors: Tensor | None) -> int:
    """Bytes of these tensors' storages, shared ones counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def _resident_peak(run: Callable[[], object]) -> int | None:
    gc.collect()
    try:
        # Freed blocks that malloc keeps stay resident, and a run that reuses them would seem to need nothing.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except (OSError, AttributeError):
        return None
    before = _status_bytes("VmRSS")
    result = run()
    peak = _status_bytes("VmHWM")
    del result
    return None if before is None or peak is None else max(0, peak - before)


def _status_bytes(field: str) -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None
