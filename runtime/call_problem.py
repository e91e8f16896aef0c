"""What a call is known by: the `Problem` that it poses on its device, and its tensors' shapes, dtypes and devices."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.generator.arch import arch_of_capability
from tilewright.generator.errors import InvalidInput
from tilewright.generator.problem import Problem
from tilewright.runtime.canonical import mask_class
from tilewright.runtime.masks import Mask
from tilewright.runtime.selection import Selection


def tensors_key(query: Tensor, key: Tensor, value: Tensor) -> tuple[object, ...]:
    """What settles a call but for its options and strides. Raises `AttributeError` for what is no tensor."""
    return (
        *(query.shape, key.shape, value.shape),
        *(query.dtype, key.dtype, value.dtype),
        *(query.device, key.device, value.device),
    )


def target_of(device: torch.device) -> str:
    """The architecture name of a torch device; `InvalidInput` for one that tilewright has no kernels for."""
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda" or torch.version.hip is not None:
        raise InvalidInput(f"tensors must be on cpu or an NVIDIA cuda device, got {device}; move them")
    try:
        return arch_of_capability(*torch.cuda.get_device_capability(device)).name
    except InvalidInput as error:  # a device that no known architecture matches
        raise InvalidInput(f"{error}; tilewright cannot run on {device}") from error


def problem_of(query: Tensor, key: Tensor, mask: Mask | None) -> Problem:
    """The `Problem` that a checked call poses on its device."""
    batch, num_heads, seqlen_q, head_dim = query.shape
    return Problem(
        dtype=str(query.dtype).removeprefix("torch."),
        head_dim=head_dim,
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=key.shape[1],
        seqlen_q=seqlen_q,
        seqlen_kv=key.shape[2],
        target=target_of(query.device),
        mask=mask_class(mask, batch, num_heads, seqlen_q, key.shape[2]),
    )


def stage_problem(operation: str, query: Tensor, key: Tensor, selection: Selection) -> Problem:
    """The `Problem` that one stage of attention over chosen blocks poses on its device."""
    batch, num_heads, seqlen_q, head_dim = query.shape
    return selection.problem(
        operation,
        dtype=str(query.dtype).removeprefix("torch."),
        head_dim=head_dim,
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=key.shape[1],
        seqlen_q=seqlen_q,
        seqlen_kv=key.shape[2],
        target=target_of(query.device),
    )
