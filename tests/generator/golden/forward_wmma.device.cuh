// tilewright, generated: do not edit.
// forward_wmma/list 64x64 blocks_per_sm=1 num_stages=2 num_warps=4 q_in_registers=True smem_padding=8 tile_order=forward
// What kernel.cu says of the GPU, in CUDA's headers and PTX: bfloat16, wmma, sm_90a
// digest 1bda2e3c12ba3d27
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <cstddef>
#include <cstdint>

#pragma nv_diag_suppress 177  // a stage may define a function that this kernel does not call

// A block's dynamic shared memory: an array of bytes called name that starts at a multiple of alignment bytes.
#define DYNAMIC_SHARED_MEMORY(name, alignment) extern __shared__ __align__(alignment) unsigned char name[]

// Starts kernel(values...) on a grid of one dimension and does not wait for it; returns what kept it from starting.
template <typename... P>
cudaError_t launch_grid(void (*kernel)(P...), unsigned blocks, unsigned threads, size_t smem_bytes, cudaStream_t stream,
                        const P&... values) {
    void* parameters[] = {const_cast<P*>(&values)...};
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads), parameters, smem_bytes, stream);
}

// An element as float, and the element nearest to a float, ties to even.
__device__ __forceinline__ float to_float(float value) { return value; }
template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}

// A word of memory is one float, or two elements of 2 bytes, the first in its low half: a word to floats, and back.
template <typename Element>
__device__ __forceinline__ void from_word(uint32_t word, float* to);
template <typename Element>
__device__ __forceinline__ uint32_t to_word(const float* from);
template <>
__device__ __forceinline__ void from_word<float>(uint32_t word, float* to) {
    to[0] = __uint_as_float(word);
}
template <>
__device__ __forceinline__ uint32_t to_word<float>(const float* from) {
    return __float_as_uint(from[0]);
}

// Two floats as a word of 2-byte elements.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high);

using bfloat16 = __nv_bfloat16;  // before sm_80 converted in software

__device__ __forceinline__ float to_float(bfloat16 value) { return __bfloat162float(value); }
template <>
__device__ __forceinline__ bfloat16 from_float<bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ uint32_t pack<bfloat16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}
template <>
__device__ __forceinline__ void from_word<bfloat16>(uint32_t word, float* to) {
    to[0] = __uint_as_float(word << 16);  // a bfloat16 is the upper half of a float
    to[1] = __uint_as_float(word & 0xffff0000u);
}
template <>
__device__ __forceinline__ uint32_t to_word<bfloat16>(const float* from) {
    const uint32_t low = __bfloat16_as_ushort(from_float<bfloat16>(from[0]));
    return low | uint32_t(__bfloat16_as_ushort(from_float<bfloat16>(from[1]))) << 16;
}

// 2^x, relative error below 2^-21: 0 for -inf, NaN for NaN; what would be below 2^-126 is 0.
__device__ __forceinline__ float exp2_approximate(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
    return result;
}

// 16 bytes from global to shared memory without a register, both at multiples of 16; zeros when not real, and then nothing is
// read. from_global must be a valid address always. There once cp_async_wait has waited for the copy's group.
__device__ __forceinline__ void cp_async_16(void* to_shared, const void* from_global, bool real) {
    const unsigned smem_address = unsigned(__cvta_generic_to_shared(to_shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(smem_address), "l"(from_global), "r"(real ? 16 : 0)
                 : "memory");
}

// Closes the group of this thread's copies since the last; it may be empty.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Until at most PENDING of this thread's newest groups are still in flight.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

namespace wmma = nvcuda::wmma;

// A 16 x 16 operand from shared memory at a multiple of 32 bytes; its rows (its columns, if col_major) are stride elements apart.
// Told that the address is in shared memory, which wmma::load_matrix_sync is not: nvcc 13.0 takes a generic one in its place and
// emits four loads of 4 bytes, and for a row_major matrix_b a transpose, where this is one ldmatrix.
#define DEFINE_LOAD_FRAGMENT(use, layout, which)                                                                         \
    __device__ __forceinline__ void load_fragment(                                                                       \
        wmma::fragment<wmma::use, 16, 16, 16, bfloat16, wmma::layout>& fragment, const bfloat16* from_shared, int stride) { \
        static_assert(sizeof(fragment.x) == 16, "a bfloat16 operand is four registers");                                 \
        uint32_t* registers = reinterpret_cast<uint32_t*>(&fragment.x);                                                  \
        asm volatile("wmma.load." which ".m16n16k16.shared.bf16 { %0, %1, %2, %3 }, [%4], %5;\n"                         \
                     : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])                    \
                     : "r"(unsigned(__cvta_generic_to_shared(from_shared))), "r"(stride)                                 \
                     : "memory");                                                                                        \
    }
DEFINE_LOAD_FRAGMENT(matrix_a, row_major, "a.sync.aligned.row")
DEFINE_LOAD_FRAGMENT(matrix_a, col_major, "a.sync.aligned.col")
DEFINE_LOAD_FRAGMENT(matrix_b, row_major, "b.sync.aligned.row")
DEFINE_LOAD_FRAGMENT(matrix_b, col_major, "b.sync.aligned.col")
#undef DEFINE_LOAD_FRAGMENT
