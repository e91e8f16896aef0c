"""Attention in plain PyTorch: what answers when there is no kernel and no compiler to make one.

Right on every input, in bounded memory; not fast. The dispatcher says when it is used and why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.runtime.masks import Mask

CHUNK_BYTES = 256 * 2**20
"""What one chunk of float32 scores may take."""


def fallback_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`out` [B, Hq, Nq, D] in query's dtype and `lse` [B, Hq, Nq] float32, by chunks of query rows in float32.

    A row with no active key gives output 0 and lse -inf.
    """
    batch, num_heads, seqlen_q, head_dim = query.shape
    num_kv_heads, seqlen_kv = key.shape[1], key.shape[2]
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.full((batch, num_heads, seqlen_q), -torch.inf, dtype=torch.float32, device=query.device)
    if out.numel() == 0 or seqlen_kv == 0:
        return out, lse
    group = num_heads // num_kv_heads
    keys, values = key.float().unsqueeze(2), value.float().unsqueeze(2)
    rows = max(1, CHUNK_BYTES // (4 * batch * num_heads * seqlen_kv))
    for start in range(0, seqlen_q, rows):
        stop = min(start + rows, seqlen_q)
        q = query[:, :, start:stop].float().reshape(batch, num_kv_heads, group, stop - start, head_dim)
        scores = (q @ keys.transpose(-1, -2)).mul_(scale).reshape(batch, num_heads, stop - start, seqlen_kv)
        if mask is not None:
            active = mask.dense_rows(batch, num_heads, seqlen_q, seqlen_kv, query.device, start, stop)
            scores.masked_fill_(~active, -torch.inf)
        row_lse = torch.logsumexp(scores, dim=-1)
        empty = row_lse == -torch.inf
        weights = torch.exp(scores - row_lse.masked_fill(empty, 0.0).unsqueeze(-1))
        chunk = weights.reshape(batch, num_kv_heads, group, stop - start, seqlen_kv) @ values
        out[:, :, start:stop] = chunk.reshape(batch, num_heads, stop - start, head_dim).to(query.dtype)
        lse[:, :, start:stop] = row_lse
    return out, lse
