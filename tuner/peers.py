"""PyTorch's own attention, and others', beside which tilewright is benchmarked: one interface, each at its best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.generator.abi import UNBOUNDED
from tilewright.generator.errors import InvalidInput
from tilewright.runtime import masks
from tilewright.runtime.canonical import canonical
from tilewright.runtime.masks import Mask
from tilewright.tuner.baselines import MASK_SHARE_OF_FREE_MEMORY, free_bytes
from tilewright.tuner.memory import tensor_bytes

ANOTHER = "another function"

ANOTHER_FUNCTION = f"dense: {ANOTHER}"
"""What the variant of a row starts with that computes dense attention in place of the mask."""


def names_another_function(variant: str) -> bool:
    """Whether a row's variant says that something else was computed than what the row asks for."""
    return variant.partition(",")[0].endswith(f": {ANOTHER}")


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call: query [B, H, Nq, D], key and value [B, Hkv, Nkv, D], the mask and the scale."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    scale: float

    @property
    def is_grouped(self) -> bool:
        return self.query.shape[1] != self.key.shape[1]

    @property
    def band(self) -> tuple[int, int] | None:
        """(left, right) where the whole mask is one band, `UNBOUNDED` where a side cuts nothing; None for another."""
        seqlen_q, seqlen_kv = self.query.shape[2], self.key.shape[2]
        form = canonical(self.mask, seqlen_q, seqlen_kv)
        if form.bound is None or form.terms != ("bound",):
            return None
        left, right = form.bound
        return UNBOUNDED if left >= seqlen_kv - 1 else left, UNBOUNDED if right >= seqlen_q - 1 else right

    @property
    def is_causal(self) -> bool:
        """Whether PyTorch's `is_causal` means the same: it aligns the first query with the first key."""
        return self.band == (UNBOUNDED, 0) and self.query.shape[2] == self.key.shape[2]

    @property
    def is_dense(self) -> bool:
        """Whether `dense_mask` is the mask: dense attention, with PyTorch's `is_causal` or without, is the function."""
        return self.mask is None or self.is_causal

    @property
    def dense_mask(self) -> Mask | None:
        """What dense attention computes instead: causal where no query sees a later key, half the work; else all."""
        bound = canonical(self.mask, self.query.shape[2], self.key.shape[2]).bound
        is_causal = bound is not None and bound[1] <= 0 and self.query.shape[2] == self.key.shape[2]
        return masks.causal() if is_causal else None


@dataclass(frozen=True, eq=False)
class Ready:
    """A call prepared by one setting: `run` makes it once, `held_bytes` is what was built for it and stays."""

    run: Callable[[], Tensor]
    held_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Setting:
    """One way to configure a peer. `make` may compile or raise; `context` is entered around all runs."""

    name: str
    make: Callable[[], Ready]
    context: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)


def _own_mask(call: Call) -> Mask | None:
    return call.mask


@dataclass(frozen=True, eq=False)
class Peer:
    """An implementation to compare with.

    unfit: why it cannot answer a call, or None. settings: its configurations; the fastest right one counts.
    computes: the mask of the function that it computes, against which it is checked.
    """

    name: str
    unfit: Callable[[Call], str | None]
    settings: Callable[[Call], Iterator[Setting]]
    computes: Callable[[Call], Mask | None] = _own_mask


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""PyTorch's fused kernels by the names that rows use."""

STAND_INS = ("flash", "cudnn")
"""Those that are shown on CUDA beside a mask they cannot take, as what dense attention costs. `sdpa_dense` is shown
everywhere."""


def _backend_reason(backend: str, call: Call) -> str | None:
    if not call.query.is_cuda:
        return None if backend == "flash" else f"PyTorch's {backend} kernel is for CUDA"
    if backend != "efficient" and call.query.dtype == torch.float32:
        return f"PyTorch's {backend} kernel takes float16 and bfloat16"
    return None


def _sdpa(call: Call, *, causal: bool = False, mask: Tensor | None = None, repeat_heads: bool = False) -> Ready:
    key, value, grouped = call.key, call.value, call.is_grouped
    held = tensor_bytes(mask)
    if grouped and repeat_heads:
        # Heads are repeated outside the timing: the kernel has no grouped heads.
        group = call.query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), False
        held += tensor_bytes(key, value)
    query, scale = call.query, call.scale

    def run() -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )

    return Ready(run, held)


def _sdpa_backend(backend: str) -> Peer:
    """One fused kernel: the very function where there is no mask or PyTorch's causal one, else a stand-in."""

    def unfit(call: Call) -> str | None:
        if not call.is_dense and not (call.query.is_cuda and backend in STAND_INS):
            return f"PyTorch's {backend} kernel takes no mask but causal with as many queries as keys"
        return _backend_reason(backend, call)

    def settings(call: Call) -> Iterator[Setting]:
        yield Setting(
            _dense_name(call),
            lambda: _sdpa(call, causal=call.dense_mask is not None, repeat_heads=backend == "efficient"),
            lambda: sdpa_kernel(BACKENDS[backend]),
        )

    return Peer(f"sdpa_{backend}", unfit, settings, lambda call: call.dense_mask)


def _dense_settings(call: Call) -> Iterator[Setting]:
    yield Setting(f"{_dense_name(call)}, PyTorch's choice", lambda: _sdpa(call, causal=call.dense_mask is not None))


def _dense_name(call: Call) -> str:
    name = "full" if call.dense_mask is None else "causal"
    return name if call.is_dense else f"{ANOTHER_FUNCTION}, {name}"


def _masked_reason(call: Call) -> str | None:
    if call.mask is None:
        return "there is no mask"
    needed = _dense_mask_bytes(call)
    allowed = MASK_SHARE_OF_FREE_MEMORY * free_bytes(call.query.device)
    if needed > allowed:
        return f"the dense mask would take {needed / 2**30:.1f} GiB; at most {allowed / 2**30:.1f} GiB are set aside"
    return None


def _dense_mask_bytes(call: Call) -> int:
    """Of the boolean mask and of the copy in the query's dtype that PyTorch makes of it."""
    lead = (1, 1) if call.mask is None else call.mask.lead
    return lead[0] * lead[1] * call.query.shape[2] * call.key.shape[2] * (1 + max(4, call.query.dtype.itemsize))


def _masked_settings(call: Call) -> Iterator[Setting]:
    batch, num_heads, seqlen_q, _ = call.query.shape

    def make() -> Ready:
        assert call.mask is not None
        dense = call.mask.dense(batch, num_heads, seqlen_q, call.key.shape[2], call.query.device)
        # With a mask and grouped heads together PyTorch has no fast path, so heads are repeated.
        return _sdpa(call, mask=dense, repeat_heads=True)

    yield Setting("boolean mask", make)
    if call.query.is_cuda:
        yield Setting("boolean mask, efficient", make, lambda: sdpa_kernel(BACKENDS["efficient"]))
        if _backend_reason("cudnn", call) is None:
            yield Setting("boolean mask, cudnn", make, lambda: sdpa_kernel(BACKENDS["cudnn"]))


def all_peers() -> dict[str, Peer]:
    """Every peer by name, in the order of a table."""
    from tilewright.tuner.peers_fa4 import fa4
    from tilewright.tuner.peers_flex import flex

    peers = [
        *(_sdpa_backend(backend) for backend in BACKENDS),
        Peer("sdpa_dense", lambda call: None, _dense_settings, lambda call: call.dense_mask),
        Peer("sdpa_masked", _masked_reason, _masked_settings),
        flex(),
        fa4(),
    ]
    return {peer.name: peer for peer in peers}


def peers_named(names: str) -> list[Peer]:
    """The peers in a list like `flex,sdpa_dense`, in that order; `none` gives none of them.

    Raises `InvalidInput` that lists the known ones.
    """
    known = all_peers()
    if names == "none":
        return []
    wanted = list(dict.fromkeys(part.strip() for part in names.split(",") if part.strip()))
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise InvalidInput(f"peers must be among {', '.join(known)}, or none; got {', '.join(unknown) or repr(names)}")
    return [known[name] for name in wanted]
