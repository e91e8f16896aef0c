// The little of CUDA that generated kernels use, on the CPU: a block's threads are fibers that run in an order drawn anew at
// every round, so that a missing barrier shows; shared memory starts as NaN; an asynchronous copy lands either at once or
// only when it is waited for. One block at a time. The environment's EMULATED_SEED draws the order; even: copies land late.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

namespace emulated {

struct Copy {
    void* to;
    const void* from;
    int bytes;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done;
    std::vector<std::vector<Copy>> groups;  // committed, oldest first
    std::vector<Copy> open;                 // not yet committed
};

struct Barrier {
    int members, arrived = 0;
    unsigned generation = 0;
    int votes = 0, result = 0;
};

inline std::vector<Fiber> fibers;
inline Barrier block_barrier;
inline std::vector<Barrier> warp_barriers;
inline std::vector<float> exchanged;
inline ucontext_t scheduler;
inline int current;
inline void (*body)();
inline uint64_t random_state = 1;
inline bool copies_land_late = true;
inline unsigned char* smem;

inline unsigned random_below(unsigned limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return unsigned(random_state >> 33) % limit;
}

inline void yield() { swapcontext(&fibers[current].context, &scheduler); }

inline int arrive(Barrier& barrier, int vote = 0) {
    const unsigned generation = barrier.generation;
    barrier.votes |= vote;
    if (++barrier.arrived == barrier.members) {
        barrier.result = barrier.votes;
        barrier.arrived = barrier.votes = 0;
        ++barrier.generation;
        return barrier.result;
    }
    while (barrier.generation == generation) yield();
    return barrier.result;
}

inline void land(const Copy& copy) {
    std::memset(copy.to, 0, 16);
    std::memcpy(copy.to, copy.from, copy.bytes);
}

inline void cp_async(void* to, const void* from, int bytes) {
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) std::abort();
    if (copies_land_late) {
        std::memset(to, 0xff, 16);  // in flight: neither the old value nor the new one
        fibers[current].open.push_back({to, from, bytes});
    } else {
        land({to, from, bytes});
    }
}

inline void cp_async_commit() {
    fibers[current].groups.push_back(std::move(fibers[current].open));
    fibers[current].open.clear();
}

inline void cp_async_wait(int pending) {
    auto& groups = fibers[current].groups;
    while (int(groups.size()) > pending) {
        for (const Copy& copy : groups.front()) land(copy);
        groups.erase(groups.begin());
    }
}

inline void enter() {
    body();
    fibers[current].done = true;
    yield();
}

}  // namespace emulated

inline thread_local struct { unsigned x; } threadIdx, blockIdx;

namespace emulated {

// Runs body() once for every thread of one block.
inline void run_block(int threads, size_t smem_bytes) {
    constexpr size_t STACK = 256 * 1024;
    std::memset(smem, 0xff, smem_bytes);
    fibers.resize(threads);
    block_barrier = {threads};
    warp_barriers.assign(threads / 32, Barrier{32});
    exchanged.assign(threads, 0.0f);
    std::vector<int> order(threads);
    for (int t = 0; t < threads; ++t) {
        Fiber& fiber = fibers[t];
        order[t] = t;
        fiber.done = false;
        fiber.groups.clear();
        fiber.open.clear();
        if (!fiber.stack) fiber.stack.reset(new char[STACK]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    for (bool running = true; running;) {
        running = false;
        for (int t = threads - 1; t > 0; --t) std::swap(order[t], order[random_below(t + 1)]);
        for (const int t : order) {
            if (fibers[t].done) continue;
            running = true;
            current = t;
            threadIdx.x = t;
            swapcontext(&scheduler, &fibers[t].context);
        }
    }
}

}  // namespace emulated

inline void __syncthreads() { emulated::arrive(emulated::block_barrier); }
inline int __syncthreads_or(int vote) { return emulated::arrive(emulated::block_barrier, vote != 0); }
inline void __syncwarp() { emulated::arrive(emulated::warp_barriers[threadIdx.x / 32]); }
inline float __shfl_xor_sync(unsigned, float value, int distance) {
    const unsigned thread = threadIdx.x;
    emulated::exchanged[thread] = value;
    __syncwarp();
    const float other = emulated::exchanged[thread ^ unsigned(distance)];
    __syncwarp();
    return other;
}
inline int __ffs(int word) { return __builtin_ffs(word); }
inline float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
template <typename T>
T __ldg(const T* from) {
    if (reinterpret_cast<uintptr_t>(from) % sizeof(T) != 0) std::abort();  // misaligned
    return *from;
}

typedef void* cudaStream_t;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaFuncAttributes {
    int numRegs, maxThreadsPerBlock;
    size_t localSizeBytes, sharedSizeBytes;
};
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "error"; }
template <typename Function>
cudaError_t cudaFuncSetAttribute(Function*, cudaFuncAttribute, int) {
    return cudaSuccess;
}
template <typename Function>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Function*) {
    return *attributes = {}, cudaSuccess;
}

struct Arguments;
namespace emulated {
void call_kernel(const void* kernel, const Arguments& args);  // defined behind the generated source, which has the struct
}

inline cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** parameters, size_t smem_bytes,
                                    cudaStream_t) {
    static const void* launched;
    static const Arguments* args;
    const char* seed = std::getenv("EMULATED_SEED");
    emulated::random_state = seed == nullptr ? 0 : std::strtoull(seed, nullptr, 10);
    emulated::copies_land_late = emulated::random_state % 2 == 0;
    launched = kernel;
    args = static_cast<const Arguments*>(parameters[0]);
    // Exactly what was asked for, on a boundary like the hardware's, with a guard behind it.
    std::vector<unsigned char> memory(smem_bytes + 256, 0xa5);
    emulated::smem = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128);
    emulated::body = [] { emulated::call_kernel(launched, *args); };
    for (unsigned index = 0; index < grid.x; ++index) {
        blockIdx.x = index;
        emulated::run_block(int(block.x), smem_bytes);
        for (size_t i = 0; i < 64; ++i) {
            if (emulated::smem[smem_bytes + i] != 0xa5) std::abort();  // written past the end
        }
    }
    return cudaSuccess;
}
