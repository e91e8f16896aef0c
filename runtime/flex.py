"""FlexAttention's `BlockMask` as one of our masks.

A `BlockMask` lists, per block of query rows, partial KV blocks, where its `mask_mod` decides pair by pair, and full
ones, where every pair is active. The blocks become a `block_mask`; what `mask_mod` says of the partial ones is
evaluated once, by chunks of rows, and kept as bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewright.generator.errors import InvalidInput
from tilewright.runtime.mask_bits import CHUNK_PAIRS, pack_bits
from tilewright.runtime.mask_terms import BlockMask, Mask, PackedMask, as_4d, ceil_div

if TYPE_CHECKING:
    from torch.nn.attention import flex_attention


def mask_of_block_mask(flex_mask: flex_attention.BlockMask) -> Mask:
    """The mask a `BlockMask` describes, on the device its lists are on.

    A `BlockMask` made for all batch entries or all heads (B=None, H=None) is evaluated for the first one and shared.
    The conversion reads one number back (whether there are partial blocks), so do it once and keep the mask. Raises
    `InvalidInput` for anything that is no `BlockMask` or whose lists contradict its lengths.
    """
    if type(flex_mask).__name__ != "BlockMask":
        raise InvalidInput(f"expected a FlexAttention BlockMask, got {type(flex_mask).__name__}")
    if torch.compiler.is_compiling():
        raise InvalidInput(
            "a BlockMask cannot be converted inside a compiled function, got one there; call "
            "masks.from_block_mask outside and pass the mask it returns"
        )
    seqlen_q, seqlen_kv = flex_mask.seq_lengths
    size_q, size_kv = flex_mask.BLOCK_SIZE
    blocks_q, blocks_kv = ceil_div(seqlen_q, size_q), ceil_div(seqlen_kv, size_kv)
    partial = _listed(flex_mask.kv_num_blocks, flex_mask.kv_indices, blocks_q, blocks_kv)
    whole = torch.zeros_like(partial)
    if flex_mask.full_kv_num_blocks is not None and flex_mask.full_kv_indices is not None:
        whole = _listed(flex_mask.full_kv_num_blocks, flex_mask.full_kv_indices, blocks_q, blocks_kv)
    blocks = BlockMask(partial | whole, size_q, size_kv)
    if _keeps_everything(flex_mask) or not bool(partial.any()):
        return blocks
    return blocks & PackedMask(_pair_bits(flex_mask, BlockMask(whole, size_q, size_kv)), seqlen_kv)


def _keeps_everything(flex_mask: flex_attention.BlockMask) -> bool:
    """Whether `mask_mod` is the one PyTorch puts where none was given."""
    from torch.nn.attention.flex_attention import noop_mask

    return flex_mask.mask_mod is noop_mask


def _listed(counts: Tensor, indices: Tensor, blocks_q: int, blocks_kv: int) -> Tensor:
    """bool [B, H, blocks_q, blocks_kv] from counts [..., rows] and indices [..., rows, columns].

    Entries past the count may hold anything and are not looked at.
    """
    indices = as_4d(indices)[:, :, :blocks_q].long()
    counts = counts[(None,) * (3 - counts.dim())][:, :, :blocks_q]
    if indices.shape[2] != blocks_q:
        raise InvalidInput(f"the BlockMask's lengths need {blocks_q} rows of blocks, got {indices.shape[2]}")
    place = torch.arange(indices.shape[3], device=indices.device)
    # Whatever lies past the count goes to one column more, which is cut off again.
    target = torch.where(place < counts.unsqueeze(-1), indices, blocks_kv).clamp(0, blocks_kv)
    flags = torch.zeros(*indices.shape[:3], blocks_kv + 1, dtype=torch.bool, device=indices.device)
    return flags.scatter_(-1, target, True)[..., :blocks_kv].contiguous()


def _pair_bits(flex_mask: flex_attention.BlockMask, whole: BlockMask) -> Tensor:
    """What `mask_mod` says, or True in full blocks: int32 [B|1, H|1, seqlen_q, ceil(seqlen_kv / 32)]."""
    from torch.nn.attention.flex_attention import create_mask

    seqlen_q, seqlen_kv = flex_mask.seq_lengths
    device = whole.active.device
    batch, num_heads = whole.lead
    mask_mod = flex_mask.mask_mod
    words = torch.empty(batch, num_heads, seqlen_q, ceil_div(seqlen_kv, 32), dtype=torch.int32, device=device)
    step = max(1, CHUNK_PAIRS // max(1, batch * num_heads * seqlen_kv))
    for start in range(0, seqlen_q, step):
        stop = min(start + step, seqlen_q)

        def shifted(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, start: int = start) -> Tensor:
            return mask_mod(b, h, q + start, kv)

        active = create_mask(shifted, batch, num_heads, stop - start, seqlen_kv, device=device)
        active = active | whole.rows(seqlen_q, seqlen_kv, device, start, stop)
        words[:, :, start:stop] = pack_bits(active)
    return words
