"""FlexAttention's block masks, converted and compared with what FlexAttention itself computes from them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from tilewright.generator.errors import InvalidInput
from tilewright.runtime import flex, masks
from tilewright.runtime.canonical import canonical

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window_and_stride(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return ((q - k).abs() <= 9) | (k % 50 == 0)


def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k).abs() <= 8 * (h + 1)


def by_batch(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (k >= 30 * b)


def from_a_table(table: Tensor) -> Mod:
    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return table[q] == table[k]

    return mod


MODS: dict[str, tuple[Mod, int | None, int | None]] = {
    "causal": (causal, None, None),
    "window_and_stride": (window_and_stride, None, None),
    "by_head": (by_head, None, 3),
    "by_batch": (by_batch, 2, None),
    "by_both": (lambda b, h, q, k: by_head(b, h, q, k) & by_batch(b, h, q, k), 2, 3),
    "from_a_table": (from_a_table(torch.arange(400) // 70), None, None),
    "nothing": (lambda b, h, q, k: q < 0, None, None),
}


@pytest.mark.parametrize("lengths", [(128, 128), (100, 300), (300, 100), (1, 65)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("size", [(128, 128), (32, 16), (16, 64)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("name", MODS)
def test_a_block_mask_keeps_its_meaning(name: str, size: tuple[int, int], lengths: tuple[int, int]) -> None:
    mod, batch, heads = MODS[name]
    theirs = create_block_mask(mod, batch, heads, *lengths, device="cpu", BLOCK_SIZE=size)
    ours = masks.from_block_mask(theirs)
    want = create_mask(mod, 2, 3, *lengths, device="cpu")
    assert torch.equal(ours.dense(2, 3, *lengths).expand(2, 3, *lengths), want)
    assert ours.lead == (batch or 1, heads or 1)


def test_a_converted_mask_gives_flex_attentions_own_output() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 200, 16, generator=generator) for _ in range(3))
    theirs = create_block_mask(MODS["by_both"][0], 2, 3, 200, 200, device="cpu", BLOCK_SIZE=64)
    dense = masks.from_block_mask(theirs).dense(2, 3, 200, 200)
    ours = torch.nn.functional.scaled_dot_product_attention(query, key, value, dense)
    # A row without keys is 0 in FlexAttention as in ours; SDPA gives NaN there.
    ours = torch.where(dense.any(-1, keepdim=True), ours, 0.0)
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=theirs), ours)


def test_indices_past_the_count_are_not_read() -> None:
    counts = torch.tensor([[[2, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 0, -7], [99, 2, 1]]]], dtype=torch.int32)
    mask = masks.from_block_mask(BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, compute_q_blocks=False))
    want = torch.zeros(32, 48, dtype=torch.bool)
    want[:16, :32] = True
    assert torch.equal(mask.dense(1, 1, 32, 48)[0, 0], want)


def test_full_blocks_are_active_whatever_mask_mod_says() -> None:
    one = torch.ones(1, 1, 2, dtype=torch.int32)
    partial = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    full = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    theirs = BlockMask.from_kv_blocks(one, partial, one, full, BLOCK_SIZE=16, mask_mod=causal, compute_q_blocks=False)
    want = torch.ones(32, 32, dtype=torch.bool)
    want[:16, :16] = want[16:, 16:] = torch.ones(16, 16, dtype=torch.bool).tril()
    assert torch.equal(masks.from_block_mask(theirs).dense(1, 1, 32, 32)[0, 0], want)


def test_without_partial_blocks_no_pairs_are_kept() -> None:
    theirs = create_block_mask(from_a_table(torch.arange(128) // 32), None, None, 128, 128, "cpu", BLOCK_SIZE=32)
    mask = masks.from_block_mask(theirs)
    assert mask.spec == "block_mask(#0, 32, 32)"
    assert canonical(mask, 128, 128).terms == ("and_blocks",)


def test_partial_blocks_become_blocks_and_bits() -> None:
    mask = masks.from_block_mask(create_block_mask(causal, None, None, 128, 128, "cpu", BLOCK_SIZE=32))
    assert mask.spec == "(block_mask(#0, 32, 32) & packed_mask(#1, 128))"
    assert canonical(mask, 128, 128).terms == ("and_blocks", "and_bits")
    assert torch.equal(masks.from_spec(mask.spec, mask.tensors).dense(1, 1, 128, 128), mask.dense(1, 1, 128, 128))


def test_chunks_agree_with_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = create_block_mask(MODS["by_both"][0], 2, 3, 100, 70, "cpu", BLOCK_SIZE=16)
    whole = flex.mask_of_block_mask(theirs).dense(2, 3, 100, 70)
    monkeypatch.setattr(flex, "CHUNK_PAIRS", 3000)
    assert torch.equal(flex.mask_of_block_mask(theirs).dense(2, 3, 100, 70), whole)


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "seqlen_kv"), [(3, 3, 64, 64), (2, 2, 64, 64), (2, 3, 64, 256), (2, 3, 63, 64)]
)
def test_a_block_mask_for_another_call_is_refused(batch: int, heads: int, seqlen_q: int, seqlen_kv: int) -> None:
    mask = masks.from_block_mask(create_block_mask(MODS["by_both"][0], 2, 3, 64, 64, "cpu", BLOCK_SIZE=16))
    with pytest.raises(InvalidInput, match=r"must have leading|must end in|was made for lengths 64x64"):
        mask.check(batch, heads, seqlen_q, seqlen_kv)


def test_block_masks_combine_with_ours() -> None:
    theirs = create_block_mask(causal, None, None, 64, 64, "cpu", BLOCK_SIZE=16)
    for mask in (masks.sliding_window(3, 3) & theirs, theirs & masks.sliding_window(3, 3)):
        assert torch.equal(mask.dense(1, 1, 64, 64), masks.sliding_window(3, 0).dense(1, 1, 64, 64))


def test_anything_else_is_refused() -> None:
    with pytest.raises(InvalidInput, match="expected a FlexAttention BlockMask, got Tensor"):
        masks.from_block_mask(torch.ones(2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODS)
def test_conversion_on_a_gpu(name: str) -> None:
    mod, batch, heads = (
        MODS[name] if name != "from_a_table" else (from_a_table(torch.arange(400, device="cuda") // 70), None, None)
    )
    ours = masks.from_block_mask(create_block_mask(mod, batch, heads, 100, 300, device="cuda", BLOCK_SIZE=64))
    want = create_mask(mod, 2, 3, 100, 300, device="cuda")
    assert torch.equal(ours.dense(2, 3, 100, 300, "cuda").expand(2, 3, 100, 300), want)
