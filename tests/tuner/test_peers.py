"""Peers compute what they claim, are left out where they cannot, and take the mask exactly as it is."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.generator.errors import InvalidInput
from tilewright.runtime import masks
from tilewright.runtime.masks import Mask
from tilewright.tuner import peers_fa4
from tilewright.tuner.oracle import oracle
from tilewright.tuner.peers import ANOTHER_FUNCTION, Call, all_peers, peers_named
from tilewright.tuner.peers_flex import _kernel_options, flex, flex_mask, mask_mod_of
from tilewright.tuner.workloads import WorkloadRow, load_workload

BATCH, HEADS, SEQLEN_Q, SEQLEN_KV = 2, 4, 100, 140


def _random(*size: int, density: float = 0.3) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(len(size))) < density


def _packed() -> Mask:
    words = torch.randint(-(2**31), 2**31, (SEQLEN_Q, 5), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    words[:, -1] &= 2**12 - 1  # 140 keys are 4 words and 12 bits
    return masks.packed_mask(words, SEQLEN_KV)


MASKS: dict[str, Callable[[], Mask]] = {
    "full": masks.full,
    "causal": masks.causal,
    "left window": lambda: masks.sliding_window(20, -1),
    "window": lambda: masks.sliding_window(20, 5),
    "open window": lambda: masks.sliding_window(-1, -1),
    "stride": lambda: masks.sliding_window(3, 3) | masks.global_stride(17),
    "tokens": lambda: masks.global_tokens([0, 7, 99]) & masks.causal(),
    "blocks": lambda: masks.block_mask(_random(4, 5), (32, 32)),
    "blocks a head": lambda: masks.block_mask(_random(4, 7, 9), (16, 16)),
    "blocks a batch entry": lambda: masks.block_mask(_random(2, 1, 4, 5), (32, 32)),
    "blocks everywhere": lambda: masks.block_mask(_random(2, 4, 4, 5), (32, 32)) | masks.sliding_window(2, 2),
    "documents": lambda: masks.document(torch.tensor([0, 30, 30, 100]), torch.tensor([0, 50, 90, 140])),
    "pairs": lambda: masks.token_mask(_random(4, SEQLEN_Q, SEQLEN_KV)),
    "bits": _packed,
}


def _call(mask: Mask | None, *, seqlen_q: int = SEQLEN_Q, seqlen_kv: int = SEQLEN_KV, kv_heads: int = HEADS) -> Call:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, HEADS, seqlen_q, 16, generator=generator)
    key, value = (torch.randn(BATCH, kv_heads, seqlen_kv, 16, generator=generator) for _ in range(2))
    return Call(query, key, value, mask, 0.25)


def _dense(mask: Mask) -> Tensor:
    return mask.dense(BATCH, HEADS, SEQLEN_Q, SEQLEN_KV).expand(BATCH, HEADS, SEQLEN_Q, SEQLEN_KV)


def _places() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.meshgrid(*(torch.arange(n) for n in (BATCH, HEADS, SEQLEN_Q, SEQLEN_KV)), indexing="ij")


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_mod_is_the_mask(name: str) -> None:
    mask = MASKS[name]()
    predicate = mask_mod_of(mask, SEQLEN_Q, SEQLEN_KV)
    assert torch.equal(predicate(*_places()), _dense(mask))


@pytest.mark.parametrize("block_size", [(32, 16), (64, 64), (128, 128)])
@pytest.mark.parametrize("name", ["stride", "blocks a head", "documents", "blocks everywhere"])
def test_flex_block_lists_describe_the_mask(name: str, block_size: tuple[int, int]) -> None:
    mask = MASKS[name]()
    lists = flex_mask(_call(mask), block_size)
    lead = (lists.kv_num_blocks.shape[0], lists.kv_num_blocks.shape[1])
    grid = (-(-SEQLEN_Q // block_size[0]), -(-SEQLEN_KV // block_size[1]))

    def blocks(counts: Tensor | None, indices: Tensor | None) -> Tensor:
        assert counts is not None
        assert indices is not None
        listed = torch.zeros(*lead, *grid, dtype=torch.bool)
        for place in torch.cartesian_prod(*(torch.arange(n) for n in (*lead, grid[0]))).tolist():
            listed[(*place, indices[tuple(place)][: counts[tuple(place)]].long())] = True
        by_pair = listed.repeat_interleave(block_size[0], 2).repeat_interleave(block_size[1], 3)
        return by_pair[:, :, :SEQLEN_Q, :SEQLEN_KV].expand(BATCH, HEADS, -1, -1)

    full = blocks(lists.full_kv_num_blocks, lists.full_kv_indices)
    partial = blocks(lists.kv_num_blocks, lists.kv_indices)
    assert not (full & partial).any()
    assert torch.equal(full | (partial & lists.mask_mod(*_places())), _dense(mask))


def test_flex_compiled_agrees_with_the_oracle() -> None:
    call = _call(masks.sliding_window(20, 5) | masks.global_stride(17), kv_heads=2)
    settings = list(flex([(64, 32)]).settings(call))
    assert [setting.name for setting in settings] == ["default"]  # 100 queries: its decoding kernel chooses the tile
    call = _call(masks.sliding_window(20, 5) | masks.global_stride(17), seqlen_q=SEQLEN_KV, kv_heads=2)
    settings = list(flex([(64, 32)]).settings(call))
    assert [setting.name for setting in settings] == ["default", "64x32"]
    with torch.no_grad():
        ready = settings[1].make()
        out = ready.run()
    expected, _ = oracle(call.query, call.key, call.value, call.mask, call.scale)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    assert ready.held_bytes > 0


def test_flex_takes_a_block_mask_as_one_list_without_a_predicate() -> None:
    active = _random(HEADS, 3, 3, density=0.5)
    active[..., 0] = True
    call = _call(masks.block_mask(active, (64, 64)), seqlen_q=SEQLEN_KV)
    settings = {setting.name: setting for setting in flex([(128, 128), (64, 64), (64, 32)]).settings(call)}
    assert list(settings) == ["default", "64x64, one list", "64x64", "64x32, one list", "64x32"]
    expected, _ = oracle(call.query, call.key, call.value, call.mask, call.scale)
    with torch.no_grad():
        torch.testing.assert_close(settings["64x64, one list"].make().run().double(), expected, rtol=0, atol=1e-5)
    window = _call(masks.sliding_window(20, 5), seqlen_q=SEQLEN_KV)
    assert [setting.name for setting in flex([(64, 64)]).settings(window)] == ["default", "64x64"]


def test_flex_gives_64_rows_one_warpgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    call = _call(masks.causal(), seqlen_q=SEQLEN_KV)
    assert _kernel_options(call, (64, 32)) == {}
    monkeypatch.setattr(Tensor, "is_cuda", True)
    assert _kernel_options(call, (64, 32)) == {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4}
    assert _kernel_options(call, (128, 64)) == {"BLOCK_M": 128, "BLOCK_N": 64}


def test_sdpa_peers_compute_what_they_claim() -> None:
    call = _call(masks.sliding_window(20, 5), kv_heads=2)
    peers = all_peers()
    dense, _ = oracle(call.query, call.key, call.value, None, call.scale)
    masked, _ = oracle(call.query, call.key, call.value, call.mask, call.scale)
    for name, expected in (("sdpa_dense", dense), ("sdpa_masked", masked)):
        (setting,) = peers[name].settings(call)
        torch.testing.assert_close(setting.make().run().double(), expected, rtol=0, atol=1e-5)
    (setting,) = peers["sdpa_dense"].settings(call)
    assert setting.name.startswith(ANOTHER_FUNCTION)
    assert peers["sdpa_dense"].computes(call) is None
    assert peers["sdpa_masked"].computes(call) is call.mask


@pytest.mark.parametrize(
    ("mask", "seqlen_q", "name"),
    [
        (None, SEQLEN_Q, "full"),
        (masks.causal(), SEQLEN_KV, "causal"),
        (masks.sliding_window(SEQLEN_KV - 1, 0), SEQLEN_KV, "causal"),  # a window that cuts nothing
        (masks.sliding_window(20, 0), SEQLEN_KV, f"{ANOTHER_FUNCTION}, causal"),
        (masks.causal() & masks.global_stride(9), SEQLEN_KV, f"{ANOTHER_FUNCTION}, causal"),
        (masks.sliding_window(20, 5), SEQLEN_KV, f"{ANOTHER_FUNCTION}, full"),
        (masks.causal(), SEQLEN_Q, f"{ANOTHER_FUNCTION}, full"),  # PyTorch aligns the first query, we the last
    ],
    ids=["none", "causal", "wide window", "causal window", "causal stride", "window", "causal, ragged"],
)
def test_dense_attention_is_causal_where_no_query_sees_a_later_key(mask: Mask | None, seqlen_q: int, name: str) -> None:
    call, dense = _call(mask, seqlen_q=seqlen_q), all_peers()["sdpa_dense"]
    (setting,) = dense.settings(call)
    assert setting.name == f"{name}, PyTorch's choice"
    expected, _ = oracle(call.query, call.key, call.value, dense.computes(call), call.scale)
    torch.testing.assert_close(setting.make().run().double(), expected, rtol=0, atol=1e-5)
    if not name.startswith(ANOTHER_FUNCTION):
        same, _ = oracle(call.query, call.key, call.value, mask, call.scale)
        assert torch.equal(expected, same)


def test_fused_kernels_stand_in_for_a_mask_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    call = _call(masks.sliding_window(20, 0), seqlen_q=SEQLEN_KV)
    peers = all_peers()
    assert "no mask but causal" in str(peers["sdpa_flash"].unfit(call))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    assert "float16 and bfloat16" in str(peers["sdpa_flash"].unfit(call))
    half = Call(*(t.half() for t in (call.query, call.key, call.value)), call.mask, call.scale)
    for name in ("sdpa_flash", "sdpa_cudnn"):
        assert peers[name].unfit(half) is None
        (setting,) = peers[name].settings(half)
        assert setting.name == f"{ANOTHER_FUNCTION}, causal"
        assert peers[name].computes(half).spec == "causal()"  # type: ignore[union-attr]
    assert "no mask but causal" in str(peers["sdpa_efficient"].unfit(half))


def test_a_fused_kernel_with_its_own_causal_flag() -> None:
    call = _call(masks.causal(), seqlen_q=SEQLEN_KV)
    flash = all_peers()["sdpa_flash"]
    assert flash.unfit(call) is None
    (setting,) = flash.settings(call)
    with setting.context():
        out = setting.make().run()
    expected, _ = oracle(call.query, call.key, call.value, call.mask, call.scale)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("peer", "mask", "reason"),
    [
        ("sdpa_flash", masks.sliding_window(20, 5), "no mask but causal"),
        ("sdpa_flash", masks.causal(), "as many queries as keys"),  # PyTorch aligns the first query, we the last
        ("sdpa_cudnn", None, "for CUDA"),
        ("sdpa_masked", None, "no mask"),
        ("fa4", None, "float16 and bfloat16 on CUDA"),
    ],
)
def test_a_peer_that_cannot_says_why(peer: str, mask: Mask | None, reason: str) -> None:
    assert reason in str(all_peers()[peer].unfit(_call(mask)))


def test_a_dense_mask_that_would_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.tuner.peers.free_bytes", lambda device: 1000)
    assert "GiB" in str(all_peers()["sdpa_masked"].unfit(_call(masks.causal())))


def _fake_flash_attention(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """A stand-in for flash_attn.cute with the interface that is used; it computes from the block lists it is given."""
    calls: list[dict[str, object]] = []

    class BlockSparseTensorsTorch:
        def __init__(self, *lists: Tensor, block_size: tuple[int, int]) -> None:
            self.lists, self.block_size = lists, block_size

    def flash_attn_func(query: Tensor, key: Tensor, value: Tensor, **options: object) -> tuple[Tensor, None]:
        calls.append(options)
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        active = torch.ones(*q.shape[:3], k.shape[2], dtype=torch.bool)
        blocks = options.get("block_sparse_tensors")
        if isinstance(blocks, BlockSparseTensorsTorch):
            partial_counts, _, counts, indices = blocks.lists
            assert not partial_counts.any()
            grid = torch.zeros(indices.shape, dtype=torch.bool)
            order = torch.arange(indices.shape[-1]) < counts.unsqueeze(-1)
            grid.scatter_(-1, indices.long(), order)
            pairs = grid.repeat_interleave(blocks.block_size[0], 2).repeat_interleave(blocks.block_size[1], 3)
            active = pairs[:, :, : q.shape[2], : k.shape[2]]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=active, scale=float(str(options["softmax_scale"])), enable_gqa=True
        )
        return out.transpose(1, 2), None

    interface, sparsity = types.ModuleType("flash_attn.cute.interface"), types.ModuleType("flash_attn.cute.b")
    monkeypatch.setattr(interface, "flash_attn_func", flash_attn_func, raising=False)
    monkeypatch.setattr(sparsity, "BlockSparseTensorsTorch", BlockSparseTensorsTorch, raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.ModuleType("flash_attn.cute"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", sparsity)
    return calls


def test_fa4_gets_the_blocks_at_their_own_size_and_finer(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_flash_attention(monkeypatch)
    active = _random(4, 2, 3, density=0.6)
    active[..., 0] = True
    call = _call(masks.block_mask(active, (128, 128)), seqlen_q=200, seqlen_kv=300)
    expected, _ = oracle(call.query, call.key, call.value, call.mask, call.scale)
    settings = list(peers_fa4.fa4().settings(call))
    assert [setting.name for setting in settings] == ["128x128", "128x64", "64x128", "64x64"]
    for setting in settings:
        torch.testing.assert_close(setting.make().run().double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (None, {"causal": False}),
        (masks.causal(), {"causal": True}),
        (masks.sliding_window(20, 0), {"causal": False, "window_size": (20, 0)}),
        (masks.sliding_window(-1, 5), {"causal": False, "window_size": (None, 5)}),
    ],
    ids=["dense", "causal", "window", "half-open window"],
)
def test_fa4_gets_bands_in_its_own_words(
    mask: Mask | None, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _fake_flash_attention(monkeypatch)
    (setting,) = peers_fa4.fa4().settings(_call(mask))
    setting.make().run()
    assert calls == [{"softmax_scale": 0.25, **options}]


def test_fa4_takes_grouped_heads_together_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _fake_flash_attention(monkeypatch)
    call = _call(masks.sliding_window(20, 0), seqlen_q=SEQLEN_KV, kv_heads=2)
    settings = list(peers_fa4.fa4().settings(call))
    assert [setting.name for setting in settings] == ["band", "band, heads apart"]
    band = {"softmax_scale": 0.25, "causal": False, "window_size": (20, 0)}
    for setting in settings:
        setting.make().run()
    assert calls == [band, {**band, "pack_gqa": False}]


ANCHOR_SETTINGS = {
    "W1": ["band"],
    "W2": ["band", "band, heads apart"],
    "W3": ["128x128", "128x64", "64x128", "64x64"],
    "W4": ["64x64"],
    "W5": ["64x64"],
    "W6": ["128x128", "128x64", "64x128", "64x64"],
}


@pytest.mark.parametrize("row", load_workload("anchors").rows[:6], ids=lambda row: row.name.split()[0])
def test_fa4_has_settings_for_the_anchors_it_can_answer(row: WorkloadRow, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16)
    query = empty.expand(1, row.num_heads, row.seqlen_q, row.head_dim)
    key = empty.expand(1, row.num_kv_heads, row.seqlen_kv, row.head_dim)
    call = Call(query, key, key, row.make_mask(), 1.0)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(peers_fa4.importlib.util, "find_spec", lambda name: object())  # type: ignore[attr-defined]
    peer = peers_fa4.fa4()
    assert peer.unfit(call) is None
    assert [setting.name for setting in peer.settings(call)] == ANCHOR_SETTINGS[row.name.split()[0]]


def test_peers_are_chosen_by_name() -> None:
    assert [peer.name for peer in peers_named("flex, sdpa_dense,flex")] == ["flex", "sdpa_dense"]
    assert peers_named("none") == []
    with pytest.raises(InvalidInput, match=r"peers must be among sdpa_flash, .*; got flax"):
        peers_named("flex,flax")
