"""The fp64 reference of attention: the specification that every kernel is checked against.

It reads a mask only through its `dense_rows`, straight from the mask's definition, and knows nothing of plans,
tiles or kernels, so that a mistake in those cannot hide here as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

SCORE_BYTES_LIMIT = {"cpu": 64 << 20, "cuda": 1 << 30}
"""How large one chunk's fp64 scores may be; a chunk holds about four such temporaries."""

RowRange = tuple[int, int]


class DenseRows(Protocol):
    """What restricts a call, as far as its answer goes: `runtime.masks.Mask`, or lists of blocks."""

    def dense_rows(
        self,
        batch: int,
        num_heads: int,
        seqlen_q: int,
        seqlen_kv: int,
        device: torch.device | str,
        q_start: int,
        q_stop: int,
    ) -> Tensor:
        """Query rows q_start to q_stop - 1, True where active: bool [B|1, H|1, q_stop - q_start, seqlen_kv]."""
        ...


def row_pieces(query: Tensor, key: Tensor, rows: Sequence[int] | None) -> list[RowRange]:
    """Ranges [start, stop) that cover these ascending query rows (None: all), each small enough for its fp64 scores."""
    batch, num_heads, seqlen_q, _ = query.shape
    row_bytes = 8 * batch * num_heads * max(key.shape[2], 1)
    longest = max(1, SCORE_BYTES_LIMIT.get(query.device.type, 64 << 20) // max(row_bytes, 1))
    runs = [(0, seqlen_q)] if rows is None else row_runs(rows)
    return [(begin, min(begin + longest, stop)) for start, stop in runs for begin in range(start, stop, longest)]


def row_runs(rows: Sequence[int]) -> list[RowRange]:
    """The ascending rows as maximal ranges [start, stop) of neighbours: [0, 1, 2, 7] gives [(0, 3), (7, 8)]."""
    runs: list[RowRange] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


def oracle(query: Tensor, key: Tensor, value: Tensor, mask: DenseRows | None, scale: float) -> tuple[Tensor, Tensor]:
    """`softmax(scale * query @ key^T where active) @ value` and its log-sum-exp, in fp64.

    query [B, H, Nq, D], key and value [B, Hkv, Nkv, D] with H a multiple of Hkv, any dtype; they are widened to fp64
    as they are, so the rounding of the inputs is not counted as an error. Returns out [B, H, Nq, D] and lse
    [B, H, Nq] (natural log), both fp64. A row with no active key gives out 0 and lse -inf.
    """
    return _over(query, key, value, mask, scale, row_pieces(query, key, None))


def oracle_rows(
    query: Tensor, key: Tensor, value: Tensor, mask: DenseRows | None, scale: float, rows: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`oracle` for some query rows alone: out [B, H, len(rows), D] and lse [B, H, len(rows)], in the rows' order.

    rows: ascending, without repetition, each in [0, Nq).
    """
    return _over(query, key, value, mask, scale, row_pieces(query, key, rows))


def active_rows(mask: DenseRows | None, query: Tensor, key: Tensor, start: int, stop: int) -> Tensor | None:
    """Which pairs of these query rows are active: bool [B|1, H|1, stop - start, Nkv], or None for all of them."""
    if mask is None:
        return None
    batch, num_heads, seqlen_q, _ = query.shape
    return mask.dense_rows(batch, num_heads, seqlen_q, key.shape[2], query.device, q_start=start, q_stop=stop)


def grouped_scores(query: Tensor, key: Tensor) -> Tensor:
    """`query @ key^T` as [B, H, rows, Nkv] with the query heads that share a KV head taken together (no copy of K)."""
    batch, num_heads, rows, head_dim = query.shape
    kv_heads, seqlen_kv = key.shape[1], key.shape[2]
    group = num_heads // max(kv_heads, 1)
    scores = query.reshape(batch, kv_heads, group * rows, head_dim) @ key.mT
    return scores.view(batch, num_heads, rows, seqlen_kv)


def _over(
    query: Tensor, key: Tensor, value: Tensor, mask: DenseRows | None, scale: float, pieces: list[RowRange]
) -> tuple[Tensor, Tensor]:
    batch, num_heads, _, head_dim = query.shape
    total = sum(stop - start for start, stop in pieces)
    out = torch.empty(batch, num_heads, total, head_dim, dtype=torch.float64, device=query.device)
    lse = torch.empty(batch, num_heads, total, dtype=torch.float64, device=query.device)
    key64, value64 = key.double(), value.double()
    done = 0
    for start, stop in pieces:
        target = slice(done, done + stop - start)
        active = active_rows(mask, query, key, start, stop)
        piece = _attend(query[:, :, start:stop].double(), key64, value64, active, scale)
        out[:, :, target], lse[:, :, target] = piece
        done += stop - start
    return out, lse


def _attend(query: Tensor, key: Tensor, value: Tensor, active: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    batch, num_heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    scores = grouped_scores(query, key).mul_(scale)
    if active is not None:
        scores.masked_fill_(~active, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    # -inf - -inf is NaN; subtracting 0 there instead leaves exp(-inf) = 0, the wanted weight of an empty row.
    weights = scores.sub_(torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1)).exp_()
    grouped = weights.view(batch, kv_heads, (num_heads // max(kv_heads, 1)) * rows, weights.shape[-1])
    return (grouped @ value).view(batch, num_heads, rows, head_dim), lse
