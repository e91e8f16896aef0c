"""Importing this makes timing short, here and in every worker that this process starts: no test asks how fast it is.

A sample flushes 64 MiB of cache first, 20 ms against microseconds of a test's kernel, and up to fifty are taken.
"""

from __future__ import annotations

from tilewright.tuner import timing, worker

timing.CPU_CACHE_LIMIT_BYTES = 1 << 20
timing.TIMING_S /= 10
timing.SURVEY_S /= 10
timing.time_kernel.__kwdefaults__["budget_s"] = timing.TIMING_S
worker._START = f"import {__name__}; {worker._START}"
