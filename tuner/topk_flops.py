"""Multiplications and additions of attention that chooses its own blocks, beside dense attention's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.runtime.selection import Selection


@dataclass(frozen=True, slots=True)
class Flops:
    """Of one call: choosing (means and scores), attending to the chosen pairs, and dense attention of the same mask."""

    choosing: float
    attending: float
    dense: float

    @property
    def share(self) -> float:
        """Both stages over dense attention."""
        return (self.choosing + self.attending) / self.dense


def topk_flops(query: Tensor, key: Tensor, lists: tuple[Tensor, Tensor] | None, selection: Selection) -> Flops:
    """What a call takes whose choice is `lists` (indices and counts); None where every block is in, without choosing.

    A pair of query and key is 4 head_dim operations, a scored block 2 head_dim, an element that is averaged 1.
    """
    batch, num_heads, seqlen_q, head_dim = query.shape
    seqlen_kv = key.shape[2]
    dense = 4.0 * head_dim * batch * num_heads * seen_keys(seqlen_q, seqlen_kv, causal=selection.causal)
    if lists is None:
        return Flops(0.0, dense, dense)
    averaged = key.numel()
    if selection.query_group > 1 or selection.num_choosers != num_heads:
        averaged += query.numel()
    scored = batch * selection.num_choosers * _allowed_blocks(selection, seqlen_q, seqlen_kv)
    pairs = chosen_pairs(*lists, selection, seqlen_q, seqlen_kv) * (num_heads // selection.num_choosers)
    return Flops(2.0 * head_dim * scored + averaged, 4.0 * head_dim * pairs, dense)


def seen_keys(seqlen_q: int, seqlen_kv: int, *, causal: bool) -> int:
    """Pairs of one head that dense attention has: all, or those where the key is not after the query."""
    if not causal:
        return seqlen_q * seqlen_kv
    return int((torch.arange(seqlen_q) + seqlen_kv - seqlen_q + 1).clamp(0, seqlen_kv).sum())


def _allowed_blocks(selection: Selection, seqlen_q: int, seqlen_kv: int) -> int:
    """Blocks that one chooser's groups score, over all groups."""
    groups, blocks = selection.num_groups(seqlen_q), selection.num_blocks(seqlen_kv)
    if not selection.causal:
        return groups * blocks
    last = ((torch.arange(groups) + 1) * selection.query_group).clamp(max=seqlen_q) - 1 + seqlen_kv - seqlen_q
    return int((last.div(selection.block_size, rounding_mode="floor") + 1).clamp(0, blocks).sum())


def chosen_pairs(indices: Tensor, counts: Tensor, selection: Selection, seqlen_q: int, seqlen_kv: int) -> int:
    """Pairs of query and key in the lists [B, choosers, groups, K], a causal choice cut at each query, of all choosers.

    Entries past a count do not matter; those before it are different blocks.
    """
    size, group = selection.block_size, selection.query_group
    places = torch.arange(indices.shape[3], device=indices.device)
    starts = torch.where(places < counts.unsqueeze(3), indices.long() * size, seqlen_kv)
    first = torch.arange(indices.shape[2], device=indices.device) * group
    total = torch.zeros((), dtype=torch.int64, device=indices.device)
    for row in range(group):
        rows = first + row
        ends = (rows + seqlen_kv - seqlen_q + 1).clamp(max=seqlen_kv) if selection.causal else first * 0 + seqlen_kv
        keys = (ends.view(1, 1, -1, 1) - starts).clamp(0, size) * (rows < seqlen_q).view(1, 1, -1, 1)
        total += keys.sum()
    return int(total)
