"""What a call must give, and how far off a kernel may be: bounds relative to PyTorch's own error at the same dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.tuner.oracle import DenseRows, active_rows, grouped_scores, oracle, oracle_rows, row_pieces

PEER_MAX_FACTOR, PEER_RMS_FACTOR = 2.0, 1.5
"""How many times PyTorch's largest, and its RMS, error is allowed."""

MAX_FLOOR: dict[torch.dtype, float] = {torch.float32: 1e-5, torch.float16: 2**-11, torch.bfloat16: 2**-8}
RMS_FLOOR: dict[torch.dtype, float] = {torch.float32: 2e-6, torch.float16: 2**-12, torch.bfloat16: 2**-9}
"""What is allowed where PyTorch happens to be exact (one key a row, say), relative to the largest output and to the
outputs' RMS: one rounding of the 16-bit types; for float32 a hundred, because exponentials may be approximations."""

LSE_FLOOR: dict[torch.dtype, float] = {torch.float32: 1e-5, torch.float16: 1e-4, torch.bfloat16: 1e-4}
"""Absolute. lse is float32 whatever the inputs are, so this is the sharp check: one key in a thousand too many or too
few moves it by 1e-3, while the output barely moves out of its rounding."""

FLOAT32_ROUNDING = 2.0**-24
LEAST_ROUNDINGS = 8.0
"""A logit of size s, summed in float32 one product after the other, is off by about sqrt(head_dim) roundings of s, and
by no fewer than these; that moves lse by as much and the weights by that fraction."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The fp64 answer for some query rows, and the bounds.

    rows: int64 [R], or None for all rows. out [B, H, R, D] and lse [B, H, R] in fp64.
    max_bound, rms_bound: on |out - expected|; lse_bound: on |lse - expected| where finite.
    """

    rows: Tensor | None
    out: Tensor
    lse: Tensor
    max_bound: float
    rms_bound: float
    lse_bound: float


def expect(
    query: Tensor, key: Tensor, value: Tensor, mask: DenseRows | None, scale: float, rows: Sequence[int] | None = None
) -> Expected:
    """The oracle and the bounds of one call, of every query row or of these ascending ones.

    The peer's error comes from `scaled_dot_product_attention` with the dense mask, by chunks of rows; of lse, which
    it does not return, from a float32 log-sum-exp.
    """
    if rows is None:
        out, lse = oracle(query, key, value, mask, scale)
    else:
        out, lse = oracle_rows(query, key, value, mask, scale, rows)
    filled = lse != -torch.inf
    largest = _number(out.abs().amax() if out.numel() else 0.0)
    out_rms = _number(out.square().mean().sqrt() if out.numel() else 0.0)
    # The largest logit that matters lies within log(Nkv) of a row's lse.
    peak = _number(lse[filled].abs().amax() if bool(filled.any()) else 0.0) + math.log(max(key.shape[2], 1))
    value_size = _number(value.abs().amax() if value.numel() else 0.0)
    peer_max, peer_rms, peer_lse = _peer_errors(query, key, value, mask, scale, rows, out, lse)
    dtype = query.dtype
    conditioning = max(LEAST_ROUNDINGS, math.sqrt(query.shape[3])) * FLOAT32_ROUNDING * peak
    return Expected(
        rows=None if rows is None else torch.tensor(list(rows), device=query.device),
        out=out,
        lse=lse,
        max_bound=PEER_MAX_FACTOR * peer_max + MAX_FLOOR[dtype] * largest + conditioning * value_size,
        rms_bound=PEER_RMS_FACTOR * peer_rms + RMS_FLOOR[dtype] * out_rms + conditioning * out_rms,
        lse_bound=PEER_MAX_FACTOR * peer_lse + LSE_FLOOR[dtype] + conditioning,
    )


def sample_rows(
    batch: int, num_heads: int, seqlen_q: int, seqlen_kv: int, head_dim: int, device_type: str
) -> list[int]:
    """Query rows to check where all would take too long: the first, the last, and short random runs; ascending.

    At most 256 of them, and at most about a second's worth of fp64 on the device.
    """
    budget = 2**30 if device_type == "cpu" else 2**35
    count = min(256, max(16, budget // max(1, batch * num_heads * seqlen_kv * head_dim)))
    if seqlen_q <= count:
        return list(range(seqlen_q))
    quarter, run = count // 4, 4
    rows = {*range(quarter), *range(seqlen_q - quarter, seqlen_q)}
    generator = torch.Generator().manual_seed(seqlen_q)
    for start in torch.randint(0, seqlen_q - run, (count // (2 * run),), generator=generator).tolist():
        rows.update(range(start, start + run))
    return sorted(rows)


def _peer_errors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: DenseRows | None,
    scale: float,
    rows: Sequence[int] | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[float, float, float]:
    """PyTorch's largest and RMS output error, and its largest lse error, over rows with an active key."""
    worst = torch.zeros(3, dtype=torch.float64, device=query.device)
    done = 0
    for start, stop in row_pieces(query, key, rows):
        part = slice(done, done + stop - start)
        done += stop - start
        active = active_rows(mask, query, key, start, stop)
        piece = query[:, :, start:stop]
        peer = F.scaled_dot_product_attention(
            piece, key, value, attn_mask=active, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        scores = grouped_scores(piece.float(), key.float()).mul_(scale)
        if active is not None:
            scores.masked_fill_(~active, -torch.inf)
        filled = lse[:, :, part] != -torch.inf
        # Rows without a key are PyTorch's to define; a NaN of its own must not make the bound NaN.
        error = (peer.double() - out[:, :, part]).abs().nan_to_num(0.0) * filled.unsqueeze(-1)
        lse_error = (torch.logsumexp(scores, -1).double() - lse[:, :, part]).abs().nan_to_num(0.0, 0.0)
        if error.numel():
            worst[0] = torch.maximum(worst[0], error.amax())
            worst[1] += error.square().sum()
            worst[2] = torch.maximum(worst[2], lse_error.amax())
    peak, squares, lse_peak = worst.tolist()
    return peak, math.sqrt(squares / max(1, out.numel())), lse_peak


def _number(value: Tensor | float) -> float:
    return float(value)
