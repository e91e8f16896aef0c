// tilewright, generated: do not edit.
// forward_simt/gather 64x32 lanes_per_row=8 num_stages=2 num_warps=4 q_in_registers=False tile_order=forward vector=4
// What kernel.cu says of the GPU, in CUDA's headers and PTX: float32, simt, sm_90a
// digest 8e68a7e8d1bd9937
#pragma once

#include <cuda_runtime.h>

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
