"""The mask algebra: what a query may attend to, as values that `&` and `|` combine.

A mask answers, for every (query, key) pair, whether it is active. `dense` is the specification: it follows each
definition directly and knows nothing of plans or kernels. `spec` and `tensors` hold the same mask as data-free text
and the tensors it refers to, which is how masks pass through `torch.library` operators.

Query i sits at position i + (seqlen_kv - seqlen_q): the last query is aligned with the last key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.generator.abi import UNBOUNDED
from tilewright.generator.errors import InvalidInput
from tilewright.runtime.mask_spec import Argument, Tree, parse_spec
from tilewright.runtime.mask_terms import (
    And,
    Band,
    BlockMask,
    Document,
    Full,
    GlobalStride,
    GlobalTokens,
    Mask,
    Or,
    PackedMask,
    TokenMask,
    ceil_div,
    kind_of,
    sorted_tokens,
)

__all__ = [
    "Mask",
    "block_mask",
    "causal",
    "document",
    "from_block_mask",
    "from_spec",
    "full",
    "global_stride",
    "global_tokens",
    "packed_mask",
    "sliding_window",
    "token_mask",
]


def full() -> Mask:
    """Every pair: dense attention."""
    return Full()


def causal() -> Mask:
    """Keys up to the query's own position, the last query aligned with the last key.

    With more queries than keys the first seqlen_q - seqlen_kv queries see nothing.
    """
    return Band(UNBOUNDED, 0)


def sliding_window(left: int, right: int) -> Mask:
    """Keys from position - left to position + right, inclusive; -1 leaves a side open.

    `left` and `right` do not count the token itself, as in FlashAttention: `sliding_window(0, 0)` is the diagonal.
    Raises `InvalidInput` for a side below -1 or not an integer.
    """
    return Band(_side("left", left), _side("right", right))


def global_stride(stride: int) -> Mask:
    """Keys 0, stride, 2 * stride, ..., visible to every query; `InvalidInput` unless stride is 1 or more."""
    return GlobalStride(_positive("global_stride's stride", stride))


def global_tokens(indices: Tensor | Sequence[int]) -> Mask:
    """These keys, visible to every query; order and repetition do not matter.

    indices: 1-D, of an integer dtype, or a sequence of ints (kept on the CPU and copied to where the call runs).
    A CUDA tensor is read once, here, which is a host sync. Raises `InvalidInput` for another dtype or shape.
    """
    if not isinstance(indices, Tensor):
        values = sorted({_index("a global token", i) for i in indices})
        tensor = torch.tensor(values, dtype=torch.int32)
        return GlobalTokens(tensor, True, tensor)
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(
            f"global_tokens must be 1-D int32 or int64, got {list(indices.shape)} {indices.dtype}"
            "; for a bool vector pass mask.nonzero().flatten()"
        )
    if torch.compiler.is_compiling():
        return GlobalTokens(indices, False)
    return sorted_tokens(indices)


def block_mask(active: Tensor, block_size: int | tuple[int, int]) -> Mask:
    """Pairs whose block is True.

    active: bool [..., ceil(seqlen_q / block_q), ceil(seqlen_kv / block_kv)] with up to [batch, heads] in front, each 1
    or full. block_size: tokens a block, or (block_q, block_kv); any size from 1 up.
    Raises `InvalidInput` for another dtype or rank.
    """
    pair = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(pair) != 2:
        raise InvalidInput(f"block_size must be one integer or two, got {block_size}")
    _check_bool("block_mask", active)
    return BlockMask(active, _positive("block_size", pair[0]), _positive("block_size", pair[1]))


def document(cu_seqlens: Tensor, cu_seqlens_kv: Tensor | None = None) -> Mask:
    """Pairs of the same document.

    cu_seqlens: int32 or int64 [documents + 1], ascending from 0 to the length; empty documents are allowed.
    cu_seqlens_kv: the same for the keys where their packing differs. Raises `InvalidInput` for another dtype or rank.
    """
    cu_seqlens_kv = cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv
    for name, tensor in (("cu_seqlens", cu_seqlens), ("cu_seqlens_kv", cu_seqlens_kv)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
            raise InvalidInput(f"document's {name} must be a 1-D int32 or int64 tensor, got {kind_of(tensor)}")
        if tensor.shape[0] < 2:
            raise InvalidInput(f"document's {name} needs at least two entries, 0 and the length, got {tensor.shape[0]}")
    if cu_seqlens.shape != cu_seqlens_kv.shape:
        raise InvalidInput(
            f"cu_seqlens and cu_seqlens_kv must list the same documents, got {cu_seqlens.shape[0] - 1} "
            f"and {cu_seqlens_kv.shape[0] - 1}"
        )
    return Document(cu_seqlens, cu_seqlens_kv)


def token_mask(active: Tensor) -> Mask:
    """Pairs that are True: bool [..., seqlen_q, seqlen_kv] with up to [batch, heads] in front, each 1 or full.

    Raises `InvalidInput` for another dtype or rank.
    """
    _check_bool("token_mask", active)
    return TokenMask(active)


def packed_mask(words: Tensor, seqlen_kv: int) -> Mask:
    """A token mask in bits: int32 [..., seqlen_q, ceil(seqlen_kv / 32)], bit k % 32 of word k / 32 for key k.

    Bits past seqlen_kv must be 0. Raises `InvalidInput` for another dtype or shape.
    """
    if words.dtype != torch.int32 or not 2 <= words.dim() <= 4 or words.shape[-1] != ceil_div(seqlen_kv, 32):
        raise InvalidInput(
            f"packed_mask must be int32 [..., seqlen_q, {ceil_div(seqlen_kv, 32)}] for {seqlen_kv} keys, "
            f"got {kind_of(words)}"
        )
    return PackedMask(words, seqlen_kv)


def from_block_mask(flex_mask: Any) -> Mask:
    """The mask a FlexAttention `BlockMask` describes; see `tilewright.runtime.flex`."""
    from tilewright.runtime.flex import mask_of_block_mask

    return mask_of_block_mask(flex_mask)


def from_spec(spec: str, tensors: Sequence[Tensor] = ()) -> Mask:
    """The mask whose `.spec` and `.tensors` these are; `InvalidInput` for text that is no mask."""
    return _built(parse_spec(spec), tensors)


def _built(tree: Tree, tensors: Sequence[Tensor]) -> Mask:
    name, operands = tree
    if name in ("&", "|"):
        first, second = (_built(o, tensors) for o in operands if isinstance(o, tuple))
        return And(first, second) if name == "&" else Or(first, second)
    values = [_value(a, tensors) for a in operands if not isinstance(a, tuple)]
    if name == "block_mask" and len(values) == 3:
        values = [values[0], (values[1], values[2])]
    if name == "global_tokens" and len(values) == 1 and isinstance(values[0], Tensor):
        # A spec without `unsorted` vouches for order and uniqueness, so that no call has to read the data again.
        return GlobalTokens(values[0], True, values[0] if values[0].device.type == "cpu" else None)
    if name == "global_tokens" and len(values) == 2 and isinstance(values[0], Tensor):
        return GlobalTokens(values[0], False)
    if name not in _CONSTRUCTORS:
        raise InvalidInput(f"no mask is called {name!r}; masks are {', '.join(_CONSTRUCTORS)}")
    try:
        mask: Mask = _CONSTRUCTORS[name](*values)
    except (TypeError, AttributeError) as error:
        raise InvalidInput(f"{name} cannot take {', '.join(map(str, operands)) or 'no arguments'}: {error}") from error
    return mask


def _value(argument: Argument, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(argument, str) or not argument.startswith("#"):
        return argument
    index = int(argument[1:])
    if index >= len(tensors):
        raise InvalidInput(f"the mask refers to tensor {argument}, got {len(tensors)} tensors")
    return tensors[index]


_CONSTRUCTORS: dict[str, Any] = {
    "full": full,
    "causal": causal,
    "sliding_window": sliding_window,
    "global_stride": global_stride,
    "global_tokens": global_tokens,
    "block_mask": block_mask,
    "document": document,
    "token_mask": token_mask,
    "packed_mask": packed_mask,
}


def _index(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return int(value.__index__())
    except (AttributeError, TypeError):
        raise InvalidInput(f"{name} must be an integer, got {value!r}") from None


def _positive(name: str, value: Any) -> int:
    number = _index(name, value)
    if number < 1:
        raise InvalidInput(f"{name} must be 1 or more, got {number}")
    return min(number, UNBOUNDED)


def _side(name: str, value: Any) -> int:
    number = _index(f"sliding_window's {name}", value)
    if number < -1:
        raise InvalidInput(f"sliding_window's {name} must be 0 or more, or -1 for no limit, got {number}")
    return UNBOUNDED if number == -1 else min(number, UNBOUNDED)


def _check_bool(name: str, active: Any) -> None:
    if not isinstance(active, Tensor) or active.dtype != torch.bool:
        raise InvalidInput(f"{name} must be a bool tensor, True where active, got {kind_of(active)}")
    if not 2 <= active.dim() <= 4:
        raise InvalidInput(
            f"{name} must have 2 to 4 dimensions, [batch, heads] before the last two, got {kind_of(active)}"
        )
