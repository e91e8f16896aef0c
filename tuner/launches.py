"""How many kernels one call starts on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

_COPIES = ("Memcpy", "Memset")


def kernel_launches(run: Callable[[], object], device: torch.device) -> int | None:
    """Kernels that `run` starts, copies and fills of memory left out; None on the CPU and where nothing is profiled."""
    if device.type != "cuda":
        return None
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    events = profiler.events() or []
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.name.startswith(_COPIES)]
    return len(kernels) or None
