// Small kernels of atomic operations and of waits between blocks, each right or wrong in one way, for the host's execution.
#include "device.cuh"

#include <cstdint>

namespace {

constexpr int THREADS = 64;

// A counter a pair of blocks, then a partial sum a block.
struct Arguments {
    unsigned* counters;
    float* partial;
    const float* from;
    float* to;
};

// to[i] += from[i] of both of a pair's blocks, by the later one. WRONG: which step it lacks.
enum Wrong { NONE, NO_RELEASE, NO_ACQUIRE, NO_BARRIER_BEFORE, NO_BARRIER_AFTER, PLAIN_COUNTER };

template <int WRONG>
__global__ void merged(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    unsigned* before = reinterpret_cast<unsigned*>(smem);
    const int thread = int(threadIdx.x), pair = int(blockIdx.x) / 2;
    const float own = args.from[int(blockIdx.x) * THREADS + thread];
    args.partial[int(blockIdx.x) * THREADS + thread] = own;  // the partial sum
    if (thread == 0) *before = 7u;
    __syncthreads();
    if (WRONG == NO_BARRIER_BEFORE) args.partial[int(blockIdx.x) * THREADS + thread] = own;
    if (thread == 63) {
        if (WRONG == NO_RELEASE) {
            *before = atomicAdd(args.counters + pair, 1u);
        } else if (WRONG == PLAIN_COUNTER) {
            *before = args.counters[pair]++;
        } else {
            *before = atomic_add_release(args.counters + pair, 1u);
        }
        if (WRONG != NO_ACQUIRE) load_acquire(args.counters + pair);
    }
    if (WRONG == NO_BARRIER_AFTER) __syncwarp();
    if (WRONG != NO_BARRIER_AFTER) __syncthreads();
    if (*before != 1u) return;
    const int other = int(blockIdx.x) ^ 1;
    args.to[pair * THREADS + thread] = own + args.partial[other * THREADS + thread];  // the other's
}

// Each block adds to what the one before it passed on: to[i] = the sum over all blocks so far, which has come from block to
// block. WRONG: a later block is waited for.
template <bool WRONG>
__global__ void passed_on(const Arguments args) {
    const int thread = int(threadIdx.x), at = int(blockIdx.x);
    float sum = args.from[at * THREADS + thread];
    const int other = WRONG ? at + 1 : at - 1;
    if (other >= 0 && other < int(gridDim.x)) {
        if (thread == 0) {
            while (load_acquire(args.counters + other) == 0u) pause_waiting();  // the wait
        }
        __syncthreads();
        sum += args.partial[other * THREADS + thread];
    }
    args.partial[at * THREADS + thread] = sum;
    __syncthreads();
    if (thread == 32) atomic_add_release(args.counters + at, 1u);
    // What the first block wrote was acquired from one that had acquired it.
    args.to[at * THREADS + thread] = sum - args.partial[thread] + args.partial[thread];
}

// Three blocks that run at once, twice: each writes, all wait for all, each reads what the next one wrote. POLLED: they ask with
// load_relaxed, and acquire at the end. WRONG: nothing is released, or a fourth block is waited for, or nothing is acquired.
enum Meeting { RIGHT, POLLED, RELAXED, ONE_TOO_MANY, NOT_ACQUIRED };

template <int WRONG>
__global__ void all_meet(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    float* tile = reinterpret_cast<float*>(smem);
    const int thread = int(threadIdx.x), at = int(blockIdx.x), blocks = int(gridDim.x);
    float value = args.from[at * THREADS + thread];
    for (int round = 0; round < 2; ++round) {
        float* partial = args.partial + round * 3 * THREADS;
        if (thread < 4) tile[thread] = float(at);
        partial[at * THREADS + thread] = value;
        __syncthreads();
        if (thread == 0) {
            if (WRONG == RELAXED) {
                atomicAdd(args.counters + round, 1u);
            } else {
                atomic_add_release(args.counters + round, 1u);
            }
            if (WRONG == POLLED || WRONG == NOT_ACQUIRED) {
                while (load_relaxed(args.counters + round) < unsigned(blocks)) pause_waiting();
                if (WRONG == POLLED) load_acquire(args.counters + round);
            } else {
                while (load_acquire(args.counters + round) < unsigned(blocks + (WRONG == ONE_TOO_MANY))) pause_waiting();  // the wait
            }
        }
        __syncthreads();
        value = partial[(at + 1) % blocks * THREADS + thread] + tile[thread % 4] - float(at);  // the next one's
        __syncthreads();
    }
    args.to[at * THREADS + thread] = value;
}

// Threads of one block wait for the last of them. WRONG: which never comes.
template <bool WRONG>
__global__ void waited_within(const Arguments args) {
    const int thread = int(threadIdx.x);
    if (thread == 40) args.partial[0] = 3.0f;
    if (thread == 40 && !WRONG) atomic_add_release(args.counters, 1u);
    while (load_acquire(args.counters) == 0u) pause_waiting();  // the wait
    args.to[thread] = args.partial[0];
}

// to[i] = how many threads of i's kind there are, counted in shared memory, and each thread's place among them once.
enum Step { ALL, NO_ZERO, NO_FIRST_BARRIER, NO_LAST_BARRIER, READ_BEFORE };

template <int WRONG>
__global__ void counted(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    int* counts = reinterpret_cast<int*>(smem);
    const int thread = int(threadIdx.x), kind = thread % 3;
    if (thread < 3 && WRONG != NO_ZERO) counts[thread] = 0;  // the start
    if (WRONG != NO_FIRST_BARRIER) __syncthreads();
    const int early = WRONG == READ_BEFORE ? counts[kind] : 0;
    const int place = atomic_add_shared(counts + kind, 1);  // the count
    if (WRONG != NO_LAST_BARRIER) __syncthreads();
    args.to[thread] = float(counts[kind] + early);
    args.partial[kind * THREADS + place] = 1.0f;
}

// A warp counts for itself: one lane after the other, with a barrier of the warp between.
__global__ void counted_in_turn(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    int* count = reinterpret_cast<int*>(smem) + threadIdx.x / 32;
    const int lane = int(threadIdx.x) % 32;
    if (lane == 3) *count = 5;
    __syncwarp();
    if (lane == 4) atomic_add_shared(count, 1);
    __syncwarp();
    if (lane == 5) args.to[threadIdx.x] = float(atomic_add_shared(count, 1) + *count);
    __syncwarp();
    if (lane != 5) args.to[threadIdx.x] = float(*count);
}

// Through global memory within a block. WRONG: with no barrier.
template <bool WRONG>
__global__ void through_global(const Arguments args) {
    const int thread = int(threadIdx.x);
    args.partial[thread] = args.from[thread];
    if (!WRONG) __syncthreads();
    args.to[thread] = args.partial[THREADS - 1 - thread];
    if (!WRONG) __syncthreads();
    args.partial[thread] = 0.0f;  // over what the other read
}

__global__ void written_by_two_blocks(const Arguments args) { args.partial[threadIdx.x] = 1.0f; }

__global__ void first_half(const Arguments args) { args.partial[threadIdx.x] = args.from[threadIdx.x]; }

// What is found with barriers alone, in a kernel of its own after first_half.
__global__ void second_half(const Arguments args) {
    const int at = THREADS - 1 - int(threadIdx.x);
    args.to[blockIdx.x * THREADS + threadIdx.x] = args.partial[at];
    if (blockIdx.x == 1) atomicAdd(args.counters, 1u);
}

__global__ void out_of_bounds(const Arguments args) { atomicAdd(args.counters - 1, 1u); }
__global__ void shared_as_global(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    atomicAdd(reinterpret_cast<unsigned*>(smem), 1u);
}
__global__ void unaligned(const Arguments args) {
    atomicAdd(reinterpret_cast<unsigned*>(reinterpret_cast<unsigned char*>(args.counters) + 2), 1u);
}

struct Kernel {
    void (*call)(Arguments);
    unsigned blocks;
    bool together = false;
};
// In the order of KERNELS in test_atomics.py.
const Kernel KERNELS[] = {
    {merged<NONE>, 4},
    {merged<NO_RELEASE>, 4},
    {merged<NO_ACQUIRE>, 4},
    {merged<NO_BARRIER_BEFORE>, 4},
    {merged<NO_BARRIER_AFTER>, 4},
    {merged<PLAIN_COUNTER>, 4},
    {passed_on<false>, 4},
    {passed_on<true>, 4},
    {all_meet<RIGHT>, 3, true},
    {all_meet<POLLED>, 3, true},
    {all_meet<NOT_ACQUIRED>, 3, true},
    {all_meet<RELAXED>, 3, true},
    {all_meet<ONE_TOO_MANY>, 3, true},
    {waited_within<false>, 1},
    {waited_within<true>, 1},
    {counted<ALL>, 1},
    {counted<NO_ZERO>, 1},
    {counted<NO_FIRST_BARRIER>, 1},
    {counted<NO_LAST_BARRIER>, 1},
    {counted<READ_BEFORE>, 1},
    {counted_in_turn, 1},
    {through_global<false>, 1},
    {through_global<true>, 1},
    {written_by_two_blocks, 2},
    {out_of_bounds, 1},
    {shared_as_global, 1},
    {unaligned, 1},
};

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int probe(int kernel, int zeroed, unsigned* counters, float* partial, const float* from, float* to) {
    const Arguments args = {counters, partial, from, to};
    if (zeroed) cudaMemsetAsync(counters, 0, 4 * sizeof(unsigned), nullptr);
    const Kernel& one = KERNELS[kernel];
    if (!one.together) return launch_grid(one.call, one.blocks, THREADS, 64, nullptr, args);
    int together = 0;
    const cudaError_t error = blocks_together(one.call, 0, THREADS, 64, &together);
    if (error != cudaSuccess || together < int(one.blocks)) return error;
    return launch_together(one.call, one.blocks, THREADS, 64, nullptr, args);
}

EXPORTED int probe_in_two(unsigned* counters, float* partial, const float* from, float* to) {
    const Arguments args = {counters, partial, from, to};
    cudaError_t error = cudaMemsetAsync(counters, 0, 4 * sizeof(unsigned), nullptr);
    if (error == cudaSuccess) error = launch_grid(first_half, 1, THREADS, 0, nullptr, args);
    return error != cudaSuccess ? error : launch_grid(second_half, 2, THREADS, 0, nullptr, args);
}

EXPORTED const char* error_name(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
