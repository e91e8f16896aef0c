"""What attention that chooses its own blocks is benchmarked beside: PyTorch, Triton and dense attention."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tilewright.generator.errors import InvalidInput
from tilewright.tuner.peers import ANOTHER, Peer, Setting, all_peers
from tilewright.tuner.topk_own import Lists, TopkCall, TopkPeer, TopkReady, nothing_to_choose, own_parts, too_large
from tilewright.tuner.topk_unfused import attend_gathered, chosen_in_chunks, dense_mask, pooled

CHUNKS = {"cpu": (4, 16, 64), "cuda": (256, 1024, 4096)}
"""Queries taken at once by what gathers keys in PyTorch: on a CPU what caches hold, on a GPU what keeps it busy."""

SELECT_CHUNK = 4096
"""Queries whose scores of all blocks exist at once, where nothing is gathered for them."""


def all_topk_peers() -> dict[str, TopkPeer]:
    """Every peer by name, in the order of a table."""
    forward = all_peers()
    peers = [
        TopkPeer("unfused", "topk", _unfit_unfused, _unfused_settings, is_rounded=True),
        TopkPeer("triton_query", "topk", _unfit_triton, _triton_settings, is_rounded=True),
        TopkPeer("naive", "topk", _unfit_naive, _naive_settings, is_rounded=True),
        *(_dense(forward[name]) for name in ("sdpa_flash", "sdpa_cudnn", "sdpa_dense")),
        _window(forward["flex"]),
    ]
    return {peer.name: peer for peer in peers}


def topk_peers_named(names: str) -> list[TopkPeer]:
    """Own parts and peers in a list like `unfused,sdpa_cudnn`, in that order; `none` gives none of them.

    Raises `InvalidInput` that lists the known ones.
    """
    known = {**{name: part for name, part in own_parts().items() if name != "tilewright"}, **all_topk_peers()}
    if names == "none":
        return []
    wanted = list(dict.fromkeys(part.strip() for part in names.split(",") if part.strip()))
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise InvalidInput(f"peers must be among {', '.join(known)}, or none; got {', '.join(unknown) or repr(names)}")
    return [known[name] for name in wanted]


def _unfit_unfused(call: TopkCall) -> str | None:
    selection = call.selection
    if selection.query_group > 1 or selection.num_choosers != call.query.shape[1]:
        return "it is written for queries and heads that choose alone"
    if selection.sink_blocks or selection.window_blocks:
        return "it is written without sinks and windows"
    if call.query.shape[2] != call.key.shape[2]:
        return "it is written for as many queries as keys"
    return nothing_to_choose(call)


def chosen_by_pytorch(call: TopkCall, chunk: int = SELECT_CHUNK) -> Lists:
    """The lists that PyTorch chooses: indices [B, H, N, K] int32, -1 for none, in no order; counts."""
    width = call.selection.list_width
    indices = torch.empty((*call.query.shape[:3], width), dtype=torch.int32, device=call.query.device)
    keys = pooled(call.key, call.selection.block_size)
    for start, stop, blocks in chosen_in_chunks(call.query, keys, call.selection, call.budgets, chunk):
        indices[:, :, start:stop] = blocks
    return indices, (indices >= 0).sum(3, dtype=torch.int32)


def _unfused_settings(call: TopkCall) -> Iterator[Setting]:
    has_gaps = len(set(call.budgets)) > 1

    def run(chunk: int) -> Tensor:
        out = torch.empty_like(call.query)
        keys = pooled(call.key, call.selection.block_size)
        for start, stop, blocks in chosen_in_chunks(call.query, keys, call.selection, call.budgets, chunk):
            out[:, :, start:stop] = attend_gathered(
                *(call.query[:, :, start:stop], call.key, call.value, blocks, call.selection, call.scale),
                first=start,
                has_gaps=has_gaps,
            )
        return out

    for chunk in CHUNKS[call.query.device.type]:
        yield Setting(
            f"{chunk} queries at once", partial(_ready, partial(run, chunk), partial(chosen_by_pytorch, call, chunk))
        )


def _ready(run: Callable[[], Tensor], lists: Callable[[], Lists]) -> TopkReady:
    return TopkReady(run, 0, lists)


def _unfit_triton(call: TopkCall) -> str | None:
    if reason := _unfit_unfused(call):
        return reason
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not call.query.is_cuda:
        return "Triton's kernels run on a GPU"
    head_dim = call.query.shape[3]
    return None if head_dim & (head_dim - 1) == 0 else f"head_dim must be a power of two for it, got {head_dim}"


def _triton_settings(call: TopkCall) -> Iterator[Setting]:
    from tilewright.tuner.topk_triton import one_query_attention

    block_size, causal = call.selection.block_size, call.selection.causal

    def run(keys_at_once: int, num_warps: int) -> Tensor:
        indices, _ = chosen_by_pytorch(call)
        return one_query_attention(
            *(call.query, call.key, call.value, indices),
            block_size=block_size,
            causal=causal,
            scale=call.scale,
            keys_at_once=keys_at_once,
            num_warps=num_warps,
        )

    whole = 1 << (block_size - 1).bit_length()
    for keys in dict.fromkeys(min(count, whole) for count in (16, 32, 64)):
        for warps in (1, 2):
            name = f"{keys} keys at once, num_warps {warps}"
            yield Setting(name, partial(_ready, partial(run, keys, warps), partial(chosen_by_pytorch, call)))


def _unfit_naive(call: TopkCall) -> str | None:
    batch, num_heads, seqlen_q, _ = call.query.shape
    pairs = batch * num_heads * seqlen_q * call.key.shape[2]
    # The mask as bool, PyTorch's copy of it in the scores' dtype, and on the CPU the scores.
    return _unfit_unfused(call) or too_large(call, "a dense mask", pairs * (1 + 2 * call.query.itemsize))


def _naive_settings(call: TopkCall) -> Iterator[Setting]:
    def run() -> Tensor:
        indices, _ = chosen_by_pytorch(call, call.query.shape[2])
        mask = dense_mask(indices, call.key.shape[2], call.selection)
        return torch.nn.functional.scaled_dot_product_attention(
            *(call.query, *_repeated(call)), attn_mask=mask, scale=call.scale
        )

    yield Setting("dense mask", partial(_ready, run, partial(chosen_by_pytorch, call, call.query.shape[2])))


def _repeated(call: TopkCall) -> tuple[Tensor, Tensor]:
    """Key and value with a head for each of the query's: with a mask and grouped heads PyTorch has no fast path."""
    group = call.query.shape[1] // call.key.shape[1]
    if group == 1:
        return call.key, call.value
    return call.key.repeat_interleave(group, 1), call.value.repeat_interleave(group, 1)


def _dense(peer: Peer) -> TopkPeer:
    """One of PyTorch's dense kernels: the very function where every block is taken."""

    def settings(call: TopkCall) -> Iterator[Setting]:
        for setting in peer.settings(call.dense):
            yield setting if call.is_dense else replace(setting, name=f"dense: {ANOTHER}, {setting.name}")

    return TopkPeer(peer.name, "dense", lambda call: peer.unfit(call.dense), settings)


def _window(peer: Peer) -> TopkPeer:
    """FlexAttention with a sliding window of the same density: what a fixed choice costs."""

    def settings(call: TopkCall) -> Iterator[Setting]:
        for setting in peer.settings(call.window):
            yield replace(setting, name=f"window: {ANOTHER}, {setting.name}")

    def unfit(call: TopkCall) -> str | None:
        return nothing_to_choose(call) or peer.unfit(call.window)

    return TopkPeer(f"{peer.name}_window", "window", unfit, settings)
