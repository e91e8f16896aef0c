"""Bits for bools: the packed words that kernels read, a bit a key, a block or a tile."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.runtime.mask_terms import Mask, ceil_div

CHUNK_PAIRS = 16 * 2**20
"""Pairs evaluated at once: with the temporaries of a nested mask, about a dozen bytes a pair, below 256 MiB."""


def pack_bits(active: Tensor) -> Tensor:
    """bool [..., n] as int32 words [..., ceil(n / 32)]: bit i % 32 of word i / 32; bits past n are 0."""
    length = active.shape[-1]
    words = ceil_div(length, 32)
    if active.numel() == 0:
        return torch.zeros(*active.shape[:-1], words, dtype=torch.int32, device=active.device)
    if words * 32 != length:
        active = torch.nn.functional.pad(active, (0, words * 32 - length))
    # Eight bools make a byte and four bytes, lowest first, make a word on every little-endian machine.
    flags = active.contiguous().view(torch.uint8).view(*active.shape[:-1], words * 4, 8)
    packed = flags[..., 0].clone()
    for bit in range(1, 8):
        packed |= flags[..., bit] << bit
    return packed.view(torch.int32)


def unpack_bits(words: Tensor, length: int) -> Tensor:
    """int32 words [..., ceil(length / 32)] as bool [..., length]."""
    octets = words.contiguous().view(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    flags = (octets.unsqueeze(-1) >> shifts) & 1
    return flags.flatten(-2)[..., :length].to(torch.bool)


def row_chunk(mask: Mask, seqlen_kv: int) -> int:
    """How many query rows of `mask` to evaluate at once."""
    batch, num_heads = mask.lead
    return max(1, CHUNK_PAIRS // max(1, batch * num_heads * seqlen_kv))


def pack_rows(mask: Mask, seqlen_q: int, seqlen_kv: int, device: torch.device) -> Tensor:
    """Every pair of `mask` as int32 [B|1, H|1, seqlen_q, ceil(seqlen_kv / 32)], by chunks of rows; no host sync."""
    batch, num_heads = mask.lead
    out = torch.empty(batch, num_heads, seqlen_q, ceil_div(seqlen_kv, 32), dtype=torch.int32, device=device)
    step = row_chunk(mask, seqlen_kv)
    for start in range(0, seqlen_q, step):
        stop = min(start + step, seqlen_q)
        out[:, :, start:stop] = pack_bits(mask.rows(seqlen_q, seqlen_kv, device, start, stop))
    return out
