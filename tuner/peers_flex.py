"""FlexAttention as a peer, at its best: compiled, with block lists built exactly, at every block size that may pay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import flex_attention

from tilewright.generator.abi import UNBOUNDED
from tilewright.generator.errors import NotSupported
from tilewright.runtime import mask_terms as terms
from tilewright.runtime.canonical import canonical
from tilewright.runtime.mask_tiles import classify_tiles
from tilewright.tuner.memory import tensor_bytes
from tilewright.tuner.peers import Call, Peer, Ready, Setting

BLOCK_SIZES: tuple[tuple[int, int], ...] = (
    (128, 128), (128, 64), (64, 64), (128, 32), (64, 32), (128, 16), (64, 16),
)  # fmt: skip
"""Query rows by keys of a block. 128x128, the default, is the worst on scattered masks: a key makes a block active."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

WARPGROUP_ROWS = 64
"""Query rows that the tensor cores' instructions take at once on Hopper, from 4 warps."""

DECODE_QUERIES = 128
"""Below this many queries FlexAttention runs its decoding kernel, which chooses its own tile."""


def flex(block_sizes: Sequence[tuple[int, int]] = BLOCK_SIZES) -> Peer:
    """The peer; `block_sizes` are tried besides PyTorch's default."""
    return Peer("flex", lambda call: None, lambda call: _settings(call, block_sizes))


def _settings(call: Call, block_sizes: Sequence[tuple[int, int]]) -> Iterator[Setting]:
    yield Setting("default", lambda: _compiled(call, (128, 128), {}))
    if call.query.shape[2] < DECODE_QUERIES:
        return
    # The blocks of a block mask first, in case there is no time for all.
    for size in sorted(block_sizes, key=lambda size: not _cuts_no_block(call.mask, size)):
        name, options = f"{size[0]}x{size[1]}", _kernel_options(call, size)
        if _cuts_no_block(call.mask, size):
            yield Setting(f"{name}, one list", partial(_compiled, call, size, options, one_list=True))
        if options or size != (128, 128):
            yield Setting(name, partial(_compiled, call, size, options))


def _kernel_options(call: Call, block_size: tuple[int, int]) -> dict[str, int]:
    """The tile, where it is not the mask's blocks anyway, as on the CPU; and 4 warps for 64 rows.

    At head_dim 128 PyTorch's default is 8 warps whatever the tile; its own autotuning gives 64 rows 4, one warpgroup.
    """
    if not call.query.is_cuda:
        return {}
    warps = {"num_warps": 4} if block_size[0] == WARPGROUP_ROWS else {}
    return {"BLOCK_M": block_size[0], "BLOCK_N": block_size[1], **warps}


def _cuts_no_block(mask: terms.Mask | None, block_size: tuple[int, int]) -> bool:
    """Whether it is a block mask all of whose blocks consist of whole ones of this size."""
    if not isinstance(mask, terms.BlockMask):
        return False
    return mask.sparse_block_q % block_size[0] == 0 and mask.sparse_block_kv % block_size[1] == 0


def _compiled(call: Call, block_size: tuple[int, int], options: dict[str, int], *, one_list: bool = False) -> Ready:
    # Past its recompile limit PyTorch would run the eager reference: so a fresh start for each setting, and fullgraph,
    # which makes that an error.
    torch._dynamo.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    block_mask = None if call.mask is None else flex_mask(call, block_size, one_list=one_list)
    query, key, value, scale, grouped = call.query, call.key, call.value, call.scale, call.is_grouped
    kernel_options = options or None

    def run() -> Tensor:
        out: Tensor = compiled(
            query, key, value, block_mask=block_mask, scale=scale, enable_gqa=grouped, kernel_options=kernel_options
        )
        return out

    return Ready(run, 0 if block_mask is None else _held_bytes(block_mask))


def flex_mask(call: Call, block_size: tuple[int, int], *, one_list: bool = False) -> FlexMask:
    """The call's mask as FlexAttention takes it: exact lists of full and partial blocks, and a mask_mod for the latter.

    Built from the mask's terms, so that nothing of N x N is needed, which `create_block_mask` would. one_list: of the
    active blocks alone, all taken as full, without a mask_mod; the kernel then has one loop instead of two.
    """
    assert call.mask is not None
    seqlen_q, seqlen_kv = call.query.shape[2], call.key.shape[2]
    active, is_full = classify_tiles(canonical(call.mask, seqlen_q, seqlen_kv), *block_size, call.query.device)
    # FlexAttention cuts the last blocks at the lengths itself, so a cut block is full too if all its pairs are active;
    # classify_tiles leaves it partial, which is right and costs one evaluated block a row.
    lists = _listed(active) if one_list else (*_listed(active & ~is_full), *_listed(is_full))
    mask: FlexMask = FlexMask.from_kv_blocks(
        *lists,  # type: ignore[misc]
        BLOCK_SIZE=block_size,
        mask_mod=None if one_list else mask_mod_of(call.mask, seqlen_q, seqlen_kv),
        seq_lengths=(seqlen_q, seqlen_kv),
    )
    return mask


def _listed(flags: Tensor) -> tuple[Tensor, Tensor]:
    """(counts, indices) of the set flags along the last dimension, ascending, int32."""
    order = flags.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return flags.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _held_bytes(mask: FlexMask) -> int:
    return tensor_bytes(*(value for value in mask.as_tuple(flatten=True) if isinstance(value, Tensor)))


def mask_mod_of(mask: terms.Mask, seqlen_q: int, seqlen_kv: int) -> MaskMod:
    """The mask as FlexAttention's predicate over (batch, head, query index, key index)."""
    match mask:
        case terms.And(first=first, second=second):
            one, two = mask_mod_of(first, seqlen_q, seqlen_kv), mask_mod_of(second, seqlen_q, seqlen_kv)
            return lambda b, h, q, k: one(b, h, q, k) & two(b, h, q, k)
        case terms.Or(first=first, second=second):
            one, two = mask_mod_of(first, seqlen_q, seqlen_kv), mask_mod_of(second, seqlen_q, seqlen_kv)
            return lambda b, h, q, k: one(b, h, q, k) | two(b, h, q, k)
        case terms.Full():
            return lambda b, h, q, k: q >= 0
        case terms.Band(left=left, right=right):
            return _band(left, right, seqlen_kv - seqlen_q)
        case terms.GlobalStride(stride=stride):
            return lambda b, h, q, k: k % stride == 0
        case terms.GlobalTokens():
            flags = mask.key_flags(seqlen_kv, mask.indices.device)
            return lambda b, h, q, k: flags[k]
        case terms.BlockMask(active=active, sparse_block_q=block_q, sparse_block_kv=block_kv):
            blocks = _looked_up(active)
            return lambda b, h, q, k: blocks(b, h, q // block_q, k // block_kv)
        case terms.Document():
            query_segment = _segments(mask.cu_seqlens_q, seqlen_q)
            key_segment = _segments(mask.cu_seqlens_kv, seqlen_kv)
            return lambda b, h, q, k: query_segment[q] == key_segment[k]
        case terms.TokenMask(active=active):
            return _looked_up(active)
        case terms.PackedMask(words=packed):
            words = _looked_up(packed)
            return lambda b, h, q, k: ((words(b, h, q, k // 32) >> (k % 32)) & 1) != 0
    raise NotSupported(f"no mask_mod is written for {mask.spec}")


def _band(left: int, right: int, offset: int) -> MaskMod:
    if left == UNBOUNDED and right == UNBOUNDED:
        return lambda b, h, q, k: q >= 0
    if left == UNBOUNDED:
        return lambda b, h, q, k: k <= q + offset + right
    if right == UNBOUNDED:
        return lambda b, h, q, k: k >= q + offset - left
    return lambda b, h, q, k: (k >= q + offset - left) & (k <= q + offset + right)


def _looked_up(tensor: Tensor) -> MaskMod:
    """Reads `tensor[b, h, i, j]`, dimensions that are shared left out."""
    whole = terms.as_4d(tensor)
    if whole.shape[0] > 1 and whole.shape[1] > 1:
        return lambda b, h, i, j: whole[b, h, i, j]
    if whole.shape[0] > 1:
        by_batch = whole[:, 0].contiguous()
        return lambda b, h, i, j: by_batch[b, i, j]
    if whole.shape[1] > 1:
        by_head = whole[0].contiguous()
        return lambda b, h, i, j: by_head[h, i, j]
    shared = whole[0, 0].contiguous()
    return lambda b, h, i, j: shared[i, j]


def _segments(cu_seqlens: Tensor, length: int) -> Tensor:
    """The number of each position's segment."""
    at = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, at, right=True)
