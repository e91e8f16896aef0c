"""The public call on a CUDA device. Run with `pytest -m gpu` where there is one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.generator.arch import arch_named
from tilewright.generator.family import all_families
from tilewright.generator.space import families_for, legal_variants
from tilewright.runtime.call_problem import target_of
from tilewright.runtime.dispatch import DISPATCHER
from tilewright.tuner.oracle import oracle

HAVE_CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAVE_CUDA, reason="needs a CUDA device")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def inputs(
    seqlen_q: int = 300,
    seqlen_kv: int = 300,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, heads, seqlen_q), (2, kv_heads, seqlen_kv), (2, kv_heads, seqlen_kv)]
    query, key, value = (
        torch.randn(*shape, head_dim, generator=generator, device="cuda", dtype=dtype) for shape in shapes
    )
    return query, key, value


def assert_right(query: Tensor, key: Tensor, value: Tensor, mask: tw.masks.Mask | None) -> None:
    out, lse = tw.attention(query, key, value, mask, return_lse=True)
    assert tw.explain(query, key, value, mask).reason != "fallback"
    want, want_lse = oracle(query, key, value, mask, query.shape[3] ** -0.5)
    assert out.isfinite().all()
    assert (out.double() - want).abs().max() <= TOLERANCE[query.dtype]
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    finite = want_lse != -math.inf
    assert (lse.double() - want_lse)[finite].abs().max() <= TOLERANCE[query.dtype]


def mask_of(name: str) -> tw.masks.Mask | None:
    generator = torch.Generator("cuda").manual_seed(1)
    blocks = torch.rand(2, 4, 5, 5, generator=generator, device="cuda") < 0.5
    tokens = torch.rand(4, 300, 300, generator=generator, device="cuda") < 0.3
    masks = {
        "dense": None,
        "causal": tw.masks.causal(),
        "window_or_stride": tw.masks.sliding_window(32, 32) | tw.masks.global_stride(64),
        "causal_longformer": (tw.masks.sliding_window(32, 0) | tw.masks.global_tokens([0, 5, 200])) & tw.masks.causal(),
        "blocks": tw.masks.block_mask(blocks, 64),
        "blocks_and_causal": tw.masks.block_mask(blocks, 64) & tw.masks.causal(),
        "tokens": tw.masks.token_mask(tokens),
        "document": tw.masks.document(torch.tensor([0, 100, 101, 300], device="cuda")) & tw.masks.causal(),
    }
    return masks[name]


MASKS = [
    "dense",
    "causal",
    "window_or_stride",
    "causal_longformer",
    "blocks",
    "blocks_and_causal",
    "tokens",
    "document",
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_mask_and_dtype(mask: str, dtype: torch.dtype) -> None:
    assert_right(*inputs(dtype=dtype), mask_of(mask))


@pytest.mark.parametrize("head_dim", [16, 48, 128, 256])
def test_head_dims(head_dim: int) -> None:
    assert_right(*inputs(head_dim=head_dim), mask_of("causal"))


@pytest.mark.parametrize("lengths", [(1, 300), (300, 1), (129, 1025), (1025, 129)], ids=lambda n: f"{n[0]}x{n[1]}")
def test_ragged_lengths(lengths: tuple[int, int]) -> None:
    for name in ("dense", "causal", "window_or_stride"):
        assert_right(*inputs(*lengths), mask_of(name))


def test_unaligned_views() -> None:
    packed = torch.randn(2, 301, 3, 4, 64 + 1, device="cuda", dtype=torch.bfloat16)[:, 1:, ..., 1:]
    query, key, value = (packed[:, :, i].transpose(1, 2) for i in range(3))
    assert key.data_ptr() % 16
    assert_right(query, key, value, mask_of("window_or_stride"))


def test_the_caller_waits_for_nothing() -> None:
    query, key, value = inputs()
    mask = mask_of("blocks_and_causal")
    tw.attention(query, key, value, mask)
    other = mask_of("blocks_and_causal")
    tw.attention(query, key, value, causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for fresh in (other, mask, tw.masks.sliding_window(9, 9) & tw.masks.causal()):
            tw.attention(query, key, value, fresh)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_call_runs_on_the_current_stream() -> None:
    query, key, value = inputs(2048, 2048)
    want = tw.attention(query, key, value)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        later = query * 1.0  # ready only once the sleep is over
        out = tw.attention(later, key, value)
    stream.synchronize()
    assert torch.equal(out, want)


def test_cuda_graph_capture_and_replay() -> None:
    query, key, value = inputs()
    mask = mask_of("window_or_stride")
    tw.attention(query, key, value, mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.attention(query, key, value, mask)
    query.copy_(torch.randn_like(query))
    graph.replay()
    assert torch.equal(out, tw.attention(query, key, value, mask))


def test_a_captured_plan_outlives_the_dispatchers_memory() -> None:
    query, key, value = inputs()
    mask = mask_of("blocks")
    want = tw.attention(query, key, value, mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.attention(query, key, value, mask)
    tw.reload_winners()  # forgets every prepared call
    garbage = [torch.full((1 << 18,), -1, device="cuda", dtype=torch.int32) for _ in range(64)]
    graph.replay()
    assert torch.equal(out, want)
    assert len(garbage) == 64


def test_a_plan_made_on_one_stream_is_ready_on_another() -> None:
    query, key, value = inputs()
    want = tw.attention(query, key, value, mask_of("blocks"))
    slow, other = torch.cuda.Stream(), torch.cuda.Stream()
    mask = mask_of("blocks")
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(50_000_000)
        tw.attention(query, key, value, mask)
    with torch.cuda.stream(other):
        out = tw.attention(query, key, value, mask)
    other.synchronize()
    assert torch.equal(out, want)


def test_a_capture_that_would_have_to_compile_says_so() -> None:
    query, key, value = inputs(head_dim=224)
    with pytest.raises(tw.InvalidInput, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        tw.attention(query, key, value)


def test_torch_compile_with_cuda_graphs() -> None:
    query, key, value = inputs()

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q * 2.0, k, v, tw.masks.sliding_window(32, 32) | tw.masks.global_stride(64))

    want = tw.attention(query * 2.0, key, value, mask_of("window_or_stride"))
    for _ in range(3):
        assert torch.equal(attend(query, key, value).clone(), want)


def test_every_family_is_reached() -> None:
    arch = arch_named(target_of(torch.device("cuda")))
    names = {family.name for family in families_for("attention_forward", arch)}
    assert {"forward_simt", "forward_wmma"} <= names <= set(all_families())
    reached = set()
    for seqlen_q in (300, 1):  # some families are for few queries alone
        problem = DISPATCHER.prepare(*inputs(seqlen_q), None).choice.problem
        reached |= {spec.family for spec in legal_variants(problem)}
    assert reached == names


@pytest.mark.parametrize("kv_heads", [1, 2, 16])
@pytest.mark.parametrize("name", ["dense", "causal"])
def test_few_queries_split_their_keys(name: str, kv_heads: int) -> None:
    query, key, value = inputs(3, 4099, heads=16, kv_heads=kv_heads)
    assert_right(query, key, value, mask_of(name))


@pytest.mark.skipif(not HAVE_CUDA or torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("seqlen_q", [1, 300])
def test_another_device_than_the_current_one_answers(seqlen_q: int) -> None:
    query, key, value = (tensor.to("cuda:1") for tensor in inputs(seqlen_q, 4099, head_dim=128))
    assert torch.cuda.current_device() == 0
    assert_right(query, key, value, None)
