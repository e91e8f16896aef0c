"""The ladder's own kernels, run thread by thread on the CPU through the headers of `emulated_cuda`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tilewright.generator.errors import LaunchFailed
from tilewright.generator.render import render
from tilewright.generator.variant import AxisValue, Kernel, VariantSpec
from tilewright.runtime import masks
from tilewright.runtime.canonical import canonical
from tilewright.runtime.launch import LoadedKernel
from tilewright.runtime.plans import build_plan
from tilewright.tuner.oracle import oracle

SMEM_LIMIT = 64 * 1024

CUDA = """
#include <functional>
constexpr cudaError_t cudaErrorInvalidValue = cudaError_t(1), cudaErrorMemoryAllocation = cudaError_t(2);
constexpr int cudaDevAttrMaxSharedMemoryPerBlockOptin = 0;
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = SMEM_LIMIT, cudaSuccess; }
inline cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t) {
    *memory = std::malloc(bytes);
    std::memset(*memory, 0xff, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return std::free(memory), cudaSuccess; }
inline float __shfl_sync(unsigned, float value, int source) {
    const unsigned thread = threadIdx.x;
    emulated::exchanged[thread] = value;
    __syncwarp();
    const float other = emulated::exchanged[thread / 32 * 32 + source];
    __syncwarp();
    return other;
}
inline std::function<void()> launched_body;
inline void launch(std::function<void()> body, unsigned blocks, int threads, size_t smem_bytes) {
    emulated::random_state = blocks;
    std::vector<unsigned char> memory(smem_bytes + 256, 0xa5);
    emulated::smem = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128);
    launched_body = std::move(body);
    emulated::body = [] { launched_body(); };
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        emulated::run_block(threads, smem_bytes);
        for (size_t i = 0; i < 64; ++i) {
            if (emulated::smem[smem_bytes + i] != 0xa5) std::abort();  // written past the end
        }
    }
}
""".replace("SMEM_LIMIT", str(SMEM_LIMIT))
"""What the ladder uses of CUDA and the headers lack."""

SHAPES = [(2, 4, 2, 45, 115), (1, 2, 2, 97, 50), (1, 1, 1, 1, 70)]
"""Batch, heads, KV heads, queries, keys: ragged with grouped heads; rows without a key; a single query."""


def _loaded(axes: dict[str, AxisValue], dtype: str, head_dim: int, folder: Path, compiler: list[str]) -> LoadedKernel:
    spec = VariantSpec.from_values("ladder", {"mask_form": "scan", **axes})
    rendered = render(Kernel("attention_forward", dtype, head_dim, (), spec, "sm_80"))
    source = rendered.sources["kernel.cu"]
    source = source.replace("#include <limits>", f"#include <limits>\n{CUDA}", 1)
    source = source.replace("extern __shared__ float smem[];", "float* smem = (float*)emulated::smem;")
    source, launches = re.subn(
        r"attention_kernel<<<(\w+), (\w+), (\w+), stream>>>\(([^)]*)\);",
        r"launch([=] { attention_kernel(\4); }, \1, \2, \3);",
        source,
    )
    assert launches == 1
    (folder / "kernel.cpp").write_text(source)
    (folder / "binding.cpp").write_text(rendered.sources["binding.cpp"])
    library = folder / "kernel.so"
    command = [*compiler, str(folder / "kernel.cpp"), str(folder / "binding.cpp"), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return LoadedKernel(library, rendered.kernel, rendered.module_name)


def _run(loaded: LoadedKernel, shape: tuple[int, int, int, int, int]) -> tuple[torch.Tensor, ...]:
    """out, lse, and the same from the oracle."""
    batch, heads, kv_heads, seqlen_q, seqlen_kv = shape
    generator = torch.Generator().manual_seed(seqlen_q)
    dtype, head_dim = getattr(torch, loaded.kernel.dtype), loaded.kernel.head_dim

    def padded(count: int, tokens: int) -> torch.Tensor:
        whole = torch.full((batch, count, tokens + 3, head_dim + 5), float("nan"), dtype=dtype)
        view = whole[:, :, 1 : tokens + 1, 3 : 3 + head_dim]
        return view.copy_(torch.randn(view.shape, generator=generator))

    query, key, value = padded(heads, seqlen_q), padded(kv_heads, seqlen_kv), padded(kv_heads, seqlen_kv)
    mask = masks.causal() & (masks.sliding_window(8, 0) | masks.global_stride(19))
    spec = loaded.kernel.spec
    plan = build_plan(
        canonical(mask, seqlen_q, seqlen_kv), "scan", spec.block_m, spec.block_n,
        batch=batch, num_heads=heads, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, device="cpu",
    )  # fmt: skip
    out = torch.full((batch, heads, seqlen_q, head_dim), float("nan"), dtype=dtype)
    lse = torch.full((batch, heads, seqlen_q), float("nan"))
    loaded.run(query, key, value, plan, 0.3, out, lse)
    return (out, lse, *oracle(query, key, value, mask, 0.3))


@pytest.mark.parametrize(
    ("axes", "dtype", "head_dim"),
    [
        ({"rung": "naive", "block_m": 128, "block_n": 1}, "float32", 64),
        ({"rung": "naive", "block_m": 128, "block_n": 1}, "bfloat16", 16),
        ({"rung": "tiled_full_row", "block_m": 4, "block_n": 32}, "float32", 64),
        ({"rung": "tiled_full_row", "block_m": 16, "block_n": 64}, "float16", 48),
        ({"rung": "online_softmax", "block_m": 8, "block_n": 32}, "float32", 64),
        ({"rung": "online_softmax", "block_m": 4, "block_n": 64}, "bfloat16", 48),
    ],
)
def test_a_rung_agrees_with_the_oracle(
    axes: dict[str, AxisValue], dtype: str, head_dim: int, tmp_path: Path, emulated_cuda: list[str]
) -> None:
    loaded = _loaded(axes, dtype, head_dim, tmp_path, emulated_cuda)
    rounding = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    for shape in SHAPES:
        out, lse, expected, expected_lse = _run(loaded, shape)
        torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=rounding)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)


def test_a_full_row_that_does_not_fit_is_refused_at_launch(tmp_path: Path, emulated_cuda: list[str]) -> None:
    axes: dict[str, AxisValue] = {"rung": "tiled_full_row", "block_m": 16, "block_n": 32}
    loaded = _loaded(axes, "float32", 16, tmp_path, emulated_cuda)
    _run(loaded, (1, 1, 1, 5, 900))
    with pytest.raises(LaunchFailed, match="ladder/scan 16x32 rung=tiled_full_row"):
        _run(loaded, (1, 1, 1, 5, 1100))  # 16 rows of 1100 scores are 70400 bytes
