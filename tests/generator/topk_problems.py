"""Problems that the tests of several families of chosen blocks share."""

from __future__ import annotations

from tilewright.generator.problem import Problem
from tilewright.runtime.selection import SELECT_BLOCKS, SELECTED_ATTENTION, Selection


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


def choosing_problem(
    arch: str = "sm_90a",
    head_dim: int = 64,
    *,
    top: int = 16,
    seqlen: int = 32768,
    block_size: int = 64,
    causal: bool = False,
    dtype: str = "bfloat16",
) -> Problem:
    """seqlen: queries, which choose among 32768 keys."""
    return Selection(block_size, top, 8, 1, causal).problem(
        SELECT_BLOCKS,
        dtype=dtype,
        head_dim=head_dim,
        batch=1,
        num_heads=8,
        num_kv_heads=8,
        seqlen_q=seqlen,
        seqlen_kv=32768,
        target=arch,
    )
