"""Plans against the masks they are made from, read exactly as the kernel's argument list documents them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tilewright.generator.abi import MASK_ARGUMENTS, UNBOUNDED
from tilewright.generator.errors import InvalidInput
from tilewright.generator.variant import Kernel, VariantSpec
from tilewright.runtime import masks, plans
from tilewright.runtime.canonical import canonical
from tilewright.runtime.mask_terms import ceil_div
from tilewright.runtime.plans import MaskPlan, build_plan, plan_for

BATCH, HEADS = 2, 2
SHAPES = [(33, 33), (17, 70), (70, 17), (1, 129), (100, 96), (5, 1)]
TILES = [(16, 32), (32, 16), (8, 24), (64, 64), (13, 7), (128, 128)]


def random_bool(*shape: int, density: float = 0.4, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < density


def blocks(nq: int, nkv: int, bq: int, bkv: int, *lead: int, density: float = 0.4, seed: int = 0) -> masks.Mask:
    active = random_bool(*lead, ceil_div(nq, bq), ceil_div(nkv, bkv), density=density, seed=seed)
    return masks.block_mask(active, (bq, bkv))


def some_tokens(nkv: int, count: int, seed: int = 0) -> masks.Mask:
    return masks.global_tokens(torch.randint(nkv, (count,), generator=torch.Generator().manual_seed(seed)))


def cuts(length: int, documents: int) -> torch.Tensor:
    inner = torch.randint(length + 1, (documents - 1,), generator=torch.Generator().manual_seed(length))
    return torch.cat([torch.tensor([0]), inner.sort().values, torch.tensor([length])]).to(torch.int32)


def packed(nq: int, nkv: int, documents: int = 3) -> masks.Mask:
    return masks.document(cuts(nq, documents), cuts(nkv, documents))


MASKS: dict[str, Callable[[int, int], masks.Mask | None]] = {
    "none": lambda nq, nkv: None,
    "full": lambda nq, nkv: masks.full(),
    "causal": lambda nq, nkv: masks.causal(),
    "window": lambda nq, nkv: masks.sliding_window(3, 5),
    "diagonal": lambda nq, nkv: masks.sliding_window(0, 0),
    "window-left": lambda nq, nkv: masks.sliding_window(20, -1),
    "window-wider-than-keys": lambda nq, nkv: masks.sliding_window(1000, 1000),
    "stride": lambda nq, nkv: masks.global_stride(8),
    "stride-1": lambda nq, nkv: masks.global_stride(1),
    "stride-past-end": lambda nq, nkv: masks.global_stride(1000),
    "two-strides": lambda nq, nkv: masks.global_stride(4) & masks.global_stride(6),
    "tokens": lambda nq, nkv: some_tokens(nkv, 6),
    "no-tokens": lambda nq, nkv: masks.global_tokens([]),
    "every-token": lambda nq, nkv: masks.global_tokens(range(nkv)),
    "window|stride": lambda nq, nkv: masks.sliding_window(4, 4) | masks.global_stride(16),
    "causal&(window|stride)": lambda nq, nkv: masks.causal() & (masks.sliding_window(4, 4) | masks.global_stride(16)),
    "distributed": lambda nq, nkv: (
        masks.causal() & masks.sliding_window(4, 4) | masks.causal() & masks.global_stride(16)
    ),
    "window|stride|tokens": lambda nq, nkv: (
        masks.sliding_window(2, 0) | masks.global_stride(16) | some_tokens(nkv, 5) | some_tokens(nkv, 2, 1)
    ),
    "blocks": lambda nq, nkv: blocks(nq, nkv, 16, 16),
    "blocks-1": lambda nq, nkv: blocks(nq, nkv, 1, 1, HEADS),
    "blocks-2": lambda nq, nkv: blocks(nq, nkv, 2, 2, density=0.8),
    "blocks-3": lambda nq, nkv: blocks(nq, nkv, 3, 3, density=0.9),
    "blocks-wide": lambda nq, nkv: blocks(nq, nkv, 4, 64, density=0.7),
    "blocks-per-head": lambda nq, nkv: blocks(nq, nkv, 32, 16, HEADS, density=0.6),
    "blocks-per-batch": lambda nq, nkv: blocks(nq, nkv, 16, 16, BATCH, 1),
    "blocks-per-both": lambda nq, nkv: blocks(nq, nkv, 16, 48, BATCH, HEADS),
    "blocks-all": lambda nq, nkv: blocks(nq, nkv, 16, 16, density=2.0),
    "blocks-none": lambda nq, nkv: blocks(nq, nkv, 16, 16, density=-1.0),
    "blocks&blocks": lambda nq, nkv: blocks(nq, nkv, 16, 32, HEADS) & blocks(nq, nkv, 48, 16, BATCH, 1, seed=1),
    "blocks&finer-blocks": lambda nq, nkv: blocks(nq, nkv, 3, 5) & blocks(nq, nkv, 7, 16, seed=1),
    "blocks|blocks": lambda nq, nkv: blocks(nq, nkv, 16, 32) | blocks(nq, nkv, 24, 8, HEADS, seed=1),
    "window|blocks": lambda nq, nkv: masks.sliding_window(3, 3) | blocks(nq, nkv, 16, 16, HEADS),
    "blocks&(window|blocks)": lambda nq, nkv: (
        blocks(nq, nkv, 16, 16, density=0.8) & (masks.sliding_window(3, 3) | blocks(nq, nkv, 32, 8, HEADS, seed=1))
    ),
    "document": lambda nq, nkv: packed(nq, nkv),
    "many-documents": lambda nq, nkv: packed(nq, nkv, 9) & masks.causal(),
    "two-packings": lambda nq, nkv: packed(nq, nkv, 3) & packed(nq, nkv, 2),
    "document|window": lambda nq, nkv: packed(nq, nkv) | masks.sliding_window(1, 1),
    "document&stride|window": lambda nq, nkv: packed(nq, nkv) & masks.global_stride(4) | masks.sliding_window(1, 1),
    "tokens-pairs": lambda nq, nkv: masks.token_mask(random_bool(nq, nkv)),
    "pairs-per-both": lambda nq, nkv: masks.token_mask(random_bool(BATCH, HEADS, nq, nkv, density=0.97)),
    "pairs-per-batch&causal": lambda nq, nkv: (
        masks.token_mask(random_bool(BATCH, 1, nq, nkv, density=0.97)) & masks.causal()
    ),
    "pairs&pairs": lambda nq, nkv: (
        masks.token_mask(random_bool(nq, nkv)) & masks.token_mask(random_bool(HEADS, nq, nkv, seed=1))
    ),
    "two-brackets": lambda nq, nkv: (
        (masks.sliding_window(2, 2) | masks.global_stride(4)) & (masks.sliding_window(9, 0) | some_tokens(nkv, 5))
    ),
    "everything": lambda nq, nkv: (
        masks.sliding_window(40, 2)
        & packed(nq, nkv)
        & (masks.sliding_window(5, 5) | masks.global_stride(8) | some_tokens(nkv, 3) | blocks(nq, nkv, 8, 8, HEADS))
        & masks.token_mask(random_bool(BATCH, 1, nq, nkv, density=0.9))
    ),
}


class Emulator:
    """A kernel in numpy: it sees the plan's arguments and nothing else of the mask."""

    def __init__(self, plan: MaskPlan, seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int) -> None:
        self.seqlen_q, self.seqlen_kv, self.block_m, self.block_n = seqlen_q, seqlen_kv, block_m, block_n
        names = [a.name for a in MASK_ARGUMENTS]
        assert len(plan.arguments) == len(names)
        assert all(type(value) is int for value in plan.arguments)
        self.values = dict(zip(names, plan.arguments, strict=True))
        self.by_pointer = {t.data_ptr(): t.reshape(-1).numpy() for t in plan.tensors if t.numel()}

    def read(self, name: str, index: np.ndarray) -> np.ndarray:
        """Elements of a pointer argument; numpy refuses an index past the tensor that the plan keeps alive."""
        if index.size == 0:
            return np.zeros(index.shape, dtype=np.uint32)
        flat = self.by_pointer[self.values[name]]
        assert index.min() >= 0
        words = flat[index]
        return words.view(np.uint32) if words.dtype == np.int32 and ("bit" in name) else words

    def bit(self, name: str, base: np.ndarray, index: np.ndarray) -> np.ndarray:
        return (self.read(name, base + index // 32) >> (index % 32).astype(np.uint32)) & 1 != 0

    def pair(self, b: int, h: int, q: np.ndarray, k: np.ndarray, with_global_keys: bool = True) -> np.ndarray:
        """Whether pairs are active: q is [rows, 1], k is [1, keys], both inside the lengths."""
        v = self.values
        position = q + (self.seqlen_kv - self.seqlen_q)
        active = (k >= position - v["bound_left"]) & (k <= position + v["bound_right"])
        if v["row_begin"]:
            row = b * v["row_stride_b"] + q
            active &= (k >= self.read("row_begin", row)) & (k < self.read("row_end", row))
        # `terms` are compiled into a kernel; here they follow from the arguments the term would fill.
        terms = self.terms
        bracket = np.zeros_like(active)
        if "window" in terms:
            bracket |= (k >= position - v["window_left"]) & (k <= position + v["window_right"])
        if "stride" in terms and with_global_keys:
            bracket |= k % v["stride"] == 0
        if "tokens" in terms and with_global_keys:
            bracket |= self.bit("token_bits", np.zeros_like(k), k)
        if "or_blocks" in terms:
            bracket |= self.block(b, h, q, k)
        if {"window", "stride", "tokens", "or_blocks"} & set(terms):
            active &= bracket
        if "and_blocks" in terms:
            active &= self.block(b, h, q, k)
        if "and_bits" in terms:
            active &= self.bit("mask_bits", b * v["bits_stride_b"] + h * v["bits_stride_h"] + q * v["bits_words"], k)
        return active

    terms: tuple[str, ...] = ()

    def block(self, b: int, h: int, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        v = self.values
        row = b * v["block_stride_b"] + h * v["block_stride_h"] + q // v["sparse_block_q"] * v["block_words"]
        return self.bit("block_bits", row, k // v["sparse_block_kv"])

    def run(self, form: str, b: int, h: int) -> np.ndarray:
        """The active pairs of one head, as a kernel of this mask form would visit them."""
        q, k = np.arange(self.seqlen_q)[:, None], np.arange(self.seqlen_kv)[None, :]
        v = self.values
        if form == "scan":
            row = b * v["dense_stride_b"] + h * v["dense_stride_h"] + q * self.seqlen_kv
            return self.read("dense_mask", row + k) != 0
        if form == "analytic":
            return self.pair(b, h, q, k)
        if form == "gather":
            return self.gather(b, h, q, k)
        out = np.zeros((self.seqlen_q, self.seqlen_kv), dtype=bool)
        for tile_q in range(ceil_div(self.seqlen_q, self.block_m)):
            row = b * v["tile_stride_b"] + h * v["tile_stride_h"] + tile_q
            full, partial = self.listed(row) if form == "list" else self.mapped(row)
            rows = slice(tile_q * self.block_m, (tile_q + 1) * self.block_m)
            for tile in full:
                assert (tile + 1) * self.block_n <= self.seqlen_kv, "a full tile reaches past the keys"
                out[rows, tile * self.block_n : (tile + 1) * self.block_n] = True
            for tile in partial:
                keys = slice(tile * self.block_n, (tile + 1) * self.block_n)
                out[rows, keys] = self.pair(b, h, q[rows], k[:, keys])
        return out

    def listed(self, row: int) -> tuple[list[int], list[int]]:
        v, at = self.values, np.array(row)
        full, count = int(self.read("full_num_blocks", at)), int(self.read("kv_num_blocks", at))
        assert 0 <= full <= count <= v["tiles_kv"]
        tiles = self.read("kv_indices", row * v["tiles_kv"] + np.arange(count)).tolist()
        assert tiles[:full] == sorted(set(tiles[:full]))
        assert tiles[full:] == sorted(set(tiles[full:]) - set(tiles[:full]))
        return tiles[:full], tiles[full:]

    def mapped(self, row: int) -> tuple[list[int], list[int]]:
        v = self.values
        tiles = np.arange(v["tiles_kv"])
        assert v["tile_words"] == ceil_div(len(tiles), 32)
        base = np.full_like(tiles, row * v["tile_words"])
        active, full = self.bit("active_bitmap", base, tiles), self.bit("full_bitmap", base, tiles)
        assert not (full & ~active).any()
        return tiles[full].tolist(), tiles[active & ~full].tolist()

    def gather(self, b: int, h: int, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """The window's own keys, then the gathered ones under the terms outside the bracket."""
        v, terms = self.values, self.terms
        count = v["num_gathered"]
        keys = np.arange(count)
        keys = self.read("gather_indices", keys) if v["gather_indices"] and count else keys * v["stride"]
        assert keys.tolist() == sorted(set(keys.tolist()))
        assert all(0 <= key < self.seqlen_kv for key in keys)
        out = self.pair(b, h, q, k, with_global_keys=False)
        if {"stride", "tokens"} & set(terms):
            self.terms = tuple(t for t in terms if t not in ("window", "stride", "tokens", "or_blocks"))
            out[:, keys] |= self.pair(b, h, q, keys[None, :])
            self.terms = terms
        return out


def emulate(mask: masks.Mask | None, form: str, shape: tuple[int, int], tile: tuple[int, int]) -> torch.Tensor:
    """bool [BATCH, HEADS, seqlen_q, seqlen_kv] as a kernel with this plan sees the mask."""
    seqlen_q, seqlen_kv = shape
    parts = canonical(mask, seqlen_q, seqlen_kv)
    plan = build_plan(
        parts, form, *tile, batch=BATCH, num_heads=HEADS, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, device="cpu"
    )
    kernel = Emulator(plan, seqlen_q, seqlen_kv, *tile)
    kernel.terms = parts.terms
    if mask is None or mask.lead == (1, 1):
        # Shared by all heads: the last one must read the same place as the first.
        return torch.from_numpy(kernel.run(form, BATCH - 1, HEADS - 1)).expand(BATCH, HEADS, *shape)
    heads = [kernel.run(form, b, h) for b in range(BATCH) for h in range(HEADS)]
    return torch.from_numpy(np.stack(heads)).view(BATCH, HEADS, *shape)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Masks here are small: waking threads for them would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def expected(mask: masks.Mask | None, shape: tuple[int, int]) -> torch.Tensor:
    dense = (masks.full() if mask is None else mask).dense(BATCH, HEADS, *shape)
    return dense.expand(BATCH, HEADS, *shape)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("name", MASKS)
def test_every_form_sees_the_mask_as_defined(name: str, shape: tuple[int, int]) -> None:
    mask = MASKS[name](*shape)
    want = expected(mask, shape)
    for form in ("scan", "analytic", "gather"):
        assert torch.equal(emulate(mask, form, shape, (16, 16)), want), form
    for form in ("list", "bitmap"):
        for tile in TILES if form == "list" else TILES[1:4]:
            assert torch.equal(emulate(mask, form, shape, tile), want), (form, tile)


def tiles_of(mask: masks.Mask | None, shape: tuple[int, int], tile: tuple[int, int]) -> tuple[int, int]:
    """(full, partial) tiles of the first head."""
    seqlen_q, seqlen_kv = shape
    parts = canonical(mask, seqlen_q, seqlen_kv)
    plan = build_plan(
        parts,
        "list",
        *tile,
        batch=1,
        num_heads=1,
        seqlen_q=shape[0],
        seqlen_kv=shape[1],
        device="cpu",
    )
    values = dict(zip([a.name for a in MASK_ARGUMENTS], plan.arguments, strict=True))
    counts = {t.data_ptr(): int(t.sum()) for t in plan.tensors}
    full = counts[values["full_num_blocks"]]
    return full, counts[values["kv_num_blocks"]] - full


@pytest.mark.parametrize(
    ("mask", "shape", "tile", "full", "partial"),
    [
        (None, (128, 128), (32, 32), 16, 0),
        (None, (100, 100), (32, 32), 12, 4),
        (masks.causal(), (128, 128), (32, 32), 6, 4),
        (masks.causal(), (64, 128), (32, 32), 2 + 3, 2),
        (masks.sliding_window(32, 32), (256, 256), (16, 16), 16 * 3 - 2, 2 * 14),
        (masks.sliding_window(1000, 1000), (64, 64), (32, 32), 4, 0),
        (masks.global_stride(64), (128, 256), (32, 32), 0, 16),
        (masks.global_tokens(range(32, 64)), (128, 256), (32, 32), 4, 0),
        (masks.block_mask(torch.eye(4, dtype=torch.bool), 64), (256, 256), (32, 32), 16, 0),
        (masks.block_mask(torch.eye(4, dtype=torch.bool), 64), (256, 256), (128, 128), 0, 2),
        (masks.document(torch.tensor([0, 64, 128])), (128, 128), (32, 32), 8, 0),
        (masks.token_mask(torch.ones(64, 64, dtype=torch.bool)), (64, 64), (24, 16), 12, 0),
    ],
    ids=str,
)
def test_tiles_are_classified_as_tightly_as_known(
    mask: masks.Mask | None, shape: tuple[int, int], tile: tuple[int, int], full: int, partial: int
) -> None:
    assert tiles_of(mask, shape, tile) == (full, partial)


def test_full_tiles_ignore_rows_past_the_last_query() -> None:
    assert tiles_of(
        masks.causal(),
        (40, 104),
        (32, 32),
    ) == (2 + 3, 1 + 1)


def test_a_last_ragged_row_of_tiles_can_be_full() -> None:
    active = torch.ones(1, 1, dtype=torch.bool)
    assert tiles_of(masks.block_mask(active, 64), (40, 64), (32, 32)) == (4, 0)


ORDERED = [
    "causal",
    "window|blocks",
    "blocks-per-head",
    "blocks-per-batch",
    "blocks-per-both",
    "blocks-none",
    "pairs&pairs",
]


@pytest.mark.parametrize("shape", [*SHAPES, (0, 16), (16, 0)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("rows", [16, 48])
@pytest.mark.parametrize("form", ["list", "bitmap"])
@pytest.mark.parametrize("name", ORDERED)
def test_the_blocks_with_the_most_active_tiles_start_first(
    name: str, form: str, rows: int, shape: tuple[int, int]
) -> None:
    parts = canonical(MASKS[name](*shape), *shape)
    plan = build_plan(
        parts, form, 16, 32, batch=BATCH, num_heads=HEADS, seqlen_q=shape[0], seqlen_kv=shape[1], device="cpu",
        order_rows=rows,
    )  # fmt: skip
    kernel = Emulator(plan, *shape, 16, 32)
    blocks, v = ceil_div(shape[0], rows), kernel.values
    counts = np.zeros((BATCH, HEADS, blocks), dtype=int)
    for b, h, tile in np.ndindex(BATCH, HEADS, ceil_div(shape[0], 16)):
        row = b * v["tile_stride_b"] + h * v["tile_stride_h"] + tile
        full, partial = kernel.listed(row) if form == "list" else kernel.mapped(row)
        counts[b, h, tile * 16 // rows] += len(full) + len(partial)
    order = kernel.read("tile_order", np.arange(counts.size))
    assert plan.tensors[-1].dtype == torch.int32
    powers = [int(count).bit_length() for count in counts.reshape(-1)]  # equal within a factor of two
    assert order.tolist() == np.argsort(-np.array(powers, dtype=int), kind="stable").tolist()


@pytest.mark.parametrize(("form", "rows"), [("analytic", 16), ("scan", 16), ("list", 24), ("list", 0)])
def test_an_order_without_counted_tiles_is_refused(form: str, rows: int) -> None:
    with pytest.raises(InvalidInput, match=f"whole tiles of 16 rows; got {form}, {rows} rows"):
        build_plan(
            canonical(masks.causal(), 32, 32), form, 16, 32, batch=1, num_heads=1, seqlen_q=32, seqlen_kv=32,
            device="cpu", order_rows=rows,
        )  # fmt: skip


@pytest.mark.parametrize("order", ["forward", "longest"])
def test_a_kernels_plan_has_the_order_that_its_blocks_take(order: str) -> None:
    axes = {"num_warps": 2, "num_stages": 2, "q_in_registers": True, "tile_order": order, "blocks_per_sm": 1}
    values = {"mask_form": "list", "block_m": 32, "block_n": 32, **axes}
    kernel = Kernel(
        "attention_forward", "float16", 64, ("bound",), VariantSpec.from_values("forward_mma", values), "sm_90a"
    )
    sizes = {"batch": 1, "num_heads": 2, "seqlen_q": 100, "seqlen_kv": 100}
    plan = plan_for(kernel, canonical(masks.causal(), 100, 100), device="cpu", **sizes)
    got = dict(zip([a.name for a in MASK_ARGUMENTS], plan.arguments, strict=True))
    assert (got["tile_order"] != 0) == (order == "longest")
    if order == "longest":
        assert Emulator(plan, 100, 100, 32, 32).read("tile_order", np.arange(8)).tolist() == [3, 7, 1, 2, 5, 6, 0, 4]


@pytest.mark.parametrize("form", ["analytic", "gather"])
def test_structured_masks_of_96_000_tokens_take_no_square_memory(form: str) -> None:
    n = 96_000
    mask = (masks.sliding_window(32, 32) | masks.global_stride(512) | masks.global_tokens([5, 77])) & masks.document(
        torch.tensor([0, 1000, n])
    )
    parts = canonical(mask, n, n)
    plan = build_plan(parts, form, 64, 64, batch=1, num_heads=8, seqlen_q=n, seqlen_kv=n, device="cpu")
    assert parts.materialised_bytes == 0
    assert plan.extra_bytes <= 16 * n


def test_lists_for_96_000_tokens_are_of_the_size_of_the_tile_grid() -> None:
    n = 96_000
    parts = canonical(masks.sliding_window(4096, 0), n, n)
    plan = build_plan(parts, "list", 128, 128, batch=1, num_heads=8, seqlen_q=n, seqlen_kv=n, device="cpu")
    assert plan.extra_bytes == 4 * 750 * (750 + 2)


def test_unused_arguments_are_neutral() -> None:
    plan = build_plan(
        canonical(None, 8, 8), "analytic", 16, 16, batch=1, num_heads=1, seqlen_q=8, seqlen_kv=8, device="cpu"
    )
    values = dict(zip([a.name for a in MASK_ARGUMENTS], plan.arguments, strict=True))
    open_sides = {"bound_left", "bound_right", "window_left", "window_right"}
    assert {n for n, v in values.items() if v == UNBOUNDED} == open_sides
    assert {v for n, v in values.items() if n not in open_sides} == {0}
    assert plan.extra_bytes == 0


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("form", ["scan", "analytic", "gather", "list", "bitmap"])
@pytest.mark.parametrize("name", ["none", "causal", "window|stride", "blocks-per-head", "tokens-pairs", "no-tokens"])
def test_empty_lengths_have_plans(name: str, form: str, shape: tuple[int, int]) -> None:
    mask = MASKS[name](*shape)
    assert emulate(mask, form, shape, (16, 16)).numel() == 0


def test_a_scan_mask_of_more_than_8_gib_is_refused_with_advice() -> None:
    n = 96_000
    parts = canonical(masks.causal(), n, n)
    with pytest.raises(InvalidInput, match=r"scan needs 8\.6 GiB .* use form list"):
        build_plan(parts, "scan", 64, 64, batch=1, num_heads=1, seqlen_q=n, seqlen_kv=n, device="cpu")


def test_other_lengths_than_the_canonical_mask_was_made_for_are_refused() -> None:
    parts = canonical(masks.causal(), 8, 8)
    with pytest.raises(InvalidInput, match="made canonical for lengths 8x8, got 8x16"):
        build_plan(parts, "list", 16, 16, batch=1, num_heads=1, seqlen_q=8, seqlen_kv=16, device="cpu")


def test_a_mask_that_does_not_fit_is_refused_when_planned() -> None:
    mask = masks.block_mask(torch.ones(3, 2, 2, dtype=torch.bool), 16)
    parts = canonical(mask, 32, 32)
    with pytest.raises(InvalidInput, match=r"\[batch, heads\] = \[1, 4\]"):
        build_plan(parts, "list", 16, 16, batch=1, num_heads=4, seqlen_q=32, seqlen_kv=32, device="cpu")


def test_scan_chunks_agree_with_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, shape = MASKS["everything"](50, 41), (50, 41)
    whole = {form: emulate(mask, form, shape, (16, 8)) for form in ("scan", "list")}
    for module in (plans.row_chunk.__globals__, plans.classify_tiles.__globals__):
        monkeypatch.setitem(module, "CHUNK_PAIRS", 500)
    for form, want in whole.items():
        assert torch.equal(emulate(mask, form, shape, (16, 8)), want)


@pytest.mark.parametrize("form", ["scan", "analytic", "gather", "list", "bitmap"])
@pytest.mark.parametrize("name", MASKS)
def test_plans_read_nothing_back_from_the_device(name: str, form: str) -> None:
    """Tensors on the meta device have shapes and no data: whatever the host wanted to read would raise."""
    shape = (100, 96)
    mask = MASKS[name](*shape)
    moved = mask if mask is None else mask.to("meta")
    sizes = {"batch": BATCH, "num_heads": HEADS, "seqlen_q": shape[0], "seqlen_kv": shape[1]}
    order = 32 if form in ("list", "bitmap") else None
    want = build_plan(canonical(mask, *shape), form, 16, 32, device="cpu", order_rows=order, **sizes)
    got = build_plan(canonical(moved, *shape), form, 16, 32, device="meta", order_rows=order, **sizes)
    assert [(t.shape, t.dtype) for t in got.tensors] == [(t.shape, t.dtype) for t in want.tensors]
    pointers = {i for i, a in enumerate(MASK_ARGUMENTS) if a.ctype == "pointer"}
    numbers = [i for i in range(len(MASK_ARGUMENTS)) if i not in pointers]
    assert [got.arguments[i] for i in numbers] == [want.arguments[i] for i in numbers]


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["scan", "analytic", "gather", "list", "bitmap"])
@pytest.mark.parametrize("name", MASKS)
def test_plans_on_a_gpu_are_those_of_the_cpu_and_never_wait_for_the_host(name: str, form: str) -> None:
    shape = (100, 96)
    mask = MASKS[name](*shape)
    on_gpu = mask if mask is None else mask.to("cuda")
    sizes = {"batch": BATCH, "num_heads": HEADS, "seqlen_q": shape[0], "seqlen_kv": shape[1]}
    order = 32 if form in ("list", "bitmap") else None
    want = build_plan(canonical(mask, *shape), form, 16, 32, device="cpu", order_rows=order, **sizes)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = build_plan(canonical(on_gpu, *shape), form, 16, 32, device="cuda", order_rows=order, **sizes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(got.tensors) == len(want.tensors)
    for ours, theirs in zip(got.tensors, want.tensors, strict=True):
        assert torch.equal(ours.cpu(), theirs)
