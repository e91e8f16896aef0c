// tilewright, generated: do not edit.
// forward_decode/list 16x32 blocks_per_sm=1 num_stages=3 num_warps=4
// What kernel.cu says of the GPU, in CUDA's headers and PTX: bfloat16, mma, sm_90a
// digest 441cbb80a36850eb
#pragma once

#include <cuda_bf16.h>
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

// Atomic operations; each returns what was there. On shared memory, which orders nothing.
__device__ __forceinline__ int atomic_add_shared(int* to, int value) { return atomicAdd(to, value); }

// On global memory, from one block to another: who acquires the sum, or one that was added to later, sees what this thread
// wrote before, and what others of its block wrote before the last barrier.
__device__ __forceinline__ unsigned atomic_add_release(unsigned* to, unsigned value) {
    unsigned before;
    asm volatile("atom.release.gpu.add.u32 %0, [%1], %2;\n" : "=r"(before) : "l"(to), "r"(value) : "memory");
    return before;
}
__device__ __forceinline__ unsigned load_acquire(const unsigned* from) {
    unsigned value;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];\n" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// In a loop that waits for load_acquire.
__device__ __forceinline__ void pause_waiting() { __nanosleep(250); }

// A grid whose blocks all run at once, so that they may wait for each other: how many the device has room for, and the launch.
template <typename... P>
cudaError_t blocks_together(void (*kernel)(P...), int device, int threads, size_t smem_bytes, int* blocks) {
    int multiprocessors = 0, resident = 0;
    cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, smem_bytes);
    *blocks = multiprocessors * resident;
    return error == cudaSuccess && *blocks == 0 ? cudaErrorLaunchOutOfResources : error;
}
template <typename... P>
cudaError_t launch_together(void (*kernel)(P...), unsigned blocks, unsigned threads, size_t smem_bytes, cudaStream_t stream,
                            const P&... values) {
    void* parameters[] = {const_cast<P*>(&values)...};
    return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads), parameters, smem_bytes,
                                       stream);
}

// Four 8 x 8 matrices of 2-byte elements from shared memory: lane 8i + r gives the address of matrix i's row r, a multiple of 16,
// and every lane gets, of matrix i in registers[i], the elements 2t and 2t + 1 of row lane / 4, t = lane % 4.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&registers)[4], const void* shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];\n"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(unsigned(__cvta_generic_to_shared(shared_row)))
                 : "memory");
}

// The same, every matrix transposed: the elements 2t and 2t + 1 of column lane / 4.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&registers)[4], const void* shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];\n"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(unsigned(__cvta_generic_to_shared(shared_row)))
                 : "memory");
}

// Two matrices: lanes 0 to 15 give the addresses of their rows, those of the other lanes are not read.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&registers)[2], const void* shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 { %0, %1 }, [%2];\n"
                 : "=r"(registers[0]), "=r"(registers[1])
                 : "r"(unsigned(__cvta_generic_to_shared(shared_row)))
                 : "memory");
}

// Two matrices, each transposed.
__device__ __forceinline__ void ldmatrix_x2_transposed(uint32_t (&registers)[2], const void* shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 { %0, %1 }, [%2];\n"
                 : "=r"(registers[0]), "=r"(registers[1])
                 : "r"(unsigned(__cvta_generic_to_shared(shared_row)))
                 : "memory");
}

// d = a b + c in float: a is 16 x 16, b 16 x 8, c and d 16 x 8; d may be c. With g = lane / 4 and t = lane % 4 a lane holds
//   a[i]: row g + 8 * (i % 2), columns 2t + 8 * (i / 2) and the next     b[i]: rows 2t + 8i and the next, column g
//   c[i], d[i]: row g + 8 * (i / 2), column 2t + i % 2
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4]);
template <>
__device__ __forceinline__ void mma_m16n8k16<bfloat16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                       const float (&c)[4]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %10, %11, %12, %13 };\n"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
                   "f"(c[3]));
}
