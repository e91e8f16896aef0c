"""The torch operators, so that `torch.compile`, CUDA graphs and autograd see tilewright as one call."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from tilewright.generator.errors import NotSupported
from tilewright.runtime.dispatch import DISPATCHER, mask_from_operator
from tilewright.runtime.topk_ops import define_topk_operators

_torch_library: Any = torch.library  # its functions carry no types
_LIBRARY = _torch_library.Library("tilewright", "DEF")
_LIBRARY.define(
    "attention_forward(Tensor query, Tensor key, Tensor value, Tensor[] mask_tensors, str mask_spec, float scale)"
    " -> (Tensor out, Tensor lse)"
)


def _attention_forward(
    query: Tensor, key: Tensor, value: Tensor, mask_tensors: list[Tensor], mask_spec: str, scale: float
) -> tuple[Tensor, Tensor]:
    return DISPATCHER.attend(query, key, value, mask_from_operator(mask_spec, mask_tensors), scale)


_LIBRARY.impl("attention_forward", _attention_forward, "CPU")
_LIBRARY.impl("attention_forward", _attention_forward, "CUDA")


def _attention_forward_fake(
    query: Tensor, key: Tensor, value: Tensor, mask_tensors: list[Tensor], mask_spec: str, scale: float
) -> tuple[Tensor, Tensor]:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


_torch_library.register_fake("tilewright::attention_forward", _attention_forward_fake, lib=_LIBRARY)


def _no_backward(ctx: Any, *gradients: Tensor) -> NoReturn:
    raise NotSupported(
        "tilewright.attention has no backward yet; for training use "
        "torch.nn.attention.flex_attention, or call it under torch.no_grad()"
    )


_torch_library.register_autograd("tilewright::attention_forward", _no_backward, lib=_LIBRARY)

define_topk_operators(_LIBRARY)
