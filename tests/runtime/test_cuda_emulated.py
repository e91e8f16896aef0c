"""The generated CUDA kernels, run thread by thread on the CPU: what they compute, their barriers and their bounds.

Threads run in a random order between barriers and shared memory starts as NaN, so a kernel that reads what was not yet
written, or writes what is still read, gives another answer than the mask's own definition does.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.generator.render import render
from tilewright.generator.variant import Kernel, VariantSpec
from tilewright.runtime import masks
from tilewright.runtime.canonical import canonical
from tilewright.runtime.launch import LoadedKernel
from tilewright.runtime.masks import Mask
from tilewright.runtime.plans import build_plan

INSTRUCTIONS = (
    (r'asm volatile\("cp\.async\.cg[^;]*?;\\n"[^;]*;', "emulated::cp_async(to, from, real ? 16 : 0);"),
    (r'asm volatile\("cp\.async\.commit[^;]*;\\n"[^;]*;', "emulated::cp_async_commit();"),
    (r'asm volatile\("cp\.async\.wait[^;]*;\\n"[^;]*;', "emulated::cp_async_wait(PENDING);"),
    (r'asm\("ex2[^;]*;"[^;]*;', "result = std::exp2(x);"),
    (r"const unsigned smem_address = [^;]*;", ""),
    (r"extern __shared__ __align__\(16\) unsigned char smem\[\];", "unsigned char* smem = emulated::smem;"),
)
"""What only a GPU has, and what stands for it."""

CALL = """
void emulated::call_kernel(const void* kernel, const Arguments& args) {
    reinterpret_cast<void (*)(Arguments)>(reinterpret_cast<uintptr_t>(kernel))(args);
}
"""


def emulated(kernel: Kernel, folder: Path, compiler: list[str], *, without: str = "") -> LoadedKernel:
    """`kernel` compiled for this CPU; `without`: a statement that is left out of it."""
    rendered = render(kernel)
    source = rendered.sources["kernel.cu"]
    if without:
        assert without in source
        source = source.replace(without, "")
    for pattern, replacement in INSTRUCTIONS:
        source = re.sub(pattern, replacement, source)
    assert re.search(r"\basm\b", source) is None, "an instruction that nothing stands for"
    (folder / "kernel.cpp").write_text(source + CALL)
    (folder / "binding.cpp").write_text(rendered.sources["binding.cpp"])
    library = folder / "kernel.so"
    command = [*compiler, str(folder / "kernel.cpp"), str(folder / "binding.cpp"), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return LoadedKernel(library, kernel, rendered.module_name)


def padded(shape: tuple[int, ...], dtype: torch.dtype, offset: int, generator: torch.Generator) -> torch.Tensor:
    """Random values in a view whose surroundings are NaN; an offset that is no multiple of 16 bytes unaligns it."""
    batch, heads, tokens, head_dim = shape
    whole = torch.full((batch, heads, tokens + 3, head_dim + 16), float("nan"), dtype=dtype)
    view = whole[:, :, 1 : tokens + 1, offset : offset + head_dim]
    return view.copy_(torch.randn(shape, generator=generator).to(dtype))


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp64, from the mask's definition."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (t.double().repeat_interleave(groups, dim=1) for t in (key, value))
    scores = query.double() @ keys.transpose(2, 3) * scale
    if mask is not None:
        batch, heads, seqlen_q, _ = query.shape
        active = mask.dense(batch, heads, seqlen_q, key.shape[2], torch.device("cpu"))
        scores = scores.masked_fill(~active, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]) @ values, lse


def check(
    loaded: LoadedKernel, mask: Mask | None, shape: dict[str, int], *, offset: int = 0, magnitude: float = 1.0
) -> None:
    kernel = loaded.kernel
    spec = kernel.spec
    generator = torch.Generator().manual_seed(shape["seqlen_q"])
    dtype = getattr(torch, kernel.dtype)
    batch, heads, kv_heads, seqlen_q, seqlen_kv = (
        shape[n] for n in ("batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_kv")
    )
    query = padded((batch, heads, seqlen_q, kernel.head_dim), dtype, offset, generator) * magnitude
    key = padded((batch, kv_heads, seqlen_kv, kernel.head_dim), dtype, offset, generator)
    value = padded((batch, kv_heads, seqlen_kv, kernel.head_dim), dtype, offset, generator)
    if offset:
        query = padded(tuple(query.shape), dtype, offset, generator).copy_(query)
    form = canonical(mask, seqlen_q, seqlen_kv)
    terms = () if spec.mask_form == "scan" else form.terms
    assert set(terms) == set(kernel.mask_terms), terms
    plan = build_plan(
        form, spec.mask_form, spec.block_m, spec.block_n,
        batch=batch, num_heads=heads, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, device="cpu",
    )  # fmt: skip
    out = torch.full((batch, heads, seqlen_q, kernel.head_dim), float("nan"), dtype=dtype)
    lse = torch.full((batch, heads, seqlen_q), float("nan"))
    loaded.run(query, key, value, plan, 0.3, out, lse)
    expected, expected_lse = reference(query, key, value, mask, 0.3)
    rounding = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=rounding)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)


def block_bits(shape: tuple[int, ...], density: float) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) < density


RAGGED = {"batch": 2, "num_heads": 2, "num_kv_heads": 1, "seqlen_q": 45, "seqlen_kv": 115}
MORE_QUERIES = {"batch": 1, "num_heads": 2, "num_kv_heads": 2, "seqlen_q": 97, "seqlen_kv": 50}
ONE_QUERY = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "seqlen_q": 1, "seqlen_kv": 70}

PLAIN: dict[str, Any] = {
    "block_m": 32, "block_n": 16, "num_warps": 4, "num_stages": 2, "lanes_per_row": 8, "vector": 4,
    "q_in_registers": False, "tile_order": "forward",
}  # fmt: skip


def _blocks(seqlen_q: int, seqlen_kv: int, size: tuple[int, int], density: float, heads: int = 1) -> Mask:
    shape = (heads, -(-seqlen_q // size[0]), -(-seqlen_kv // size[1]))
    return masks.block_mask(block_bits(shape if heads > 1 else shape[1:], density), size)


CASES: list[tuple[str, str, int, str, str, dict[str, Any]]] = [
    ("dense", "float32", 16, "sm_75", "analytic", {"num_stages": 1}),
    ("dense", "float16", 64, "sm_80", "analytic", {"num_stages": 3, "vector": 8, "block_n": 32}),
    ("causal", "float32", 48, "sm_80", "analytic", {"num_stages": 2, "tile_order": "reversed", "lanes_per_row": 16}),
    ("causal", "bfloat16", 32, "sm_75", "list", {"num_stages": 2, "block_m": 64, "lanes_per_row": 4}),
    ("longformer", "float32", 64, "sm_90a", "gather", {"q_in_registers": True}),
    ("longformer", "float32", 32, "sm_75", "gather", {"num_stages": 2, "block_n": 32, "block_m": 16}),
    ("longformer", "bfloat16", 16, "sm_80", "analytic", {"num_stages": 3, "block_m": 64, "lanes_per_row": 4}),
    ("tokens", "float16", 32, "sm_80", "gather", {"num_stages": 3, "num_warps": 8, "block_m": 64}),
    ("tokens", "float32", 16, "sm_80", "bitmap", {"num_stages": 2}),
    ("document", "float32", 32, "sm_75", "analytic", {"num_stages": 1, "lanes_per_row": 16, "vector": 2}),
    ("blocks", "float32", 32, "sm_80", "list", {"num_stages": 3, "block_n": 32}),
    ("blocks", "bfloat16", 48, "sm_80", "bitmap", {"num_stages": 1}),
    ("or_blocks", "float32", 16, "sm_75", "list", {"num_stages": 2, "q_in_registers": True}),
    ("bits", "float16", 16, "sm_80", "list", {"num_stages": 2}),
    ("bits", "float32", 32, "sm_80", "scan", {"num_stages": 2, "block_m": 16}),
    ("document", "float32", 16, "sm_75", "scan", {"num_stages": 2}),
]  # fmt: skip


def _mask(name: str, shape: dict[str, int]) -> Mask | None:
    seqlen_q, seqlen_kv = shape["seqlen_q"], shape["seqlen_kv"]
    if name == "document":
        cuts = [0, seqlen_kv // 3, seqlen_kv // 2, seqlen_kv]
        cuts_q = [0, seqlen_q // 3, seqlen_q // 3, seqlen_q]
        return masks.document(torch.tensor(cuts_q), torch.tensor(cuts)) & masks.sliding_window(40, 9)
    table: dict[str, Any] = {
        "dense": lambda: None,
        "causal": masks.causal,
        "longformer": lambda: masks.sliding_window(8, 5) | masks.global_stride(19),
        "tokens": lambda: (
            masks.causal() & (masks.sliding_window(9, 0) | masks.global_tokens([0, 3, 17, 40, seqlen_kv - 1]))
        ),
        "blocks": lambda: _blocks(seqlen_q, seqlen_kv, (24, 40), 0.4, shape["num_heads"]) & masks.causal(),
        "or_blocks": lambda: masks.sliding_window(5, 5) | _blocks(seqlen_q, seqlen_kv, (7, 16), 0.3),
        "bits": lambda: masks.token_mask(block_bits((seqlen_q, seqlen_kv), 0.1)),
    }
    return table[name]()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "dtype", "head_dim", "arch", "form", "axes"), CASES)
def test_simt_follows_the_masks_definition(
    name: str,
    dtype: str,
    head_dim: int,
    arch: str,
    form: str,
    axes: dict[str, Any],
    tmp_path: Path,
    emulated_cuda: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = VariantSpec.from_values("forward_simt", {"mask_form": form, **PLAIN, **axes})
    mask = _mask(name, RAGGED)
    terms = () if form == "scan" else canonical(mask, RAGGED["seqlen_q"], RAGGED["seqlen_kv"]).terms
    kernel = Kernel("attention_forward", dtype, head_dim, terms, spec, arch)
    loaded = emulated(kernel, tmp_path, emulated_cuda)
    monkeypatch.setenv("EMULATED_SEED", "2")  # asynchronous copies land when they are waited for
    check(loaded, mask, RAGGED)
    check(loaded, _mask(name, ONE_QUERY), ONE_QUERY, offset=8)
    monkeypatch.setenv("EMULATED_SEED", "3")  # and at once
    check(loaded, mask, RAGGED)
    check(loaded, _mask(name, MORE_QUERIES), MORE_QUERIES, offset=3, magnitude=4.0)


@pytest.mark.parametrize(
    ("num_stages", "arch", "without"),
    [
        (2, "sm_80", "__syncwarp();"),
        (2, "sm_80", "__syncthreads();"),
        (2, "sm_75", "__syncthreads();  // the tile before is no longer read"),
        (3, "sm_80", "cp_async_wait<LOOKAHEAD - 1>();"),
    ],
)
def test_a_missing_barrier_shows(
    num_stages: int,
    arch: str,
    without: str,
    tmp_path: Path,
    emulated_cuda: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = VariantSpec.from_values("forward_simt", {"mask_form": "analytic", **PLAIN, "num_stages": num_stages})
    kernel = Kernel("attention_forward", "float32", 16, (), spec, arch)
    loaded = emulated(kernel, tmp_path, emulated_cuda, without=without)
    monkeypatch.setenv("EMULATED_SEED", "2")
    with pytest.raises(AssertionError, match="not close"):
        check(loaded, None, RAGGED)
