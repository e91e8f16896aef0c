"""The public call: right on every input, and clear about the inputs it cannot take."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.runtime.fallback import fallback_attention

MASKS: dict[str, tw.masks.Mask | None] = {
    "dense": None,
    "causal": tw.masks.causal(),
    "window": tw.masks.sliding_window(5, 2),
    "window_or_stride": tw.masks.sliding_window(8, 8) | tw.masks.global_stride(16),
    "causal_longformer": (tw.masks.sliding_window(8, 0) | tw.masks.global_stride(16)) & tw.masks.causal(),
    "tokens": tw.masks.sliding_window(3, 3) | tw.masks.global_tokens([0, 7, 30]),
    "stride_alone": tw.masks.global_stride(7),
}


def inputs(
    seqlen_q: int = 65,
    seqlen_kv: int = 65,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, seqlen_q), (batch, kv_heads, seqlen_kv), (batch, kv_heads, seqlen_kv)]
    query, key, value = (torch.randn(*shape, head_dim, generator=generator).to(dtype) for shape in shapes)
    return query, key, value


def expected(
    query: Tensor, key: Tensor, value: Tensor, mask: tw.masks.Mask | None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, in float64, pair by pair."""
    batch, heads, seqlen_q, head_dim = query.shape
    group = heads // key.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (key, value))
    scores = query.double() @ k.transpose(-1, -2) * (head_dim**-0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask.dense(batch, heads, seqlen_q, key.shape[2]), -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    return weights @ v, lse


def assert_right(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], tolerance: float = 5e-6) -> None:
    out, lse = got
    assert out.isfinite().all()
    difference = out.double() - want[0]
    assert difference.abs().max() <= tolerance
    assert difference.square().mean().sqrt() <= tolerance / 4
    assert torch.equal(lse == -math.inf, want[1] == -math.inf)
    finite = want[1] != -math.inf
    assert (lse.double() - want[1])[finite].abs().max() <= 2e-6 if finite.any() else True


@pytest.mark.parametrize("lengths", [(65, 65), (1, 65), (70, 33), (33, 130)], ids=lambda n: f"{n[0]}x{n[1]}")
@pytest.mark.parametrize("mask", list(MASKS))
def test_every_structured_mask_at_ragged_lengths(mask: str, lengths: tuple[int, int]) -> None:
    query, key, value = inputs(*lengths)
    got = tw.attention(query, key, value, MASKS[mask], return_lse=True)
    assert_right(got, expected(query, key, value, MASKS[mask]))


def test_data_masks_per_head_and_per_batch() -> None:
    query, key, value = inputs(64, 96)
    generator = torch.Generator().manual_seed(1)
    blocks = tw.masks.block_mask(torch.rand(2, 4, 8, 6, generator=generator) < 0.4, (8, 16))
    tokens = tw.masks.token_mask(torch.rand(4, 64, 96, generator=generator) < 0.5)
    for mask in (blocks, tokens, blocks & tokens, blocks | tw.masks.sliding_window(4, 4), blocks & tw.masks.causal()):
        assert_right(tw.attention(query, key, value, mask, return_lse=True), expected(query, key, value, mask))


def test_documents_with_a_ragged_pack() -> None:
    query, key, value = inputs(100, 100)
    mask = tw.masks.document(torch.tensor([0, 38, 39, 100])) & tw.masks.causal()
    assert_right(tw.attention(query, key, value, mask, return_lse=True), expected(query, key, value, mask))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    query, key, value = inputs(dtype=dtype)
    mask = MASKS["window_or_stride"]
    out, lse = tw.attention(query, key, value, mask, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_right((out, lse), expected(query, key, value, mask), tolerance)


def test_arguments_combine_with_the_mask() -> None:
    query, key, value = inputs(40, 50)
    stride = tw.masks.global_stride(4)
    got = tw.attention(query, key, value, stride, causal=True, window_size=(9, 3), scale=-0.5, return_lse=True)
    mask = stride & tw.masks.causal() & tw.masks.sliding_window(9, 3)
    assert_right(got, expected(query, key, value, mask, -0.5))


def test_rows_without_keys_give_zero_and_minus_infinity() -> None:
    query, key, value = inputs(10, 4)
    out, lse = tw.attention(query, key, value, causal=True, return_lse=True)
    assert out[:, :, :6].eq(0).all()
    assert lse[:, :, :6].eq(-math.inf).all()
    assert lse[:, :, 6:].isfinite().all()


@pytest.mark.parametrize(
    ("shape_q", "shape_kv"),
    [
        ((0, 4, 8, 32), (0, 2, 8, 32)),
        ((2, 4, 0, 32), (2, 2, 8, 32)),
        ((2, 4, 8, 32), (2, 2, 0, 32)),
        ((2, 0, 8, 32), (2, 0, 8, 32)),
    ],
    ids=["no batch", "no queries", "no keys", "no heads"],
)
def test_empty_tensors(shape_q: tuple[int, ...], shape_kv: tuple[int, ...]) -> None:
    query, key = torch.randn(shape_q), torch.randn(shape_kv)
    out, lse = tw.attention(query, key, key, causal=True, return_lse=True)
    assert out.shape == shape_q
    assert lse.shape == shape_q[:3]
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()


def test_strided_views_are_read_in_place() -> None:
    packed = torch.randn(2, 65, 3, 4, 32)  # [batch, tokens, q/k/v, heads, head_dim], as fused projections give it
    query, key, value = (packed[:, :, i].transpose(1, 2) for i in range(3))
    mask = MASKS["window_or_stride"]
    assert_right(tw.attention(query, key, value, mask, return_lse=True), expected(query, key, value, mask))


def test_what_lies_beside_the_tensors_is_never_read() -> None:
    def surrounded(t: Tensor) -> Tensor:
        batch, heads, tokens, head_dim = t.shape
        buffer = torch.full((batch, heads, tokens + 64, head_dim + 16), math.nan)
        view = buffer[:, :, 32 : 32 + tokens, :head_dim]
        view.copy_(t)
        return view

    query, key, value = inputs()
    for mask in MASKS.values():
        got = tw.attention(surrounded(query), surrounded(key), surrounded(value), mask, return_lse=True)
        assert_right(got, expected(query, key, value, mask))


@pytest.mark.parametrize("offset", [-3e4, 3e4], ids=["very negative", "very large"])
def test_extreme_scores(offset: float) -> None:
    query, key, value = inputs()
    query[..., 0], key[..., 0] = offset, 1.0
    query[..., 1], key[..., 1] = 1.0, 0.0
    want = expected(query, key, value, MASKS["causal"])
    out = tw.attention(query, key, value, MASKS["causal"])
    assert (out.double() - want[0]).abs().max() < 0.02  # float32 keeps 3 digits of a score next to 5000


def test_a_nan_is_seen_not_hidden() -> None:
    query, key, value = inputs()
    query[0, 0, 3, 5] = math.nan
    out = tw.attention(query, key, value)
    assert out[0, 0, 3].isnan().all()
    assert out[0, 0, 4].isfinite().all()


def test_repeated_calls_agree_and_inputs_stay() -> None:
    query, key, value = inputs()
    before = [t.clone() for t in (query, key, value)]
    first = tw.attention(query, key, value, MASKS["tokens"])
    assert torch.equal(first, tw.attention(query, key, value, MASKS["tokens"]))
    assert all(torch.equal(a, b) for a, b in zip(before, (query, key, value), strict=True))


def test_a_mask_written_to_is_planned_anew() -> None:
    query, key, value = inputs(64, 64)
    active = torch.ones(8, 8, dtype=torch.bool)
    mask = tw.masks.block_mask(active, 8)
    dense = tw.attention(query, key, value, mask)
    active[:, 4:] = False
    assert not torch.allclose(dense, tw.attention(query, key, value, mask))
    assert_right(tw.attention(query, key, value, mask, return_lse=True), expected(query, key, value, mask))


def test_masks_made_in_inference_mode() -> None:
    query, key, value = inputs(64, 64)
    with torch.inference_mode():
        active = torch.rand(8, 8) < 0.5
        mask = tw.masks.block_mask(active, 8)
        first = tw.attention(query, key, value, mask, return_lse=True)
        assert_right(first, expected(query, key, value, mask))
        active.fill_(True)
        assert_right(tw.attention(query, key, value, mask, return_lse=True), expected(query, key, value, None))


def test_new_lengths_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = inputs(64, 64)
    tw.attention(query, key, value, causal=True)

    def no_build(kernel: Any) -> None:
        raise AssertionError(f"a new length compiled {kernel}")

    monkeypatch.setattr("tilewright.generator.build.build", no_build)
    for length in (65, 1, 300):
        query, key, value = inputs(length, length, seed=length)
        got = tw.attention(query, key, value, causal=True, return_lse=True)
        assert_right(got, expected(query, key, value, tw.masks.causal()))


def test_under_torch_compile() -> None:
    query, key, value = inputs(64, 64)
    active = torch.rand(8, 8) < 0.5

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
        structured = tw.masks.sliding_window(8, 8) | tw.masks.global_stride(16)
        return tw.attention(q, k, v, structured) + tw.attention(q, k, v, tw.masks.block_mask(blocks, 8), causal=True)

    mask = tw.masks.block_mask(active, 8) & tw.masks.causal()
    want = expected(query, key, value, MASKS["window_or_stride"])[0] + expected(query, key, value, mask)[0]
    assert (attend(query, key, value, active).double() - want).abs().max() < 1e-5


def test_the_operator_passes_torchs_own_checks() -> None:
    query, key, value = inputs()
    arguments = (query, key, value, [], "sliding_window(8, 8)", 0.2)
    torch.library.opcheck(
        torch.ops.tilewright.attention_forward.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_backward_is_refused_in_words_and_forward_works() -> None:
    query, key, value = inputs()
    out = tw.attention(query.requires_grad_(), key, value)
    assert_right((out.detach(), expected(query, key, value, None)[1].float()), expected(query, key, value, None))
    with pytest.raises(tw.NotSupported, match="no backward yet"):
        out.sum().backward()


def bad_inputs() -> dict[str, tuple[dict[str, Any], str]]:
    query, key, value = inputs()
    return {
        "rank": ({"query": query[0]}, r"query must have 4 dimensions.*got \[4, 65, 32\]"),
        "not a tensor": ({"value": None}, "value must be a torch.Tensor, got NoneType"),
        "dtype": ({"query": query.double()}, "query must be float32, float16, bfloat16; got float64"),
        "mixed dtypes": ({"key": key.half()}, "one dtype; got float32, float16 and float32"),
        "mixed devices": ({"key": key.to("meta")}, "one device; got cpu, meta and cpu"),
        "head_dim": (
            {n: t[..., :20] for n, t in zip(("query", "key", "value"), (query, key, value), strict=True)},
            "head_dim must be a multiple of 16 up to 256, got 20",
        ),
        "head_dims differ": ({"key": key[..., :16], "value": value[..., :16]}, "one head_dim; got 32 and 16"),
        "heads": ({"query": query[:, :3]}, "multiple of key's heads, got 3 and 2"),
        "batch": ({"query": query[:1]}, "one batch size; got 1 and 2"),
        "key and value": ({"value": value[:, :, :5]}, "key and value must have one shape"),
        "stride": ({"query": query.transpose(2, 3).contiguous().transpose(2, 3)}, "call query.contiguous()"),
        "scale": ({"scale": math.nan}, "scale must be finite, got nan"),
        "scale type": ({"scale": "1"}, "scale must be a finite float or None, got str"),
        "window": ({"window_size": 5}, r"window_size must be \(left, right\)"),
        "window side": ({"window_size": (-2, 0)}, "-2"),
        "mask type": ({"mask": torch.ones(65, 65, dtype=torch.bool)}, "tw.masks.token_mask"),
        "mask shape": ({"mask": tw.masks.token_mask(torch.ones(64, 65, dtype=torch.bool))}, "65"),
        "mask blocks": ({"mask": tw.masks.block_mask(torch.ones(4, 4, dtype=torch.bool), 128)}, "block"),
        "mask batch": ({"mask": tw.masks.token_mask(torch.ones(3, 1, 65, 65, dtype=torch.bool))}, "3"),
    }


@pytest.mark.parametrize("case", list(bad_inputs()))
def test_bad_input_is_refused_in_words(case: str) -> None:
    query, key, value = inputs()
    change, text = bad_inputs()[case]
    arguments: dict[str, Any] = {"query": query, "key": key, "value": value, **change}
    with pytest.raises(tw.InvalidInput, match=text) as error:
        tw.attention(**arguments)
    assert "\n" not in str(error.value)


def test_the_fallback_is_right_too() -> None:
    query, key, value = inputs(70, 33)
    for mask in MASKS.values():
        assert_right(fallback_attention(query, key, value, mask, 32**-0.5), expected(query, key, value, mask))
