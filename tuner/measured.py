"""What a measurement gives back; plain data, because it travels between processes."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.generator.errors import Outcome


@dataclass(frozen=True, slots=True)
class Measured:
    """One variant, verified and timed on one problem, or the reason why not.

    time_us: the median, None unless the outcome is ok. times_us: every sample. stopped_early: clearly slower than
    the limit it was given, so timed with few samples. max_error, rms_error: absolute, from the verification; None
    where it did not come that far. worst_ratio: the largest error over its bound. registers, local_bytes: a thread's;
    0 on the CPU.
    """

    outcome: Outcome
    time_us: float | None = None
    times_us: tuple[float, ...] = ()
    max_error: float | None = None
    rms_error: float | None = None
    message: str = ""
    registers: int = 0
    smem_bytes: int = 0
    local_bytes: int = 0
    worst_ratio: float | None = None
    stopped_early: bool = False
