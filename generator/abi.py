"""The arguments of a compiled kernel: one list that the templates, the binding and the launcher all read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CType = Literal["pointer", "int64", "int32", "double"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One slot of a kernel's argument list; `note` becomes the comment in the generated struct."""

    name: str
    ctype: CType
    note: str


def _arguments(ctype: CType, note: str, names: str) -> list[Argument]:
    return [Argument(name, ctype, note) for name in names.split()]


TENSOR_ARGUMENTS: tuple[Argument, ...] = (
    *_arguments("pointer", "[batch, num_heads, seqlen_q, head_dim]", "query"),
    *_arguments("pointer", "[batch, num_kv_heads, seqlen_kv, head_dim]", "key value"),
    *_arguments("pointer", "[batch, num_heads, seqlen_q, head_dim]", "out"),
    *_arguments("pointer", "[batch, num_heads, seqlen_q] float, contiguous", "lse"),
    *_arguments("int32", "sizes", "batch num_heads num_kv_heads seqlen_q seqlen_kv"),
    *_arguments("int64", "strides in elements: batch, head, token", "q_stride_b q_stride_h q_stride_n"),
    *_arguments("int64", "strides in elements: batch, head, token", "k_stride_b k_stride_h k_stride_n"),
    *_arguments("int64", "strides in elements: batch, head, token", "v_stride_b v_stride_h v_stride_n"),
    *_arguments("int64", "strides in elements: batch, head, token", "o_stride_b o_stride_h o_stride_n"),
    *_arguments("double", "multiplies query . key", "softmax_scale"),
)
"""What comes from the caller's tensors, in launch order."""

MASK_ARGUMENTS: tuple[Argument, ...] = (
    *_arguments("int32", "bound: keys from position - left to position + right, inclusive", "bound_left bound_right"),
    *_arguments("int32", "window: the same, one term of the bracket", "window_left window_right"),
    *_arguments("int32", "stride: keys that are multiples of it; 0 where absent", "stride"),
    *_arguments("pointer", "document: [B, seqlen_q] int32, keys from row_begin to row_end - 1", "row_begin row_end"),
    *_arguments("int64", "in elements; 0 where shared by the batch", "row_stride_b"),
    *_arguments("pointer", "tokens: [ceil(seqlen_kv / 32)] uint32, bit k % 32 of word k / 32", "token_bits"),
    *_arguments(
        "pointer", "gather: [num_gathered] int32 key indices, ascending; null: multiples of stride", "gather_indices"
    ),
    *_arguments("int32", "gather: how many keys are gathered", "num_gathered"),
    *_arguments("pointer", "blocks: [B, H, blocks_q, block_words] uint32, a bit a block", "block_bits"),
    *_arguments("int64", "in words; 0 where shared", "block_stride_b block_stride_h"),
    *_arguments(
        "int32", "words a row of blocks, then the mask's own granularity", "block_words sparse_block_q sparse_block_kv"
    ),
    *_arguments("pointer", "bits: [B, H, seqlen_q, bits_words] uint32, a bit a pair", "mask_bits"),
    *_arguments("int64", "in words; 0 where shared", "bits_stride_b bits_stride_h"),
    *_arguments("int32", "words a query row", "bits_words"),
    *_arguments("pointer", "scan: [B, H, seqlen_q, seqlen_kv] uint8", "dense_mask"),
    *_arguments("int64", "in bytes; 0 where shared", "dense_stride_b dense_stride_h"),
    *_arguments("pointer", "list: [B, H, tiles_q, tiles_kv] int32, full tiles first, then partial ones", "kv_indices"),
    *_arguments(
        "pointer",
        "list: [B, H, tiles_q] int32 counts of full tiles, of full and partial",
        "full_num_blocks kv_num_blocks",
    ),
    *_arguments("pointer", "bitmap: [B, H, tiles_q, tile_words] uint32, a bit a tile", "active_bitmap full_bitmap"),
    *_arguments("int64", "list, bitmap: in rows of tiles_q; 0 where shared", "tile_stride_b tile_stride_h"),
    *_arguments("int32", "list: tiles_kv; bitmap: words a row", "tiles_kv tile_words"),
    *_arguments(
        "pointer",
        "list, bitmap: [B * H * blocks a head] int32, which query tile each block takes; null: in order",
        "tile_order",
    ),
)
"""What comes from the mask's plan, in launch order; unused slots are 0."""

WORKSPACE_NOTE = "scratch of workspace_bytes, at a multiple of 256 bytes"

STREAM_ARGUMENTS: tuple[Argument, ...] = (
    *_arguments("int32", "CUDA device ordinal; on the CPU 0", "device"),
    *_arguments("int32", "OpenMP threads on the CPU; 0 on a GPU", "num_threads"),
    *_arguments("pointer", "cudaStream_t; null on the CPU", "stream"),
)

FORWARD_ARGUMENTS: tuple[Argument, ...] = TENSOR_ARGUMENTS + MASK_ARGUMENTS + STREAM_ARGUMENTS
"""Arguments of every `attention_forward` kernel's `launch`, in order."""

_CHOICE_ARGUMENTS: tuple[Argument, ...] = (
    *_arguments("int32", "sizes", "batch num_heads num_kv_heads seqlen_q seqlen_kv"),
    *_arguments(
        "int32",
        "heads that choose: num_heads, or num_kv_heads where a group of heads shares its choice",
        "num_choosers",
    ),
    *_arguments("int32", "keys a block; blocks, the last one may be shorter", "block_size num_blocks"),
    *_arguments("int32", "places in a list of chosen blocks", "list_width"),
    *_arguments("int32", "consecutive queries that share a choice; groups of them", "query_group num_groups"),
)

SELECT_ARGUMENTS: tuple[Argument, ...] = (
    *_arguments("pointer", "[batch, num_heads, seqlen_q, head_dim]", "query"),
    *_arguments("pointer", "[batch, num_kv_heads, seqlen_kv, head_dim]", "key"),
    *_arguments("pointer", "[num_choosers] int32, blocks that each of them takes, at most list_width", "budgets"),
    *_arguments("pointer", "[batch, num_choosers, num_groups, list_width] int32, ascending, then -1", "indices"),
    *_arguments("pointer", "[batch, num_choosers, num_groups] int32", "counts"),
    *_arguments("pointer", WORKSPACE_NOTE, "workspace"),
    *_CHOICE_ARGUMENTS,
    *_arguments(
        "int32", "first blocks that are always in; blocks up to a query's own that are", "sink_blocks window_blocks"
    ),
    *_arguments("int64", "strides in elements: batch, head, token", "q_stride_b q_stride_h q_stride_n"),
    *_arguments("int64", "strides in elements: batch, head, token", "k_stride_b k_stride_h k_stride_n"),
    *STREAM_ARGUMENTS,
)
"""Arguments of every `select_blocks` kernel's `launch`, in order."""

SELECTED_ARGUMENTS: tuple[Argument, ...] = (
    *_arguments("pointer", "[batch, num_heads, seqlen_q, head_dim]", "query"),
    *_arguments("pointer", "[batch, num_kv_heads, seqlen_kv, head_dim]", "key value"),
    *_arguments("pointer", "[batch, num_heads, seqlen_q, head_dim]", "out"),
    *_arguments("pointer", "[batch, num_heads, seqlen_q] float, contiguous", "lse"),
    *_arguments("pointer", "[batch, num_choosers, num_groups, list_width] int32; past a count anything", "indices"),
    *_arguments("pointer", "[batch, num_choosers, num_groups] int32, list_width at most", "counts"),
    *_arguments(
        "pointer", "[num_choosers] int32 on the host: most entries of each one's lists; null: list_width", "budgets"
    ),
    *_arguments("pointer", WORKSPACE_NOTE, "workspace"),
    *_CHOICE_ARGUMENTS,
    *_arguments("int64", "strides in elements: batch, head, token", "q_stride_b q_stride_h q_stride_n"),
    *_arguments("int64", "strides in elements: batch, head, token", "k_stride_b k_stride_h k_stride_n"),
    *_arguments("int64", "strides in elements: batch, head, token", "v_stride_b v_stride_h v_stride_n"),
    *_arguments("int64", "strides in elements: batch, head, token", "o_stride_b o_stride_h o_stride_n"),
    *_arguments("double", "multiplies query . key", "softmax_scale"),
    *STREAM_ARGUMENTS,
)
"""Arguments of every `selected_attention` kernel's `launch`, in order."""

ARGUMENTS: dict[str, tuple[Argument, ...]] = {
    "attention_forward": FORWARD_ARGUMENTS,
    "select_blocks": SELECT_ARGUMENTS,
    "selected_attention": SELECTED_ARGUMENTS,
}
"""Every operation that kernels compute, and the arguments of its `launch`."""

WITH_WORKSPACE = frozenset({"select_blocks", "selected_attention"})
"""Operations whose modules also have `workspace_bytes`, of the same arguments: how much scratch `launch` needs."""


def arguments_of(operation: str, *, workspace: bool = False) -> tuple[Argument, ...]:
    """The arguments of an operation's `launch`; workspace: of families that ask for scratch where others need none."""
    arguments = ARGUMENTS[operation]
    if not workspace or operation in WITH_WORKSPACE:
        return arguments
    return (*arguments, *_arguments("pointer", WORKSPACE_NOTE, "workspace"))


UNBOUNDED = 2**30
"""A window side that does not restrict; positions stay below it, so sums stay inside int32."""
