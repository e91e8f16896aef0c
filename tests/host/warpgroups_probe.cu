// Warpgroups that copy boxes, multiply them and pass stages on, rightly and wrongly, on the host and on a GPU.
// Built for one ELEMENT, one N_KEYS and one N_VALUES: a GPU's device.cuh holds products of one width of each kind.
#include "device.cuh"

#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Element = ELEMENT;
constexpr int M = 64, K = 128, ROW_BYTES = 128, CHUNKS = K / BOX_COLUMNS, KEY_ROWS = 64;
constexpr unsigned WARP = 0xffffffffu;

// Sizes and strides of a tensor: columns, rows, heads, batch; strides in elements.
struct Tensor {
    const void* base;
    int64_t sizes[4], strides[4];
    int box_rows;
};
struct Maps {
    TensorMap a, b;
};
struct Arguments {
    Tensor a, b;
    float* d;
    int column, row, head, batch;  // of the box that `boxes` copies
    int tiles;                     // of `pipeline`
    int wrong;                     // what to do wrong, or 0
    bool accumulate;
};

__device__ __forceinline__ Mbarrier* barriers_at(unsigned char* smem, int bytes) { return reinterpret_cast<Mbarrier*>(smem + bytes); }

__device__ __forceinline__ void init_barriers(Mbarrier* barriers, int count, int arrivals) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < count; ++i) mbarrier_init(&barriers[i], arrivals);
        mbarrier_init_fence();
    }
    __syncthreads();
}

// d[row][column] of a warpgroup's accumulator, row by row of N.
template <int N>
__device__ __forceinline__ void store(float* to, const float (&d)[N / 2]) {
    const int thread = int(threadIdx.x) % WARPGROUP, first = thread / 32 * 16 + thread % 32 / 4;
    for (int i = 0; i < N / 2; ++i) to[(first + i / 2 % 2 * 8) * N + i / 4 * 8 + thread % 4 * 2 + i % 2] = d[i];
}

// d = a b^T (+ 1 where it accumulates): a [64, 128], b [N_KEYS, 128].
constexpr int KEYS_BYTES = CHUNKS * (M + N_KEYS) * ROW_BYTES;
__global__ void keys(const __grid_constant__ Arguments args, const __grid_constant__ Maps maps) {
    DYNAMIC_SHARED_MEMORY(smem, 1024);
    unsigned char *a = smem, *b = smem + CHUNKS * M * ROW_BYTES;
    Mbarrier* full = barriers_at(smem, KEYS_BYTES);
    init_barriers(full, 1, 1);
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(full, KEYS_BYTES);
        for (int c = 0; c < CHUNKS; ++c) {
            bulk_load(a + c * M * ROW_BYTES, &maps.a, full, c * BOX_COLUMNS, 0, 0, 0);
            bulk_load(b + c * N_KEYS * ROW_BYTES, &maps.b, full, c * BOX_COLUMNS, 0, 0, 0);
        }
    }
    mbarrier_wait(full, 0);
    float d[N_KEYS / 2];
    for (float& x : d) x = 1.0f;
    wgmma_fence();
    const SharedMatrix left = shared_matrix(a, 0), right = shared_matrix(b, 0);
    for (int k = 0; k < K / 16; ++k) {
        wgmma_keys<Element, N_KEYS>(d, left.plus(k / 4 * M * ROW_BYTES + k % 4 * 32), right.plus(k / 4 * N_KEYS * ROW_BYTES + k % 4 * 32),
                                    args.accumulate || k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>(d);
    store<N_KEYS>(args.d, d);
}

// A lane's part of columns 16k to 16k + 15 of a [64, ...], in registers.
__device__ __forceinline__ void load_left(const Tensor& from, int k, uint32_t (&a)[4]) {
    const int row = int(threadIdx.x) / 32 * 16 + int(threadIdx.x) % 32 / 4, pair = int(threadIdx.x) % 4 * 2;
    for (int i = 0; i < 4; ++i) {
        const uint16_t* at = static_cast<const uint16_t*>(from.base) + (row + i % 2 * 8) * from.strides[1] + k * 16 + i / 2 * 8 + pair;
        a[i] = at[0] | uint32_t(at[1]) << 16;
    }
}

// The same as `keys`, a from registers.
constexpr int RIGHT_BYTES = CHUNKS * N_KEYS * ROW_BYTES;
__global__ void registers(const __grid_constant__ Arguments args, const __grid_constant__ Maps maps) {
    DYNAMIC_SHARED_MEMORY(smem, 1024);
    Mbarrier* full = barriers_at(smem, RIGHT_BYTES);
    init_barriers(full, 1, 1);
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(full, RIGHT_BYTES);
        for (int c = 0; c < CHUNKS; ++c) bulk_load(smem + c * N_KEYS * ROW_BYTES, &maps.b, full, c * BOX_COLUMNS, 0, 0, 0);
    }
    uint32_t a[K / 16][4];
    for (int k = 0; k < K / 16; ++k) load_left(args.a, k, a[k]);
    mbarrier_wait(full, 0);
    float d[N_KEYS / 2];
    for (float& x : d) x = 1.0f;
    wgmma_fence();
    const SharedMatrix right = shared_matrix(smem, 0);
    for (int k = 0; k < K / 16; ++k) {
        wgmma_keys<Element, N_KEYS>(d, a[k], right.plus(k / 4 * N_KEYS * ROW_BYTES + k % 4 * 32), args.accumulate || k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>(d);
    store<N_KEYS>(args.d, d);
}

// d = 1 + a b: a [64, 64] from registers, b [64, N_VALUES].
constexpr int VALUE_CHUNKS = (N_VALUES + BOX_COLUMNS - 1) / BOX_COLUMNS, VALUES_BYTES = VALUE_CHUNKS * KEY_ROWS * ROW_BYTES;
__global__ void values(const __grid_constant__ Arguments args, const __grid_constant__ Maps maps) {
    DYNAMIC_SHARED_MEMORY(smem, 1024);
    Mbarrier* full = barriers_at(smem, VALUES_BYTES);
    init_barriers(full, 1, 1);
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(full, VALUES_BYTES);
        for (int c = 0; c < VALUE_CHUNKS; ++c) bulk_load(smem + c * KEY_ROWS * ROW_BYTES, &maps.b, full, c * BOX_COLUMNS, 0, 0, 0);
    }
    uint32_t a[KEY_ROWS / 16][4];
    for (int k = 0; k < KEY_ROWS / 16; ++k) load_left(args.a, k, a[k]);
    mbarrier_wait(full, 0);
    float d[N_VALUES / 2];
    for (float& x : d) x = 1.0f;
    wgmma_fence();
    const SharedMatrix right = shared_matrix(smem, KEY_ROWS * ROW_BYTES);
    for (int k = 0; k < KEY_ROWS / 16; ++k) wgmma_values<Element, N_VALUES>(d, a[k], right.plus(k * 16 * ROW_BYTES));
    wgmma_commit();
    wgmma_wait<0>(d);
    store<N_VALUES>(args.d, d);
}

// d = the rows of one box as they lie in shared memory, elements as floats.
__global__ void boxes(const __grid_constant__ Arguments args, const __grid_constant__ Maps maps) {
    DYNAMIC_SHARED_MEMORY(smem, 1024);
    const int bytes = args.a.box_rows * ROW_BYTES;
    Mbarrier* full = barriers_at(smem, bytes);
    init_barriers(full, 1, 1);
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(full, bytes);
        bulk_load(smem, &maps.a, full, args.column, args.row, args.head, args.batch);
    }
    mbarrier_wait(full, 0);
    const Element* elements = reinterpret_cast<const Element*>(smem);
    for (int i = int(threadIdx.x); i < bytes / 2; i += int(blockDim.x)) args.d[i] = to_float(elements[i]);
}

// a and b through registers and ordinary stores in place of bulk copies: d = a b^T, a [64, 64], b [N_KEYS, 64].
constexpr int STORED_BYTES = (M + N_KEYS) * ROW_BYTES;
enum Stored { FENCED, UNFENCED, FENCED_TOO_EARLY, FENCED_TOO_LATE, OWN_ROWS, OVERWRITTEN, OVERWRITTEN_UNFENCED };
__device__ __forceinline__ void store_rows(unsigned char* to, const Tensor& from, int first, int rows, int thread, int threads) {
    for (int i = thread; i < rows * 8; i += threads) {
        const int row = first + i / 8, chunk = i % 8;
        const uint4* at = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from.base) + row * from.strides[1] + chunk * 8);
        *reinterpret_cast<uint4*>(to + row * ROW_BYTES + (chunk ^ row % 8) * 16) = *at;  // stored
    }
}
__global__ void stored(const __grid_constant__ Arguments args, const __grid_constant__ Maps maps) {
    DYNAMIC_SHARED_MEMORY(smem, 1024);
    unsigned char *a = smem, *b = smem + M * ROW_BYTES;
    Mbarrier* full = barriers_at(smem, STORED_BYTES);
    const int thread = int(threadIdx.x);
    init_barriers(full, 1, 1);
    if (args.wrong == FENCED_TOO_EARLY) fence_proxy_async();
    store_rows(b, args.b, 0, N_KEYS, thread, WARPGROUP);
    if (args.wrong != OWN_ROWS) store_rows(a, args.a, 0, M, thread, WARPGROUP);
    if (args.wrong != UNFENCED && args.wrong != FENCED_TOO_EARLY && args.wrong != FENCED_TOO_LATE && args.wrong != OVERWRITTEN_UNFENCED) {
        fence_proxy_async();
    }
    __syncthreads();
    if (args.wrong == FENCED_TOO_LATE) fence_proxy_async();
    if (args.wrong == OWN_ROWS) {  // each warp's rows of a are its own affair
        store_rows(a, args.a, thread / 32 * 16, 16, thread % 32, 32);
        fence_proxy_async();
        __syncwarp();
    }
    if (args.wrong >= OVERWRITTEN) {
        if (thread == 0) {
            mbarrier_arrive_expect(full, M * ROW_BYTES);
            bulk_load(a, &maps.a, full, 0, 0, 0, 0);  // over stores
        }
        mbarrier_wait(full, 0);
    }
    float d[N_KEYS / 2];
    wgmma_fence();
    const SharedMatrix left = shared_matrix(a, 0), right = shared_matrix(b, 0);
    for (int k = 0; k < 4; ++k) wgmma_keys<Element, N_KEYS>(d, left.plus(k * 32), right.plus(k * 32), k > 0);  // of stores
    wgmma_commit();
    wgmma_wait<0>(d);
    store<N_KEYS>(args.d, d);
}

// Two warpgroups multiply what a third one's thread loads, through a ring of stages: d = sum over tiles t of a b_t^T for each of
// two a [64, 64], b [tiles * N_KEYS, 64]; and each consumer reads an element of each stage like ordinary memory.
constexpr int STAGES = 2, CONSUMERS = 2, STAGE_BYTES = N_KEYS * ROW_BYTES, QUERY_BYTES = CONSUMERS * M * ROW_BYTES;
constexpr int PIPELINE_BYTES = QUERY_BYTES + STAGES * STAGE_BYTES;
enum Pipeline {
    RIGHT,
    BY_WARPS,  // a warp's lane 0 arrives for it
    NO_EMPTY_WAIT,
    NO_FULL_WAIT,
    RELEASED_BEFORE_PRODUCTS,
    RELEASED_BEFORE_READS,
    NO_PRODUCT_WAIT,
    NO_WARP_BARRIER,
    TOO_FEW_BYTES,
    TOO_MANY_BYTES,
    ONE_ARRIVAL_MISSING,
    ONE_ARRIVAL_TOO_MANY,
    ONE_COPY_TOO_MANY,
};
__device__ __forceinline__ float produce_and_consume(const Arguments& args, const Maps& maps, unsigned char* smem, float (&d)[N_KEYS / 2]) {
    Mbarrier* full = barriers_at(smem, PIPELINE_BYTES);
    Mbarrier *empty = full + STAGES, *query_full = empty + STAGES;
    const bool by_warps = args.wrong == BY_WARPS || args.wrong == NO_WARP_BARRIER;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], CONSUMERS * (by_warps ? 4 : WARPGROUP) + (args.wrong == ONE_ARRIVAL_MISSING));
        }
        mbarrier_init(query_full, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    const int group = int(threadIdx.x) / WARPGROUP;
    if (group == CONSUMERS) {
        registers_release<24>();
        if (threadIdx.x % WARPGROUP != 0) return 0.0f;
        mbarrier_arrive_expect(query_full, QUERY_BYTES);
        for (int g = 0; g < CONSUMERS; ++g) bulk_load(smem + g * M * ROW_BYTES, &maps.a, query_full, 0, g * M, 0, 0);
        for (int t = 0; t < args.tiles + (args.wrong == ONE_COPY_TOO_MANY); ++t) {
            const int stage = t % STAGES;
            if (args.wrong != NO_EMPTY_WAIT) mbarrier_wait(&empty[stage], t / STAGES % 2 ^ 1);  // empty
            const int bytes = STAGE_BYTES - (args.wrong == TOO_FEW_BYTES ? 128 : 0) + (args.wrong == TOO_MANY_BYTES ? 128 : 0);
            mbarrier_arrive_expect(&full[stage], bytes);
            bulk_load(smem + QUERY_BYTES + stage * STAGE_BYTES, &maps.b, &full[stage], 0, t * N_KEYS, 0, 0);  // a stage
        }
        return 0.0f;
    }
    registers_acquire<128>();
    const auto release = [&](int stage) {
        fence_proxy_async();  // what was read like ordinary memory
        if (by_warps && args.wrong != NO_WARP_BARRIER) __syncwarp();
        if (!by_warps || threadIdx.x % 32 == 0) mbarrier_arrive(&empty[stage]);  // released
        if (args.wrong == ONE_ARRIVAL_TOO_MANY && threadIdx.x == 0) mbarrier_arrive(&empty[stage]);
    };
    float sum = 0.0f;
    mbarrier_wait(query_full, 0);
    for (int t = 0; t < args.tiles; ++t) {
        const int stage = t % STAGES;
        const unsigned char* tile = smem + QUERY_BYTES + stage * STAGE_BYTES;
        if (args.wrong != NO_FULL_WAIT) mbarrier_wait(&full[stage], t / STAGES % 2);  // full
        const SharedMatrix left = shared_matrix(smem + group * M * ROW_BYTES, 0), right = shared_matrix(tile, 0);
        wgmma_fence();
        for (int k = 0; k < 4; ++k) wgmma_keys<Element, N_KEYS>(d, left.plus(k * 32), right.plus(k * 32), t > 0 || k > 0);  // a tile
        wgmma_commit();
        if (args.wrong == RELEASED_BEFORE_PRODUCTS) release(stage);
        if (args.wrong != NO_PRODUCT_WAIT) wgmma_wait<0>(d);
        if (args.wrong == RELEASED_BEFORE_READS) release(stage);
        if (args.wrong != RELEASED_BEFORE_PRODUCTS) {
            sum += to_float(reinterpret_cast<const Element*>(tile)[threadIdx.x % WARPGROUP]);  // read like ordinary memory
        }
        if (args.wrong != RELEASED_BEFORE_PRODUCTS && args.wrong != RELEASED_BEFORE_READS) release(stage);
    }
    return sum;
}
__global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1) pipeline(const __grid_constant__ Arguments args, const __grid_constant__ Maps maps) {
    DYNAMIC_SHARED_MEMORY(smem, 1024);
    float d[N_KEYS / 2];
    const float sum = produce_and_consume(args, maps, smem, d);
    const int group = int(threadIdx.x) / WARPGROUP;
    if (group == CONSUMERS) return;
    store<N_KEYS>(args.d + group * M * N_KEYS, d);  // what the tiles gave
    args.d[CONSUMERS * M * N_KEYS + threadIdx.x] = sum;
}

// A warpgroup writes, the other reads, and back: named barriers. d[i] = 2 i.
enum Handed { TURNS, NO_ARRIVAL, NO_TURN_BACK, OTHER_COUNT, ONE_LANE, TWICE };
__global__ void handed(const __grid_constant__ Arguments args, const __grid_constant__ Maps) {
    DYNAMIC_SHARED_MEMORY(smem, 1024);
    float* cells = reinterpret_cast<float*>(smem);
    const int thread = int(threadIdx.x) % WARPGROUP;
    for (int round = 0; round < 4; ++round) {
        if (int(threadIdx.x) < WARPGROUP) {
            if (round > 0 && args.wrong != NO_TURN_BACK) named_barrier_sync(2, 2 * WARPGROUP);  // its turn
            cells[thread] = float(thread + round - 3) * 2.0f;  // handed over
            if (args.wrong == OTHER_COUNT) named_barrier_arrive(1, WARPGROUP);
            if (args.wrong == TWICE) named_barrier_arrive(1, 2 * WARPGROUP);  // once
            if (args.wrong == ONE_LANE ? threadIdx.x % 32 == 0 : args.wrong != NO_ARRIVAL) named_barrier_arrive(1, 2 * WARPGROUP);  // written
        } else {
            named_barrier_sync(1, 2 * WARPGROUP);  // there
            args.d[thread] = cells[thread ^ 32];
            if (round < 3) named_barrier_arrive(2, 2 * WARPGROUP);
        }
    }
}

// One mistake each, of a block of two warpgroups and a half.
enum Misused {
    NOTHING,
    NOT_INITIALISED,
    INITIALISED_TWICE,
    NOT_SHOWN,
    NO_INIT_FENCE,
    USED_AS_DATA,
    COPIED_OVER,
    NO_ARRIVALS,
    MISPLACED_BARRIER,
    STRANGE_PARITY,
    STRANGE_PARITY_TESTED,
    ODD_DESTINATION,
    PAST_THE_END,
    NO_SUCH_HEAD,
    ODD_COLUMN,
    NO_MAP,
    DIVERGENT_WARPGROUP,
    WARPGROUP_IN_PART,
    HALF_A_WARPGROUP,
    DIFFERENT_MATRICES,
    ODD_START,
    ODD_CHUNKS,
    PRODUCT_PAST_THE_END,
    PRODUCT_OF_NOTHING,
    NO_REGISTER_FENCE,
    NO_LEFT_FENCE,
    READ_TOO_EARLY,
    WRITTEN_TOO_EARLY,
    SETTLED_TOO_EARLY,
    NO_COMMIT,
    LEFT_EARLY,
    STORED_OVER,
    NAMED_ZERO,
    NAMED_PART,
    OVERTAKEN,
};
constexpr int MISUSED_BYTES = 4 * N_KEYS * ROW_BYTES + M * ROW_BYTES;
__global__ void misused(const __grid_constant__ Arguments args, const __grid_constant__ Maps maps) {
    DYNAMIC_SHARED_MEMORY(smem, 1024);
    unsigned char *a = smem, *b = smem + M * ROW_BYTES;
    Mbarrier* barriers = barriers_at(smem, MISUSED_BYTES);
#ifdef __CUDA_ARCH__
    constexpr int wrong = NOTHING;  // a barrier of 40 threads is an illegal instruction even where nobody comes to it
#else
    const int wrong = args.wrong;
#endif
    const int thread = int(threadIdx.x);
    const bool leader = thread == 0;
    if (leader) {
        if (wrong != NOT_INITIALISED) mbarrier_init(barriers, wrong == NO_ARRIVALS ? 0 : 1);  // initialised
        if (wrong == INITIALISED_TWICE) mbarrier_init(barriers, 1);
        if (wrong == MISPLACED_BARRIER) mbarrier_init(barriers_at(smem, MISUSED_BYTES + 4), 1);
        if (wrong != NO_INIT_FENCE) mbarrier_init_fence();
    }
    if (wrong == NOT_SHOWN && thread == 32) mbarrier_arrive(barriers);  // not shown
    __syncthreads();
    if (wrong == USED_AS_DATA && thread == 77) args.d[0] = float(barriers->word);
    if (leader) {
        Maps none = {};
        mbarrier_arrive_expect(barriers, (wrong == NO_MAP ? 0 : M + N_KEYS) * ROW_BYTES);
        if (wrong == NO_MAP) bulk_load(a, &none.a, barriers, 0, 0, 0, 0);
        bulk_load(a, &maps.a, barriers, wrong == ODD_COLUMN ? 4 : 0, 0, wrong == NO_SUCH_HEAD ? 7 : 0, 0);  // a
        const int skew = wrong == ODD_DESTINATION ? 512 : wrong == PAST_THE_END ? 5 * N_KEYS * ROW_BYTES : 0;
        if (wrong == COPIED_OVER) bulk_load(smem + MISUSED_BYTES, &maps.b, barriers, 0, 0, 0, 0);
        bulk_load(b + skew, &maps.b, barriers, 0, 0, 0, 0);  // b
    }
    if (wrong == OVERTAKEN && thread < 64) {
        mbarrier_wait(barriers, 0);
        named_barrier_sync(4, 64);
        if (thread == 1) mbarrier_arrive(barriers);
        if (thread == 1) mbarrier_wait(barriers, 1);
        named_barrier_sync(4, 64);
    }
    if (wrong == OVERTAKEN && thread < 128) {
        named_barrier_sync(5, 128);
    }
    if (wrong == STRANGE_PARITY_TESTED) mbarrier_test(barriers, 3);
    mbarrier_wait(barriers, wrong == STRANGE_PARITY ? 2 : 0);  // parity
    if (wrong == NOTHING && !mbarrier_test(barriers, 0)) barriers[0].word = 0u;  // a fault: it was waited for
    if (wrong == HALF_A_WARPGROUP ? thread < 2 * WARPGROUP : thread >= WARPGROUP) return;
    float d[N_KEYS / 2];
    for (float& x : d) x = 0.0f;
    if (wrong == DIVERGENT_WARPGROUP && thread == 70) wgmma_commit();
    if (wrong == WARPGROUP_IN_PART && thread == 70) return;
    if (wrong != NO_REGISTER_FENCE) wgmma_fence();  // registers
    SharedMatrix left = shared_matrix(a, 0), right = shared_matrix(b, 0);
    if (wrong == DIFFERENT_MATRICES && thread == 33) right = right.plus(32);
    if (wrong == ODD_START) right = right.plus(128);
    if (wrong == PRODUCT_PAST_THE_END) right = right.plus(6 * N_KEYS * ROW_BYTES);
    if (wrong == PRODUCT_OF_NOTHING) right = right.plus(N_KEYS * ROW_BYTES);
    wgmma_keys<Element, N_KEYS>(d, left, right, false);  // first
    if (wrong != NO_COMMIT) wgmma_commit();
    if (wrong == SETTLED_TOO_EARLY) wgmma_wait<1>(d);  // one too many
    if (wrong == READ_TOO_EARLY) args.d[thread] = d[0];
    if (wrong == WRITTEN_TOO_EARLY) d[1] = 0.0f;
    if (wrong == LEFT_EARLY) return;
    if (wrong == STORED_OVER && leader) *reinterpret_cast<uint4*>(b) = uint4{0, 0, 0, 0};
    if (wrong == NAMED_ZERO) named_barrier_sync(0, WARPGROUP);
    if (wrong == NAMED_PART) named_barrier_sync(3, 40);
    wgmma_wait<0>(d);
    if (wrong == NO_LEFT_FENCE) {
        const uint32_t registers[4] = {0, 0, 0, 0};
        wgmma_keys<Element, N_KEYS>(d, registers, right, true);  // again
    }
    if (wrong == ODD_CHUNKS) {
        float e[N_VALUES / 2];
        const uint32_t registers[4] = {0, 0, 0, 0};
        for (float& x : e) x = 0.0f;
        wgmma_fence();
        wgmma_values<Element, N_VALUES>(e, registers, shared_matrix(b, 512));
        wgmma_commit();
        wgmma_wait<0>(e);
    }
    store<N_KEYS>(args.d, d);
}

struct Kernel {
    void (*call)(Arguments, Maps);
    unsigned threads;
    int smem_bytes;  // before the barriers; -1: a box
    int after;       // from the barriers on
};
// In the order of KERNELS in test_warpgroups.py.
const Kernel KERNELS[] = {
    {keys, WARPGROUP, KEYS_BYTES, 64},
    {registers, WARPGROUP, RIGHT_BYTES, 64},
    {values, WARPGROUP, VALUES_BYTES, 64},
    {boxes, WARPGROUP, -1, 64},
    {stored, WARPGROUP, STORED_BYTES, 64},
    {pipeline, (CONSUMERS + 1) * WARPGROUP, PIPELINE_BYTES, 64},
    {handed, 2 * WARPGROUP, WARPGROUP * 4, 64},
    {misused, 2 * WARPGROUP + 64, MISUSED_BYTES, 64 + N_KEYS * ROW_BYTES},
};

bool describe(TensorMap* map, const Tensor& tensor) {
    return tensor.box_rows == 0 || make_tensor_map<Element>(map, tensor.base, tensor.sizes, tensor.strides, tensor.box_rows);
}

}  // namespace

EXPORT const char* error_text(int code) { return cudaGetErrorString(cudaError_t(code)); }
EXPORT bool is_described(const Tensor* tensor) {
    TensorMap map;
    return describe(&map, *tensor);
}
// -1: a tensor has no map.
EXPORT int run(int kernel, const Arguments* args) {
    const Kernel& one = KERNELS[kernel];
    const int smem_bytes = (one.smem_bytes < 0 ? args->a.box_rows * ROW_BYTES : one.smem_bytes) + one.after;
    Maps maps;
    if (!describe(&maps.a, args->a) || !describe(&maps.b, args->b)) return -1;
    const cudaError_t error = cudaFuncSetAttribute(one.call, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    if (error != cudaSuccess) return error;
    return launch_grid(one.call, 1, one.threads, size_t(smem_bytes), nullptr, *args, maps);
}
