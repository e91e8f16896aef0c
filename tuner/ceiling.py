"""What a plain matrix product reaches on a device: the ceiling that attention's rates are told as a percentage of."""

from __future__ import annotations

import torch

from tilewright.tuner.timing import Stopwatch, time_kernel

SIZE = 8192
"""Rows and columns of the three matrices: large enough for a GPU's best rate, 384 MiB in all at 16 bits."""


def matrix_ceiling(device: torch.device, dtype: torch.dtype, stopwatch: Stopwatch, size: int = SIZE) -> float | None:
    """TFLOP/s of `torch.matmul` on standard normal matrices, the median; None where it is no ceiling of attention's.

    Those are the CPU, float32 (whose products are not of the tensor cores), and a device without memory for it.
    """
    if device.type != "cuda" or dtype == torch.float32:
        return None
    try:
        return matmul_tflops(device, dtype, stopwatch, size)
    except torch.OutOfMemoryError:
        return None


def matmul_tflops(device: torch.device, dtype: torch.dtype, stopwatch: Stopwatch, size: int) -> float:
    """TFLOP/s of the product of two `size` x `size` matrices, 2 operations a product; the median of the runs."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    timing = time_kernel(lambda: torch.matmul(left, right, out=out), device, stopwatch=stopwatch)
    return 2.0 * size**3 / timing.median_us / 1e6
