"""How a case's tensors lie in memory: packed, transposed, amid NaNs, or past 2^31 elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["packed", "transposed", "padded", "unaligned", "far_tokens", "far_heads"]

GUARD = 64
"""Elements before and after each tensor; keeps the tensor's first element aligned to 128 bytes in every dtype."""

FAR_TOKEN_STRIDE = 2**24
FAR_TOKENS = 130
"""Row 128 of a view with this token stride starts at element 2^31."""

POISON_BITS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float32: (torch.int32, 0x7FC0DEAD),
    torch.float16: (torch.int16, 0x7E5A),
    torch.bfloat16: (torch.int16, 0x7FDA),
    torch.int32: (torch.int32, 0x7FC0DEAD),
}
"""NaNs with a payload of our own, as integers: an element that still has it was never written. Of int32 the same bits,
which are no block's number."""


def bits_of(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, so that NaNs compare equal to themselves."""
    return tensor.view(POISON_BITS[tensor.dtype][0])


def poison(tensor: Tensor) -> None:
    """Fill with the bits that say "never written"."""
    bits_of(tensor).fill_(POISON_BITS[tensor.dtype][1])


def still_poisoned(tensor: Tensor) -> Tensor:
    """Where the poison is still there: bool, the tensor's shape."""
    return bits_of(tensor) == POISON_BITS[tensor.dtype][1]


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor as a view into a poisoned buffer; `outside` counts what was written beside it.

    view: [B, H, N, D] (or fewer dimensions), last dimension contiguous; first element 128-byte aligned, but in the
    layout `unaligned`.
    buffer: the whole storage, one-dimensional.
    """

    view: Tensor
    buffer: Tensor

    def outside(self) -> Tensor:
        """How many elements of the buffer that do not belong to the view are no longer poison (a device scalar)."""
        in_buffer, in_view = still_poisoned(self.buffer), still_poisoned(self.view)
        beside = self.buffer.numel() - self.view.numel()
        return beside - (in_buffer.count_nonzero() - in_view.count_nonzero())


def place(size: tuple[int, ...], layout: Layout, dtype: torch.dtype, device: torch.device) -> Placed:
    """A poisoned buffer and the view of `size` into it.

    packed: contiguous. transposed: [B, N, H, D] in memory. padded: 5 rows of NaN behind each head's last row and 16
    columns beside each row. unaligned: the same with 5 columns, from one element further on, so that few rows start at
    a multiple of 16 bytes. The far layouts live in one huge sparse buffer: see `FarBuffer`.
    """
    start = GUARD
    if layout == "transposed":
        batch, heads, tokens, dim = size
        strides: tuple[int, ...] = (tokens * heads * dim, dim, heads * dim, 1)
        span = batch * tokens * heads * dim
    elif layout in ("padded", "unaligned"):
        batch, heads, tokens, dim = size
        row = dim + (16 if layout == "padded" else 5)
        head = (tokens + 5) * row
        start += layout == "unaligned"
        strides, span = (heads * head, head, row, 1), batch * heads * head
    else:
        strides = tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
        span = math.prod(size)
    buffer = torch.empty(span + 2 * GUARD, dtype=dtype, device=device)
    poison(buffer)
    return Placed(buffer.as_strided(size, strides, start), buffer)


def size4(tensor: Tensor) -> tuple[int, int, int, int]:
    """The size of a tensor of four dimensions."""
    batch, heads, tokens, dim = tensor.shape
    return batch, heads, tokens, dim


class FarBuffer:
    """One buffer of more than 2^31 elements, never filled, from which views with huge strides are cut.

    On the CPU its pages exist only once touched, so it costs the few rows that are used; on a GPU it costs all of
    its bytes while it lives (`bytes_needed`).
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(FAR_TOKENS * FAR_TOKEN_STRIDE, dtype=dtype, device=device)
        self._used = 0

    @staticmethod
    def bytes_needed(dtype: torch.dtype) -> int:
        """Size of the buffer."""
        return FAR_TOKENS * FAR_TOKEN_STRIDE * dtype.itemsize

    def cut(self, size: tuple[int, int, int, int], layout: Layout) -> Tensor:
        """A view [B, H, N, D] that overlaps no other; its last token, or its last head, lies past 2^31 elements.

        `far_tokens` needs N up to 130 with B * H * D small; `far_heads` needs one batch entry and two heads.
        """
        batch, heads, tokens, dim = size
        offset = self._used
        if layout == "far_tokens":
            strides, span = (heads * dim, dim, FAR_TOKEN_STRIDE, 1), batch * heads * dim
        else:
            strides, span = (0, 2**31, dim, 1), tokens * dim
        self._used += -(-span // GUARD) * GUARD
        return self._buffer.as_strided(size, strides, offset)
