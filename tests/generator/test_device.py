"""The vocabulary of device.cuh: kernels say nothing else of CUDA, the guide lists it, and both sides define it."""

from __future__ import annotations

import dataclasses
import re
from importlib import resources
from pathlib import Path

import pytest

from tilewright.generator import render as render_module
from tilewright.generator.arch import arch_named
from tilewright.generator.family import Family, all_families, family_named
from tilewright.generator.legality import has_workspace
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.render import Rendered, render
from tilewright.generator.resources import compile_sources
from tilewright.generator.sample import covering_sample
from tilewright.generator.space import family_default
from tilewright.generator.variant import Kernel, kernel_of
from tilewright.runtime.selection import Selection

GUIDE = Path(__file__).parents[2] / "docs" / "adding-a-kernel.md"
HOST = resources.files("tilewright.templates") / "_host"

KEYWORDS = {
    *("__attribute__", "__device__", "__forceinline__", "__global__", "__grid_constant__", "__host__"),
    *("__launch_bounds__", "__noinline__"),
}
INTRINSICS = {
    *("__all_sync", "__any_sync", "__ballot_sync", "__shfl_sync", "__shfl_xor_sync"),
    *("__syncthreads", "__syncthreads_or", "__syncwarp"),
    *("__ffs", "__popc", "__float_as_uint", "__ldg", "__uint_as_float", "atomicAdd", "atomicOr"),
}
RUNTIME = {
    *("cudaError_t", "cudaSuccess", "cudaErrorInvalidConfiguration", "cudaErrorInvalidValue", "cudaStream_t"),
    *("cudaGetDevice", "cudaSetDevice", "cudaGetLastError", "cudaGetErrorString"),
    *("cudaFuncAttributes", "cudaFuncGetAttributes", "cudaFuncSetAttribute"),
    *("cudaFuncAttributeMaxDynamicSharedMemorySize", "cudaDevAttrMaxSharedMemoryPerBlockOptin"),
    *("cudaDeviceGetAttribute", "cudaDevAttrMultiProcessorCount"),
    *("cudaMallocAsync", "cudaMemsetAsync", "cudaFreeAsync"),
}
OWN = {
    *("bfloat16", "float16", "from_float", "from_word", "pack", "to_float", "to_word"),
    *("exp2_approximate", "DYNAMIC_SHARED_MEMORY", "launch_grid"),
    *("cp_async_16", "cp_async_commit", "cp_async_wait", "load_fragment"),
    *("ldmatrix_x2", "ldmatrix_x2_transposed", "ldmatrix_x4", "ldmatrix_x4_transposed", "mma_m16n8k16"),
}
"""What device.cuh itself defines, warpgroups aside."""
BETWEEN_BLOCKS = {
    *("atomic_add_shared", "atomic_add_release", "load_acquire", "pause_waiting"),
    *("blocks_together", "launch_together"),
}
"""What it defines for kernels whose blocks wait for each other."""

EARLY = {"launch_early", "wait_for_kernels_before", "let_next_start"}
"""What it defines for kernels that start before those ahead of them end."""
WARPGROUPS = {
    *("Mbarrier", "mbarrier_init", "mbarrier_init_fence", "mbarrier_arrive", "mbarrier_arrive_if"),
    *("mbarrier_arrive_expect", "mbarrier_wait", "mbarrier_test", "log2_approximate", "reciprocal_approximate"),
    *("named_barrier_sync", "named_barrier_arrive", "registers_release", "registers_acquire"),
    *("TensorMap", "BOX_COLUMNS", "make_tensor_map", "bulk_load", "fence_proxy_async"),
    *("WARPGROUP", "SharedMatrix", "shared_matrix", "uniform"),
    *("wgmma_fence", "wgmma_keys", "wgmma_values", "wgmma_commit", "wgmma_wait"),
}
"""What it defines for families of wgmma."""
HALVES = {"pack_halves_down", "from_halves", "max_halves", "add_halves", "halves_reach"}
"""What it defines for those that choose blocks."""
HANDED = {
    *("mbarrier_arrive_times", "load_acquire_shared", "store_release_shared", "pause_briefly"),
    *("pack_halves", "multiply_add_halves", "larger_magnitudes"),
}
"""What it defines for selected_region alone."""
WMMA = {
    *("accumulator", "fill_fragment", "fragment", "load_matrix_sync", "mma_sync", "store_matrix_sync"),
    *("matrix_a", "matrix_b", "col_major", "row_major", "mem_col_major", "mem_row_major"),
}
"""What kernels may say after `wmma::`."""
WORDS = sorted(
    KEYWORDS - {"__attribute__"}
    | INTRINSICS
    | RUNTIME
    | OWN
    | BETWEEN_BLOCKS
    | EARLY
    | WARPGROUPS
    | HALVES
    | HANDED
    | WMMA
)

STANDARD_HEADERS = {"atomic", "cstdint", "limits"}
MASKS = (MaskClass(("window", "stride"), "sparse"), MaskClass(("bound", "and_blocks"), "blocks"), MaskClass((), "full"))
CHOICES = tuple(
    Selection(64, 16, 8, group, causal).mask_class(8, 4096) for group in (1, 64) for causal in (True, False)
)

# Every instruction of the mma section, so that ptxas sees them.
PROBE = """#include "device.cuh"

__global__ void probe(const uint4* from, float* to, float scale) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    uint4* rows = reinterpret_cast<uint4*>(smem);
    cp_async_16(rows + threadIdx.x, from + threadIdx.x, true);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    uint32_t a[4], transposed[4], b[2], c[2];
    ldmatrix_x4(a, rows + threadIdx.x);
    ldmatrix_x4_transposed(transposed, rows + threadIdx.x);
    ldmatrix_x2(b, rows + threadIdx.x % 16);
    ldmatrix_x2_transposed(c, rows + threadIdx.x % 16);
    float d[4] = {scale, to_float(from_float<ELEMENT>(scale)), 0.0f, exp2_approximate(scale)};
    mma_m16n8k16<ELEMENT>(d, a, b, d);
    mma_m16n8k16<ELEMENT>(d, transposed, c, d);
    for (int i = 0; i < 4; ++i) to[threadIdx.x * 4 + i] = d[i];
}

cudaError_t start(const uint4* from, float* to, cudaStream_t stream) {
    return launch_grid(probe, 1, 32, 512, stream, from, to, 1.0f);
}
"""

# And what orders blocks, whose kernel is the last of the two that is launched.
PROBE_BETWEEN_BLOCKS = """
__global__ void between_blocks(unsigned* counter, unsigned* to) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    int* count = reinterpret_cast<int*>(smem);
    if (threadIdx.x == 0) *count = 0;
    __syncthreads();
    to[threadIdx.x] = unsigned(atomic_add_shared(count, 1)) + atomicAdd(counter + 1, 1u);
    __syncthreads();
    if (threadIdx.x == 0) atomic_add_release(counter, 1u);
    while (load_acquire(counter) == 0u) pause_waiting();
}

cudaError_t start_between_blocks(unsigned* counter, unsigned* to, cudaStream_t stream) {
    int blocks = 0;
    const cudaError_t error = blocks_together(between_blocks, 0, 32, 16, &blocks);
    return error != cudaSuccess ? error : launch_together(between_blocks, blocks, 32, 16, stream, counter, to);
}
"""


def cuda_families() -> list[Family]:
    return [family for family in all_families().values() if family.language == "cuda"]


def some_kernels(family: Family, arch: str) -> list[Kernel]:
    """The family's defaults for each dtype and mask, and each value of each axis; of longer calls, or of one query, if
    it has none.
    """
    masks = MASKS if family.operation == "attention_forward" else CHOICES
    for seqlen_q, seqlen in ((4096, 4096), (32768, 32768), (1, 4096)):
        found: dict[Kernel, None] = {}
        for dtype in family.dtypes:
            for mask in masks:
                asked = Problem(dtype, 64, 1, 8, 8, seqlen_q, seqlen, arch, mask, family.operation)
                default = family_default(asked, family)
                if default is not None:
                    found[kernel_of(asked, default)] = None
        asked = Problem(family.dtypes[0], 64, 1, 8, 8, seqlen_q, seqlen, arch, masks[0], family.operation)
        found.update(dict.fromkeys(kernel_of(asked, spec) for spec in covering_sample(asked, family)))
        if found:
            return list(found)
    return []


def without_comments(text: str) -> str:
    return re.sub(r"//.*", "", text)


@pytest.mark.parametrize(
    ("family", "arch"),
    [
        pytest.param(family, arch, id=f"{family.name}-{arch}")
        for family in cuda_families()
        for arch in ("sm_75", "sm_90a")
        if family.instructions in arch_named(arch).instructions
    ],
)
def test_a_kernel_says_nothing_else_of_cuda(family: Family, arch: str) -> None:
    kernels = some_kernels(family, arch)
    assert len(kernels) >= 3
    for kernel in kernels:
        code = without_comments(render(kernel).sources["kernel.cu"])
        assert re.findall(r'#include "(.+)"', code) == ["device.cuh"]
        assert set(re.findall(r"#include <(.+)>", code)) <= STANDARD_HEADERS
        assert set(re.findall(r"\b__\w+", code)) <= KEYWORDS | INTRINSICS
        assert set(re.findall(r"\batomic[A-Z_]\w*", code)) <= INTRINSICS | BETWEEN_BLOCKS
        if not has_workspace(kernel) or family.name == "forward_wgmma":  # whose workspace is one atomicAdd's
            assert not set(re.findall(r"\b\w+\b", code)) & BETWEEN_BLOCKS
        assert set(re.findall(r"\bcuda\w+", code)) <= RUNTIME
        words = set(re.findall(r"\b(?:bulk|fence|mbarrier|named_barrier|registers|wgmma)_\w+", code))
        assert words <= (WARPGROUPS | HANDED if family.name == "selected_region" else WARPGROUPS)
        assert set(re.findall(r"\bwmma::(\w+)", code)) <= WMMA
        assert re.findall(r"\basm\b|<<<|\bextern\b|\bnvcuda\b|\bhalf2?\s+\w|\bnv_\w+", code) == []


@pytest.mark.parametrize("name", WORDS)
def test_the_guide_lists_every_word(name: str) -> None:
    section = re.split(r"\n#+ ", GUIDE.read_text(encoding="utf-8").split("### The vocabulary of device.cuh")[1])[0]
    assert re.search(rf"\b{name}\b", section)


@pytest.mark.parametrize("name", WORDS)
def test_the_host_defines_every_word(name: str) -> None:
    headers = "".join(
        entry.read_text(encoding="utf-8") for entry in HOST.iterdir() if entry.name.endswith((".h", ".cuh"))
    )
    assert re.search(rf"\b{name}\b", without_comments(headers))


def device_header(arch: str, dtype: str, instructions: str, operation: str = "attention_forward") -> Rendered:
    """The device.cuh of a family with these instructions, and the probe as its kernel.cu."""
    family = family_named("forward_simt")
    asked = Problem(dtype, 64, 1, 8, 8, 4096, 4096, arch, MASKS[1])
    spec = family_default(asked, family)
    assert spec is not None
    kernel = dataclasses.replace(kernel_of(asked, spec), operation=operation)
    header = (
        render_module._environment()
        .get_template("_stages/device.cuh.jinja")
        .render(
            kernel=kernel,
            spec=spec,
            arch=arch_named(arch),
            family=dataclasses.replace(family, instructions=instructions),
            digest="0" * 16,
        )
    )
    probe = PROBE if operation == "attention_forward" else PROBE + PROBE_BETWEEN_BLOCKS
    return Rendered(kernel, {"kernel.cu": probe.replace("ELEMENT", dtype), "device.cuh": header}, "cuda", "0" * 16)


def defined(arch: str, dtype: str, instructions: str, operation: str = "attention_forward") -> set[str]:
    """What that header defines."""
    header = device_header(arch, dtype, instructions, operation).sources["device.cuh"]
    function = r"^(?:__device__ __forceinline__|inline bool|cudaError_t)\b.*?(\w+)(?:<[^>]+>)?\("
    functions = re.findall(function, header, re.MULTILINE)
    functions += re.findall(r"^ +__device__ __forceinline__ \w+ (\w+)\(", header, re.MULTILINE)
    names = re.findall(r"^(?:using|constexpr int|struct(?: alignas\(\d+\))?) (\w+) [={]", header, re.MULTILINE)
    return {*functions, *names, *re.findall(r"#define ([A-Z_]+)", header)}


def test_a_header_has_the_sections_of_its_dtype_architecture_and_instructions() -> None:
    matrices = {name for name in OWN if name.startswith(("ldmatrix", "mma"))}
    copies = {name for name in OWN if name.startswith("cp_async")}
    helper = {"DEFINE_LOAD_FRAGMENT"}
    assert defined("sm_80", "float32", "simt") == OWN - matrices - {"float16", "bfloat16", "load_fragment"}
    assert defined("sm_75", "float16", "simt") == OWN - matrices - copies - {"bfloat16", "load_fragment"}
    assert defined("sm_75", "float16", "wmma") == OWN - matrices - copies - {"bfloat16"}
    assert defined("sm_80", "bfloat16", "wmma") == OWN - matrices - {"float16"} | helper
    assert defined("sm_80", "bfloat16", "mma") == OWN - {"float16", "load_fragment"}
    assert defined("sm_80", "float16", "mma", "select_blocks") == defined("sm_80", "float16", "mma") | BETWEEN_BLOCKS
    vocabulary = OWN | WARPGROUPS | {"shared_address", "plus", "descriptor"}
    vocabulary -= matrices | {"float16", "load_fragment"}
    assert defined("sm_90a", "bfloat16", "wgmma") == vocabulary
    assert defined("sm_90a", "bfloat16", "wgmma", "select_blocks") == vocabulary | BETWEEN_BLOCKS | EARLY | HALVES


@pytest.mark.nvcc
@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize(("arch", "operation"), [("sm_80", "attention_forward"), ("sm_90a", "select_blocks")])
def test_the_mma_section_compiles(arch: str, operation: str, dtype: str, tmp_path: Path) -> None:
    report = compile_sources(device_header(arch, dtype, "mma", operation), tmp_path)
    assert 0 < report.registers < 64
