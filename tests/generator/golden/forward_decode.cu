// tilewright, generated: do not edit.
// forward_decode/list 16x32 blocks_per_sm=1 num_stages=3 num_warps=4
// attention_forward, bfloat16, head_dim 128, sm_90a, mask terms: and_blocks
// digest 441cbb80a36850eb
//
// O = softmax(softmax_scale * Q K^T + mask) V and lse for few queries, which read far more than they compute, after Flash-Decoding.
// A block's rows are the queries of all heads that share a KV head, so that its keys are read once. Keys are split between blocks,
// and a block's between its warps, each of which streams its own tiles; what they found is merged at the end.
#include "device.cuh"

#include <atomic>
#include <cstdint>
#include <limits>

constexpr int HEAD_DIM = 128;
constexpr int BLOCK_M = 16;          // rows of a block: queries of one head or of several
constexpr int BLOCK_N = 32;
constexpr int NUM_WARPS = 4;
constexpr int ROWS_PER_WARP = BLOCK_M;  // each warp has all rows, and keys of its own
constexpr int THREADS = NUM_WARPS * 32;
constexpr int NUM_STAGES = 3;        // KV tiles of a warp in flight and in use
constexpr int LOOKAHEAD = NUM_STAGES - 1;
constexpr bool QUERY_IN_REGISTERS = true;
constexpr int BLOCKS_PER_SM = 1;     // blocks that the registers must leave room for
constexpr int MOST_PACKED = 64;         // rows: with more than these a block has the queries of one head
constexpr int TILE_ALIGN = 1;           // a run of tiles starts at any key: rows are copied one by one
constexpr unsigned WARP = 0xffffffffu;  // every lane

static_assert(BLOCK_M % 16 == 0 && HEAD_DIM % 16 == 0, "rows and head_dim are whole fragments");
static_assert(BLOCK_N % 32 == 0 && BLOCK_N <= 128, "the mask of a tile's row is whole words, four at most");
static_assert(LOOKAHEAD >= 1, "a stage to compute from and one to fill");

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

constexpr bool HAS_GATHERED = false;  // tiles may hold scattered keys, packed
constexpr bool HAS_LIST = true;
__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int lowest_bit(uint32_t word) { return __ffs(int(word)) - 1; }
constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();

using Element = bfloat16;

// A row of Q, K or V in shared memory is HEAD_DIM elements in chunks of 16 bytes. Nothing pads it: instead the place of a chunk
// depends on its row. The 8 rows of a matrix that ldmatrix reads, and the chunks that 8 lanes copy, then lie in different banks.
constexpr int CHUNK = 8;  // elements
constexpr int CHUNKS_A_ROW = HEAD_DIM / CHUNK;
constexpr int SWIZZLE = CHUNKS_A_ROW % 8 == 0 ? 8 : CHUNKS_A_ROW % 4 == 0 ? 4 : 2;  // neighbours that change places
static_assert(sizeof(Element) == 2 && HEAD_DIM % 16 == 0, "a row is a whole number of 16-byte chunks, and an even one");

// Where a row's chunk begins, in elements. Rows repeat after 8; 8 / SWIZZLE of them fill the banks once.
__device__ __forceinline__ int swizzled(int row, int chunk) {
    return row * HEAD_DIM + int(unsigned(chunk) ^ unsigned(row) / (8 / SWIZZLE) % SWIZZLE) * CHUNK;
}

// What a lane reads of a block of 16 rows and 16 columns with one ldmatrix_x4: a row's left or right half. Blocks whose place in
// the row differs by SWIZZLE chunks lie a constant apart; between those, the swizzle makes the difference one of bits.
struct BlockPlace {
    int at;  // of the first block of the row

    // rows: the first of 16, at a multiple of 16; block: which 16 columns.
    __device__ __forceinline__ const Element* operator()(const Element* rows, int block) const {
        constexpr int PERIOD = SWIZZLE / 2;  // blocks
        return rows + block / PERIOD * (SWIZZLE * CHUNK) + (at ^ block % PERIOD * (2 * CHUNK));
    }
};

// As mma wants a left operand of 16 rows, and transposed a right one of 16 rows: left halves of rows 0 to 7 and 8 to 15, then
// right halves.
__device__ __forceinline__ BlockPlace place_by_halves(int lane_idx) { return {swizzled(lane_idx % 16, lane_idx / 16)}; }

// As mma wants the columns of a right operand: both halves of rows 0 to 7, then of rows 8 to 15.
__device__ __forceinline__ BlockPlace place_by_rows(int lane_idx) {
    return {swizzled(lane_idx % 8 + lane_idx / 16 * 8, lane_idx / 8 % 2)};
}

// Blocks of 16 rows, keys or dims; an accumulator covers 8 columns, so a block of keys or dims is two of them.
constexpr int ROW_BLOCKS = BLOCK_M / 16;
constexpr int KEY_BLOCKS = BLOCK_N / 16;
constexpr int DIM_BLOCKS = HEAD_DIM / 16;
constexpr int MASK_WORDS = BLOCK_N / 32;
// A row's maximum may lag behind by this many powers of two before what was accumulated is rescaled: P is then at most 256,
// which half holds as exactly as 1, and on ordinary scores nothing is rescaled after the first tiles.
constexpr float RESCALE_THRESHOLD = 8.0f;
// The maximum of a row that has met no active key. Finite, so that -inf - (-inf) never happens: 2^(-inf - NO_MAX) is 0.
constexpr float NO_MAX = std::numeric_limits<float>::lowest();

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
    void* workspace;  // scratch of workspace_bytes, at a multiple of 256 bytes
};

struct KernelInfo {
    int registers;    // a thread
    int local_bytes;  // a thread: spills and indexed arrays
    int smem_bytes;   // a block, static and dynamic
    int max_threads;  // a block
};

namespace {

// How a launch deals out its work: a unit is up to BLOCK_M of the rows of `heads` query heads, row r being query r % seqlen_q of
// head r / seqlen_q of them; each unit has `splits` blocks, one after the other, which take parts of its tiles.
struct Split {
    int heads, splits;
    int64_t units;
};

// A unit's rows, [row_start, row_stop) of the heads from `head` on.
struct QueryTile {
    int batch, head, kv_head;
    int row_start, row_stop;
};

// What a block found of a row.
struct RowResult {
    float row_max, row_sum;  // row_max in powers of 2
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

class TileSequence {
  public:
    static constexpr int covered_begin = 0, covered_end = 0;
    int count;  // numbers are from 0 to count - 1

    __device__ __forceinline__ TileSequence(const Arguments& args, int batch, int head, int row_start, int)
        : seqlen_kv_(args.seqlen_kv) {
        const int64_t tile_row = batch * args.tile_stride_b + head * args.tile_stride_h + row_start / BLOCK_M;
        indices_ = static_cast<const int*>(args.kv_indices) + tile_row * args.tiles_kv;
        num_full_ = static_cast<const int*>(args.full_num_blocks)[tile_row];
        count = static_cast<const int*>(args.kv_num_blocks)[tile_row];
    }

    // True: every number has a tile.
    __device__ __forceinline__ bool at(int number, Tile& tile) const {
        const int start = indices_[number] * BLOCK_N;
        tile = {start, smaller(start + BLOCK_N, seqlen_kv_), number < num_full_ ? FULL : PARTIAL};
        return true;
    }

  private:
    const int* indices_;
    int num_full_, seqlen_kv_;
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

// A KV tile in shared memory. Rows repeat their pattern of banks from a multiple of 128 bytes on.
struct alignas(128) Stage {
    Element smem_k[BLOCK_N * HEAD_DIM];
    Element smem_v[BLOCK_N * HEAD_DIM];
};

// What a block keeps in shared memory. A warp's stages take its part of the output when it has seen all its tiles.
struct SharedTiles {
    Stage stages[NUM_WARPS][NUM_STAGES];
    Element smem_q[BLOCK_M * HEAD_DIM];
    RowResult rows[NUM_WARPS][BLOCK_M];
    unsigned arrived;  // blocks of this unit that were done before this one
};
constexpr int SMEM_BYTES = sizeof(SharedTiles);
static_assert(SMEM_BYTES == 201344, "shared memory is what the legality rules count");

constexpr int OUTPUT_STRIDE = HEAD_DIM + 8;  // floats: the rows that a warp writes at once then lie in different banks
static_assert(BLOCK_M * OUTPUT_STRIDE * sizeof(float) <= NUM_STAGES * sizeof(Stage), "the output fits its warp's stages");

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

// The active pairs of a lane's two rows of every 16 as bits of VISIBLE_WORDS words: that of row g + 8 * half, column
// 8n + 2t + e is bit visible_bit(half, n, e) of word half % VISIBLE_WORDS.
constexpr int VISIBLE_WORDS = (BLOCK_N + 63) / 64;
using Visible = uint32_t[ROW_BLOCKS][VISIBLE_WORDS];
__device__ __forceinline__ constexpr int visible_bit(int half, int n, int e) {
    return n % 4 * 8 + n / 4 * 2 + (VISIBLE_WORDS == 1 ? half * 4 : 0) + e;
}

// How many words of 32 columns there are up to the last with an active pair in some lane.
__device__ __forceinline__ int visible_words(const Visible& visible) {
    int words = 0;
#pragma unroll
    for (int w = 0; w < MASK_WORDS; ++w) {
        uint32_t bits = 0u;
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                bits |= visible[r][half % VISIBLE_WORDS] & 0x03030303u << visible_bit(half, 4 * w, 0);
            }
        }
        if (__any_sync(WARP, bits != 0u)) words = w + 1;
    }
    return words;
}

// Which pairs of a tile that is not FULL are active, in the rows that this lane holds of ROW_BLOCKS * 16 from first_row. Returns
// how many words of 32 columns there are up to the warp's last active pair. Rows from row_stop on get the last row's bits.
__device__ __forceinline__ int visible_pairs(const Arguments& args, const QueryTile& at, const Tile& tile, int covered_begin,
                                              int covered_end, int first_row, Visible& visible) {
    const int lane_idx = threadIdx.x % 32, first_column = lane_idx % 4 * 2;
    const auto row_of = [&](int r, int half) {
        const int row = smaller(first_row + r * 16 + half * 8 + lane_idx / 4, at.row_stop - 1);
        return row_mask(args, at.batch, at.head + row / args.seqlen_q, row % args.seqlen_q);
    };
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
        for (int w = 0; w < VISIBLE_WORDS; ++w) visible[r][w] = 0u;
    }
    if (words_suffice(args, tile)) {
        uint32_t real[MASK_WORDS], scattered[MASK_WORDS];
#pragma unroll
        for (int w = 0; w < MASK_WORDS; ++w) {
            if constexpr (HAS_SCATTERED) {
                const ColumnMask column = column_mask(args, tile, w * 32 + lane_idx, covered_begin, covered_end);
                real[w] = __ballot_sync(WARP, column.key < args.seqlen_kv);
                scattered[w] = __ballot_sync(WARP, column.scattered);
            } else {
                real[w] = bits_between(0, tile.stop - tile.start - w * 32);
                scattered[w] = 0u;
            }
        }
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const RowMask row = row_of(r, half);
                uint32_t bits = 0u;
#pragma unroll
                for (int w = 0; w < MASK_WORDS; ++w) {
                    const uint32_t word = visible_word(args, tile, w, real[w], scattered[w], row);
                    bits |= (word >> first_column & 0x03030303u) << visible_bit(half, 4 * w, 0);
                }
                visible[r][half % VISIBLE_WORDS] |= bits;
            }
        }
        return visible_words(visible);
    }
    RowMask rows[ROW_BLOCKS][2];
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) rows[r][half] = row_of(r, half);
    }
#pragma unroll 1
    for (int pair = 0; pair < BLOCK_N / 4; ++pair) {
        const int n = pair / 2, e = pair % 2;
        const ColumnMask column = column_mask(args, tile, n * 8 + first_column + e, covered_begin, covered_end);
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t bit = pair_active(rows[r][half], column) ? 1u << visible_bit(half, n, e) : 0u;
                visible[r][half % VISIBLE_WORDS] |= bit;
            }
        }
    }
    return visible_words(visible);
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

// Lanes that copy one row between them: as many as divide its chunks, at most the 8 that write to every bank once.
constexpr int LANES_A_ROW = SWIZZLE;

// The first of the chunks that a thread copies of every row it has a part in.
__device__ __forceinline__ int first_chunk(int sharer) { return sharer % LANES_A_ROW; }

// load: ROWS rows to shared memory, dealt to SHARERS threads, of which this is one. from: its first chunk of row 0; source(row) is
// the row's place from there on, negative where there is none: then it is 0. ALIGNED: through cp.async, there after cp_async_wait
// and a barrier; else through registers, an element at a time, there after a barrier.
template <bool ALIGNED, int ROWS, int SHARERS, typename Source>
__device__ __forceinline__ void copy_rows(const Element* from, int64_t row_stride, int sharer, Element* smem,
                                          const Source& source) {
    constexpr int ROWS_A_PASS = SHARERS / LANES_A_ROW;
    constexpr int UNROLL = ALIGNED ? ROWS : 1;  // what is copied through registers shall not take many
#pragma unroll UNROLL
    for (int pass = 0; pass < ROWS; pass += ROWS_A_PASS) {
        const int row = pass + sharer / LANES_A_ROW;
        if (ROWS % ROWS_A_PASS != 0 && row >= ROWS) break;
        const int place = source(row);
        const bool real = place >= 0;
        const Element* row_from = from + int64_t(real ? place : 0) * row_stride;
#pragma unroll UNROLL
        for (int c = 0; c < CHUNKS_A_ROW; c += LANES_A_ROW) {
            Element* to = smem + swizzled(row, first_chunk(sharer)) + c * CHUNK;
            if constexpr (ALIGNED) {
                cp_async_16(to, row_from + c * CHUNK, real);
            } else {
                uint4 chunk = {0u, 0u, 0u, 0u};
                if (real) chunk = fetch_chunk<false>(row_from + c * CHUNK);
                *reinterpret_cast<uint4*>(to) = chunk;
            }
        }
    }
}

// load: the same for aligned rows that are all there, one after the other: a thread's addresses then differ by constants.
template <int ROWS, int SHARERS>
__device__ __forceinline__ void copy_whole_rows(const Element* from, int64_t row_stride, int sharer, Element* smem) {
    constexpr int ROWS_A_PASS = SHARERS / LANES_A_ROW;
#pragma unroll
    for (int pass = 0; pass < ROWS; pass += ROWS_A_PASS) {
        const int row = pass + sharer / LANES_A_ROW;
        if (ROWS % ROWS_A_PASS != 0 && row >= ROWS) break;
#pragma unroll
        for (int c = 0; c < CHUNKS_A_ROW; c += LANES_A_ROW) {
            cp_async_16(smem + swizzled(row, first_chunk(sharer)) + c * CHUNK, from + pass * row_stride + c * CHUNK, true);
        }
    }
}

// load: a tile's keys, or its values. from: token 0. sharer: which of the 32 threads this is.
__device__ __forceinline__ void load_tile(const Arguments& args, bool aligned, const Element* from, int64_t row_stride,
                                          const Tile& tile, Element* smem, int sharer) {
    from += first_chunk(sharer) * CHUNK;
    if (aligned && (!HAS_GATHERED || tile.kind != GATHERED) && tile.start + BLOCK_N <= tile.stop) {
        from += (tile.start + sharer / LANES_A_ROW) * row_stride;
        return copy_whole_rows<BLOCK_N, 32>(from, row_stride, sharer, smem);
    }
    const auto source = [&](int row) {
        if (tile.start + row >= tile.stop) return -1;
        if constexpr (!HAS_GATHERED) return tile.start + row;
        const int key = tile_key(args, tile, row);
        return key < args.seqlen_kv ? key : -1;
    };
    if (aligned) {
        copy_rows<true, BLOCK_N, 32>(from, row_stride, sharer, smem, source);
    } else {
        copy_rows<false, BLOCK_N, 32>(from, row_stride, sharer, smem, source);
    }
}

// A warp's queries: [ROWS_PER_WARP, HEAD_DIM].
struct Query {
    uint32_t q[ROW_BLOCKS][DIM_BLOCKS][4];

    // 16 rows and 16 dims as the left operand of a product.
    __device__ __forceinline__ void block(int r, int d, uint32_t (&fragment)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) fragment[i] = q[r][d][i];
    }
};

// Scores or output of a warp: lane 4g + t holds of each block of 16 rows, in [n][2 * half + e], row g + 8 * half and column
// 8n + 2t + e.
using Scores = float[ROW_BLOCKS][2 * KEY_BLOCKS][4];
using Output = float[ROW_BLOCKS][2 * DIM_BLOCKS][4];

// What is kept of each row that a lane holds a part of. row_max in powers of 2; row_sum is this lane's share.
struct RowState {
    float row_max[ROW_BLOCKS][2], row_sum[ROW_BLOCKS][2];
};

// scores: acc_s = Q K^T, [ROWS_PER_WARP, BLOCK_N], not scaled.
__device__ __forceinline__ void compute_scores(const Query& query, const Element* smem_k, BlockPlace place, Scores& acc_s) {
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
        for (int n = 0; n < 2 * KEY_BLOCKS; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) acc_s[r][n][i] = 0.0f;
        }
    }
#pragma unroll
    for (int d = 0; d < DIM_BLOCKS; ++d) {
        uint32_t q[ROW_BLOCKS][4];
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) query.block(r, d, q[r]);
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; ++n) {
            uint32_t k[4];
            ldmatrix_x4(k, place(smem_k + n * 16 * HEAD_DIM, d));
            const uint32_t low[2] = {k[0], k[1]}, high[2] = {k[2], k[3]};  // keys 0 to 7, keys 8 to 15
#pragma unroll
            for (int r = 0; r < ROW_BLOCKS; ++r) {
                mma_m16n8k16<Element>(acc_s[r][2 * n], q[r], low, acc_s[r][2 * n]);
                mma_m16n8k16<Element>(acc_s[r][2 * n + 1], q[r], high, acc_s[r][2 * n + 1]);
            }
        }
    }
}

// acc_s *= scale_log2, where the scale cannot be left to the exponentials.
__device__ __forceinline__ void scale_scores(float scale_log2, Scores& acc_s) {
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
        for (int n = 0; n < 2 * KEY_BLOCKS; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) acc_s[r][n][i] *= scale_log2;
        }
    }
}

// Scores of pairs that are not active become -inf.
__device__ __forceinline__ void apply_mask(const Visible& visible, Scores& acc_s) {
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
        for (int n = 0; n < 2 * KEY_BLOCKS; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t word = visible[r][i / 2 % VISIBLE_WORDS];
                if ((word >> visible_bit(i / 2, n, i % 2) & 1u) == 0u) acc_s[r][n][i] = NEGATIVE_INFINITY;
            }
        }
    }
}

// softmax, first half: the running maximum; where it grew past the threshold, sums and output are rescaled to it.
__device__ __forceinline__ void update_max(const Scores& acc_s, float scale_log2, RowState& rows, Output& acc_o) {
    float tile_max[ROW_BLOCKS][2];
    bool grew = false;
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = NEGATIVE_INFINITY;
#pragma unroll
            for (int n = 0; n < 2 * KEY_BLOCKS; ++n) {
                largest = fmaxf(largest, fmaxf(acc_s[r][n][2 * half], acc_s[r][n][2 * half + 1]));  // passes over NaN
            }
            tile_max[r][half] = largest * scale_log2;
            grew |= tile_max[r][half] > rows.row_max[r][half] + RESCALE_THRESHOLD;
        }
    }
    if (!__any_sync(WARP, grew)) return;
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float new_max = fmaxf(rows.row_max[r][half], tile_max[r][half]);
            new_max = fmaxf(new_max, __shfl_xor_sync(WARP, new_max, 1));
            new_max = fmaxf(new_max, __shfl_xor_sync(WARP, new_max, 2));
            const float factor = exp2_approximate(rows.row_max[r][half] - new_max);
            rows.row_max[r][half] = new_max;
            rows.row_sum[r][half] *= factor;
#pragma unroll
            for (int n = 0; n < 2 * DIM_BLOCKS; ++n) {
                acc_o[r][n][2 * half] *= factor;
                acc_o[r][n][2 * half + 1] *= factor;
            }
        }
    }
}

// softmax, second half: two neighbouring probabilities 2^(scale_log2 * score - row_max) as a word, added to row_sum.
__device__ __forceinline__ uint32_t probabilities(float low, float high, float scale_log2, float row_max, float& row_sum) {
    low = exp2_approximate(low * scale_log2 - row_max);
    high = exp2_approximate(high * scale_log2 - row_max);
    row_sum += low + high;
    return pack<Element>(low, high);
}

// accumulate: acc_o += P V, [ROWS_PER_WARP, HEAD_DIM], a word of 32 columns at a time, as many as have an active pair. Within a
// word one block's exponentials and another's products can overlap; the branch between words keeps the compiler from starting
// more of them than there are registers for.
__device__ __forceinline__ void accumulate(const Scores& acc_s, int words, float scale_log2, const Element* smem_v,
                                           BlockPlace place, RowState& rows, Output& acc_o) {
#pragma unroll
    for (int n = 0; n < KEY_BLOCKS; ++n) {
        if (n > 0 && n % 2 == 0 && n / 2 >= words) break;
        uint32_t p[ROW_BLOCKS][4];
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half = i % 2;
                const float* s = &acc_s[r][2 * n + i / 2][2 * half];
                p[r][i] = probabilities(s[0], s[1], scale_log2, rows.row_max[r][half], rows.row_sum[r][half]);
            }
        }
#pragma unroll
        for (int d = 0; d < DIM_BLOCKS; ++d) {
            uint32_t v[4];
            ldmatrix_x4_transposed(v, place(smem_v + n * 16 * HEAD_DIM, d));
            const uint32_t left[2] = {v[0], v[1]}, right[2] = {v[2], v[3]};  // dims 0 to 7, dims 8 to 15
#pragma unroll
            for (int r = 0; r < ROW_BLOCKS; ++r) {
                mma_m16n8k16<Element>(acc_o[r][2 * d], p[r], left, acc_o[r][2 * d]);
                mma_m16n8k16<Element>(acc_o[r][2 * d + 1], p[r], right, acc_o[r][2 * d + 1]);
            }
        }
    }
}

// epilogue: a block of 16 rows of acc_o, times each row's factor, through the warp's place in shared memory; `rows` are stored.
__device__ __forceinline__ void store_rows(const float (&acc_o)[2 * DIM_BLOCKS][4], const float (&factor)[2], Element* smem,
                                           Element* out, int64_t row_stride, bool aligned, int rows, int lane_idx) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2 * DIM_BLOCKS; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t* to = reinterpret_cast<uint32_t*>(smem + swizzled(lane_idx / 4 + 8 * half, n)) + lane_idx % 4;
            *to = pack<Element>(acc_o[n][2 * half] * factor[half], acc_o[n][2 * half + 1] * factor[half]);
        }
    }
    __syncwarp();
    constexpr int ROWS_A_PASS = 32 / LANES_A_ROW;
#pragma unroll
    for (int pass = 0; pass < 16; pass += ROWS_A_PASS) {
        const int row = pass + lane_idx / LANES_A_ROW;
        if (row >= rows) break;
#pragma unroll
        for (int c = 0; c < CHUNKS_A_ROW; c += LANES_A_ROW) {
            const int chunk = c + lane_idx % LANES_A_ROW;
            store_chunk(out + row * row_stride + chunk * CHUNK, *reinterpret_cast<const uint4*>(smem + swizzled(row, chunk)),
                        aligned);
        }
    }
}

// The workspace: of each unit how many of its blocks are done; then of each block its rows' results and their outputs, not divided
// by row_sum, [BLOCK_M, HEAD_DIM] in float.
struct Workspace {
    int64_t rows_of, output_of, bytes;
};

__host__ __device__ __forceinline__ Workspace workspace_layout(const Split& split) {
    const int64_t rows = split.units * split.splits * BLOCK_M;
    Workspace layout;
    layout.rows_of = (split.units * int64_t(sizeof(unsigned)) + 255) / 256 * 256;
    layout.output_of = layout.rows_of + rows * int64_t(sizeof(RowResult));
    layout.bytes = layout.output_of + rows * HEAD_DIM * int64_t(sizeof(float));
    return layout;
}

__device__ __forceinline__ QueryTile query_tile(const Arguments& args, const Split& split, unsigned unit) {
    const int rows = split.heads * args.seqlen_q, tiles_q = (rows + BLOCK_M - 1) / BLOCK_M;
    const int tile = unit % tiles_q, group = unit / tiles_q, groups = args.num_heads / split.heads;
    QueryTile at;
    at.batch = group / groups;
    at.head = group % groups * split.heads;
    at.kv_head = at.head / (args.num_heads / args.num_kv_heads);
    at.row_start = tile * BLOCK_M;
    at.row_stop = smaller(at.row_start + BLOCK_M, rows);
    return at;
}

// The tiles of a unit: those of the queries that its rows lie between, of its first head, for masks that heads of one unit share.
__device__ __forceinline__ TileSequence unit_tiles(const Arguments& args, const QueryTile& at) {
    const int first = at.row_start % args.seqlen_q, last = (at.row_stop - 1) % args.seqlen_q;
    const int head = at.row_start / args.seqlen_q, last_head = (at.row_stop - 1) / args.seqlen_q;
    if (head != last_head) return TileSequence(args, at.batch, at.head, 0, args.seqlen_q);
    return TileSequence(args, at.batch, at.head + head, first, last + 1);
}

// One chunk of a row of the output and, with its first chunk, lse.
__device__ __forceinline__ void store_result(const Arguments& args, const QueryTile& at, int row, int chunk, const RowResult& result,
                                             const float (&output)[CHUNK], bool aligned) {
    const int place = at.row_start + row, head = at.head + place / args.seqlen_q, query = place % args.seqlen_q;
    const bool empty = result.row_max == NO_MAX && result.row_sum == 0.0f;  // no active key
    const float factor = empty ? 0.0f : 1.0f / result.row_sum;
    uint32_t words[CHUNK / 2];
#pragma unroll
    for (int i = 0; i < CHUNK / 2; ++i) words[i] = pack<Element>(output[2 * i] * factor, output[2 * i + 1] * factor);
    Element* out = static_cast<Element*>(args.out) + at.batch * args.o_stride_b + head * args.o_stride_h + query * args.o_stride_n;
    store_chunk(out + chunk * CHUNK, {words[0], words[1], words[2], words[3]}, aligned);
    if (chunk == 0) {
        float* lse = static_cast<float*>(args.lse) + (int64_t(at.batch) * args.num_heads + head) * args.seqlen_q;
        lse[query] = empty ? NEGATIVE_INFINITY : result.row_max * 0.6931471805599453f + logf(result.row_sum);  // ln(2)
    }
}

// merge: adds what somebody else found of a row to `result` and `output`, whose row_max is no smaller.
__device__ __forceinline__ void merge(const RowResult& found, const float* from, RowResult& result, float (&output)[CHUNK]) {
    const float factor = exp2_approximate(found.row_max - result.row_max);
    result.row_sum += factor * found.row_sum;
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        output[i] += factor * four.x, output[i + 1] += factor * four.y;
        output[i + 2] += factor * four.z, output[i + 3] += factor * four.w;
    }
}

__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    attention_forward(const __grid_constant__ Arguments args, const __grid_constant__ Split split) {
    // setup
    DYNAMIC_SHARED_MEMORY(smem, 128);
    SharedTiles& shared = *reinterpret_cast<SharedTiles*>(smem);
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    const unsigned unit = blockIdx.x / split.splits;
    const int part = blockIdx.x % split.splits;
    const QueryTile at = query_tile(args, split, unit);
    const bool aligned = rows_are_aligned(args);
    const Element* key = static_cast<const Element*>(args.key) + at.batch * args.k_stride_b + at.kv_head * args.k_stride_h;
    const Element* value = static_cast<const Element*>(args.value) + at.batch * args.v_stride_b + at.kv_head * args.v_stride_h;
    const float scale_log2 = float(args.softmax_scale * 1.4426950408889634);  // log2(e): the softmax works in powers of 2
    // -inf * scale must be -inf, and the largest score the one with the largest product: else scores are scaled one by one.
    const bool scale_folds = scale_log2 > 0.0f;
    const float score_scale = scale_folds ? scale_log2 : 1.0f;
    const BlockPlace place_k = place_by_rows(lane_idx), place_v = place_by_halves(lane_idx);
    Stage* stages = shared.stages[warp_idx];

    Query query_rows;
    Output acc_o;
    RowState rows;
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
        for (int n = 0; n < 2 * DIM_BLOCKS; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) acc_o[r][n][i] = 0.0f;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows.row_max[r][half] = NO_MAX;
            rows.row_sum[r][half] = 0.0f;
        }
    }
    const TileSequence tiles = unit_tiles(args, at);
    const int last = int(int64_t(tiles.count) * (part + 1) / split.splits);
    int number = int(int64_t(tiles.count) * part / split.splits) + warp_idx;  // the warp's next tile

    // load
    const auto load_query = [&] {
        const Element* query = static_cast<const Element*>(args.query) + at.batch * args.q_stride_b;
        for (int index = threadIdx.x; index < BLOCK_M * CHUNKS_A_ROW; index += THREADS) {
            const int row = index / CHUNKS_A_ROW, chunk = index % CHUNKS_A_ROW, place = at.row_start + row;
            uint4 loaded = {0u, 0u, 0u, 0u};
            if (place < at.row_stop) {
                const int head = at.head + place / args.seqlen_q;
                const Element* from = query + head * args.q_stride_h + place % args.seqlen_q * args.q_stride_n + chunk * CHUNK;
                loaded = aligned ? fetch_chunk<true>(from) : fetch_chunk<false>(from);
            }
            *reinterpret_cast<uint4*>(shared.smem_q + swizzled(row, chunk)) = loaded;
        }
    };
    const auto load_next = [&](Stage& stage) {
        Tile tile;
        tile.stop = 0;  // there is none
        for (; number < last && tile.stop == 0; number += NUM_WARPS) {
            if (!tiles.at(number, tile)) tile.stop = 0;
        }
        if (tile.stop > 0) {
            load_tile(args, aligned, key, args.k_stride_n, tile, stage.smem_k, lane_idx);
            load_tile(args, aligned, value, args.v_stride_n, tile, stage.smem_v, lane_idx);
        }
        cp_async_commit();  // also when empty: waiting counts groups
        return tile;
    };
    Tile ahead[LOOKAHEAD];  // in flight, oldest first
#pragma unroll
    for (int i = 0; i < LOOKAHEAD; ++i) ahead[i] = load_next(stages[i]);
    load_query();
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
        for (int d = 0; d < DIM_BLOCKS; ++d) ldmatrix_x4(query_rows.q[r][d], place_v(shared.smem_q + r * 16 * HEAD_DIM, d));
    }

    // compute
    int stage = 0;
    while (ahead[0].stop > 0) {
        cp_async_wait<LOOKAHEAD - 1>();
        __syncwarp();  // the tile is there for all lanes, and the one before it, whose stage is filled next, no longer read
        const Tile tile = ahead[0];
#pragma unroll
        for (int i = 0; i + 1 < LOOKAHEAD; ++i) ahead[i] = ahead[i + 1];
        ahead[LOOKAHEAD - 1] = load_next(stages[stage == 0 ? NUM_STAGES - 1 : stage - 1]);
        Visible visible;
        const bool masked = tile.kind != FULL;
        int words = MASK_WORDS;
        if (masked) {
            words = visible_pairs(args, at, tile, tiles.covered_begin, tiles.covered_end, at.row_start, visible);
        }
        if (words > 0) {
            // scores
            Scores acc_s;
            compute_scores(query_rows, stages[stage].smem_k, place_k, acc_s);

            // softmax
            if (!scale_folds) scale_scores(scale_log2, acc_s);
            if (masked) apply_mask(visible, acc_s);
            update_max(acc_s, score_scale, rows, acc_o);

            // softmax, accumulate
            accumulate(acc_s, words, score_scale, stages[stage].smem_v, place_v, rows, acc_o);
        }
        stage = stage + 1 == NUM_STAGES ? 0 : stage + 1;
    }
    cp_async_wait<0>();
    __syncwarp();  // no lane reads the last tile any more

    // merge, the block's warps
    float* own_output = reinterpret_cast<float*>(stages);
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = r * 16 + half * 8 + lane_idx / 4;
            float total = rows.row_sum[r][half];
            total += __shfl_xor_sync(WARP, total, 1);
            total += __shfl_xor_sync(WARP, total, 2);
            if (lane_idx % 4 == 0) shared.rows[warp_idx][row] = {rows.row_max[r][half], total};
#pragma unroll
            for (int n = 0; n < 2 * DIM_BLOCKS; ++n) {
                *reinterpret_cast<float2*>(own_output + row * OUTPUT_STRIDE + n * 8 + lane_idx % 4 * 2) = {
                    acc_o[r][n][2 * half], acc_o[r][n][2 * half + 1]};
            }
        }
    }
    __syncthreads();
    const Workspace layout = workspace_layout(split);
    unsigned char* workspace = static_cast<unsigned char*>(args.workspace);
    RowResult* found_rows = reinterpret_cast<RowResult*>(workspace + layout.rows_of) + int64_t(unit) * split.splits * BLOCK_M;
    float* found_output = reinterpret_cast<float*>(workspace + layout.output_of) + int64_t(unit) * split.splits * BLOCK_M * HEAD_DIM;
    const int chunks = (at.row_stop - at.row_start) * CHUNKS_A_ROW;
    for (int index = threadIdx.x; index < chunks; index += THREADS) {
        const int row = index / CHUNKS_A_ROW, chunk = index % CHUNKS_A_ROW;
        RowResult result = {NO_MAX, 0.0f};
#pragma unroll
        for (int warp = 0; warp < NUM_WARPS; ++warp) result.row_max = fmaxf(result.row_max, shared.rows[warp][row].row_max);
        float output[CHUNK] = {};
#pragma unroll
        for (int warp = 0; warp < NUM_WARPS; ++warp) {
            const float* from = reinterpret_cast<const float*>(shared.stages[warp]) + row * OUTPUT_STRIDE + chunk * CHUNK;
            merge(shared.rows[warp][row], from, result, output);
        }
        if (split.splits == 1) {
            store_result(args, at, row, chunk, result, output, aligned);
            continue;
        }
        const int place = part * BLOCK_M + row;
        if (chunk == 0) found_rows[place] = result;
        float4* to = reinterpret_cast<float4*>(found_output + int64_t(place) * HEAD_DIM + chunk * CHUNK);
#pragma unroll
        for (int i = 0; i < CHUNK / 4; ++i) to[i] = {output[4 * i], output[4 * i + 1], output[4 * i + 2], output[4 * i + 3]};
    }
    if (split.splits == 1) return;

    // merge, the unit's blocks, by the last of them that is done: in their order, so that the sum is always the same
    unsigned* blocks_done = reinterpret_cast<unsigned*>(workspace) + unit;
    __syncthreads();
    if (threadIdx.x == 0) shared.arrived = atomic_add_release(blocks_done, 1u);
    __syncthreads();
    if (shared.arrived + 1 < unsigned(split.splits)) return;
    load_acquire(blocks_done);
    for (int index = threadIdx.x; index < chunks; index += THREADS) {
        const int row = index / CHUNKS_A_ROW, chunk = index % CHUNKS_A_ROW;
        RowResult result = {NO_MAX, 0.0f};
        for (int other = 0; other < split.splits; ++other) {
            result.row_max = fmaxf(result.row_max, found_rows[other * BLOCK_M + row].row_max);
        }
        float output[CHUNK] = {};
#pragma unroll 4
        for (int other = 0; other < split.splits; ++other) {
            const int64_t place = other * BLOCK_M + row;
            merge(found_rows[place], found_output + place * HEAD_DIM + chunk * CHUNK, result, output);
        }
        store_result(args, at, row, chunk, result, output, aligned);
    }
}

std::atomic<int> prepared[64];  // multiprocessors of each device that is

// Past 48 KB a kernel must be told of its shared memory, once for each device. Gives the device's multiprocessors.
cudaError_t prepare(int device, int* multiprocessors) {
    const bool remembered = device < 64;
    *multiprocessors = remembered ? prepared[device].load(std::memory_order_acquire) : 0;
    if (*multiprocessors > 0) return cudaSuccess;
    cudaError_t error = cudaFuncSetAttribute(attention_forward, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess && remembered) prepared[device].store(*multiprocessors, std::memory_order_release);
    return error;
}

int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// An upper bound of a unit's tiles, from what the host knows of the mask.
int64_t most_tiles(const Arguments& args) {
    if (HAS_LIST) return args.tiles_kv;
    int64_t keys = args.seqlen_kv;
    if (HAS_BOUND) keys = lesser(keys, int64_t(args.bound_left) + args.bound_right + args.seqlen_q);
    if (HAS_GATHERED || HAS_STRIDE) {
        const int64_t scattered = HAS_GATHERED ? args.num_gathered : keys;
        const int64_t window = HAS_WINDOW ? int64_t(args.window_left) + args.window_right + args.seqlen_q : 0;
        return (lesser(keys, window) + scattered + 2 * BLOCK_N - 1) / BLOCK_N;
    }
    return (keys + BLOCK_N - 1) / BLOCK_N;
}

// Which heads share blocks, and how many blocks share a unit: what takes least time by a count of tiles that a warp takes one
// after the other, START of them for what comes before the first and after the last.
Split choose_split(const Arguments& args, int multiprocessors) {
    constexpr int START = 4;
    Split split = {1, 1, 0};
    const int group = args.num_heads / args.num_kv_heads;
    // Heads of one unit have one list.
    const bool one_list = !HAS_LIST || (args.tile_stride_h == 0 && args.seqlen_q <= BLOCK_M);
    if (one_list && int64_t(group) * args.seqlen_q <= MOST_PACKED) split.heads = group;
    const int64_t rows = int64_t(split.heads) * args.seqlen_q;
    split.units = (rows + BLOCK_M - 1) / BLOCK_M * (args.num_heads / split.heads) * args.batch;
    if (split.units == 0) return split;
    const int64_t tiles = most_tiles(args), resident = int64_t(multiprocessors) * BLOCKS_PER_SM;
    const int64_t most = lesser((tiles + NUM_WARPS - 1) / NUM_WARPS, 2 * resident / split.units + 1);
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int64_t splits = 1; splits <= most; ++splits) {
        const int64_t waves = (split.units * splits + resident - 1) / resident;
        const int64_t steps = (tiles + splits * NUM_WARPS - 1) / (splits * NUM_WARPS);
        const int64_t cost = waves * (steps + START) + (splits > 1 ? START + splits / 8 : 0);
        if (cost < least) least = cost, split.splits = int(splits);
    }
    return split;
}

cudaError_t launch_stages(const Arguments& args, cudaStream_t stream) {
    int multiprocessors = 0;
    cudaError_t error = prepare(args.device, &multiprocessors);
    if (error != cudaSuccess) return error;
    const Split split = choose_split(args, multiprocessors);
    if (split.units == 0) return cudaSuccess;
    if (split.units * split.splits > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;  // the grid's limit
    if (split.splits > 1) error = cudaMemsetAsync(args.workspace, 0, size_t(workspace_layout(split).rows_of), stream);
    if (error != cudaSuccess) return error;
    return launch_grid(attention_forward, unsigned(split.units * split.splits), THREADS, SMEM_BYTES, stream, args, split);
}

}  // namespace

// 0 where no unit is split.
__attribute__((visibility("hidden"))) int64_t workspace_bytes(const Arguments& args) {
    int multiprocessors = 0;
    if (prepare(args.device, &multiprocessors) != cudaSuccess) return 0;  // the launch will say so
    const Split split = choose_split(args, multiprocessors);
    return split.splits > 1 ? workspace_layout(split).bytes : 0;
}

__attribute__((visibility("hidden"))) int launch_kernel(const Arguments& args) {
    int previous = 0;
    cudaError_t error = cudaGetDevice(&previous);
    if (error == cudaSuccess && previous != args.device) error = cudaSetDevice(args.device);
    if (error == cudaSuccess) error = launch_stages(args, static_cast<cudaStream_t>(args.stream));
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
