"""Which compute tiles a mask touches, and which it fills: the lists and bitmaps kernels walk.

Tiles (block_m x block_n) and the mask's own granularity are independent. Each term says of every tile whether it has
an active pair (`any`) and whether all its pairs are active (`all`); the terms combine tile by tile. `any` of an `&`
may be claimed for a tile that holds no active pair, which costs time, never correctness: a tile that is not full is
evaluated pair by pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.generator.abi import UNBOUNDED
from tilewright.runtime.canonical import CanonicalMask
from tilewright.runtime.mask_bits import CHUNK_PAIRS, unpack_bits
from tilewright.runtime.mask_terms import BlockMask, as_4d

Verdict = tuple[Tensor, Tensor]
"""(any, all) of one term: two bools that broadcast to [B, H, tiles_q, tiles_kv]."""


@dataclass(frozen=True, eq=False)
class _Grid:
    """First and last row and key of each tile, cut at the lengths; rows are [tiles_q, 1], keys [1, tiles_kv]."""

    block_m: int
    block_n: int
    seqlen_q: int
    seqlen_kv: int
    q_first: Tensor
    q_last: Tensor
    k_first: Tensor
    k_last: Tensor

    @classmethod
    def of(cls, block_m: int, block_n: int, seqlen_q: int, seqlen_kv: int, device: torch.device) -> _Grid:
        q_first = torch.arange(0, seqlen_q, block_m, device=device).unsqueeze(1)
        k_first = torch.arange(0, seqlen_kv, block_n, device=device).unsqueeze(0)
        q_last = (q_first + (block_m - 1)).clamp(max=seqlen_q - 1)
        k_last = (k_first + (block_n - 1)).clamp(max=seqlen_kv - 1)
        return cls(block_m, block_n, seqlen_q, seqlen_kv, q_first, q_last, k_first, k_last)


def classify_tiles(canonical: CanonicalMask, block_m: int, block_n: int, device: torch.device) -> Verdict:
    """(active, full): bool [B|1, H|1, tiles_q, tiles_kv].

    A tile is full when every pair of its existing rows is active and it ends at or before seqlen_kv; rows past
    seqlen_q don't count against it.
    """
    grid = _Grid.of(block_m, block_n, canonical.seqlen_q, canonical.seqlen_kv, device)
    ends_inside = grid.k_first + block_n <= grid.seqlen_kv
    active = torch.ones_like(grid.q_first + grid.k_first, dtype=torch.bool)[None, None]
    is_full = ends_inside & active
    for some, every in _required(canonical, grid):
        active = active & some
        is_full = is_full & every
    return active.contiguous(), is_full.contiguous()


def tile_lists(active: Tensor, is_full: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(kv_indices, full_num_blocks, kv_num_blocks), all int32: full tiles first, then partial ones, ascending.

    Entries of kv_indices past kv_num_blocks are tiles too, inactive ones, but no kernel reads them.
    """
    tiles_kv = active.shape[-1]
    full_before = is_full.cumsum(-1, dtype=torch.int32)
    active_before = active.cumsum(-1, dtype=torch.int32)
    full_counts, counts = full_before[..., -1:], active_before[..., -1:]
    if tiles_kv == 0:
        full_counts = counts = torch.zeros(*active.shape[:-1], 1, dtype=torch.int32, device=active.device)
    tile = torch.arange(tiles_kv, dtype=torch.int32, device=active.device).expand(active.shape)
    # Inactive tiles take the places at the end, so that every place is written exactly once.
    place = torch.where(is_full, full_before - 1, full_counts + active_before - full_before - 1)
    place = torch.where(active, place, counts + tile - active_before)
    indices = torch.empty(active.shape, dtype=torch.int32, device=active.device)
    indices.scatter_(-1, place.long(), tile)
    return indices, full_counts.squeeze(-1).contiguous(), counts.squeeze(-1).contiguous()


def longest_first(counts: Tensor, batch: int, num_heads: int, tiles_a_block: int) -> Tensor:
    """int32 [batch * num_heads * blocks]: the blocks of a grid, (batch, head, block) counted in this order, by falling
    number of active tiles as a whole power of two; those with the same one stay in order.

    Sorted by the very number, blocks that run at the same time would be of all heads, and read keys that the cache has
    not: on masks of even rows an H200 took 1.3 times as long.

    counts: [B|1, H|1, tiles_q] active tiles of each row of tiles, of which a block takes `tiles_a_block`.
    """
    blocks = -(-counts.shape[2] // tiles_a_block)
    padded = torch.nn.functional.pad(counts, (0, blocks * tiles_a_block - counts.shape[2]))
    of_blocks = padded.view(*counts.shape[:2], blocks, tiles_a_block).sum(3)
    of_grid = of_blocks.expand(batch, num_heads, blocks).reshape(-1)
    exponents = torch.frexp(of_grid.to(torch.float32)).exponent  # 0 for none
    return exponents.argsort(descending=True, stable=True).to(torch.int32)


def _required(canonical: CanonicalMask, grid: _Grid) -> list[Verdict]:
    """The verdicts that must all hold."""
    verdicts: list[Verdict] = []
    if canonical.bound is not None:
        verdicts.append(_band(canonical.bound, grid))
    if canonical.row_begin is not None and canonical.row_end is not None:
        verdicts.append(_row_ranges(canonical.row_begin, canonical.row_end, grid))
    bracket = _bracket(canonical, grid)
    if bracket:
        some, every = bracket[0]
        for other_some, other_every in bracket[1:]:
            some, every = some | other_some, every | other_every
        verdicts.append((some, every))
    if canonical.and_blocks is not None:
        verdicts.append(_blocks(canonical.and_blocks, grid))
    if canonical.residual is not None:
        verdicts.append(_bits(canonical.and_bits(grid.q_first.device), grid))
    return verdicts


def _bracket(canonical: CanonicalMask, grid: _Grid) -> list[Verdict]:
    """The verdicts of which one must hold."""
    verdicts: list[Verdict] = []
    if canonical.window is not None:
        verdicts.append(_band(canonical.window, grid))
    if canonical.stride or canonical.tokens is not None:
        verdicts.append(_global_keys(canonical, grid))
    if canonical.or_blocks is not None:
        verdicts.append(_blocks(canonical.or_blocks, grid))
    return verdicts


def _band(band: tuple[int, int], grid: _Grid) -> Verdict:
    """Positions of a tile are consecutive, so its rows' ranges join into one range without holes."""
    left, right = band
    offset = grid.seqlen_kv - grid.seqlen_q
    first, last = grid.q_first + offset, grid.q_last + offset
    some = every = torch.ones_like(grid.k_first, dtype=torch.bool)
    if left != UNBOUNDED:
        some, every = some & (grid.k_last >= first - left), every & (grid.k_first >= last - left)
    if right != UNBOUNDED:
        some, every = some & (grid.k_first <= last + right), every & (grid.k_last <= first + right)
    return some[None, None], every[None, None]


def _row_ranges(row_begin: Tensor, row_end: Tensor, grid: _Grid) -> Verdict:
    """Documents: the least and greatest limits of each tile's rows."""
    has_keys = row_end > row_begin
    # A row without keys neither widens what its tile touches nor lets it be full.
    lowest = _over_rows(torch.where(has_keys, row_begin, grid.seqlen_kv), grid, "amin", grid.seqlen_kv)
    highest = _over_rows(torch.where(has_keys, row_end, 0), grid, "amax", 0)
    latest = _over_rows(row_begin, grid, "amax", 0)
    earliest = _over_rows(torch.where(has_keys, row_end, 0), grid, "amin", grid.seqlen_kv)
    some = (lowest <= grid.k_last) & (highest > grid.k_first)
    every = (latest <= grid.k_first) & (earliest > grid.k_last)
    return some, every


def _over_rows(values: Tensor, grid: _Grid, reduction: str, neutral: int) -> Tensor:
    """[B, seqlen_q] reduced over each tile's rows: [B, 1, tiles_q, 1]."""
    tiles_q = grid.q_first.shape[0]
    padded = torch.nn.functional.pad(values, (0, tiles_q * grid.block_m - grid.seqlen_q), value=neutral)
    rows = padded.view(values.shape[0], 1, tiles_q, grid.block_m)
    return rows.amin(3, keepdim=True) if reduction == "amin" else rows.amax(3, keepdim=True)


def _global_keys(canonical: CanonicalMask, grid: _Grid) -> Verdict:
    """Strided and listed keys, counted per tile by one prefix sum over the keys."""
    device = grid.k_first.device
    flags = torch.zeros(grid.seqlen_kv, dtype=torch.bool, device=device)
    if canonical.tokens is not None:
        flags = canonical.tokens.key_flags(grid.seqlen_kv, device)
    if canonical.stride:
        flags[:: canonical.stride] = True
    before = torch.nn.functional.pad(flags.cumsum(0), (1, 0))
    count = before[grid.k_last + 1] - before[grid.k_first]
    return (count > 0)[None, None], (count == grid.k_last + 1 - grid.k_first)[None, None]


def _blocks(blocks: BlockMask, grid: _Grid) -> Verdict:
    """Blocks under each tile, counted by a 2-D prefix sum over the block grid: any ratio of tile to block."""
    active = as_4d(blocks.active)
    sums = torch.nn.functional.pad(active.cumsum(2, dtype=torch.int32).cumsum(3, dtype=torch.int32), (1, 0, 1, 0))
    top, bottom = grid.q_first[:, 0] // blocks.sparse_block_q, grid.q_last[:, 0] // blocks.sparse_block_q + 1
    first, last = grid.k_first[0] // blocks.sparse_block_kv, grid.k_last[0] // blocks.sparse_block_kv + 1
    strips = sums.index_select(2, bottom) - sums.index_select(2, top)
    count = strips.index_select(3, last) - strips.index_select(3, first)
    area = (bottom - top).unsqueeze(1) * (last - first).unsqueeze(0)
    return count > 0, count == area


def _bits(words: Tensor, grid: _Grid) -> Verdict:
    """Bits under each tile, by chunks of tile rows; words or bytes at once where block_n allows."""
    batch, num_heads = words.shape[:2]
    tiles_q, tiles_kv = grid.q_first.shape[0], grid.k_first.shape[1]
    some = torch.empty(batch, num_heads, tiles_q, tiles_kv, dtype=torch.bool, device=words.device)
    every = torch.empty_like(some)
    pairs_a_tile_row = max(1, batch * num_heads * grid.block_m * grid.seqlen_kv)
    step = max(1, CHUNK_PAIRS // pairs_a_tile_row)
    for start in range(0, tiles_q, step):
        stop = min(start + step, tiles_q)
        rows = words[:, :, start * grid.block_m : min(stop * grid.block_m, grid.seqlen_q)]
        some_keys, every_key = _along_keys(rows, grid.block_n, grid.seqlen_kv, tiles_kv)
        some[:, :, start:stop] = _along_rows(some_keys, grid.block_m, stop - start, False).any(3)
        every[:, :, start:stop] = _along_rows(every_key, grid.block_m, stop - start, True).all(3)
    return some, every


def _along_keys(words: Tensor, block_n: int, seqlen_kv: int, tiles_kv: int) -> Verdict:
    """(any, all) of each row over each tile's keys: bool [B, H, rows, tiles_kv]; a cut tile is never all."""
    unit, ones, units_a_tile = words, -1, block_n // 32
    if block_n % 32:
        unit, ones, units_a_tile = words.contiguous().view(torch.uint8), 255, block_n // 8
    if block_n % 8:
        unit, ones, units_a_tile = unpack_bits(words, seqlen_kv), 1, block_n
    missing = tiles_kv * units_a_tile - unit.shape[-1]
    # Bits past the last key are 0, so units past the last tile hold nothing and are dropped.
    unit = torch.nn.functional.pad(unit, (0, missing)) if missing > 0 else unit[..., : tiles_kv * units_a_tile]
    grouped = unit.reshape(*unit.shape[:-1], tiles_kv, units_a_tile)
    return (grouped != 0).any(-1), (grouped == ones).all(-1)


def _along_rows(flags: Tensor, block_m: int, tiles: int, neutral: bool) -> Tensor:
    """bool [B, H, rows, tiles_kv] as [B, H, tiles, block_m, tiles_kv], rows past the last filled with `neutral`."""
    missing = tiles * block_m - flags.shape[2]
    if missing:
        flags = torch.nn.functional.pad(flags, (0, 0, 0, missing), value=neutral)
    return flags.reshape(*flags.shape[:2], tiles, block_m, flags.shape[3])
