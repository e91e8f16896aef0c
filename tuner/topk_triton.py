"""A Triton kernel for attention over chosen blocks, one program a query: what one writes in an afternoon.

Importing this module needs `triton`.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _one_query(  # type: ignore[no-untyped-def]  # Triton would read annotations as code
    query,
    key,
    value,
    indices,
    out,
    q_stride_b,
    q_stride_h,
    q_stride_n,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    v_stride_b,
    v_stride_h,
    v_stride_n,
    num_heads,
    heads_per_kv,
    seqlen_q,
    seqlen_kv,
    list_width,
    scale,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    # softmax(scale * q . k) v over the blocks of the query's list, one block after the other; an entry of -1 is none.
    row = tl.program_id(0)
    head = tl.program_id(1)
    batch = head // num_heads
    head_q = head % num_heads
    head_kv = head_q // heads_per_kv
    dims = tl.arange(0, HEAD_DIM)
    within = tl.arange(0, KEYS)
    at_q = batch.to(tl.int64) * q_stride_b + head_q.to(tl.int64) * q_stride_h + row.to(tl.int64) * q_stride_n
    # Base-2 exponentials are what the hardware has.
    q = tl.load(query + at_q + dims).to(tl.float32) * (scale * 1.4426950408889634)
    keys = key + batch.to(tl.int64) * k_stride_b + head_kv.to(tl.int64) * k_stride_h
    values = value + batch.to(tl.int64) * v_stride_b + head_kv.to(tl.int64) * v_stride_h
    listed = indices + (head.to(tl.int64) * seqlen_q + row) * list_width
    position = row + seqlen_kv - seqlen_q
    row_max = tl.full((), float("-inf"), tl.float32)
    row_sum = tl.zeros((), tl.float32)
    acc = tl.zeros((HEAD_DIM,), tl.float32)
    for place in range(list_width):
        block = tl.load(listed + place)
        if block >= 0:
            for start in range(0, BLOCK_SIZE, KEYS):
                tokens = block * BLOCK_SIZE + start + within
                inside = (start + within < BLOCK_SIZE) & (tokens < seqlen_kv)
                if CAUSAL:
                    inside = inside & (tokens <= position)
                k = tl.load(keys + tokens[:, None].to(tl.int64) * k_stride_n + dims[None, :], inside[:, None], 0.0)
                v = tl.load(values + tokens[:, None].to(tl.int64) * v_stride_n + dims[None, :], inside[:, None], 0.0)
                scores = tl.where(inside, tl.sum(q[None, :] * k.to(tl.float32), 1), float("-inf"))
                new_max = tl.maximum(row_max, tl.max(scores, 0))
                # Without a key so far the maximum is -inf, and -inf - -inf is NaN.
                base = tl.where(new_max == float("-inf"), 0.0, new_max)
                weights = tl.exp2(scores - base)
                rescale = tl.exp2(row_max - base)
                row_sum = row_sum * rescale + tl.sum(weights, 0)
                acc = acc * rescale + tl.sum(weights[:, None] * v.to(tl.float32), 0)
                row_max = new_max
    acc = tl.where(row_sum > 0.0, acc / row_sum, 0.0)
    at_out = (head.to(tl.int64) * seqlen_q + row) * HEAD_DIM
    tl.store(out + at_out + dims, acc.to(out.dtype.element_ty))


def one_query_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    *,
    block_size: int,
    causal: bool,
    scale: float,
    keys_at_once: int,
    num_warps: int,
) -> Tensor:
    """Attention of query [B, Hq, Nq, D] over the blocks in indices [B, Hq, Nq, K] int32, contiguous; -1 is no block.

    D and keys_at_once: powers of two. Returns out [B, Hq, Nq, D] in query's dtype; 0 where a query has no key.
    """
    batch, num_heads, seqlen_q, head_dim = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    # Triton launches on the current device.
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        _one_query[(seqlen_q, batch * num_heads)](
            *(query, key, value, indices, out),
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *(num_heads, num_heads // key.shape[1], seqlen_q, key.shape[2], indices.shape[3], scale),
            BLOCK_SIZE=block_size,
            KEYS=keys_at_once,
            HEAD_DIM=head_dim,
            CAUSAL=causal,
            num_warps=num_warps,
        )
    return out
