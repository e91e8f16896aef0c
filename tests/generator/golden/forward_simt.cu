// tilewright, generated: do not edit.
// forward_simt/gather 64x32 lanes_per_row=8 num_stages=2 num_warps=4 q_in_registers=False tile_order=forward vector=4
// attention_forward, float32, head_dim 64, sm_90a, mask terms: window stride
// digest 8e68a7e8d1bd9937
//
// O = softmax(softmax_scale * Q K^T + mask) V and lse on CUDA cores, in float32. A block owns BLOCK_M query rows and a warp
// BLOCK_M / NUM_WARPS of them: its lanes are a grid of ROW_GROUPS x LANES_PER_ROW, each lane with LANE_ROWS rows and
// LANE_COLUMNS keys of the scores, then with the same rows and LANE_DIMS columns of the output.
#include "device.cuh"

#include <atomic>
#include <cstdint>
#include <limits>

constexpr int HEAD_DIM = 64;
constexpr int BLOCK_M = 64;  // query rows a block
constexpr int BLOCK_N = 32;  // keys a tile
constexpr int NUM_WARPS = 4;
constexpr int NUM_STAGES = 2;
constexpr int SMEM_STAGES = 2;  // of them in shared memory
constexpr int LANES_PER_ROW = 8;
constexpr int VECTOR = 4;  // elements a read of shared memory
constexpr bool Q_IN_REGISTERS = false;
constexpr int TILE_ALIGN = 1;  // rows are copied one by one, so that a run of tiles may start at any key

constexpr int THREADS = NUM_WARPS * 32;
constexpr int WARP_ROWS = BLOCK_M / NUM_WARPS;
constexpr int ROW_GROUPS = 32 / LANES_PER_ROW;
constexpr int LANE_ROWS = WARP_ROWS / ROW_GROUPS;      // rows i * ROW_GROUPS + row_group
constexpr int LANE_COLUMNS = BLOCK_N / LANES_PER_ROW;  // columns c * LANES_PER_ROW + row_lane
constexpr int LANE_DIMS = HEAD_DIM / LANES_PER_ROW;    // in vectors of VALUE_VECTOR, dealt to the row's lanes in turn

constexpr bool HAS_BOUND = false;
constexpr bool HAS_DOCUMENT = false;
constexpr bool HAS_WINDOW = true;
constexpr bool HAS_STRIDE = true;
constexpr bool HAS_TOKENS = false;
constexpr bool HAS_OR_BLOCKS = false;
constexpr bool HAS_AND_BLOCKS = false;
constexpr bool HAS_AND_BITS = false;
constexpr bool HAS_DENSE = false;
constexpr bool HAS_SCATTERED = HAS_STRIDE || HAS_TOKENS;
constexpr bool HAS_BRACKET = HAS_WINDOW || HAS_SCATTERED || HAS_OR_BLOCKS;

__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int lowest_bit(uint32_t word) { return __ffs(int(word)) - 1; }
constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();

using Element = float;

constexpr int widest_vector(int width) {
    return LANE_DIMS % width == 0 ? width : widest_vector(width / 2);
}
constexpr int VALUE_VECTOR = widest_vector(VECTOR);

// Rows in shared memory are 16 bytes longer than what they hold, so that neighbouring rows start in other banks.
constexpr int KEY_STRIDE = HEAD_DIM + 16 / int(sizeof(Element));
constexpr int VALUE_STRIDE = KEY_STRIDE;
constexpr int QUERY_STRIDE = HEAD_DIM + 4;
constexpr int PROBABILITY_STRIDE = BLOCK_N + 4;

static_assert(BLOCK_M % NUM_WARPS == 0 && WARP_ROWS % ROW_GROUPS == 0, "each lane has the same number of rows");
static_assert(BLOCK_N % LANES_PER_ROW == 0 && HEAD_DIM % LANES_PER_ROW == 0, "the lanes of a row share it evenly");

struct Arguments {
    void* query;  // [batch, num_heads, seqlen_q, head_dim]
    void* key;  // [batch, num_kv_heads, seqlen_kv, head_dim]
    void* value;  // [batch, num_kv_heads, seqlen_kv, head_dim]
    void* out;  // [batch, num_heads, seqlen_q, head_dim]
    void* lse;  // [batch, num_heads, seqlen_q] float, contiguous
    int batch;  // sizes
    int num_heads;  // sizes
    int num_kv_heads;  // sizes
    int seqlen_q;  // sizes
    int seqlen_kv;  // sizes
    int64_t q_stride_b;  // strides in elements: batch, head, token
    int64_t q_stride_h;  // strides in elements: batch, head, token
    int64_t q_stride_n;  // strides in elements: batch, head, token
    int64_t k_stride_b;  // strides in elements: batch, head, token
    int64_t k_stride_h;  // strides in elements: batch, head, token
    int64_t k_stride_n;  // strides in elements: batch, head, token
    int64_t v_stride_b;  // strides in elements: batch, head, token
    int64_t v_stride_h;  // strides in elements: batch, head, token
    int64_t v_stride_n;  // strides in elements: batch, head, token
    int64_t o_stride_b;  // strides in elements: batch, head, token
    int64_t o_stride_h;  // strides in elements: batch, head, token
    int64_t o_stride_n;  // strides in elements: batch, head, token
    double softmax_scale;  // multiplies query . key
    int bound_left;  // bound: keys from position - left to position + right, inclusive
    int bound_right;  // bound: keys from position - left to position + right, inclusive
    int window_left;  // window: the same, one term of the bracket
    int window_right;  // window: the same, one term of the bracket
    int stride;  // stride: keys that are multiples of it; 0 where absent
    void* row_begin;  // document: [B, seqlen_q] int32, keys from row_begin to row_end - 1
    void* row_end;  // document: [B, seqlen_q] int32, keys from row_begin to row_end - 1
    int64_t row_stride_b;  // in elements; 0 where shared by the batch
    void* token_bits;  // tokens: [ceil(seqlen_kv / 32)] uint32, bit k % 32 of word k / 32
    void* gather_indices;  // gather: [num_gathered] int32 key indices, ascending; null: multiples of stride
    int num_gathered;  // gather: how many keys are gathered
    void* block_bits;  // blocks: [B, H, blocks_q, block_words] uint32, a bit a block
    int64_t block_stride_b;  // in words; 0 where shared
    int64_t block_stride_h;  // in words; 0 where shared
    int block_words;  // words a row of blocks, then the mask's own granularity
    int sparse_block_q;  // words a row of blocks, then the mask's own granularity
    int sparse_block_kv;  // words a row of blocks, then the mask's own granularity
    void* mask_bits;  // bits: [B, H, seqlen_q, bits_words] uint32, a bit a pair
    int64_t bits_stride_b;  // in words; 0 where shared
    int64_t bits_stride_h;  // in words; 0 where shared
    int bits_words;  // words a query row
    void* dense_mask;  // scan: [B, H, seqlen_q, seqlen_kv] uint8
    int64_t dense_stride_b;  // in bytes; 0 where shared
    int64_t dense_stride_h;  // in bytes; 0 where shared
    void* kv_indices;  // list: [B, H, tiles_q, tiles_kv] int32, full tiles first, then partial ones
    void* full_num_blocks;  // list: [B, H, tiles_q] int32 counts of full tiles, of full and partial
    void* kv_num_blocks;  // list: [B, H, tiles_q] int32 counts of full tiles, of full and partial
    void* active_bitmap;  // bitmap: [B, H, tiles_q, tile_words] uint32, a bit a tile
    void* full_bitmap;  // bitmap: [B, H, tiles_q, tile_words] uint32, a bit a tile
    int64_t tile_stride_b;  // list, bitmap: in rows of tiles_q; 0 where shared
    int64_t tile_stride_h;  // list, bitmap: in rows of tiles_q; 0 where shared
    int tiles_kv;  // list: tiles_kv; bitmap: words a row
    int tile_words;  // list: tiles_kv; bitmap: words a row
    void* tile_order;  // list, bitmap: [B * H * blocks a head] int32, which query tile each block takes; null: in order
    int device;  // CUDA device ordinal; on the CPU 0
    int num_threads;  // OpenMP threads on the CPU; 0 on a GPU
    void* stream;  // cudaStream_t; null on the CPU
};

struct KernelInfo {
    int registers;    // a thread
    int local_bytes;  // a thread: spills and indexed arrays
    int smem_bytes;   // a block, static and dynamic
    int max_threads;  // a block
};

namespace {

// What a block keeps in shared memory.
struct alignas(16) SharedTiles {
    Element smem_k[SMEM_STAGES * BLOCK_N * KEY_STRIDE];
    Element smem_v[SMEM_STAGES * BLOCK_N * VALUE_STRIDE];
    float smem_p[BLOCK_M * PROBABILITY_STRIDE];                  // each warp writes and reads its own rows
    float smem_q[Q_IN_REGISTERS ? 4 : BLOCK_M * QUERY_STRIDE];  // times softmax_scale * log2(e); never empty
};
constexpr int SMEM_BYTES = sizeof(SharedTiles);
static_assert(SMEM_BYTES == 61440, "shared memory is what the legality rules count");

// What a lane keeps in registers.
struct LaneTiles {
    float query[Q_IN_REGISTERS ? LANE_ROWS : 1][Q_IN_REGISTERS ? HEAD_DIM : 1];
    float acc_s[LANE_ROWS][LANE_COLUMNS];  // scores, then probabilities
    float acc_o[LANE_ROWS][LANE_DIMS];
    float row_max[LANE_ROWS];
    float row_sum[LANE_ROWS];  // over this lane's own columns; summed over the row's lanes at the end
};

// The keys one query row may see. Intervals are half open and inside [0, seqlen_kv).
struct RowMask {
    int begin, end;                // bound & document
    int window_begin, window_end;  // the bracket's window
    const uint32_t* block_row;     // or_blocks, and_blocks: this row's bits
    const uint32_t* bits_row;      // and_bits
    const uint8_t* dense_row;      // scan
};

// row must be a real one: below seqlen_q.
__device__ __forceinline__ RowMask row_mask(const Arguments& args, int batch, int head, int row) {
    RowMask mask;
    const int position = row + args.seqlen_kv - args.seqlen_q;  // bottom-right aligned
    mask.begin = 0;
    mask.end = args.seqlen_kv;
    if constexpr (HAS_BOUND) {
        mask.begin = larger(mask.begin, position - args.bound_left);
        mask.end = smaller(mask.end, position + args.bound_right + 1);
    }
    if constexpr (HAS_DOCUMENT) {
        const int64_t at = batch * args.row_stride_b + row;
        mask.begin = larger(mask.begin, static_cast<const int*>(args.row_begin)[at]);
        mask.end = smaller(mask.end, static_cast<const int*>(args.row_end)[at]);
    }
    if constexpr (HAS_WINDOW) {
        mask.window_begin = larger(mask.begin, position - args.window_left);
        mask.window_end = smaller(mask.end, position + args.window_right + 1);
    }
    if constexpr (HAS_OR_BLOCKS || HAS_AND_BLOCKS) {
        mask.block_row = static_cast<const uint32_t*>(args.block_bits) + batch * args.block_stride_b +
                         head * args.block_stride_h + int64_t(row / args.sparse_block_q) * args.block_words;
    }
    if constexpr (HAS_AND_BITS) {
        mask.bits_row = static_cast<const uint32_t*>(args.mask_bits) + batch * args.bits_stride_b +
                        head * args.bits_stride_h + int64_t(row) * args.bits_words;
    }
    if constexpr (HAS_DENSE) {
        mask.dense_row = static_cast<const uint8_t*>(args.dense_mask) + batch * args.dense_stride_b +
                         head * args.dense_stride_h + int64_t(row) * args.seqlen_kv;
    }
    return mask;
}

__device__ __forceinline__ bool bit_at(const uint32_t* words, int index) { return (words[index >> 5] >> (index & 31)) & 1u; }

// Whether key is one of the scattered ones (strided columns, global tokens), whatever the row.
__device__ __forceinline__ bool is_scattered(const Arguments& args, int key) {
    bool scattered = false;
    if constexpr (HAS_STRIDE) scattered |= unsigned(key) % unsigned(args.stride) == 0;
    if constexpr (HAS_TOKENS) scattered |= bit_at(static_cast<const uint32_t*>(args.token_bits), key);
    return scattered;
}

// The whole predicate for one pair. Reads no mask word for a key outside [begin, end).
__device__ __forceinline__ bool is_active(const Arguments& args, const RowMask& mask, int key) {
    if (key < mask.begin || key >= mask.end) return false;
    bool active = true;
    if constexpr (HAS_BRACKET) {
        active = false;
        if constexpr (HAS_WINDOW) active |= key >= mask.window_begin && key < mask.window_end;
        if constexpr (HAS_SCATTERED) active |= is_scattered(args, key);
        if constexpr (HAS_OR_BLOCKS) active |= bit_at(mask.block_row, key / args.sparse_block_kv);
    }
    if constexpr (HAS_AND_BLOCKS) active &= bit_at(mask.block_row, key / args.sparse_block_kv);
    if constexpr (HAS_AND_BITS) active &= bit_at(mask.bits_row, key);
    if constexpr (HAS_DENSE) active &= mask.dense_row[key] != 0;
    return active;
}

// FULL: every pair is active. PARTIAL: evaluate is_active. SCATTERED: evaluate it, keys in [covered_begin, covered_end) are
// another tile's. GATHERED: the same, and columns are places in the list of scattered keys.
enum TileKind : int { FULL = 0, PARTIAL = 1, SCATTERED = 2, GATHERED = 3 };

struct Tile {
    int start;  // first key, or first place in the list of scattered keys
    int stop;   // where the columns that matter end; at most start + BLOCK_N
    int kind;
};

// The key at a place in the list of scattered keys; seqlen_kv past its end.
__device__ __forceinline__ int gathered_key(const Arguments& args, int place) {
    if (place >= args.num_gathered) return args.seqlen_kv;
    if (args.gather_indices == nullptr) return place * args.stride;
    return static_cast<const int*>(args.gather_indices)[place];
}

// The key in a tile's column; seqlen_kv or more where there is none.
__device__ __forceinline__ int tile_key(const Arguments& args, const Tile& tile, int column) {
    return tile.kind == GATHERED ? gathered_key(args, tile.start + column) : tile.start + column;
}

// The union over a query tile's rows of what they may see, and the keys all of them see. Both ends of a row's interval
// never decrease from row to row (bands and documents), so the first and the last row decide.
struct KeyRange {
    int begin, end;            // some row may see these
    int full_begin, full_end;  // every row sees these
};

__device__ __forceinline__ KeyRange bound_range(const RowMask& first, const RowMask& last) {
    return {first.begin, last.end, last.begin, first.end};
}

__device__ __forceinline__ KeyRange window_range(const RowMask& first, const RowMask& last) {
    return {first.window_begin, last.window_end, last.window_begin, first.window_end};
}

class TileIterator {
  public:
    int covered_begin, covered_end;  // keys that the run of tiles covers

    __device__ __forceinline__ TileIterator(const Arguments& args, int batch, int head, int row_start, int row_stop)
        : args_(args) {
        const RowMask first = row_mask(args, batch, head, row_start);
        const RowMask last = row_mask(args, batch, head, row_stop - 1);
        bound_ = bound_range(first, last);
        run_ = {0, 0, 0, 0};
        if constexpr (HAS_WINDOW) run_ = window_range(first, last);
        covered_begin = at_ = run_.begin / TILE_ALIGN * TILE_ALIGN;
        covered_end = larger(at_, run_.end);
        place_ = 0;
    }

    __device__ __forceinline__ bool next(Tile& tile) {
        if (at_ < run_.end) {
            const bool full = at_ >= run_.full_begin && at_ + BLOCK_N <= run_.full_end;
            tile = {at_, smaller(at_ + BLOCK_N, run_.end), full ? FULL : PARTIAL};
            at_ += BLOCK_N;
            return true;
        }
        while (place_ < args_.num_gathered) {
            const int start = place_;
            place_ += BLOCK_N;
            const int stop = smaller(place_, args_.num_gathered);
            const int first_key = gathered_key(args_, start), last_key = gathered_key(args_, stop - 1);
            if (first_key >= bound_.end) break;
            if (last_key < bound_.begin) continue;
            if (first_key >= covered_begin && last_key < covered_end) continue;
            tile = {start, stop, GATHERED};
            return true;
        }
        return false;
    }

  private:
    const Arguments& args_;
    KeyRange bound_, run_;
    int at_, place_;
};

// A tile's column, whatever the row: its key (seqlen_kv where no row may see it here), its mask block, and whether its
// key is a scattered one.
struct ColumnMask {
    int key, block;
    bool scattered;
};

__device__ __forceinline__ ColumnMask column_mask(const Arguments& args, const Tile& tile, int column, int covered_begin,
                                                  int covered_end) {
    ColumnMask mask = {args.seqlen_kv, 0, false};
    if (tile.start + column >= tile.stop) return mask;
    const int key = tile_key(args, tile, column);
    if (key >= args.seqlen_kv) return mask;
    if (tile.kind >= SCATTERED && key >= covered_begin && key < covered_end) return mask;  // another tile's
    mask.key = key;
    if constexpr (HAS_SCATTERED) mask.scattered = tile.kind == GATHERED || is_scattered(args, key);
    if constexpr (HAS_OR_BLOCKS || HAS_AND_BLOCKS) mask.block = key / args.sparse_block_kv;
    return mask;
}

// Whether a pair of a tile that is not FULL is active.
__device__ __forceinline__ bool pair_active(const RowMask& row, const ColumnMask& column) {
    if (column.key < row.begin || column.key >= row.end) return false;
    bool active = true;
    if constexpr (HAS_BRACKET) {
        active = column.scattered;
        if constexpr (HAS_WINDOW) active |= column.key >= row.window_begin && column.key < row.window_end;
        if constexpr (HAS_OR_BLOCKS) active |= bit_at(row.block_row, column.block);
    }
    if constexpr (HAS_AND_BLOCKS) active &= bit_at(row.block_row, column.block);
    if constexpr (HAS_AND_BITS) active &= bit_at(row.bits_row, column.key);
    if constexpr (HAS_DENSE) active &= row.dense_row[column.key] != 0;
    return active;
}

// Copies of 16 bytes; a row of a tile is CHUNKS_A_ROW of them.
constexpr int CHUNK = 16 / int(sizeof(Element));
constexpr int CHUNKS_A_ROW = HEAD_DIM / CHUNK;
constexpr int CHUNKS_A_TILE = BLOCK_N * CHUNKS_A_ROW;
constexpr int CHUNKS_A_THREAD = (CHUNKS_A_TILE + THREADS - 1) / THREADS;
static_assert(HEAD_DIM % CHUNK == 0, "a row is a whole number of 16-byte chunks");
static_assert(KEY_STRIDE % CHUNK == 0 && VALUE_STRIDE % CHUNK == 0, "rows in shared memory start at 16 bytes");

// One thread's i-th chunk of a tile, and the key whose row it is part of; seqlen_kv or more: the chunk is 0.
struct Chunk {
    int row, column, key;
};

__device__ __forceinline__ Chunk chunk_of(const Arguments& args, const Tile& tile, int index) {
    int row = index / CHUNKS_A_ROW, column = index % CHUNKS_A_ROW;
    if constexpr (THREADS % CHUNKS_A_ROW == 0) {
        // The same said so that a thread's chunks differ by constants: registers that would hold each chunk's place are spared.
        row = int(threadIdx.x) / CHUNKS_A_ROW + (index - int(threadIdx.x)) / CHUNKS_A_ROW;
        column = int(threadIdx.x) % CHUNKS_A_ROW;
    }
    const bool wanted = tile.start + row < tile.stop;
    return {row, column * CHUNK, wanted ? tile_key(args, tile, row) : args.seqlen_kv};
}

// Whether every row of Q, K, V and O starts at a multiple of 16 bytes, which accesses of 16 bytes need. The same for all
// threads; asked at run time, because a second kernel would double the time to compile.
__host__ __device__ __forceinline__ bool rows_are_aligned(const Arguments& args) {
    const int64_t addresses = reinterpret_cast<intptr_t>(args.query) | reinterpret_cast<intptr_t>(args.key) |
                              reinterpret_cast<intptr_t>(args.value) | reinterpret_cast<intptr_t>(args.out);
    const int64_t strides = args.q_stride_b | args.q_stride_h | args.q_stride_n | args.k_stride_b | args.k_stride_h |
                            args.k_stride_n | args.v_stride_b | args.v_stride_h | args.v_stride_n | args.o_stride_b |
                            args.o_stride_h | args.o_stride_n;
    return ((addresses | strides * int64_t(sizeof(Element))) & 15) == 0;
}

// 16 bytes from global memory; ALIGNED: the address is a multiple of 16, else of an element alone.
template <bool ALIGNED>
__device__ __forceinline__ uint4 fetch_chunk(const Element* from) {
    if constexpr (ALIGNED) return __ldg(reinterpret_cast<const uint4*>(from));
    union {
        uint4 whole;
        uint16_t halves[8];
        uint32_t words[4];
    } chunk;
    if constexpr (sizeof(Element) == 2) {
#pragma unroll
        for (int i = 0; i < 8; ++i) chunk.halves[i] = __ldg(reinterpret_cast<const uint16_t*>(from) + i);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) chunk.words[i] = __ldg(reinterpret_cast<const uint32_t*>(from) + i);
    }
    return chunk.whole;
}

// A tile from global to shared memory through registers, a few chunks at a time; rows without a key are 0.
template <bool ALIGNED>
__device__ __forceinline__ void copy_tile(const Arguments& args, const Element* key, const Element* value, const Tile& tile,
                                          Element* smem_k, Element* smem_v) {
    constexpr int UNROLL = ALIGNED ? 4 : 1;
#pragma unroll UNROLL
    for (int index = threadIdx.x; index < CHUNKS_A_TILE; index += THREADS) {
        const Chunk chunk = chunk_of(args, tile, index);
        uint4 key_chunk = {0u, 0u, 0u, 0u}, value_chunk = key_chunk;
        if (chunk.key < args.seqlen_kv) {
            key_chunk = fetch_chunk<ALIGNED>(key + int64_t(chunk.key) * args.k_stride_n + chunk.column);
            value_chunk = fetch_chunk<ALIGNED>(value + int64_t(chunk.key) * args.v_stride_n + chunk.column);
        }
        *reinterpret_cast<uint4*>(smem_k + chunk.row * KEY_STRIDE + chunk.column) = key_chunk;
        *reinterpret_cast<uint4*>(smem_v + chunk.row * VALUE_STRIDE + chunk.column) = value_chunk;
    }
}

constexpr int WORD_ELEMENTS = 4 / int(sizeof(Element));  // a word in memory is one float, or two 2-byte elements

template <int WIDTH>
__device__ __forceinline__ void load_vector(const Element* from, float* to) {
    constexpr int WORDS = WIDTH / WORD_ELEMENTS;
    static_assert(WIDTH * sizeof(Element) <= 16, "at most 16 bytes a read");
    if constexpr (WORDS == 0) {
        to[0] = to_float(*from);
    } else if constexpr (WORDS == 1) {
        from_word<Element>(*reinterpret_cast<const uint32_t*>(from), to);
    } else if constexpr (WORDS == 2) {
        const uint2 words = *reinterpret_cast<const uint2*>(from);
        from_word<Element>(words.x, to);
        from_word<Element>(words.y, to + WORD_ELEMENTS);
    } else {
        const uint4 words = *reinterpret_cast<const uint4*>(from);
        from_word<Element>(words.x, to);
        from_word<Element>(words.y, to + WORD_ELEMENTS);
        from_word<Element>(words.z, to + 2 * WORD_ELEMENTS);
        from_word<Element>(words.w, to + 3 * WORD_ELEMENTS);
    }
}

template <int WIDTH>
__device__ __forceinline__ void load_floats(const float* from, float* to) {
    if constexpr (WIDTH == 1) {
        to[0] = from[0];
    } else if constexpr (WIDTH == 2) {
        const float2 two = *reinterpret_cast<const float2*>(from);
        to[0] = two.x, to[1] = two.y;
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + i);
            to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
        }
    }
}

// aligned: `to` is a multiple of the vector's size, else of an element's alone.
template <int WIDTH>
__device__ __forceinline__ void store_vector(Element* to, const float* from, bool aligned) {
    constexpr int WORDS = WIDTH / WORD_ELEMENTS;
    if (WORDS == 0 || !aligned) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) to[i] = from_float<Element>(from[i]);
    } else if constexpr (WORDS == 1) {
        *reinterpret_cast<uint32_t*>(to) = to_word<Element>(from);
    } else if constexpr (WORDS == 2) {
        *reinterpret_cast<uint2*>(to) = {to_word<Element>(from), to_word<Element>(from + WORD_ELEMENTS)};
    } else {
        *reinterpret_cast<uint4*>(to) = {to_word<Element>(from), to_word<Element>(from + WORD_ELEMENTS),
                                         to_word<Element>(from + 2 * WORD_ELEMENTS),
                                         to_word<Element>(from + 3 * WORD_ELEMENTS)};
    }
}

// load: the tile's keys and values into one stage; complete after cp_async_wait and a barrier.
__device__ __forceinline__ void load_tile(const Arguments& args, bool aligned, const Element* key, const Element* value,
                                          const Tile& tile, Element* smem_k, Element* smem_v) {
    if (!aligned) return copy_tile<false>(args, key, value, tile, smem_k, smem_v);
#pragma unroll
    for (int i = 0; i < CHUNKS_A_THREAD; ++i) {
        const int index = threadIdx.x + i * THREADS;
        if (CHUNKS_A_TILE % THREADS != 0 && index >= CHUNKS_A_TILE) break;
        const Chunk chunk = chunk_of(args, tile, index);
        const bool real = chunk.key < args.seqlen_kv;
        const int64_t from = real ? chunk.key : 0;
        cp_async_16(smem_k + chunk.row * KEY_STRIDE + chunk.column, key + from * args.k_stride_n + chunk.column, real);
        cp_async_16(smem_v + chunk.row * VALUE_STRIDE + chunk.column, value + from * args.v_stride_n + chunk.column, real);
    }
}

// NUM_STAGES stages: while one tile is computed, the next LOOKAHEAD are on their way.
constexpr int LOOKAHEAD = NUM_STAGES - 1;
static_assert(LOOKAHEAD >= 1 && SMEM_STAGES == NUM_STAGES, "every stage has its place in shared memory");

template <typename LoadQuery, typename Compute>
__device__ __forceinline__ void for_each_tile(const Arguments& args, bool aligned, TileIterator& tiles, const Element* key,
                                              const Element* value, Element* smem_k, Element* smem_v,
                                              const LoadQuery& load_query, const Compute& compute) {
    constexpr int KEY_STAGE = BLOCK_N * KEY_STRIDE, VALUE_STAGE = BLOCK_N * VALUE_STRIDE;
    Tile ahead[LOOKAHEAD];  // in flight, oldest first; none past the first `count`
    int count = 0;
    bool more = true;
#pragma unroll
    for (int stage = 0; stage < LOOKAHEAD; ++stage) {
        more = more && tiles.next(ahead[stage]);
        if (more) {
            load_tile(args, aligned, key, value, ahead[stage], smem_k + stage * KEY_STAGE, smem_v + stage * VALUE_STAGE);
            ++count;
        }
        cp_async_commit();  // also when empty: waiting counts groups
    }
    load_query();
    int stage = 0, load_stage = LOOKAHEAD;
    while (count > 0) {
        const Tile tile = ahead[0];
        cp_async_wait<LOOKAHEAD - 1>();
        __syncthreads();  // the tile is there for all, and the one before it, whose stage is filled next, no longer read
#pragma unroll
        for (int i = 0; i + 1 < LOOKAHEAD; ++i) ahead[i] = ahead[i + 1];
        --count;
        more = more && tiles.next(ahead[LOOKAHEAD - 1]);
        if (more) {
            load_tile(args, aligned, key, value, ahead[LOOKAHEAD - 1], smem_k + load_stage * KEY_STAGE,
                      smem_v + load_stage * VALUE_STAGE);
            ++count;
        }
        cp_async_commit();
        compute(tile, smem_k + stage * KEY_STAGE, smem_v + stage * VALUE_STAGE);
        stage = stage + 1 == NUM_STAGES ? 0 : stage + 1;
        load_stage = load_stage + 1 == NUM_STAGES ? 0 : load_stage + 1;
    }
    cp_async_wait<0>();
}

struct QueryTile {
    int batch, head, kv_head;
    int row_start, row_stop;
};

__device__ __forceinline__ QueryTile query_tile(const Arguments& args) {
    const int tiles_q = (args.seqlen_q + BLOCK_M - 1) / BLOCK_M;
    const int batch_head = blockIdx.x / tiles_q;
    const int tile = blockIdx.x % tiles_q;
    QueryTile at;
    at.batch = batch_head / args.num_heads;
    at.head = batch_head % args.num_heads;
    at.kv_head = at.head / (args.num_heads / args.num_kv_heads);
    at.row_start = tile * BLOCK_M;
    at.row_stop = smaller(at.row_start + BLOCK_M, args.seqlen_q);
    return at;
}

// The largest value, or the sum, over the lanes that share a row.
__device__ __forceinline__ float largest_of_row(float value) {
#pragma unroll
    for (int distance = LANES_PER_ROW / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
}

__device__ __forceinline__ float sum_of_row(float value) {
#pragma unroll
    for (int distance = LANES_PER_ROW / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// One thread's place in the block, and where its rows are.
struct Lane {
    int warp_row;   // the warp's first row in the tile
    int row_group;  // its place among the warp's groups of lanes
    int row_lane;   // its place among the lanes of a row

    __device__ __forceinline__ Lane() {
        const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
        warp_row = warp_idx * WARP_ROWS;
        row_group = lane_idx / LANES_PER_ROW;
        row_lane = lane_idx % LANES_PER_ROW;
    }

    // The tile's row that is the lane's i-th.
    __device__ __forceinline__ int row(int i) const { return warp_row + i * ROW_GROUPS + row_group; }
};

// CHUNK elements of a query row times scale, as float; zeros when not real.
template <bool ALIGNED>
__device__ __forceinline__ void load_query_chunk(const Element* from, bool real, float scale, float* to) {
    uint4 chunk = {0u, 0u, 0u, 0u};
    if (real) chunk = fetch_chunk<ALIGNED>(from);
    from_word<Element>(chunk.x, to);
    from_word<Element>(chunk.y, to + WORD_ELEMENTS);
    from_word<Element>(chunk.z, to + 2 * WORD_ELEMENTS);
    from_word<Element>(chunk.w, to + 3 * WORD_ELEMENTS);
#pragma unroll
    for (int e = 0; e < CHUNK; ++e) to[e] *= scale;
}

// load: the query rows times scale, in float32; rows past the last are 0. query points at the tile's first row.
template <bool ALIGNED>
__device__ __forceinline__ void load_query_tile(const Element* query, int64_t stride, int rows, float scale, const Lane& lane,
                                                float* smem_q, LaneTiles& tiles) {
    if constexpr (Q_IN_REGISTERS) {
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) {
            const int row = lane.row(i);
#pragma unroll
            for (int column = 0; column < HEAD_DIM; column += CHUNK) {
                load_query_chunk<ALIGNED>(query + row * stride + column, row < rows, scale, &tiles.query[i][column]);
            }
        }
    } else {
        constexpr int UNROLL = ALIGNED ? 8 : 1;
#pragma unroll UNROLL
        for (int index = threadIdx.x; index < BLOCK_M * CHUNKS_A_ROW; index += THREADS) {
            const int row = index / CHUNKS_A_ROW, column = index % CHUNKS_A_ROW * CHUNK;
            float values[CHUNK];
            load_query_chunk<ALIGNED>(query + row * stride + column, row < rows, scale, values);
#pragma unroll
            for (int e = 0; e < CHUNK; e += 4) {
                *reinterpret_cast<float4*>(smem_q + row * QUERY_STRIDE + column + e) = {values[e], values[e + 1],
                                                                                       values[e + 2], values[e + 3]};
            }
        }
    }
}

// scores: acc_s[i][c] = query[row i] . key[column c] for the lane's rows and its first COLUMNS columns; the others are 0.
template <int COLUMNS>
__device__ __forceinline__ void compute_scores(const Lane& lane, const float* smem_q, const Element* smem_k, LaneTiles& tiles) {
    constexpr int STEPS = HEAD_DIM / VECTOR;
    constexpr int UNROLL = Q_IN_REGISTERS ? STEPS : 16 / VECTOR;  // registers need constant indices
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
#pragma unroll
        for (int c = 0; c < LANE_COLUMNS; ++c) tiles.acc_s[i][c] = 0.0f;
    }
#pragma unroll UNROLL
    for (int step = 0; step < STEPS; ++step) {
        const int d = step * VECTOR;
        float keys[COLUMNS][VECTOR];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            load_vector<VECTOR>(smem_k + (c * LANES_PER_ROW + lane.row_lane) * KEY_STRIDE + d, keys[c]);
        }
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) {
            float query[VECTOR];
            if constexpr (Q_IN_REGISTERS) {
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) query[e] = tiles.query[i][d + e];
            } else {
                load_floats<VECTOR>(smem_q + lane.row(i) * QUERY_STRIDE + d, query);
            }
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) tiles.acc_s[i][c] += query[e] * keys[c][e];
            }
        }
    }
}

// mask: -inf where a pair of the tile is not active.
__device__ __forceinline__ void mask_scores(const Arguments& args, const QueryTile& at, const Lane& lane, const Tile& tile,
                                            int covered_begin, int covered_end, LaneTiles& tiles) {
    ColumnMask columns[LANE_COLUMNS];
#pragma unroll
    for (int c = 0; c < LANE_COLUMNS; ++c) {
        columns[c] = column_mask(args, tile, c * LANES_PER_ROW + lane.row_lane, covered_begin, covered_end);
    }
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
        // A row past the last one asks for the last one's mask: its scores are never written.
        const RowMask row = row_mask(args, at.batch, at.head, smaller(at.row_start + lane.row(i), at.row_stop - 1));
#pragma unroll
        for (int c = 0; c < LANE_COLUMNS; ++c) {
            if (!pair_active(row, columns[c])) tiles.acc_s[i][c] = NEGATIVE_INFINITY;
        }
    }
}

// softmax: p = 2^(s - max), the running maximum and sum; what was accumulated before is rescaled to the new maximum.
__device__ __forceinline__ void online_softmax(const Lane& lane, float* smem_p, LaneTiles& tiles) {
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
        float tile_max = tiles.acc_s[i][0];
#pragma unroll
        for (int c = 1; c < LANE_COLUMNS; ++c) tile_max = fmaxf(tile_max, tiles.acc_s[i][c]);
        const float new_max = fmaxf(tiles.row_max[i], largest_of_row(tile_max));
        // No active key so far: subtract 0, so that -inf - (-inf) never happens and every p is 0.
        const float base = new_max == NEGATIVE_INFINITY ? 0.0f : new_max;
        const float rescale = exp2_approximate(tiles.row_max[i] - base);  // 0 for the first key
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < LANE_COLUMNS; ++c) {
            const float p = exp2_approximate(tiles.acc_s[i][c] - base);
            smem_p[lane.row(i) * PROBABILITY_STRIDE + c * LANES_PER_ROW + lane.row_lane] = p;
            sum += p;
        }
        tiles.row_max[i] = new_max;
        tiles.row_sum[i] = tiles.row_sum[i] * rescale + sum;
#pragma unroll
        for (int d = 0; d < LANE_DIMS; ++d) tiles.acc_o[i][d] *= rescale;
    }
    __syncwarp();  // a row's probabilities are read by all of its lanes
}

// accumulate: acc_o[i][d] += p[row i][column] * value[column][d] over the tile's columns, four at a time.
__device__ __forceinline__ void accumulate(const Lane& lane, int columns, const float* smem_p, const Element* smem_v,
                                           LaneTiles& tiles) {
#pragma unroll 1
    for (int column = 0; column < columns; column += 4) {  // past the last column p and value are 0
        float p[LANE_ROWS][4];
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) load_floats<4>(smem_p + lane.row(i) * PROBABILITY_STRIDE + column, p[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int d = 0; d < LANE_DIMS; d += VALUE_VECTOR) {
                float values[VALUE_VECTOR];
                load_vector<VALUE_VECTOR>(
                    smem_v + (column + j) * VALUE_STRIDE + d * LANES_PER_ROW + lane.row_lane * VALUE_VECTOR, values);
#pragma unroll
                for (int i = 0; i < LANE_ROWS; ++i) {
#pragma unroll
                    for (int e = 0; e < VALUE_VECTOR; ++e) tiles.acc_o[i][d + e] += p[i][j] * values[e];
                }
            }
        }
    }
}

// finish: divide by the sum and write out and lse; a row with no active key gives 0 and -inf.
__device__ __forceinline__ void write_rows(const Arguments& args, bool aligned, const QueryTile& at, const Lane& lane,
                                           LaneTiles& tiles) {
    Element* out = static_cast<Element*>(args.out) + at.batch * args.o_stride_b + at.head * args.o_stride_h;
    float* lse = static_cast<float*>(args.lse) + (int64_t(at.batch) * args.num_heads + at.head) * args.seqlen_q;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
        const int row = at.row_start + lane.row(i);
        const float row_sum = sum_of_row(tiles.row_sum[i]);
        if (row >= at.row_stop) continue;
        const bool empty = tiles.row_max[i] == NEGATIVE_INFINITY && row_sum == 0.0f;
        const float inverse = empty ? 0.0f : 1.0f / row_sum;
#pragma unroll
        for (int d = 0; d < LANE_DIMS; ++d) tiles.acc_o[i][d] *= inverse;
#pragma unroll
        for (int d = 0; d < LANE_DIMS; d += VALUE_VECTOR) {
            store_vector<VALUE_VECTOR>(out + row * args.o_stride_n + d * LANES_PER_ROW + lane.row_lane * VALUE_VECTOR,
                                       &tiles.acc_o[i][d], aligned);
        }
        if (lane.row_lane == 0) {
            lse[row] = empty ? NEGATIVE_INFINITY : tiles.row_max[i] * 0.6931471805599453f + logf(row_sum);
        }
    }
}

__global__ void __launch_bounds__(THREADS) attention_forward(const __grid_constant__ Arguments args) {
    // setup
    DYNAMIC_SHARED_MEMORY(smem, 16);
    SharedTiles& shared = *reinterpret_cast<SharedTiles*>(smem);
    const QueryTile at = query_tile(args);
    const int rows = at.row_stop - at.row_start;
    const Lane lane;
    const bool aligned = rows_are_aligned(args);
    const Element* query = static_cast<const Element*>(args.query) + at.batch * args.q_stride_b + at.head * args.q_stride_h +
                           at.row_start * args.q_stride_n;
    const Element* key = static_cast<const Element*>(args.key) + at.batch * args.k_stride_b + at.kv_head * args.k_stride_h;
    const Element* value = static_cast<const Element*>(args.value) + at.batch * args.v_stride_b + at.kv_head * args.v_stride_h;
    LaneTiles tiles;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
        tiles.row_max[i] = NEGATIVE_INFINITY;
        tiles.row_sum[i] = 0.0f;
#pragma unroll
        for (int d = 0; d < LANE_DIMS; ++d) tiles.acc_o[i][d] = 0.0f;
    }

    // load
    const auto load_query = [&] {
        const float scale = float(args.softmax_scale * 1.4426950408889634);  // log2(e): the softmax works in powers of 2
        if (aligned) {
            load_query_tile<true>(query, args.q_stride_n, rows, scale, lane, shared.smem_q, tiles);
        } else {
            load_query_tile<false>(query, args.q_stride_n, rows, scale, lane, shared.smem_q, tiles);
        }
    };

    // compute
    TileIterator kv_tiles(args, at.batch, at.head, at.row_start, at.row_stop);
    const auto compute = [&](const Tile& tile, const Element* smem_k, const Element* smem_v) {
        if (lane.warp_row >= rows) return;  // none of the warp's rows is real
        const int columns = tile.stop - tile.start;
        if (LANE_COLUMNS % 2 == 0 && columns <= BLOCK_N / 2) {
            compute_scores<(LANE_COLUMNS + 1) / 2>(lane, shared.smem_q, smem_k, tiles);
        } else {
            compute_scores<LANE_COLUMNS>(lane, shared.smem_q, smem_k, tiles);
        }
        if (tile.kind != FULL) {
            mask_scores(args, at, lane, tile, kv_tiles.covered_begin, kv_tiles.covered_end, tiles);
        }
        online_softmax(lane, shared.smem_p, tiles);
        accumulate(lane, columns, shared.smem_p, smem_v, tiles);
    };
    for_each_tile(args, aligned, kv_tiles, key, value, shared.smem_k, shared.smem_v, load_query, compute);

    // finish
    write_rows(args, aligned, at, lane, tiles);
}

}  // namespace

// Past 48 KB a kernel must be told of its shared memory, once for each device.
static cudaError_t prepare(int device) {
    static std::atomic<uint64_t> prepared{0};
    const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
    if (SMEM_BYTES <= 48 * 1024 || (prepared.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
    const cudaError_t error =
        cudaFuncSetAttribute(attention_forward, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES);
    if (error == cudaSuccess) prepared.fetch_or(bit, std::memory_order_release);
    return error;
}

static cudaError_t launch_blocks(const Arguments& args, unsigned blocks, cudaStream_t stream) {
    const cudaError_t error = prepare(args.device);
    if (error != cudaSuccess) return error;
    return launch_grid(attention_forward, blocks, THREADS, SMEM_BYTES, stream, args);
}

__attribute__((visibility("hidden"))) int launch_kernel(const Arguments& args) {
    const int64_t tiles_q = (int64_t(args.seqlen_q) + BLOCK_M - 1) / BLOCK_M;
    const int64_t blocks = tiles_q * args.num_heads * args.batch;
    if (blocks == 0) return cudaSuccess;
    if (blocks > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;  // the grid's limit
    int previous = 0;
    cudaError_t error = cudaGetDevice(&previous);
    if (error == cudaSuccess && previous != args.device) error = cudaSetDevice(args.device);
    if (error == cudaSuccess) error = launch_blocks(args, unsigned(blocks), static_cast<cudaStream_t>(args.stream));
    if (error != cudaSuccess) cudaGetLastError();  // reported here: not to be found by somebody else's next check
    if (previous != args.device) cudaSetDevice(previous);
    return error;
}

__attribute__((visibility("hidden"))) const char* error_name(int code) {
    return cudaGetErrorString(static_cast<cudaError_t>(code));
}

__attribute__((visibility("hidden"))) int kernel_info(KernelInfo* info) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, attention_forward);
    if (error != cudaSuccess) {
        cudaGetLastError();
        return error;
    }
    info->registers = attributes.numRegs;
    info->local_bytes = int(attributes.localSizeBytes);
    info->smem_bytes = int(attributes.sharedSizeBytes) + SMEM_BYTES;
    info->max_threads = attributes.maxThreadsPerBlock;
    return cudaSuccess;
}
