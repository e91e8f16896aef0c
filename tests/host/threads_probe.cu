// Small kernels, each right or wrong in one way, for the host's execution of CUDA.
#include "device.cuh"

#include <cstdint>

namespace {

constexpr int THREADS = 128;
constexpr unsigned WARP = 0xffffffffu;

struct Arguments {
    const float* from;
    float* to;
    int size;
};

// to[i] = the sum of from's values of the block, through shared memory and shuffles.
__global__ void block_sum(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    float* sums = reinterpret_cast<float*>(smem);
    const int thread = int(threadIdx.x), index = int(blockIdx.x * blockDim.x) + thread;
    float value = index < args.size ? args.from[index] : 0.0f;
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(WARP, value, distance);
    if (thread % 32 == 0) sums[thread / 32] = value;
    __syncthreads();
    float total = 0.0f;
    for (int warp = 0; warp < int(blockDim.x) / 32; ++warp) total += sums[warp];
    if (index < args.size) args.to[index] = total;
}

// to[i] = from[i], through asynchronous copies in two groups.
__global__ void copied(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    float* tile = reinterpret_cast<float*>(smem);
    const int thread = int(threadIdx.x);
    for (int half = 0; half < 2; ++half) {
        if (thread < 32) {
            const int at = half * THREADS + thread * 4;
            const bool real = at < args.size;
            cp_async_16(tile + at, args.from + (real ? at : 0), real);
        }
        cp_async_commit();
    }
    cp_async_wait<1>();
    __syncthreads();
    args.to[thread] = tile[thread];
    cp_async_wait<0>();
    __syncthreads();
    if (THREADS + thread < args.size) args.to[THREADS + thread] = tile[THREADS + thread];
}

// Even and odd lanes apart, each with its own mask: to[i] = the sum over the lanes of i's kind; then all votes together.
__global__ void two_masks(const Arguments args) {
    const int thread = int(threadIdx.x);
    float value = args.from[thread];
    if (thread % 2 == 0) {
        for (int distance = 2; distance < 32; distance *= 2) value += __shfl_xor_sync(0x55555555u, value, distance);
    } else {
        for (int distance = 2; distance < 32; distance *= 2) value += __shfl_xor_sync(0xaaaaaaaau, value, distance);
    }
    const bool all = __all_sync(WARP, value >= 0.0f), any = __any_sync(WARP, thread == 5);
    const unsigned word = __ballot_sync(WARP, thread % 4 == 1);
    const bool right = all && any == (thread < 32) && word == 0x22222222u && __shfl_sync(WARP, thread, 3) == thread / 32 * 32 + 3;
    args.to[thread] = right ? value : -1.0f;
}

__global__ void missing_barrier(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    float* tile = reinterpret_cast<float*>(smem);
    const int thread = int(threadIdx.x);
    tile[thread] = args.from[thread];
    args.to[thread] = tile[THREADS - 1 - thread];  // another warp's
}

__global__ void missing_warp_barrier(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    float* tile = reinterpret_cast<float*>(smem);
    const int thread = int(threadIdx.x);
    tile[thread] = args.from[thread];
    __syncwarp();
    const float other = tile[thread ^ 1];
    tile[thread] = other;  // its neighbour may not have read yet
    args.to[thread] = other;
}

__global__ void overwritten_too_soon(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    float* tile = reinterpret_cast<float*>(smem);
    const int thread = int(threadIdx.x);
    for (int round = 0; round < 2; ++round) {
        tile[thread] = args.from[thread];
        __syncthreads();
        args.to[thread] = tile[THREADS - 1 - thread];
    }
}

__global__ void barrier_for_some(const Arguments args) {
    if (threadIdx.x < 96) __syncthreads();
    args.to[threadIdx.x] = 0.0f;
}

__global__ void two_barriers(const Arguments args) {
    if (threadIdx.x < 64) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    args.to[threadIdx.x] = 0.0f;
}

__global__ void divergent_shuffle(const Arguments args) {
    float value = args.from[threadIdx.x];
    if (threadIdx.x % 32 < 16) value = __shfl_xor_sync(WARP, value, 1);
    args.to[threadIdx.x] = value;
}

__global__ void divergent_warp(const Arguments args) {
    float value = args.from[threadIdx.x];
    if (threadIdx.x % 32 < 16) {
        value = __shfl_xor_sync(WARP, value, 1);
    } else {
        __syncwarp();
    }
    args.to[threadIdx.x] = value;
}

__global__ void mask_without_self(const Arguments args) {
    args.to[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, args.from[threadIdx.x], 1);
}

__global__ void shuffle_from_outside(const Arguments args) {
    if (threadIdx.x % 32 < 16) args.to[threadIdx.x] = __shfl_sync(0x0000ffffu, args.from[threadIdx.x], 20);
}

__global__ void unwritten_shared(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    float* tile = reinterpret_cast<float*>(smem);
    if (threadIdx.x != 77) tile[threadIdx.x] = 1.0f;
    __syncthreads();
    args.to[threadIdx.x] = tile[threadIdx.x];
}

__global__ void past_shared(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    reinterpret_cast<float*>(smem)[threadIdx.x + args.size] = 1.0f;
}

__global__ void past_tensor(const Arguments args) { args.to[threadIdx.x] = args.from[threadIdx.x + 1]; }

__global__ void writes_input(const Arguments args) { const_cast<float*>(args.from)[threadIdx.x] = 0.0f; }

__global__ void no_wait(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    float* tile = reinterpret_cast<float*>(smem);
    const int thread = int(threadIdx.x);
    if (thread < 32) cp_async_16(tile + thread * 4, args.from + thread * 4, true);
    cp_async_commit();
    __syncthreads();
    args.to[thread] = tile[thread];
}

__global__ void no_barrier_after_wait(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    float* tile = reinterpret_cast<float*>(smem);
    const int thread = int(threadIdx.x);
    if (thread < 32) cp_async_16(tile + thread * 4, args.from + thread * 4, true);
    cp_async_commit();
    cp_async_wait<0>();
    args.to[thread] = tile[thread];
}

__global__ void misaligned(const Arguments args) {
    const float4 four = *reinterpret_cast<const float4*>(args.from + 1);
    args.to[threadIdx.x] = four.x;
}

__global__ void past_local_array(const Arguments args) {
    float values[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    args.to[threadIdx.x] = values[args.size - 252];
}

__global__ void int_overflow(const Arguments args) { args.to[threadIdx.x] = args.from[args.size * 16777217 & 127]; }

__global__ void written_twice(const Arguments args) { args.to[threadIdx.x / 2] = 1.0f; }

// Of memory that the launch allocated: all of it written, or all but one element.
__global__ void through_memory(const Arguments args, float* memory, int skipped) {
    const int thread = int(threadIdx.x);
    if (thread != skipped) memory[thread] = args.from[thread];
    args.to[thread] = memory[thread];
}

struct Kernel {
    void (*call)(Arguments);
    unsigned threads;
    size_t smem_bytes;
};
// In the order of KERNELS in test_threads.py.
const Kernel KERNELS[] = {
    {block_sum, THREADS, THREADS / 8},
    {copied, THREADS, 2 * THREADS * 4},
    {two_masks, THREADS, 0},
    {missing_barrier, THREADS, THREADS * 4},
    {missing_warp_barrier, THREADS, THREADS * 4},
    {overwritten_too_soon, THREADS, THREADS * 4},
    {barrier_for_some, THREADS, 0},
    {two_barriers, THREADS, 0},
    {divergent_shuffle, THREADS, 0},
    {divergent_warp, THREADS, 0},
    {mask_without_self, THREADS, 0},
    {shuffle_from_outside, THREADS, 0},
    {unwritten_shared, THREADS, THREADS * 4},
    {past_shared, THREADS, THREADS * 4},
    {past_tensor, THREADS, 0},
    {writes_input, THREADS, 0},
    {no_wait, THREADS, THREADS * 4},
    {no_barrier_after_wait, THREADS, THREADS * 4},
    {misaligned, THREADS, 0},
    {past_local_array, THREADS, 0},
    {int_overflow, THREADS, 0},
    {written_twice, THREADS, 0},
};

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int probe(int kernel, unsigned blocks, unsigned threads, long smem_bytes, const float* from, float* to, int size) {
    const Kernel& one = KERNELS[kernel];
    const size_t bytes = smem_bytes < 0 ? one.smem_bytes : size_t(smem_bytes);
    return launch_grid(one.call, blocks, threads == 0 ? one.threads : threads, bytes, nullptr, Arguments{from, to, size});
}

// The same of a kernel that is launched twice, with memory of the launch's own.
EXPORTED int probe_memory(const float* from, float* to, int skipped) {
    float* memory = nullptr;
    cudaError_t error = cudaMallocAsync(reinterpret_cast<void**>(&memory), THREADS * sizeof(float), nullptr);
    const Arguments args = {from, to, THREADS};
    for (int i = 0; i < 2 && error == cudaSuccess; ++i) error = launch_grid(through_memory, 1, THREADS, 0, nullptr, args, memory, skipped);
    const cudaError_t freed = cudaFreeAsync(memory, nullptr);
    return error != cudaSuccess ? error : freed;
}

EXPORTED const char* error_name(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
