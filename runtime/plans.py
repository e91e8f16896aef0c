"""Plans: a canonical mask as the arguments of a compiled kernel, for one mask form and tile size.

All work happens on the device that runs the kernel, in tensor operations without a host sync. `analytic` and `gather`
plans are O(N) for structured masks; `list` and `bitmap` plans are of the size of the tile grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.generator.abi import MASK_ARGUMENTS, UNBOUNDED
from tilewright.generator.errors import InvalidInput
from tilewright.generator.legality import derived_values
from tilewright.generator.problem import MASK_FORMS
from tilewright.generator.variant import Kernel
from tilewright.runtime.canonical import CanonicalMask
from tilewright.runtime.mask_bits import pack_bits, row_chunk
from tilewright.runtime.mask_terms import as_4d, ceil_div
from tilewright.runtime.mask_tiles import classify_tiles, longest_first, tile_lists

SCAN_LIMIT_BYTES = 8 * 2**30
"""A larger N x N mask is refused: `scan` is the baseline, every other form does without."""

_ORDER = tuple(argument.name for argument in MASK_ARGUMENTS)
_DEFAULTS = {
    name: UNBOUNDED if name in ("bound_left", "bound_right", "window_left", "window_right") else 0 for name in _ORDER
}


@dataclass(frozen=True, eq=False)
class MaskPlan:
    """What a kernel is launched with.

    arguments: integers and pointers in the order of `abi.MASK_ARGUMENTS`.
    tensors: what the pointers point into; the plan must outlive the launch.
    extra_bytes: device memory the plan itself takes, the caller's own tensors not counted.
    """

    arguments: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    extra_bytes: int


def plan_for(
    kernel: Kernel,
    canonical: CanonicalMask,
    *,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_kv: int,
    device: torch.device | str,
) -> MaskPlan:
    """The plan that `kernel` is launched with: of its mask form and tile, and in the order that its blocks take.

    Raises what `build_plan` raises.
    """
    spec, order_rows = kernel.spec, None
    if spec.values().get("tile_order") == "longest":
        order_rows = int(derived_values(kernel).get("query_rows", spec.block_m))
    return build_plan(
        canonical,
        spec.mask_form,
        spec.block_m,
        spec.block_n,
        batch=batch,
        num_heads=num_heads,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        device=device,
        order_rows=order_rows,
    )


def build_plan(
    canonical: CanonicalMask,
    form: str,
    block_m: int,
    block_n: int,
    *,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_kv: int,
    device: torch.device | str,
    order_rows: int | None = None,
) -> MaskPlan:
    """The plan for tiles of block_m query rows by block_n keys.

    order_rows: for kernels whose blocks, of so many query rows, start longest first; None where they start in order.

    Raises `InvalidInput` when the canonical mask was made for other lengths, when `form` is unknown, for a `scan` mask
    above 8 GiB, and for an order of blocks that are no whole tiles or whose form lists no tiles.
    """
    if form not in MASK_FORMS:
        raise InvalidInput(f"mask form must be one of {', '.join(MASK_FORMS)}; got {form}")
    if (canonical.seqlen_q, canonical.seqlen_kv) != (seqlen_q, seqlen_kv):
        raise InvalidInput(
            f"the mask was made canonical for lengths {canonical.seqlen_q}x{canonical.seqlen_kv}, "
            f"got {seqlen_q}x{seqlen_kv}; call canonical again for these lengths"
        )
    if block_m < 1 or block_n < 1:
        raise InvalidInput(f"tiles must be 1 or more in both directions, got {block_m}x{block_n}")
    if order_rows is not None and (form not in ("list", "bitmap") or order_rows < 1 or order_rows % block_m):
        raise InvalidInput(
            "blocks start longest first by the tiles that form list or bitmap counts, and own whole tiles of"
            f" {block_m} rows; got {form}, {order_rows} rows"
        )
    if canonical.mask is not None:
        canonical.mask.check(batch, num_heads, seqlen_q, seqlen_kv, device)
    plan = _PlanArguments(torch.device(device))
    if form == "scan":
        _fill_scan(plan, canonical)
        return plan.finish()
    _fill_elements(plan, canonical)
    if form == "gather":
        _fill_gather(plan, canonical)
    elif form in ("list", "bitmap"):
        active, is_full = classify_tiles(canonical, block_m, block_n, plan.device)
        plan.values["tiles_kv"] = active.shape[3]
        plan.strides("tile", active, rows=active.shape[2])
        if form == "list":
            indices, full_counts, counts = tile_lists(active, is_full)
            plan.point("kv_indices", indices)
            plan.point("full_num_blocks", full_counts)
            plan.point("kv_num_blocks", counts)
        else:
            plan.point("active_bitmap", pack_bits(active))
            plan.point("full_bitmap", pack_bits(is_full))
            plan.values["tile_words"] = ceil_div(active.shape[3], 32)
        if order_rows is not None:
            active_tiles = active.sum(3, dtype=torch.int32)
            plan.point("tile_order", longest_first(active_tiles, batch, num_heads, order_rows // block_m))
    return plan.finish()


class _PlanArguments:
    """The argument values by name while a plan is filled in."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.values: dict[str, int] = dict(_DEFAULTS)
        self.tensors: list[Tensor] = []
        self.extra_bytes = 0

    def point(self, name: str, tensor: Tensor, *, is_new: bool = True) -> None:
        """Let argument `name` point at `tensor`, which is kept alive."""
        assert tensor.is_contiguous()
        self.values[name] = tensor.data_ptr()
        self.tensors.append(tensor)
        if is_new:
            self.extra_bytes += tensor.numel() * tensor.element_size()

    def strides(self, name: str, tensor: Tensor, *, rows: int) -> None:
        """Strides of a contiguous [B|1, H|1, ...] in units of `rows` a head; 0 where shared."""
        self.values[f"{name}_stride_h"] = rows if tensor.shape[1] > 1 else 0
        self.values[f"{name}_stride_b"] = rows * tensor.shape[1] if tensor.shape[0] > 1 else 0

    def finish(self) -> MaskPlan:
        return MaskPlan(tuple(self.values[name] for name in _ORDER), tuple(self.tensors), self.extra_bytes)


def _fill_elements(plan: _PlanArguments, canonical: CanonicalMask) -> None:
    """What kernels need to decide about a single pair, whichever way they find their tiles."""
    if canonical.bound is not None:
        plan.values["bound_left"], plan.values["bound_right"] = canonical.bound
    if canonical.window is not None:
        plan.values["window_left"], plan.values["window_right"] = canonical.window
    plan.values["stride"] = canonical.stride
    if canonical.row_begin is not None and canonical.row_end is not None:
        plan.point("row_begin", canonical.row_begin)
        plan.point("row_end", canonical.row_end)
        plan.values["row_stride_b"] = canonical.seqlen_q if canonical.row_begin.shape[0] > 1 else 0
    if canonical.tokens is not None:
        flags = canonical.tokens.key_flags(canonical.seqlen_kv, plan.device)
        plan.point("token_bits", pack_bits(flags))
    if canonical.blocks is not None:
        words = pack_bits(as_4d(canonical.blocks.active))
        plan.point("block_bits", words)
        plan.strides("block", words, rows=words.shape[2] * words.shape[3])
        plan.values["block_words"] = words.shape[3]
        plan.values["sparse_block_q"] = canonical.blocks.sparse_block_q
        plan.values["sparse_block_kv"] = canonical.blocks.sparse_block_kv
    if canonical.residual is not None:
        words = canonical.and_bits(plan.device)
        plan.point("mask_bits", words)
        plan.strides("bits", words, rows=words.shape[2] * words.shape[3])
        plan.values["bits_words"] = words.shape[3]


def _fill_gather(plan: _PlanArguments, canonical: CanonicalMask) -> None:
    """The strided and listed keys, ascending and unique; how many is known on the host."""
    if canonical.tokens is None:
        plan.values["num_gathered"] = ceil_div(canonical.seqlen_kv, canonical.stride) if canonical.stride else 0
        return
    if canonical.stride:
        multiples = torch.arange(0, canonical.seqlen_kv, canonical.stride, dtype=torch.int32)
        merged = torch.unique(torch.cat([canonical.tokens.on_host(), multiples]))
        indices = merged.to(plan.device, non_blocking=True)
    else:
        indices = canonical.tokens.indices.to(plan.device, torch.int32, non_blocking=True).contiguous()
    plan.values["num_gathered"] = indices.shape[0]
    plan.point("gather_indices", indices, is_new=canonical.stride > 0)


def _fill_scan(plan: _PlanArguments, canonical: CanonicalMask) -> None:
    """The whole mask as bytes, straight from its definition."""
    mask, seqlen_q, seqlen_kv = canonical.mask, canonical.seqlen_q, canonical.seqlen_kv
    batch, num_heads = (1, 1) if mask is None else mask.lead
    size_bytes = batch * num_heads * seqlen_q * seqlen_kv
    if size_bytes > SCAN_LIMIT_BYTES:
        raise InvalidInput(
            f"mask form scan needs {size_bytes / 2**30:.1f} GiB for a {seqlen_q}x{seqlen_kv} mask, "
            f"at most {SCAN_LIMIT_BYTES // 2**30} GiB is allowed; use form list, analytic or gather"
        )
    dense = torch.ones(batch, num_heads, seqlen_q, seqlen_kv, dtype=torch.uint8, device=plan.device)
    if mask is not None:
        step = row_chunk(mask, seqlen_kv)
        for start in range(0, seqlen_q, step):
            stop = min(start + step, seqlen_q)
            dense[:, :, start:stop] = mask.rows(seqlen_q, seqlen_kv, plan.device, start, stop)
    plan.point("dense_mask", dense)
    plan.strides("dense", dense, rows=seqlen_q * seqlen_kv)
