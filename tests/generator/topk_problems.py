"""Problems that the tests of several families of chosen blocks share."""

from __future__ import annotations

from tilewright.generator.problem import Problem
from tilewright.runtime.selection import SELECTED_ATTENTION, Selection


def attending_problem(
    arch: str = "sm_90a",
    dtype: str = "bfloat16",
    head_dim: int = 64,
    *,
    block_size: int = 64,
    top: int = 16,
    causal: bool = False,
) -> Problem:
    return Selection(block_size, top, 8, 1, causal).problem(
        SELECTED_ATTENTION,
        dtype=dtype,
        head_dim=head_dim,
        batch=1,
        num_heads=8,
        num_kv_heads=8,
        seqlen_q=32768,
        seqlen_kv=32768,
        target=arch,
    )
