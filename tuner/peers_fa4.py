"""FlashAttention-4 (package `flash-attn-4`, the CuTe version) as a peer, where it is installed and applies."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewright.generator.abi import UNBOUNDED
from tilewright.runtime import mask_terms as terms
from tilewright.tuner.memory import tensor_bytes
from tilewright.tuner.peers import Call, Peer, Ready, Setting


def fa4() -> Peer:
    """The peer: causal, windows, block masks and no mask at all, in float16 and bfloat16 on CUDA."""
    return Peer("fa4", _unfit, _settings)


def _unfit(call: Call) -> str | None:
    if not call.query.is_cuda or call.query.dtype not in (torch.float16, torch.bfloat16):
        return "FlashAttention-4 takes float16 and bfloat16 on CUDA"
    if call.mask is not None and call.band is None and not isinstance(call.mask, terms.BlockMask):
        return "FlashAttention-4 takes causal, windows and block masks"
    try:
        found = importlib.util.find_spec("flash_attn.cute") is not None
    except (ImportError, ValueError):
        found = False
    return None if found else "flash_attn.cute is not installed (pip install flash-attn-4)"


def _settings(call: Call) -> Iterator[Setting]:
    if not isinstance(call.mask, terms.BlockMask):
        name = "band" if call.mask is not None else "dense"
        yield Setting(name, lambda: _banded(call))
        if call.is_grouped:
            # By default the query heads that share keys go into one tile, which loads less and wastes more at the edge.
            yield Setting(f"{name}, heads apart", lambda: _banded(call, pack_gqa=False))
        return
    own = (call.mask.sparse_block_q, call.mask.sparse_block_kv)
    # On Hopper the keys of a block must be those of its tile, which shrinks to them, and at most 128; the queries a
    # multiple of 64. Finer blocks describe the same mask.
    sizes = [own, *((q, k) for q in (128, 64) for k in (128, 64) if own[0] % q == 0 and own[1] % k == 0)]
    for size in dict.fromkeys(sizes):
        yield Setting(f"{size[0]}x{size[1]}", partial(_block_sparse, call, size))


def _run(call: Call, held: int, **options: Any) -> Ready:
    from flash_attn.cute.interface import flash_attn_func

    # [B, N, H, D] is its own layout; the copies are made outside the timing.
    query, key, value = (t.transpose(1, 2).contiguous() for t in (call.query, call.key, call.value))

    def run() -> Tensor:
        result = flash_attn_func(query, key, value, softmax_scale=call.scale, **options)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2)

    return Ready(run, held)


def _banded(call: Call, **options: Any) -> Ready:
    band = call.band
    if band is None or band == (UNBOUNDED, UNBOUNDED):
        return _run(call, 0, causal=False, **options)
    if band == (UNBOUNDED, 0):
        return _run(call, 0, causal=True, **options)
    left, right = (None if side == UNBOUNDED else side for side in band)
    return _run(call, 0, causal=False, window_size=(left, right), **options)


def _block_sparse(call: Call, size: tuple[int, int]) -> Ready:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    mask = call.mask
    assert isinstance(mask, terms.BlockMask)
    finer = (mask.sparse_block_q // size[0], mask.sparse_block_kv // size[1])
    active = terms.as_4d(mask.active).repeat_interleave(finer[0], 2).repeat_interleave(finer[1], 3)
    blocks_q, blocks_kv = -(-call.query.shape[2] // size[0]), -(-call.key.shape[2] // size[1])
    active = active[:, :, :blocks_q, :blocks_kv].expand(*call.query.shape[:2], -1, -1)
    counts = active.sum(-1, dtype=torch.int32).contiguous()
    indices = active.to(torch.uint8).argsort(dim=-1, descending=True, stable=True).to(torch.int32).contiguous()
    # Every block that is active is full; the lists of partial ones are empty.
    blocks = BlockSparseTensorsTorch(
        torch.zeros_like(counts), torch.zeros_like(indices), counts, indices, block_size=size
    )
    return _run(call, tensor_bytes(counts, indices) * 2, block_sparse_tensors=blocks)
