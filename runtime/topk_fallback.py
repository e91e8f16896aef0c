"""Attention over chosen blocks in plain PyTorch: what answers where there is no kernel, and what gives gradients.

Right on every input, in bounded memory; not fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.runtime.selection import Selection
from tilewright.runtime.topk_ranking import listed_blocks, real_entries

CHUNK_BYTES = 256 * 2**20
"""What the intermediates of one chunk may take, about."""

GATHER_FROM = 64
"""A list's keys are gathered where all keys, times the rows that share the list, are more than so many times as many;
else rows are scored against every key. Both took equally long at 20 to 25 where a row has its own list and at about 110
where 64 rows share one (two cores, AVX2, fp32, 8 heads, head_dim 64)."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, counts: Tensor, selection: Selection, scale: float
) -> tuple[Tensor, Tensor]:
    """`out` [B, Hq, Nq, D] in query's dtype and `lse` [B, Hq, Nq] float32 over the listed blocks, by chunks of groups.

    A row without a key gives output 0 and lse -inf.
    """
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
    for part in _parts(query, key, value, indices, counts, selection, scale):
        out[:, :, part.rows] = part.of_rows(part.weights @ part.value).to(query.dtype)
        lse[:, :, part.rows] = part.of_rows(part.lse.unsqueeze(-1))[..., 0]
    return out, lse


def attend_backward(
    out_gradient: Tensor,
    lse_gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    counts: Tensor,
    selection: Selection,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value for those of `attend`'s `out` and `lse`; the choice is constant.

    Weights are computed again chunk by chunk, so that memory stays bounded, and their gradient is
    weights * (d_out . value - d_out . out + d_lse).
    """
    q_gradient = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    k_gradient = torch.zeros(key.shape, dtype=torch.float32, device=query.device)
    v_gradient = torch.zeros_like(k_gradient)
    for part in _parts(query, key, value, indices, counts, selection, scale):
        given = part.lined_up(out_gradient[:, :, part.rows].float())
        given_lse = part.lined_up(lse_gradient[:, :, part.rows].float().unsqueeze(-1))
        to_weights = given @ part.value.mT
        in_all = (to_weights * part.weights).sum(-1, keepdim=True)
        to_scores = part.weights * (to_weights - in_all + given_lse) * scale
        q_gradient[:, :, part.rows] = part.of_rows(to_scores @ part.key).to(query.dtype)
        part.add_to(k_gradient, to_scores.mT @ part.query)
        part.add_to(v_gradient, part.weights.mT @ given)
    return q_gradient, k_gradient.to(key.dtype), v_gradient.to(value.dtype)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of query and the keys that they meet, in float32, lined up for matrix products.

    Leading dimensions are [B, choosers, groups] where keys are gathered, else [B, KV heads]; then come rows or keys.
    rows: which rows of each head. weights: the softmax. places: where keys are gathered, their places among all tokens
    of all KV heads, past the end for none. shape: [B, choosers, groups, heads of a chooser, rows of a group].
    """

    rows: slice
    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    lse: Tensor
    places: Tensor | None
    shape: tuple[int, int, int, int, int]

    def lined_up(self, rows: Tensor) -> Tensor:
        """[B, Hq, rows, any] in the order of `query`."""
        return _lined_up(rows, self.shape, self.key)

    def of_rows(self, lined_up: Tensor) -> Tensor:
        """The way back from `lined_up`."""
        batch, choosers, groups, shared, size = self.shape
        heads = lined_up.reshape(*self.shape, lined_up.shape[-1]).transpose(2, 3)
        return heads.reshape(batch, choosers * shared, groups * size, lined_up.shape[-1])

    def add_to(self, gradient: Tensor, keys: Tensor) -> None:
        """Add [..., keys, D] to [B, Hkv, Nkv, D] where the keys came from."""
        if self.places is None:
            gradient += keys
        else:
            head_dim = gradient.shape[3]
            found = self.places < gradient.numel() // head_dim
            places = self.places.where(found, 0)
            keys = keys.reshape(-1, head_dim).masked_fill(~found.unsqueeze(1), 0.0)
            gradient.view(-1, head_dim).index_add_(0, places, keys)


def _lined_up(rows: Tensor, shape: tuple[int, int, int, int, int], key: Tensor) -> Tensor:
    batch, choosers, groups, shared, size = shape
    heads = rows.reshape(batch, choosers, shared, groups, size, rows.shape[-1]).transpose(2, 3)
    return heads.reshape(*key.shape[:-2], -1, rows.shape[-1])


def _parts(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, counts: Tensor, selection: Selection, scale: float
) -> Iterator[_Part]:
    if query.numel() == 0 or key.shape[2] == 0 or indices.shape[3] == 0:
        return
    keys, values = key.float(), value.float()
    gather = _gathers(query, key, indices, selection)
    for groups, rows in _query_chunks(query, key, indices, selection, gather):
        lists = indices[:, :, groups], counts[:, :, groups]
        yield _part(query, keys, values, *lists, rows, selection, scale, gather)


def _gathers(query: Tensor, key: Tensor, indices: Tensor, selection: Selection) -> bool:
    sharing = min(selection.query_group, query.shape[2]) * (query.shape[1] // indices.shape[1])
    return sharing * key.shape[2] > GATHER_FROM * indices.shape[3] * selection.block_size


def _query_chunks(
    query: Tensor, key: Tensor, indices: Tensor, selection: Selection, gather: bool
) -> Iterator[tuple[slice, slice]]:
    """Groups and the rows of query that they are, by chunks: groups of one size, or some rows of one group."""
    batch, num_heads, seqlen_q, head_dim = query.shape
    size = min(selection.query_group, seqlen_q)
    keys = indices.shape[3] * selection.block_size if gather else key.shape[2]
    cost = 16 * batch * keys * (num_heads * size + (indices.shape[1] * head_dim if gather else 0))
    step = CHUNK_BYTES // cost
    part = size if step else max(1, size * CHUNK_BYTES // cost)
    whole = seqlen_q // size if step else 0
    for start in range(0, whole, step or 1):
        stop = min(start + step, whole)
        yield slice(start, stop), slice(start * size, stop * size)
    for group in range(whole, selection.num_groups(seqlen_q)):
        end = min((group + 1) * size, seqlen_q)
        for first in range(group * size, end, part):
            yield slice(group, group + 1), slice(first, min(first + part, end))


def _part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    counts: Tensor,
    rows: slice,
    selection: Selection,
    scale: float,
    gather: bool,
) -> _Part:
    """key, value: in float32. indices, counts: of the groups whose rows, or some of them, these are."""
    (batch, num_heads, seqlen_q, head_dim), (choosers, groups) = query.shape, indices.shape[1:3]
    num_kv_heads, seqlen_kv, block_size = key.shape[1], key.shape[2], selection.block_size
    size = (rows.stop - rows.start) // groups
    shape = (batch, choosers, groups, num_heads // choosers, size)
    places = None
    if gather:
        real = real_entries(indices, counts, selection.num_blocks(seqlen_kv)).unsqueeze(4)
        tokens = (indices.long().unsqueeze(4) * block_size + torch.arange(block_size, device=key.device)).flatten(3)
        listed = real.expand(*real.shape[:4], block_size).flatten(3) & (tokens < seqlen_kv)
        heads = torch.arange(choosers, device=key.device) // (choosers // num_kv_heads)
        heads = heads + num_kv_heads * torch.arange(batch, device=key.device).unsqueeze(1)
        places = heads.view(batch, choosers, 1, 1) * seqlen_kv + tokens
        places = places.where(listed, batch * num_kv_heads * seqlen_kv).flatten()
        key, value = (_gathered(t, places, (batch, choosers, groups, -1, head_dim)) for t in (key, value))
        tokens, listed = tokens[:, :, :, None, None], listed[:, :, :, None, None]
    else:
        tokens = torch.arange(seqlen_kv, device=key.device)
        flags = listed_blocks(indices, counts, selection.num_blocks(seqlen_kv))
        listed = flags.repeat_interleave(block_size, dim=3)[:, :, :, None, None, :seqlen_kv]
    lined_up = _lined_up(query[:, :, rows].float(), shape, key)
    scores = ((lined_up @ key.mT) * scale).view(*shape, key.shape[-2])
    if selection.causal:
        position = torch.arange(rows.start, rows.stop, device=key.device) + (seqlen_kv - seqlen_q)
        listed = listed & (tokens <= position.view(groups, 1, size, 1))
    scores = scores.masked_fill(~listed, -torch.inf).view(*lined_up.shape[:-1], key.shape[-2])
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return _Part(rows, lined_up, key, value, weights, lse, places, shape)


def _gathered(tensor: Tensor, places: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tokens at these places among all tokens of all heads, zeros past the end: no key is read for nothing."""
    tokens = tensor.reshape(-1, tensor.shape[3])
    found = places < len(tokens)
    return tokens.index_select(0, places.where(found, 0)).masked_fill(~found.unsqueeze(1), 0.0).view(shape)
