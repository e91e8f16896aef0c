"""Problems, and cases of a kernel, that the tests of several families of chosen blocks share."""

from __future__ import annotations

import torch

from tilewright.generator.problem import Problem
from tilewright.runtime.selected_launch import run_selected
from tilewright.runtime.selection import SELECT_BLOCKS, SELECTED_ATTENTION, Selection
from tilewright.tuner.host_kernel import HostKernel
from tilewright.tuner.topk_cases import ChoiceShape
from tilewright.tuner.topk_oracle import selected_attention_oracle


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


def sharing_problem(
    seqlen: int = 32768,
    arch: str = "sm_90a",
    dtype: str = "bfloat16",
    head_dim: int = 64,
    *,
    block_size: int = 64,
    top: int = 16,
    query_group: int = 1,
    heads: int = 1,
    seqlen_q: int | None = None,
) -> Problem:
    """Eight query heads, of which `heads` share a choice, causal."""
    return Selection(block_size, top, 8 // heads, query_group, causal=True).problem(
        SELECTED_ATTENTION,
        dtype=dtype,
        head_dim=head_dim,
        batch=1,
        num_heads=8,
        num_kv_heads=8 // heads,
        seqlen_q=seqlen if seqlen_q is None else seqlen_q,
        seqlen_kv=seqlen,
        target=arch,
    )


def union_problem(
    seqlen: int = 4096,
    arch: str = "sm_90a",
    dtype: str = "bfloat16",
    head_dim: int = 64,
    *,
    block_size: int = 64,
    query_group: int = 1,
    heads: int = 1,
    seqlen_q: int | None = None,
) -> Problem:
    """1024 keys a list."""
    return sharing_problem(
        seqlen,
        arch,
        dtype,
        head_dim,
        block_size=block_size,
        top=1024 // block_size,
        query_group=query_group,
        heads=heads,
        seqlen_q=seqlen_q,
    )


UNION_SHAPES = (
    ChoiceShape("one token", 1, 1, 1, 1, 1, 64, 1),
    ChoiceShape("alone, a short last block", 1, 2, 1, 150, 290, 64, 3),
    ChoiceShape("more queries than keys, amid NaNs", 1, 1, 1, 161, 65, 64, 2, layout="padded"),
    ChoiceShape("blocks of 256, queries before the first key", 1, 1, 1, 300, 280, 256, 1),
    ChoiceShape("blocks of 128, entries outside", 1, 2, 2, 66, 300, 128, 2, lists="outside"),
    ChoiceShape("shuffled, at odd elements", 1, 1, 1, 70, 330, 128, 3, layout="unaligned", lists="shuffled"),
    ChoiceShape("heads share, groups of 5", 1, 6, 2, 67, 200, 64, 3, query_group=5, shared=True),
    ChoiceShape("groups of 40", 1, 2, 2, 130, 257, 64, 2, query_group=40),
    ChoiceShape("nothing listed", 1, 1, 1, 9, 65, 64, 2, lists="none"),
    ChoiceShape("every block listed", 1, 1, 1, 131, 190, 64, 3, lists="all"),
    ChoiceShape("large logits", 1, 1, 1, 65, 320, 64, 2, numbers="large"),
    ChoiceShape("small blocks", 1, 2, 1, 150, 290, 16, 5, lists="chosen"),
    ChoiceShape("small blocks, heads share, transposed", 1, 4, 2, 35, 400, 16, 20, shared=True, layout="transposed"),
    ChoiceShape(
        "small blocks, groups of 3, at odd elements", 1, 2, 2, 71, 150, 32, 2, query_group=3, layout="unaligned"
    ),
    ChoiceShape("small blocks, entries outside, counting keys", 1, 2, 2, 40, 203, 16, 7, numbers="uniform_weights"),
    ChoiceShape("small blocks all listed", 1, 1, 1, 131, 190, 32, 6, lists="all"),
)
"""For families whose rows visit what neighbours chose. Blocks that nobody lists hold NaN, and past a count lists hold
other blocks' numbers."""


def check_harm_stays(loaded: HostKernel, scale: float) -> None:
    """Of a causal kernel of blocks of 64: keys that are NaN and infinite spoil the rows that see them, no others."""
    selection = Selection(64, 2, 1, 1, causal=True)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 1, 192, 64, generator=generator).bfloat16() for _ in range(3))
    key[0, 0, 70], key[0, 0, 75] = torch.nan, torch.inf
    indices = torch.zeros(1, 1, 192, 2, dtype=torch.int32)
    indices[0, 0, :, 1] = torch.arange(192) // 64
    indices[0, 0, 128::2, 1] = 1  # every other row of the last tile
    counts = torch.where(torch.arange(192) < 64, 1, 2).int().view(1, 1, 192)
    clean = torch.arange(192) < 70
    clean[129::2] = True
    out, lse = run_selected(loaded, query, key, value, indices, counts, selection, scale)
    want, want_lse = selected_attention_oracle(query, key, value, indices, counts, selection, scale)
    assert (out[:, :, clean] - want[:, :, clean]).abs().max() < 2e-2
    assert (lse[:, :, clean] - want_lse[:, :, clean]).abs().max() < 1e-3
    assert out[0, 0, 128::2].isnan().all()


def check_a_block_again(loaded: HostKernel) -> None:
    """Of a causal kernel of blocks of 64: a list may name a block again, which counts once."""
    selection = Selection(64, 4, 1, 1, causal=True)
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, 1, 200, 64, generator=generator).bfloat16() for _ in range(3))
    indices = torch.randint(0, 3, (1, 1, 200, 4), generator=generator, dtype=torch.int32)
    counts = torch.full((1, 1, 200), 4, dtype=torch.int32)
    assert any(len(set(row)) < 4 for row in indices[0, 0].tolist())
    out, lse = run_selected(loaded, query, key, value, indices, counts, selection, 0.125)
    want, want_lse = selected_attention_oracle(query, key, value, indices, counts, selection, 0.125)
    seen = want_lse > -torch.inf
    assert (out - want).abs().max() < 2e-2
    assert torch.equal(lse > -torch.inf, seen)
    assert (lse - want_lse)[seen].abs().max() < 1e-3
