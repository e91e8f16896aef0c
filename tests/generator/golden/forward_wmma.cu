// tilewright, generated: do not edit.
// forward_wmma/list 64x64 blocks_per_sm=1 num_stages=2 num_warps=4 q_in_registers=True smem_padding=8 tile_order=forward
// attention_forward, bfloat16, head_dim 128, sm_90a, mask terms: and_blocks
// digest 1bda2e3c12ba3d27
//
// O = softmax(softmax_scale * Q K^T + mask) V and lse on tensor cores through nvcuda::wmma. A block owns BLOCK_M query rows, each
// of its warps ROWS_PER_WARP of them. For each KV tile a warp computes its scores into its own shared memory, where two lanes
// share a row for the online softmax; the probabilities take the scores' place and multiply V. O stays in accumulators.
#include "device.cuh"

#include <atomic>
#include <cstdint>
#include <limits>

constexpr int HEAD_DIM = 128;
constexpr int BLOCK_M = 64;
constexpr int BLOCK_N = 64;
constexpr int NUM_WARPS = 4;
constexpr int ROWS_PER_WARP = 16;
constexpr int THREADS = NUM_WARPS * 32;
constexpr int NUM_STAGES = 2;           // KV tiles in flight and in use
constexpr int SMEM_STAGES = 2;          // of them in shared memory
constexpr int PADDING = 8;              // elements a row of Q, K and V; 8 spreads the rows of a fragment over the banks
constexpr int BLOCKS_PER_SM = 1;        // blocks that the registers must leave room for
constexpr int TILE_ALIGN = 1;           // a run of tiles starts at any key: rows are copied one by one
constexpr unsigned WARP = 0xffffffffu;  // every lane

static_assert(BLOCK_M == NUM_WARPS * ROWS_PER_WARP, "the warps share out the query rows");
static_assert(ROWS_PER_WARP % 16 == 0 && HEAD_DIM % 16 == 0, "rows and head_dim are whole fragments");
static_assert(BLOCK_N % 32 == 0, "the mask of a tile's row is whole words");

constexpr bool HAS_BOUND = false;
constexpr bool HAS_DOCUMENT = false;
constexpr bool HAS_WINDOW = false;
constexpr bool HAS_STRIDE = false;
constexpr bool HAS_TOKENS = false;
constexpr bool HAS_OR_BLOCKS = false;
constexpr bool HAS_AND_BLOCKS = true;
constexpr bool HAS_AND_BITS = false;
constexpr bool HAS_DENSE = false;
constexpr bool HAS_SCATTERED = HAS_STRIDE || HAS_TOKENS;
constexpr bool HAS_BRACKET = HAS_WINDOW || HAS_SCATTERED || HAS_OR_BLOCKS;

__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int lowest_bit(uint32_t word) { return __ffs(int(word)) - 1; }
constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();

using Element = bfloat16;

// Fragments are 16 x 16 x 16; which element a lane holds is wmma's own business, and nothing here relies on it.
constexpr int FRAGMENT = 16;
using RowOperand = wmma::fragment<wmma::matrix_a, FRAGMENT, FRAGMENT, FRAGMENT, Element, wmma::row_major>;      // Q, P
using KeyOperand = wmma::fragment<wmma::matrix_b, FRAGMENT, FRAGMENT, FRAGMENT, Element, wmma::col_major>;      // K^T
using ValueOperand = wmma::fragment<wmma::matrix_b, FRAGMENT, FRAGMENT, FRAGMENT, Element, wmma::row_major>;    // V
using Accumulator = wmma::fragment<wmma::accumulator, FRAGMENT, FRAGMENT, FRAGMENT, float>;

constexpr int ROW_BLOCKS = ROWS_PER_WARP / FRAGMENT;
constexpr int KEY_BLOCKS = BLOCK_N / FRAGMENT;
constexpr int DIM_BLOCKS = HEAD_DIM / FRAGMENT;
constexpr int MASK_WORDS = BLOCK_N / 32;
// Fragments of scores that are accumulated side by side: enough to hide the latency of one, few enough for the registers.
constexpr int SCORE_BLOCKS = 4;
static_assert(KEY_BLOCKS % SCORE_BLOCKS == 0, "a tile is whole groups of score fragments");

constexpr int KEY_STRIDE = HEAD_DIM + PADDING;
constexpr int VALUE_STRIDE = HEAD_DIM + PADDING;
// 8 more than a multiple of 32 floats: a fragment's store, the softmax's reads and its stores of P then meet no bank twice.
constexpr int SCORE_STRIDE = BLOCK_N + 8;  // floats
constexpr int P_STRIDE = BLOCK_N + 8;      // elements, in the scores' place
// A row's maximum may lag behind by this many powers of two before what was accumulated is rescaled: P is then at most 256,
// which half holds as exactly as 1, and on ordinary scores nothing is rescaled after the first tiles.
constexpr float RESCALE_THRESHOLD = 8.0f;

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

// What a block keeps in shared memory. wmma wants fragments to start at multiples of 32 bytes.
struct alignas(32) SharedTiles {
    Element smem_k[SMEM_STAGES * BLOCK_N * KEY_STRIDE];
    Element smem_v[SMEM_STAGES * BLOCK_N * VALUE_STRIDE];
    float smem_s[BLOCK_M * SCORE_STRIDE];  // each warp its own rows: scores, then P in their place
};
constexpr int SMEM_BYTES = sizeof(SharedTiles);
static_assert(SMEM_BYTES == 88064, "shared memory is what the legality rules count");
static_assert(BLOCK_N * KEY_STRIDE * sizeof(Element) % 32 == 0, "every stage starts at a multiple of 32 bytes");

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
    static constexpr int covered_begin = 0, covered_end = 0;

    __device__ __forceinline__ TileIterator(const Arguments& args, int batch, int head, int row_start, int)
        : seqlen_kv_(args.seqlen_kv) {
        const int64_t tile_row = batch * args.tile_stride_b + head * args.tile_stride_h + row_start / BLOCK_M;
        indices_ = static_cast<const int*>(args.kv_indices) + tile_row * args.tiles_kv;
        num_full_ = static_cast<const int*>(args.full_num_blocks)[tile_row];
        num_active_ = static_cast<const int*>(args.kv_num_blocks)[tile_row];
        at_ = 0;
    }

    __device__ __forceinline__ bool next(Tile& tile) {
        if (at_ >= num_active_) return false;
        const int start = indices_[at_] * BLOCK_N;
        tile = {start, smaller(start + BLOCK_N, seqlen_kv_), at_ < num_full_ ? FULL : PARTIAL};
        ++at_;
        return true;
    }

  private:
    const int* indices_;
    int num_full_, num_active_, at_, seqlen_kv_;
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

// Columns [begin, end) of a word of 32.
__device__ __forceinline__ uint32_t bits_between(int begin, int end) {
    begin = larger(begin, 0);
    end = smaller(end, 32);
    return end > begin ? WARP >> (32 - (end - begin)) << begin : 0u;
}

// Whether a tile's words follow from the rows' intervals and whole words of the mask. Where not, pairs are asked one by one:
// scattered keys under a bound, blocks that are no multiple of a word, a mask of bytes.
__device__ __forceinline__ bool words_suffice(const Arguments& args, const Tile& tile) {
    if constexpr (HAS_DENSE) return false;
    if constexpr (HAS_OR_BLOCKS || HAS_AND_BLOCKS) return args.sparse_block_kv % 32 == 0;
    if constexpr (HAS_BOUND || HAS_DOCUMENT) return tile.kind != GATHERED;
    return true;
}

// The word of a row's bits for columns [32 * word, 32 * word + 32) of a tile; real and scattered: which columns are keys of
// this tile, and which of them are scattered ones. Lists and bitmaps start tiles at multiples of a word.
__device__ __forceinline__ uint32_t visible_word(const Arguments& args, const Tile& tile, int word, uint32_t real,
                                                 uint32_t scattered, const RowMask& row) {
    const int first = tile.start + word * 32;
    uint32_t visible = real;
    if constexpr (HAS_BOUND || HAS_DOCUMENT) visible &= bits_between(row.begin - first, row.end - first);
    uint32_t block = 0u;
    if constexpr (HAS_OR_BLOCKS || HAS_AND_BLOCKS) {
        if (first < args.seqlen_kv && bit_at(row.block_row, first / args.sparse_block_kv)) block = WARP;
    }
    if constexpr (HAS_BRACKET) {
        uint32_t bracket = scattered;
        if constexpr (HAS_WINDOW) {
            if (tile.kind != GATHERED) bracket |= bits_between(row.window_begin - first, row.window_end - first);
        }
        if constexpr (HAS_OR_BLOCKS) bracket |= block;
        visible &= bracket;
    }
    if constexpr (HAS_AND_BLOCKS) visible &= block;
    if constexpr (HAS_AND_BITS) visible &= first < args.seqlen_kv ? row.bits_row[first >> 5] : 0u;
    return visible;
}

// The mask of the row that lane `from` holds, in every lane.
__device__ __forceinline__ RowMask broadcast(const RowMask& mask, int from) {
    RowMask row;
    row.begin = __shfl_sync(WARP, mask.begin, from);
    row.end = __shfl_sync(WARP, mask.end, from);
    if constexpr (HAS_WINDOW) {
        row.window_begin = __shfl_sync(WARP, mask.window_begin, from);
        row.window_end = __shfl_sync(WARP, mask.window_end, from);
    }
    if constexpr (HAS_OR_BLOCKS || HAS_AND_BLOCKS) {
        row.block_row = reinterpret_cast<const uint32_t*>(__shfl_sync(WARP, uintptr_t(mask.block_row), from));
    }
    if constexpr (HAS_AND_BITS) {
        row.bits_row = reinterpret_cast<const uint32_t*>(__shfl_sync(WARP, uintptr_t(mask.bits_row), from));
    }
    if constexpr (HAS_DENSE) {
        row.dense_row = reinterpret_cast<const uint8_t*>(__shfl_sync(WARP, uintptr_t(mask.dense_row), from));
    }
    return row;
}

// Which pairs of a tile that is not FULL are active, for FRAGMENT rows from row_start: lanes 2r and 2r + 1 get row r's bits,
// bit c % 32 of word c / 32 for column c. columns[w] is this lane's column w * 32 + lane_idx. Returns whether any pair is
// active. Rows from row_stop on get the last row's bits.
__device__ __forceinline__ bool visible_pairs(const Arguments& args, const QueryTile& at, const Tile& tile, int row_start,
                                              const ColumnMask (&columns)[MASK_WORDS], uint32_t (&visible)[MASK_WORDS]) {
    const int lane_idx = threadIdx.x % 32;
    const RowMask own = row_mask(args, at.batch, at.head, smaller(row_start + lane_idx / 2, at.row_stop - 1));
    uint32_t any = 0u;
    if (words_suffice(args, tile)) {
#pragma unroll
        for (int w = 0; w < MASK_WORDS; ++w) {
            const uint32_t real = __ballot_sync(WARP, columns[w].key < args.seqlen_kv);
            const uint32_t scattered = HAS_SCATTERED ? __ballot_sync(WARP, columns[w].scattered) : 0u;
            visible[w] = visible_word(args, tile, w, real, scattered, own);
            any |= visible[w];
        }
        return __any_sync(WARP, any != 0u);
    }
#pragma unroll 4
    for (int r = 0; r < FRAGMENT; ++r) {
        const RowMask row = broadcast(own, 2 * r);
#pragma unroll
        for (int w = 0; w < MASK_WORDS; ++w) {
            const uint32_t word = __ballot_sync(WARP, pair_active(row, columns[w]));
            any |= word;
            if (lane_idx / 2 == r) visible[w] = word;
        }
    }
    return any != 0u;
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

// load: COLUMNS of a warp's query rows, from `query`'s on, to shared memory; rows from row_stop on are 0.
template <int COLUMNS>
__device__ __forceinline__ void load_query_rows(const Element* query, int64_t row_stride, bool aligned, int row_start,
                                                int row_stop, Element* to, int to_stride) {
    constexpr int CHUNKS = COLUMNS / CHUNK;
    for (int index = threadIdx.x % 32; index < ROWS_PER_WARP * CHUNKS; index += 32) {
        const int row = index / CHUNKS, column = index % CHUNKS * CHUNK;
        uint4 chunk = {0u, 0u, 0u, 0u};
        if (row_start + row < row_stop) {
            const Element* from = query + (row_start + row) * row_stride + column;
            chunk = aligned ? fetch_chunk<true>(from) : fetch_chunk<false>(from);
        }
        *reinterpret_cast<uint4*>(to + row * to_stride + column) = chunk;
    }
}

// A warp's queries: [ROWS_PER_WARP, HEAD_DIM].
struct Query {
    RowOperand q[ROW_BLOCKS][DIM_BLOCKS];

    // From shared memory at `from`: blocks [first, first + COUNT) of head_dim.
    template <int COUNT>
    __device__ __forceinline__ void load(int first, const Element* from, int stride) {
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
            for (int d = 0; d < COUNT; ++d) {
                load_fragment(q[r][first + d], from + r * FRAGMENT * stride + d * FRAGMENT, stride);
            }
        }
    }

    __device__ __forceinline__ RowOperand block(int r, int d) const { return q[r][d]; }
};

// load: queries into registers, through the warp's place for scores, as many columns at a time as fit there.
template <int FIRST = 0>
__device__ __forceinline__ void load_query(const Element* query, int64_t row_stride, bool aligned, int row_start, int row_stop,
                                           Element* smem, Query& q) {
    if constexpr (FIRST < DIM_BLOCKS) {
        constexpr int COUNT = DIM_BLOCKS - FIRST < 2 * KEY_BLOCKS ? DIM_BLOCKS - FIRST : 2 * KEY_BLOCKS;
        __syncwarp();
        load_query_rows<COUNT * FRAGMENT>(query + FIRST * FRAGMENT, row_stride, aligned, row_start, row_stop, smem,
                                          2 * SCORE_STRIDE);
        __syncwarp();
        q.load<COUNT>(FIRST, smem, 2 * SCORE_STRIDE);
        load_query<FIRST + COUNT>(query, row_stride, aligned, row_start, row_stop, smem, q);
    }
}

// scores: acc_s = Q K^T, [ROWS_PER_WARP, BLOCK_N], not scaled.
__device__ __forceinline__ void compute_scores(const Query& query, const Element* smem_k, float* smem_s) {
#pragma unroll
    for (int n = 0; n < KEY_BLOCKS; n += SCORE_BLOCKS) {
        Accumulator acc_s[ROW_BLOCKS][SCORE_BLOCKS];
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
            for (int i = 0; i < SCORE_BLOCKS; ++i) wmma::fill_fragment(acc_s[r][i], 0.0f);
        }
#pragma unroll
        for (int d = 0; d < DIM_BLOCKS; ++d) {
            RowOperand q[ROW_BLOCKS];
#pragma unroll
            for (int r = 0; r < ROW_BLOCKS; ++r) q[r] = query.block(r, d);
#pragma unroll
            for (int i = 0; i < SCORE_BLOCKS; ++i) {
                KeyOperand k;
                load_fragment(k, smem_k + (n + i) * FRAGMENT * KEY_STRIDE + d * FRAGMENT, KEY_STRIDE);
#pragma unroll
                for (int r = 0; r < ROW_BLOCKS; ++r) wmma::mma_sync(acc_s[r][i], q[r], k, acc_s[r][i]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
            for (int i = 0; i < SCORE_BLOCKS; ++i) {
                wmma::store_matrix_sync(smem_s + r * FRAGMENT * SCORE_STRIDE + (n + i) * FRAGMENT, acc_s[r][i], SCORE_STRIDE,
                                        wmma::mem_row_major);
            }
        }
    }
}

// acc_o[row] *= factor of the row, which lanes 2 * row and 2 * row + 1 hold. smem_factor: 16 x 16 floats.
__device__ __forceinline__ void rescale(float factor, float* smem_factor, Accumulator (&acc_o)[DIM_BLOCKS]) {
    // A fragment whose rows hold the factors tells each lane the factor of each of its elements. By columns: no bank twice.
    const int lane_idx = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < FRAGMENT; c += 2) smem_factor[(c + lane_idx % 2) * FRAGMENT + lane_idx / 2] = factor;
    __syncwarp();
    Accumulator factors;
    wmma::load_matrix_sync(factors, smem_factor, FRAGMENT, wmma::mem_col_major);
#pragma unroll
    for (int d = 0; d < DIM_BLOCKS; ++d) {
#pragma unroll
        for (int i = 0; i < factors.num_elements; ++i) acc_o[d].x[i] *= factors.x[i];
    }
}

// softmax: P = 2^(scale_log2 * acc_s - row_max) for FRAGMENT rows, in the scores' place; the running maximum, and each lane's
// share of the running sum. Lanes 2r and 2r + 1 hold row r, four columns each in turn.
__device__ __forceinline__ void online_softmax(float* smem_s, float scale_log2, bool masked,
                                               const uint32_t (&visible)[MASK_WORDS], float& row_max, float& row_sum,
                                               Accumulator (&acc_o)[DIM_BLOCKS]) {
    constexpr int QUADS = BLOCK_N / 8;  // groups of four columns a lane has
    const int lane_idx = threadIdx.x % 32;
    const int row = lane_idx / 2, first_column = lane_idx % 2 * 4;
    float p[QUADS][4];
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
        const float4 s = *reinterpret_cast<const float4*>(smem_s + row * SCORE_STRIDE + q * 8 + first_column);
        p[q][0] = s.x * scale_log2;
        p[q][1] = s.y * scale_log2;
        p[q][2] = s.z * scale_log2;
        p[q][3] = s.w * scale_log2;
    }
    if (masked) {
#pragma unroll
        for (int w = 0; w < MASK_WORDS; ++w) {
            const uint32_t bits = visible[w] >> first_column;
#pragma unroll
            for (int q = 0; q < 4; ++q) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    if ((bits >> (q * 8 + c) & 1u) == 0u) p[w * 4 + q][c] = NEGATIVE_INFINITY;
                }
            }
        }
    }
    float tile_max = NEGATIVE_INFINITY;
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
        tile_max = fmaxf(tile_max, fmaxf(fmaxf(p[q][0], p[q][1]), fmaxf(p[q][2], p[q][3])));  // passes over NaN
    }
    tile_max = fmaxf(tile_max, __shfl_xor_sync(WARP, tile_max, 1));
    __syncwarp();  // every score was read: factors, then P, may take their place

    if (__any_sync(WARP, tile_max > row_max + RESCALE_THRESHOLD)) {
        const float new_max = fmaxf(row_max, tile_max);
        const float factor = exp2_approximate(row_max - (new_max == NEGATIVE_INFINITY ? 0.0f : new_max));
        row_max = new_max;
        row_sum *= factor;
        rescale(factor, smem_s, acc_o);
        __syncwarp();
    }
    // No active key so far: subtract 0, so that -inf - (-inf) never happens and every p is 0.
    const float base = row_max == NEGATIVE_INFINITY ? 0.0f : row_max;
    Element* smem_p = reinterpret_cast<Element*>(smem_s) + row * P_STRIDE + first_column;
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
#pragma unroll
        for (int c = 0; c < 4; ++c) p[q][c] = exp2_approximate(p[q][c] - base);
        row_sum += (p[q][0] + p[q][1]) + (p[q][2] + p[q][3]);
        *reinterpret_cast<uint2*>(smem_p + q * 8) = {pack<Element>(p[q][0], p[q][1]), pack<Element>(p[q][2], p[q][3])};
    }
}

// accumulate: acc_o += P V, [ROWS_PER_WARP, HEAD_DIM].
__device__ __forceinline__ void accumulate(const float* smem_s, const Element* smem_v,
                                           Accumulator (&acc_o)[ROW_BLOCKS][DIM_BLOCKS]) {
#pragma unroll
    for (int n = 0; n < KEY_BLOCKS; ++n) {
        RowOperand p[ROW_BLOCKS];
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
            const float* block = smem_s + r * FRAGMENT * SCORE_STRIDE;
            load_fragment(p[r], reinterpret_cast<const Element*>(block) + n * FRAGMENT, P_STRIDE);
        }
#pragma unroll
        for (int d = 0; d < DIM_BLOCKS; ++d) {
            ValueOperand v;
            load_fragment(v, smem_v + n * FRAGMENT * VALUE_STRIDE + d * FRAGMENT, VALUE_STRIDE);
#pragma unroll
            for (int r = 0; r < ROW_BLOCKS; ++r) wmma::mma_sync(acc_o[r][d], p[r], v, acc_o[r][d]);
        }
    }
}

// Eight elements to global memory; aligned: the address is a multiple of 16 bytes.
__device__ __forceinline__ void store_chunk(Element* to, uint4 chunk, bool aligned) {
    if (aligned) {
        *reinterpret_cast<uint4*>(to) = chunk;
        return;
    }
    uint16_t* halves = reinterpret_cast<uint16_t*>(to);
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        halves[2 * i] = uint16_t(words[i]);
        halves[2 * i + 1] = uint16_t(words[i] >> 16);
    }
}

// epilogue: COUNT blocks of FRAGMENT columns of acc_o over the row sums, through the warp's place for scores.
template <int FIRST = 0>
__device__ __forceinline__ void store_rows(const Accumulator (&acc_o)[DIM_BLOCKS], float inverse, float* smem_s, Element* out,
                                           int64_t row_stride, bool aligned, int rows) {
    if constexpr (FIRST < DIM_BLOCKS) {
        constexpr int COUNT = DIM_BLOCKS - FIRST < KEY_BLOCKS ? DIM_BLOCKS - FIRST : KEY_BLOCKS;
        __syncwarp();
#pragma unroll
        for (int d = 0; d < COUNT; ++d) {
            wmma::store_matrix_sync(smem_s + d * FRAGMENT, acc_o[FIRST + d], SCORE_STRIDE, wmma::mem_row_major);
        }
        __syncwarp();
        constexpr int CHUNKS = COUNT * FRAGMENT / CHUNK;  // a row's; FRAGMENT rows of them are COUNT for every lane
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int index = threadIdx.x % 32 + i * 32;
            const int row = index / CHUNKS, column = index % CHUNKS * CHUNK;
            const float factor = __shfl_sync(WARP, inverse, 2 * row);
            const float4* from = reinterpret_cast<const float4*>(smem_s + row * SCORE_STRIDE + column);
            const float4 low = from[0], high = from[1];
            const uint4 chunk = {
                pack<Element>(low.x * factor, low.y * factor), pack<Element>(low.z * factor, low.w * factor),
                pack<Element>(high.x * factor, high.y * factor), pack<Element>(high.z * factor, high.w * factor)};
            if (row < rows) store_chunk(out + row * row_stride + FIRST * FRAGMENT + column, chunk, aligned);
        }
        store_rows<FIRST + COUNT>(acc_o, inverse, smem_s, out, row_stride, aligned, rows);
    }
}

__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) attention_forward(const __grid_constant__ Arguments args) {
    // setup
    DYNAMIC_SHARED_MEMORY(smem, 128);
    SharedTiles& shared = *reinterpret_cast<SharedTiles*>(smem);
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    float* smem_s = shared.smem_s + warp_idx * ROWS_PER_WARP * SCORE_STRIDE;
    const QueryTile at = query_tile(args);
    const bool aligned = rows_are_aligned(args);
    const int row_start = at.row_start + warp_idx * ROWS_PER_WARP;  // this warp's
    const bool has_rows = row_start < at.row_stop;
    const Element* query = static_cast<const Element*>(args.query) + at.batch * args.q_stride_b + at.head * args.q_stride_h;
    const Element* key = static_cast<const Element*>(args.key) + at.batch * args.k_stride_b + at.kv_head * args.k_stride_h;
    const Element* value = static_cast<const Element*>(args.value) + at.batch * args.v_stride_b + at.kv_head * args.v_stride_h;
    const float scale_log2 = float(args.softmax_scale * 1.4426950408889634);  // log2(e): the softmax works in powers of 2

    Query query_rows;
    Accumulator acc_o[ROW_BLOCKS][DIM_BLOCKS];
    float row_max[ROW_BLOCKS], row_sum[ROW_BLOCKS];  // row_max in powers of 2; row_sum is this lane's half of the row
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
        for (int d = 0; d < DIM_BLOCKS; ++d) wmma::fill_fragment(acc_o[r][d], 0.0f);
        row_max[r] = NEGATIVE_INFINITY;
        row_sum[r] = 0.0f;
    }
    TileIterator tiles(args, at.batch, at.head, at.row_start, at.row_stop);

    // load
    const auto load_rows = [&] {
        if (!has_rows) return;
        Element* staging = reinterpret_cast<Element*>(smem_s);
        load_query(query, args.q_stride_n, aligned, row_start, at.row_stop, staging, query_rows);
        __syncwarp();
    };

    // compute
    const auto attend = [&](const Tile& tile, const Element* tile_k, const Element* tile_v) {
        if (!has_rows) return;
        const bool masked = tile.kind != FULL;
        uint32_t visible[ROW_BLOCKS][MASK_WORDS] = {};
        if (masked) {
            ColumnMask columns[MASK_WORDS];
#pragma unroll
            for (int w = 0; w < MASK_WORDS; ++w) {
                columns[w] = column_mask(args, tile, w * 32 + lane_idx, tiles.covered_begin, tiles.covered_end);
            }
            bool any = false;
#pragma unroll
            for (int r = 0; r < ROW_BLOCKS; ++r) {
                any |= visible_pairs(args, at, tile, row_start + r * FRAGMENT, columns, visible[r]);
            }
            if (!any) return;
        }

        // scores
        compute_scores(query_rows, tile_k, smem_s);
        __syncwarp();

        // softmax
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
            float* block_s = smem_s + r * FRAGMENT * SCORE_STRIDE;
            online_softmax(block_s, scale_log2, masked, visible[r], row_max[r], row_sum[r], acc_o[r]);
        }
        __syncwarp();

        // accumulate
        accumulate(smem_s, tile_v, acc_o);
        __syncwarp();  // P was read: the next tile's scores may take its place
    };
    for_each_tile(args, aligned, tiles, key, value, shared.smem_k, shared.smem_v, load_rows, attend);

    // finish
    if (!has_rows) return;
    Element* out = static_cast<Element*>(args.out) + at.batch * args.o_stride_b + at.head * args.o_stride_h;
    float* lse = static_cast<float*>(args.lse) + (int64_t(at.batch) * args.num_heads + at.head) * args.seqlen_q;
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
        const int first_row = row_start + r * FRAGMENT;
        const int row = first_row + lane_idx / 2;
        const float total = row_sum[r] + __shfl_xor_sync(WARP, row_sum[r], 1);
        const bool empty = row_max[r] == NEGATIVE_INFINITY && total == 0.0f;  // no active key
        const float inverse = empty ? 0.0f : 1.0f / total;
        if (lane_idx % 2 == 0 && row < at.row_stop) {
            lse[row] = empty ? NEGATIVE_INFINITY : row_max[r] * 0.6931471805599453f + logf(total);  // ln(2): natural again
        }
        store_rows(acc_o[r], inverse, smem_s + r * FRAGMENT * SCORE_STRIDE, out + first_row * args.o_stride_n,
                   args.o_stride_n, aligned, at.row_stop - first_row);
    }
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
