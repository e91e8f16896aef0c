"""One attention call, checked: what every path (kernel, fallback, explanation) starts from."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import DTYPES, check_head_dim
from tilewright.runtime import masks
from tilewright.runtime.launch import MAX_SEQLEN
from tilewright.runtime.masks import Mask

_ALLOWED = tuple(getattr(torch, name) for name in DTYPES)


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise `InvalidInput` unless the three tensors make one attention call; the message says what to change."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise InvalidInput(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise InvalidInput(
                f"{name} must have 4 dimensions, [batch, heads, seqlen, head_dim]; got {list(tensor.shape)}"
            )
        if tensor.dtype not in _ALLOWED:
            raise InvalidInput(f"{name} must be {', '.join(DTYPES)}; got {_dtype_name(tensor)}; cast it first")
    if key.dtype != query.dtype or value.dtype != query.dtype:
        raise InvalidInput(
            "query, key and value must have one dtype; got "
            f"{_dtype_name(query)}, {_dtype_name(key)} and {_dtype_name(value)}; cast two of them"
        )
    if key.device != query.device or value.device != query.device:
        raise InvalidInput(
            "query, key and value must be on one device; got "
            f"{query.device}, {key.device} and {value.device}; move two of them"
        )
    if key.shape != value.shape:
        raise InvalidInput(f"key and value must have one shape; got {list(key.shape)} and {list(value.shape)}")
    if key.shape[0] != query.shape[0]:
        raise InvalidInput(f"query and key must have one batch size; got {query.shape[0]} and {key.shape[0]}")
    if key.shape[3] != query.shape[3]:
        raise InvalidInput(f"query and key must have one head_dim; got {query.shape[3]} and {key.shape[3]}")
    check_head_dim(query.shape[3])
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    if num_heads != num_kv_heads and (num_kv_heads == 0 or num_heads % num_kv_heads):
        raise InvalidInput(
            f"query's heads must be a multiple of key's heads, got {num_heads} and {num_kv_heads}"
            "; grouped-query attention shares each key head among as many query heads"
        )
    check_strides(query, key, value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.shape[2] > MAX_SEQLEN:
            raise InvalidInput(f"{name} must have at most {MAX_SEQLEN} tokens, got {tensor.shape[2]}")


def check_strides(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise `InvalidInput` unless each tensor's last dimension is contiguous."""
    if query.stride(3) == 1 and key.stride(3) == 1 and value.stride(3) == 1:
        return
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.stride(3) != 1 and tensor.numel():
            raise InvalidInput(
                f"{name}'s last dimension must be contiguous, got a stride of {tensor.stride(3)}"
                f"; call {name}.contiguous()"
            )


def needs_operator(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a call goes through its torch operator: only tracing and autograd are worth those microseconds."""
    if torch.compiler.is_compiling():
        return True
    if not (type(query) is type(key) is type(value) is Tensor):
        return all(isinstance(t, Tensor) for t in (query, key, value))
    return wants_gradient(query, key, value)


def wants_gradient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether autograd records the call."""
    return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)


def scale_of(scale: float | None, head_dim: int) -> float:
    """The softmax scale of a call: head_dim ** -0.5 unless given. Raises `InvalidInput` for NaN and infinities."""
    if scale is None:
        return float(head_dim**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise InvalidInput(f"scale must be a finite float or None, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise InvalidInput(f"scale must be finite, got {scale}; pass None for head_dim ** -0.5")
    return float(scale)


def mask_of(given: Any, causal: bool, window_size: tuple[int, int]) -> Mask | None:
    """The one mask that the arguments of `attention` describe; None for dense attention.

    given: a `Mask`, a FlexAttention `BlockMask`, or None. Raises `InvalidInput` for anything else.
    """
    mask: Mask | None
    if given is None or isinstance(given, Mask):
        mask = given
    elif type(given).__name__ == "BlockMask":
        mask = masks.from_block_mask(given)
    else:
        raise InvalidInput(
            f"mask must be a tilewright mask, a FlexAttention BlockMask or None; got {type(given).__name__}"
            "; wrap a bool tensor as tw.masks.token_mask(tensor)"
        )
    if not causal and window_size == (-1, -1):
        return mask
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise InvalidInput(f"window_size must be (left, right), -1 for an open side; got {window_size!r}")
    band = _band(bool(causal), *window_size)
    return band if mask is None else mask & band


def _made_band(causal: bool, left: int, right: int) -> Mask:
    window = masks.sliding_window(left, right)
    if not causal:
        return window
    return masks.causal() if left == -1 and right == -1 else masks.causal() & window


_kept_band = lru_cache(maxsize=256)(_made_band)


def _band(causal: bool, left: int, right: int) -> Mask:
    # Dynamo traces neither a cache nor through one; a compiled graph makes the mask once anyway.
    if torch.compiler.is_compiling() or not (type(left) is int and type(right) is int):
        return _made_band(causal, left, right)
    return _kept_band(causal, left, right)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
