// The vocabulary of the generated CUDA kernels, on the CPU: compiled with a C++ compiler, the same kernel.cu runs as a check.
// Its counterpart for GPUs is _stages/device.cuh.jinja.
#pragma once

#include <cstdint>

#include "runtime.h"
#include "types.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)

// Of <cmath>, which takes longer to read than most kernels take to compile, only what kernels may say.
extern "C" {
float expf(float) noexcept;
float logf(float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
}

#define threadIdx (::tilewright_host::thread_index())
#define blockIdx (::tilewright_host::block_index())
#define blockDim (::tilewright_host::block_size())
#define gridDim (::tilewright_host::grid_size())

#define DYNAMIC_SHARED_MEMORY(name, alignment) unsigned char* const name = ::tilewright_host::shared_memory(alignment)

template <typename T>
inline T __ldg(const T* from) {
    return *from;
}

// Atomic operations; each returns what was there. atomicAdd, on global memory, and atomicOr, on shared memory, order nothing.
inline unsigned atomicAdd(unsigned* to, unsigned value, int line = __builtin_LINE()) {
    return tilewright_host::global_atomic_add(to, value, false, line);
}
inline unsigned atomicOr(unsigned* to, unsigned bits, int line = __builtin_LINE()) {
    return tilewright_host::shared_atomic_or(to, bits, line);
}
inline int atomic_add_shared(int* to, int value, int line = __builtin_LINE()) {
    return tilewright_host::shared_atomic_add(to, value, line);
}
// From one thread of a block to another through shared memory.
inline uint64_t load_acquire_shared(const uint64_t* from, int line = __builtin_LINE()) {
    return tilewright_host::shared_load_acquire(from, line);
}
inline void store_release_shared(uint64_t* to, uint64_t value, int line = __builtin_LINE()) {
    tilewright_host::shared_store_release(to, value, line);
}
inline void pause_briefly(int line = __builtin_LINE()) { tilewright_host::pause_thread(line); }
// From one block to another through global memory: what was written before the one is seen after the other.
inline unsigned atomic_add_release(unsigned* to, unsigned value, int line = __builtin_LINE()) {
    return tilewright_host::global_atomic_add(to, value, true, line);
}
inline unsigned load_acquire(const unsigned* from, int line = __builtin_LINE()) {
    return tilewright_host::global_load_acquire(from, line);
}
inline unsigned load_relaxed(const unsigned* from, int line = __builtin_LINE()) {
    return tilewright_host::global_load_relaxed(from, line);
}
inline void pause_waiting(int line = __builtin_LINE()) { tilewright_host::pause_thread(line); }

// Barriers.
inline void __syncthreads(int line = __builtin_LINE()) { tilewright_host::block_barrier("__syncthreads", line, 0); }
inline int __syncthreads_or(int vote, int line = __builtin_LINE()) {
    return tilewright_host::block_barrier("__syncthreads_or", line, vote != 0);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) { tilewright_host::warp_barrier(mask, line); }

// Warp shuffles and votes. Like on a GPU they order no memory.
namespace tilewright_host {

struct Shuffle {
    uint64_t value;
    int lane;  // whose value is wanted
    uint64_t result;
};
void exchange(void* const* lanes, void* context);
void collect_votes(void* const* lanes, void* context);

template <typename T>
inline T shuffle(unsigned mask, T value, int lane, const char* kind, int line) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
    Shuffle operands = {0, lane & (WARP_SIZE - 1), 0};
    __builtin_memcpy(&operands.value, &value, sizeof(T));
    warp_collective(mask, kind, line, &operands, exchange);
    __builtin_memcpy(&value, &operands.result, sizeof(T));
    return value;
}

inline unsigned votes(unsigned mask, bool vote, const char* kind, int line) {
    unsigned word = vote;
    warp_collective(mask, kind, line, &word, collect_votes);
    return word;
}

}  // namespace tilewright_host

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, int line = __builtin_LINE()) {
    const int own = int(threadIdx.x) % 32;
    return tilewright_host::shuffle(mask, value, own / width * width + (lane & (width - 1)), "__shfl_sync", line);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32, int line = __builtin_LINE()) {
    const int own = int(threadIdx.x) % 32, lane = own ^ distance;
    return tilewright_host::shuffle(mask, value, lane / width > own / width ? own : lane, "__shfl_xor_sync", line);
}
inline unsigned __ballot_sync(unsigned mask, bool vote, int line = __builtin_LINE()) {
    return tilewright_host::votes(mask, vote, "__ballot_sync", line);
}
inline int __any_sync(unsigned mask, bool vote, int line = __builtin_LINE()) {
    return tilewright_host::votes(mask, vote, "__any_sync", line) != 0;
}
inline int __all_sync(unsigned mask, bool vote, int line = __builtin_LINE()) {
    return tilewright_host::votes(mask, vote, "__all_sync", line) == mask;
}

// Asynchronous copies of 16 bytes from global to shared memory; zeros when not real.
inline void cp_async_16(void* to, const void* from, bool real, int line = __builtin_LINE()) {
    tilewright_host::copy_async(to, from, 16, real, line);
}
inline void cp_async_commit() { tilewright_host::copy_async_commit(); }
template <int PENDING>
inline void cp_async_wait() {
    tilewright_host::copy_async_wait(PENDING);
}

#include "matrices.h"
#include "warpgroups.h"

inline SharedMatrix uniform(SharedMatrix matrix, int line = __builtin_LINE()) {
    return {reinterpret_cast<const unsigned char*>(__shfl_sync(0xffffffffu, uintptr_t(matrix.start), 0, 32, line)), matrix.chunk_bytes};
}

// CUDA's run-time interface, as far as launching needs it.
typedef void* cudaStream_t;
enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorLaunchFailure = 719,  // what every fault is reported as
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaDevAttrMultiProcessorCount };
struct cudaFuncAttributes {
    int numRegs, maxThreadsPerBlock;
    size_t localSizeBytes, sharedSizeBytes;
};

inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) { return tilewright_host::report_of(error); }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    const bool count = attribute == cudaDevAttrMultiProcessorCount;
    *value = count ? int(tilewright_host::MULTIPROCESSORS) : tilewright_host::shared_memory_limit();
    return cudaSuccess;
}
inline cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t) {
    *memory = tilewright_host::device_malloc(bytes);
    return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
    return tilewright_host::device_memset(memory, value, bytes), cudaSuccess;
}
inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t) {
    return tilewright_host::device_free(memory) ? cudaSuccess : cudaErrorInvalidValue;
}
template <typename... Parameters>
inline cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute, int bytes) {
    if (bytes > tilewright_host::shared_memory_limit()) return cudaErrorInvalidValue;
    tilewright_host::allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
    return cudaSuccess;
}
template <typename... Parameters>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(Parameters...)) {
    *attributes = {0, tilewright_host::MAX_THREADS, 0, 0};
    return cudaSuccess;
}

// The only ways a kernel starts. Each thread gets a copy of the arguments, made by code whose accesses nobody watches.
namespace tilewright_host {

template <typename... Parameters>
inline cudaError_t start_grid(bool together, void (*kernel)(Parameters...), unsigned blocks, unsigned threads, size_t smem_bytes,
                              Parameters... values) {
    if (int(smem_bytes) > allowed_shared_memory(reinterpret_cast<const void*>(kernel))) return cudaErrorInvalidValue;
    const auto call = [=]() __attribute__((no_sanitize("thread", "address"))) { kernel(values...); };
    using Call = decltype(call);
    const auto call_one = [](const void* closure) __attribute__((no_sanitize("thread", "address"))) {
        (*static_cast<const Call*>(closure))();
    };
    return cudaError_t(run_grid(blocks, threads, smem_bytes, call_one, &call, together));
}

}  // namespace tilewright_host

template <typename... Parameters>
inline cudaError_t launch_grid(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, size_t smem_bytes, cudaStream_t,
                               Parameters... values) {
    return tilewright_host::start_grid(false, kernel, blocks, threads, smem_bytes, values...);
}

// Here the kernels before it have ended.
template <typename... Parameters>
inline cudaError_t launch_early(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, size_t smem_bytes,
                                cudaStream_t stream, Parameters... values) {
    return launch_grid(kernel, blocks, threads, smem_bytes, stream, values...);
}
inline void wait_for_kernels_before() {}
inline void let_next_start() {}

// A grid whose blocks all run at once: one a multiprocessor.
template <typename... Parameters>
inline cudaError_t blocks_together(void (*)(Parameters...), int, int, size_t, int* blocks) {
    return *blocks = int(tilewright_host::MULTIPROCESSORS), cudaSuccess;
}
template <typename... Parameters>
inline cudaError_t launch_together(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, size_t smem_bytes,
                                   cudaStream_t, Parameters... values) {
    return tilewright_host::start_grid(true, kernel, blocks, threads, smem_bytes, values...);
}
