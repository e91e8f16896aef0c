"""How many pairs of a mask are active: exact in O(N) for structured masks, estimated from rows for others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewright.generator.abi import UNBOUNDED
from tilewright.runtime.mask_terms import as_4d, ceil_div

if TYPE_CHECKING:
    from tilewright.runtime.canonical import CanonicalMask

SAMPLED_PAIRS = 2**20
"""Pairs read for an estimate; a few milliseconds on one core."""


def density_of(form: CanonicalMask) -> float | None:
    """Active pairs over all pairs to two significant digits, or None where the mask's data is not on the CPU."""
    if form.seqlen_q == 0 or form.seqlen_kv == 0:
        return 0.0
    if form.mask is not None and any(t.device.type != "cpu" for t in form.mask.tensors):
        return None
    if form.blocks is None and form.residual is None:
        density = _counted(form)
    elif form.terms == ("and_blocks",):
        density = _block_share(form)
    else:
        density = _sampled(form)
    return float(f"{density:.2g}")


def _counted(form: CanonicalMask) -> float:
    """Exact: each row's range of keys, and inside it the window plus the strided and listed keys outside the window."""
    position = torch.arange(form.seqlen_q) + (form.seqlen_kv - form.seqlen_q)
    begin, end = _range(position, form.bound, form.seqlen_kv)
    if form.row_begin is not None and form.row_end is not None:
        begin, end = torch.maximum(begin, form.row_begin[0].long()), torch.minimum(end, form.row_end[0].long())
    end = torch.maximum(begin, end)
    if form.window is None and not form.stride and form.tokens is None:
        return float((end - begin).sum()) / (form.seqlen_q * form.seqlen_kv)
    if form.window is None:
        inner_begin = inner_end = begin
    else:
        inner_begin, inner_end = _range(position, form.window, form.seqlen_kv)
        inner_begin = torch.minimum(torch.maximum(inner_begin, begin), end)
        inner_end = torch.maximum(torch.minimum(inner_end, end), inner_begin)
    listed = torch.empty(0, dtype=torch.int64)
    if form.tokens is not None:
        listed = form.tokens.on_host().long()
        if form.stride:
            listed = listed[listed % form.stride != 0]

    def scattered(stop: Tensor) -> Tensor:
        """How many strided and listed keys lie before `stop`."""
        before = torch.searchsorted(listed, stop)
        return before + (stop + form.stride - 1) // form.stride if form.stride else before

    outside = scattered(inner_begin) - scattered(begin) + scattered(end) - scattered(inner_end)
    return float((inner_end - inner_begin + outside).sum()) / (form.seqlen_q * form.seqlen_kv)


def _range(position: Tensor, band: tuple[int, int] | None, seqlen_kv: int) -> tuple[Tensor, Tensor]:
    """First and one-past-last key of a band for each row, both in 0 .. seqlen_kv."""
    left, right = (UNBOUNDED, UNBOUNDED) if band is None else band
    begin = torch.zeros_like(position) if left == UNBOUNDED else (position - left).clamp(0, seqlen_kv)
    end = torch.full_like(position, seqlen_kv) if right == UNBOUNDED else (position + right + 1).clamp(0, seqlen_kv)
    return begin, torch.maximum(begin, end)


def _block_share(form: CanonicalMask) -> float:
    """Exact: active blocks weighted with how many pairs of them exist."""
    blocks = form.blocks
    assert blocks is not None
    rows = _sizes(form.seqlen_q, blocks.sparse_block_q)
    columns = _sizes(form.seqlen_kv, blocks.sparse_block_kv)
    # A refined grid may reach past the last token; only the blocks that hold tokens count.
    active = as_4d(blocks.active)[:, :, : rows.shape[0], : columns.shape[0]].double().mean(dim=(0, 1))
    return float(rows @ active @ columns) / (form.seqlen_q * form.seqlen_kv)


def _sizes(length: int, block: int) -> Tensor:
    starts = torch.arange(ceil_div(length, block)) * block
    return (length - starts).clamp(max=block).double()


def _sampled(form: CanonicalMask) -> float:
    """An estimate from query rows spread evenly over the mask."""
    mask = form.mask
    assert mask is not None
    batch, num_heads = mask.lead
    wanted = max(4, SAMPLED_PAIRS // (batch * num_heads * form.seqlen_kv))
    rows = torch.linspace(0, form.seqlen_q - 1, min(wanted, form.seqlen_q)).round().long().unsqueeze(1)
    keys = torch.arange(form.seqlen_kv).unsqueeze(0)
    active = mask.pairs(rows, keys, form.seqlen_q, form.seqlen_kv)
    return float(active.expand(*active.shape[:-2], rows.shape[0], form.seqlen_kv).float().mean())
