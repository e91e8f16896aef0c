// Small kernels of values that a block's threads pass on, and of tiles that they read before the next bulk copy, each right or wrong
// in one way, for the host's execution.
#include "device.cuh"

#include <cstdint>

namespace {

constexpr int THREADS = 64, ROUNDS = 5, ROWS = 8;

struct Arguments {
    TensorMap map;  // of ROUNDS * ROWS rows
    float* to;
};

enum Wrong { NONE, NO_RELEASE, NO_ACQUIRE, NO_SYNCWARP, NEVER, NO_FENCE, FENCED_EARLY, OTHERS_FENCE, ARRIVES_TWICE };

struct alignas(1024) Shared {
    uint16_t tile[ROWS * BOX_COLUMNS];
    Mbarrier full, empty;
};

// to[i] += the first two rows of the i-th column, of each round's tile: the first warp loads it, the second reads it.
template <int WRONG>
__global__ void tiles(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 1024);
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    const int lane = int(threadIdx.x) % 32;
    if (threadIdx.x == 0) {
        mbarrier_init(&shared.full, 1);
        mbarrier_init(&shared.empty, 2);
        mbarrier_init_fence();
    }
    __syncthreads();
    float sum = 0.0f;
    for (int round = 0; round < ROUNDS; ++round) {
        if (threadIdx.x == 0) {
            mbarrier_wait(&shared.empty, round % 2 ^ 1);
            mbarrier_arrive_expect(&shared.full, sizeof shared.tile);
            bulk_load(shared.tile, &args.map, &shared.full, 0, round * ROWS, 0, 0);  // the copy
        } else if (threadIdx.x >= 32) {
            mbarrier_wait(&shared.full, round % 2);
            if (WRONG == FENCED_EARLY) fence_proxy_async();
            sum += float(shared.tile[lane]) + float(shared.tile[BOX_COLUMNS + (lane ^ 8)]);  // the read, row 1 is swizzled
            if (WRONG == NONE || WRONG == ARRIVES_TWICE || (WRONG == OTHERS_FENCE && lane == 0)) fence_proxy_async();
            __syncwarp();
            mbarrier_arrive_times(&shared.empty, WRONG == ARRIVES_TWICE ? 3 : 2, lane == 0);  // the arrival
        }
    }
    if (threadIdx.x >= 32) args.to[lane] = sum;
}

// One warp writes, the other reads.
template <int WRONG>
__global__ void handed(const Arguments args) {
    DYNAMIC_SHARED_MEMORY(smem, 16);
    uint64_t* there = reinterpret_cast<uint64_t*>(smem);
    float* values = reinterpret_cast<float*>(there + 1);
    const int lane = int(threadIdx.x) % 32;
    if (threadIdx.x == 0) *there = 0;
    __syncthreads();
    if (threadIdx.x < 32) {
        values[lane] = float(lane);  // the write
        if (WRONG != NO_SYNCWARP) __syncwarp();
        if (lane == 0 && WRONG == NO_RELEASE) *there = 1;  // the store
        if (lane == 0 && WRONG != NO_RELEASE && WRONG != NEVER) store_release_shared(there, 1);
        return;
    }
    if (WRONG != NO_ACQUIRE) {
        while (load_acquire_shared(there) == 0) pause_briefly();  // the wait
    }
    args.to[lane] = values[lane ^ 1];  // the read
}

// In the order of KERNELS in test_handed.py.
void (*const KERNELS[])(Arguments) = {
    tiles<NONE>,
    tiles<NO_FENCE>,
    tiles<FENCED_EARLY>,
    tiles<OTHERS_FENCE>,
    tiles<ARRIVES_TWICE>,
    handed<NONE>,
    handed<NO_RELEASE>,
    handed<NO_ACQUIRE>,
    handed<NO_SYNCWARP>,
    handed<NEVER>,
};

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int probe(int kernel, const void* from, float* to) {
    Arguments args = {{}, to};
    const int64_t rows = ROUNDS * ROWS, sizes[4] = {BOX_COLUMNS, rows, 1, 1}, strides[4] = {1, BOX_COLUMNS, BOX_COLUMNS, BOX_COLUMNS};
    if (!make_tensor_map<float16>(&args.map, from, sizes, strides, ROWS)) return -1;
    return launch_grid(KERNELS[kernel], 1, THREADS, sizeof(Shared), nullptr, args);
}

EXPORTED const char* error_name(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
