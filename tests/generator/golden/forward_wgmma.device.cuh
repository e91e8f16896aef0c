// tilewright, generated: do not edit.
// forward_wgmma/list 64x64 blocks_per_sm=2 num_stages=3 overlap=softmax persistent=False tile_order=longest warpgroups=1
// What kernel.cu says of the GPU, in CUDA's headers and PTX: bfloat16, wgmma, sm_90a
// digest eb587d928bf51660
#pragma once

#include <cuda_bf16.h>
#include <cuda.h>
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

constexpr int WARPGROUP = 128;

// log2(x), absolute error below 2^-21 from 0.5 to 2, else relative; -inf for 0. 1 / x, relative error below 2^-22; inf for 0.
__device__ __forceinline__ float log2_approximate(float x) {
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
    return result;
}
__device__ __forceinline__ float reciprocal_approximate(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ unsigned shared_address(const void* shared) { return unsigned(__cvta_generic_to_shared(shared)); }

// Counts arrivals and bytes in shared memory. Its phases have parity 0, 1, 0, ...; the first is 0.
struct alignas(8) Mbarrier {
    uint64_t word;
};

// By one thread, which calls mbarrier_init_fence() after the last; a barrier of the block then shows them to everybody.
__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n" ::: "memory");
}

// One arrival: what this thread did before it is seen by whoever waits for the phase.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}

// The same of the threads that do, without a branch.
__device__ __forceinline__ void mbarrier_arrive_if(Mbarrier* barrier, bool does) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %1, 0;\n"
        "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(int(does))
        : "memory");
}

// One arrival, and the phase waits for so many bytes of bulk copies too.
__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Until the phase of this parity is complete; at once if the barrier is in one of the other parity.
__device__ __forceinline__ void mbarrier_wait(Mbarrier* barrier, int parity) {
    const unsigned address = shared_address(barrier);
    unsigned complete;
    do {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}\n"
            : "=r"(complete)
            : "r"(address), "r"(parity)
            : "memory");
    } while (complete == 0u);
}

// Whether that phase is complete, without waiting; then what is seen after mbarrier_wait is seen.
__device__ __forceinline__ bool mbarrier_test(Mbarrier* barrier, int parity) {
    unsigned complete;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(complete)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return complete != 0u;
}

// A barrier of the hardware, 1 to 15, for so many threads, whole warps of them; arrive does not wait.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Orders this thread's ordinary accesses to shared memory before those of tensor cores and bulk copies that come after.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// From here on this warpgroup's threads have N registers: fewer, or more of those that others gave up.
template <int N>
__device__ __forceinline__ void registers_release() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void registers_acquire() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(N));
}

// A tensor [batch, heads, rows, columns] as the copy engine knows it: boxes of rows of 64 columns.
using TensorMap = CUtensorMap;
constexpr int BOX_COLUMNS = 64;

// sizes and strides (in elements, strides[0] is 1): columns, rows, heads, batch. False where the copy engine cannot: base and
// strides must be multiples of 16 bytes.
template <typename Element>
inline bool make_tensor_map(TensorMap* map, const void* base, const int64_t (&sizes)[4], const int64_t (&strides)[4],
                            int box_rows) {
    using Encode = decltype(&cuTensorMapEncodeTiled);  // of the driver, which is not linked
    static const Encode encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
        return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
    }();
    if (encode == nullptr) return false;
    cuuint64_t dims[4], pitches[3];
    for (int i = 0; i < 4; ++i) dims[i] = cuuint64_t(sizes[i]);
    for (int i = 0; i < 3; ++i) pitches[i] = cuuint64_t(strides[i + 1]) * sizeof(Element);
    const cuuint32_t box[4] = {BOX_COLUMNS, cuuint32_t(box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(base), dims, pitches,
                  box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// A box to shared memory, row after row of 128 bytes, by one thread; there when the barrier's phase completes, of which its bytes
// are a part. The 16-byte chunk c of the row at address a lies at chunk c ^ a / 128 % 8. What is not in the tensor becomes 0.
__device__ __forceinline__ void bulk_load(void* to_shared, const TensorMap* map, Mbarrier* barrier, int column, int row, int head,
                                          int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, { %3, %4, %5, %6 }], [%2];\n" ::"r"(shared_address(to_shared)),
                 "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

// A matrix in shared memory as wgmma knows it: rows of 128 bytes as bulk_load leaves them, from 64 columns on in further chunks.
// Kept as the descriptor's lower half, since the upper one is always the same: 8 rows are 1024 bytes, swizzled by 128.
struct SharedMatrix {
    unsigned low;
    __device__ __forceinline__ SharedMatrix plus(int bytes) const { return {low + unsigned(bytes >> 4)}; }
    __device__ __forceinline__ uint64_t descriptor() const { return uint64_t(1u << 30 | 1024u >> 4) << 32 | low; }
};
__device__ __forceinline__ SharedMatrix shared_matrix(const void* start, int chunk_bytes) {
    return {(shared_address(start) & 0x3ffffu) >> 4 | unsigned(chunk_bytes) >> 4 << 16};
}

// The same matrix, by a shuffle, which tells the compiler that it is one for the whole warp: else it may keep it in ordinary registers
// and move each product's descriptors to uniform ones.
__device__ __forceinline__ SharedMatrix uniform(SharedMatrix matrix) { return {__shfl_sync(0xffffffffu, matrix.low, 0)}; }

// What was written to registers so far is seen by the products issued from here on.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

// Closes a group of this warpgroup's products.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

// Until at most PENDING groups are in flight. settled: accumulators whose products are done then; before, nobody may touch them.
template <int PENDING, int COUNT>
__device__ __forceinline__ void wgmma_wait(float (&settled)[COUNT]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(settled[i])::"memory");  // not to be read before
}

// Products of a warpgroup, asynchronous, in float. Thread t, warp w = t / 32, lane l = t % 32, holds in d[4n + 2h + e] row
// 16w + l / 4 + 8h, column 8n + 2 (l % 4) + e.
// keys: d (+)= a b^T, a of 64 x 16, b of N x 16, both 16 columns from their start on.
template <typename Element, int N>
__device__ __forceinline__ void wgmma_keys(float (&d)[N / 2], SharedMatrix a, SharedMatrix b, bool accumulate);
// values: d += a b, a of 64 x 16 in registers as mma_m16n8k16 has it, b the 16 rows of N columns from its start on.
template <typename Element, int N>
__device__ __forceinline__ void wgmma_values(float (&d)[N / 2], const uint32_t (&a)[4], SharedMatrix b);
template <>
__device__ __forceinline__ void wgmma_keys<bfloat16, 64>(float (&d)[32], SharedMatrix a, SharedMatrix b,
                                                         bool accumulate) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 { "
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                 "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 }, "
                 "%32, %33, p, 1, 1, 0, 0;\n"
                 "}\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "l"(a.descriptor()), "l"(b.descriptor()), "r"(int(accumulate)));
}
template <>
__device__ __forceinline__ void wgmma_values<bfloat16, 128>(float (&d)[64], const uint32_t (&a)[4],
                                                           SharedMatrix b) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 { "
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                 "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
                 "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
                 "%60, %61, %62, %63 }, "
                 "{ %64, %65, %66, %67 }, %68, p, 1, 1, 1;\n"
                 "}\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                   "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                   "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                   "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()));
}
