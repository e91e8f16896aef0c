// tilewright, generated: do not edit.
// forward_wgmma/list 64x64 blocks_per_sm=2 num_stages=3 overlap=softmax persistent=False tile_order=longest warpgroups=1
// attention_forward, bfloat16, head_dim 128, sm_90a, mask terms: and_blocks
// digest eb587d928bf51660
//
// O = softmax(softmax_scale * Q K^T + mask) V and lse on Hopper's tensor cores, after FlashAttention-3. A block's last warpgroup
// loads: it finds the tiles and fills a ring of stages through the copy engine. Each of the others owns BLOCK_M query rows; its
// scores, probabilities and output stay in registers, and its products are asynchronous.
#include "device.cuh"

#include <atomic>
#include <cstdint>
#include <limits>

constexpr int HEAD_DIM = 128;
constexpr int BLOCK_M = 64;       // query rows of a warpgroup
constexpr int BLOCK_N = 64;
constexpr int WARPGROUPS = 1;     // that compute
constexpr int QUERY_ROWS = WARPGROUPS * BLOCK_M;
constexpr int THREADS = (WARPGROUPS + 1) * WARPGROUP;
constexpr int COPIERS = WARPGROUP - 32;  // threads that copy rows, and how many requests for that may wait
constexpr int REQUESTS = 2;
constexpr int NUM_STAGES = 3;     // KV tiles in flight and in use
constexpr int BLOCKS_PER_SM = 2;
constexpr bool PERSISTENT = false;
constexpr bool PING_PONG = false;
// Barriers are asked for the next tile before the exponentials, which hide the answer's latency. One H200, 2026-11-30: 1 to 5 % faster
// with two warpgroups or two blocks a multiprocessor; with three of either 1 to 2 % slower, as they hide one another's.
constexpr bool ASKS_AHEAD = true;
constexpr int LOAD_REGISTERS = 56, COMPUTE_REGISTERS = 200;
constexpr int TILE_ALIGN = 1;           // a run of tiles starts at any key
constexpr unsigned WARP = 0xffffffffu;  // every lane

static_assert(BLOCK_M == 64, "a warpgroup's product has 64 rows");
static_assert(HEAD_DIM % 16 == 0 && BLOCK_N % 32 == 0 && BLOCK_N <= 128, "products are 16 deep, the mask of a row whole words");

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
// Whether in some tiles that are not FULL each row sees an interval of keys, and whether there are others.
constexpr bool HAS_INTERVALS = false && !HAS_TOKENS;
constexpr bool HAS_OTHERS = !HAS_INTERVALS || HAS_SCATTERED;
__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int lowest_bit(uint32_t word) { return __ffs(int(word)) - 1; }
constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();

using Element = bfloat16;

constexpr int ROW_BLOCKS = 1;  // of 16 rows, a warp
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
};

struct KernelInfo {
    int registers;    // a thread
    int local_bytes;  // a thread: spills and indexed arrays
    int smem_bytes;   // a block, static and dynamic
    int max_threads;  // a block
};

namespace {

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

struct TensorMaps {
    TensorMap query, key, value;
    bool usable;   // of the queries, and of neighbouring keys and values
    bool gathers;  // of scattered ones
    bool copies;   // what they are not usable for is copied row by row
    bool aligned;  // rows_are_aligned
    unsigned query_tiles;   // of all heads
    unsigned* tiles_taken;  // by persistent blocks after their first: how many of those; null: none has a second

    __device__ __forceinline__ const TensorMap* tokens(bool keys, bool gathered) const {
        return keys ? &key : &value;
    }
};

// sizes and strides of [batch, heads, rows, HEAD_DIM], in elements.
static bool map_tensor(TensorMap* map, const void* base, int64_t batch, int64_t heads, int64_t rows, int64_t stride_b,
                       int64_t stride_h, int64_t stride_n, int box_rows) {
    const int64_t sizes[4] = {HEAD_DIM, rows, heads, batch};
    int64_t strides[4] = {1, stride_n, stride_h, stride_b};
    for (int i = 1; i < 4; ++i) {
        if (sizes[i] == 1) strides[i] = HEAD_DIM;  // never used, and may be anything
    }
    return make_tensor_map<Element>(map, base, sizes, strides, box_rows);
}

static TensorMaps map_tensors(const Arguments& args) {
    TensorMaps maps = {};
    maps.aligned = rows_are_aligned(args);
    maps.usable = map_tensor(&maps.query, args.query, args.batch, args.num_heads, args.seqlen_q, args.q_stride_b, args.q_stride_h,
                             args.q_stride_n, BLOCK_M) &&
                  map_tensor(&maps.key, args.key, args.batch, args.num_kv_heads, args.seqlen_kv, args.k_stride_b,
                             args.k_stride_h, args.k_stride_n, BLOCK_N) &&
                  map_tensor(&maps.value, args.value, args.batch, args.num_kv_heads, args.seqlen_kv, args.v_stride_b,
                             args.v_stride_h, args.v_stride_n, BLOCK_N);
    maps.copies = !maps.usable || (HAS_GATHERED && !maps.gathers);
    return maps;
}

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

__device__ __forceinline__ QueryTile query_tile(const Arguments& args, unsigned index) {
    const int tiles_q = (args.seqlen_q + QUERY_ROWS - 1) / QUERY_ROWS;
    const int place = static_cast<const int*>(args.tile_order)[index];  // the rows with the most to do start first
    const int batch_head = place / tiles_q, tile = place % tiles_q;
    QueryTile at;
    at.batch = batch_head / args.num_heads;
    at.head = batch_head % args.num_heads;
    at.kv_head = at.head / (args.num_heads / args.num_kv_heads);
    at.row_start = tile * QUERY_ROWS;
    at.row_stop = smaller(at.row_start + QUERY_ROWS, args.seqlen_q);
    return at;
}

// A KV tile, and for each warpgroup its kind there: a TileKind, INTERVAL where each row sees an interval of keys, or IDLE when none
// of its pairs is active; with LAST where no tile follows.
constexpr int INTERVAL = 4, IDLE = 5, LAST = 8, NO_KIND = -1;
struct GroupTile {
    Tile tile;  // one that stops at 0 where there is none at all
    int kinds[WARPGROUPS];
    int covered_begin, covered_end;  // the TileIterator's

    __device__ __forceinline__ void mark_last() {
#pragma unroll
        for (int& kind : kinds) kind |= LAST;
    }

    __device__ __forceinline__ void clear(int kind) {
        *this = {};
#pragma unroll
        for (int& each : kinds) each = kind;
    }
};

// Every warpgroup has a list of its own, as fine as its rows: the lists are merged, and a tile is visited once for all whose next
// one it is.
class GroupTiles {
  public:
    __device__ __forceinline__ GroupTiles(const Arguments& args, const QueryTile& at, KeyRange*)
        : tiles_{lists(args, at, 0) } {
#pragma unroll
        for (int g = 0; g < WARPGROUPS; ++g) advance(g, at.row_start + g * BLOCK_M < at.row_stop);
    }

    __device__ __forceinline__ bool next(GroupTile& next) {
        int first = NONE;
#pragma unroll
        for (int g = 0; g < WARPGROUPS; ++g) first = smaller(first, place_[g]);
        if (first == NONE) return false;
        next.clear(IDLE);
#pragma unroll
        for (int g = 0; g < WARPGROUPS; ++g) {
            const bool here = place_[g] == first;
            if (here) next.tile = ahead_[g], next.kinds[g] = ahead_[g].kind;
            if (here) advance(g, true);
        }
        return true;
    }

  private:
    static constexpr int NONE = std::numeric_limits<int>::max();

    // A group without rows has the first group's list and never looks at it.
    static __device__ __forceinline__ TileIterator lists(const Arguments& args, const QueryTile& at, int group) {
        const int row = at.row_start + group * BLOCK_M;
        return TileIterator(args, at.batch, at.head, row < at.row_stop ? row : at.row_start, at.row_stop);
    }

    // Where a tile comes in the order that every list has.
    static __device__ __forceinline__ int place(const Tile& tile) {
        return tile.start / BLOCK_N + (tile.kind == FULL ? 0 : NONE / 2);  // full tiles first
    }

    __device__ __forceinline__ void advance(int group, bool has_rows) {
        place_[group] = has_rows && tiles_[group].next(ahead_[group]) ? place(ahead_[group]) : NONE;
    }

    TileIterator tiles_[WARPGROUPS];
    Tile ahead_[WARPGROUPS];
    int place_[WARPGROUPS];
};

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
        return row_mask(args, at.batch, at.head, row);
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

// Four elements to global memory; aligned: the address is a multiple of 8 bytes.
__device__ __forceinline__ void store_words(Element* to, uint32_t low, uint32_t high, bool aligned) {
    if (aligned) {
        *reinterpret_cast<uint2*>(to) = {low, high};
        return;
    }
    uint16_t* halves = reinterpret_cast<uint16_t*>(to);
    halves[0] = uint16_t(low);
    halves[1] = uint16_t(low >> 16);
    halves[2] = uint16_t(high);
    halves[3] = uint16_t(high >> 16);
}

// A tile of Q, K or V in shared memory: boxes of 64 columns, each of ROWS rows of 128 bytes, swizzled.
constexpr int CHUNK = 8;  // elements in 16 bytes
constexpr int BOXES = (HEAD_DIM + BOX_COLUMNS - 1) / BOX_COLUMNS;
template <int ROWS>
struct BoxedTile {
    Element boxes[BOXES][ROWS * BOX_COLUMNS];
};

// Where the chunk of 16 bytes of a row lies in a box, in elements.
__device__ __forceinline__ int boxed(int row, int chunk) { return row * BOX_COLUMNS + (chunk ^ row % 8) * CHUNK; }

// What the copying warps are asked for: a warpgroup's queries, or a tile of keys or values; or to stop.
enum CopyKind : int { STOP, QUERY, KEY, VALUE };
struct CopyRequest {
    int kind;
    int batch, head;
    int place;  // the warpgroup, or the stage
    Tile tile;  // rows past its stop become 0
};

// load: a tile's rows, by COPIERS threads. from: row 0 of the tensor's head. ALIGNED: through cp.async, there after
// cp_async_wait; else an element at a time.
template <bool ALIGNED, int ROWS>
__device__ __forceinline__ void copy_rows(const Arguments& args, const Element* from, int64_t row_stride, const Tile& tile,
                                          BoxedTile<ROWS>& to, int copier) {
    constexpr int CHUNKS = BOX_COLUMNS / CHUNK, ROWS_A_PASS = COPIERS / CHUNKS;
    const int chunk = copier % CHUNKS;
#pragma unroll 1
    for (int row = copier / CHUNKS; row < ROWS; row += ROWS_A_PASS) {
        const bool real = tile.start + row < tile.stop;
        const Element* chunk_from = from + (real ? tile_key(args, tile, row) : 0) * row_stride + chunk * CHUNK;
#pragma unroll 1
        for (int box = 0; box < BOXES; ++box) {
            if (box * BOX_COLUMNS + chunk * CHUNK >= HEAD_DIM) break;
            Element* chunk_to = to.boxes[box] + boxed(row, chunk);
            if constexpr (ALIGNED) {
                cp_async_16(chunk_to, chunk_from + box * BOX_COLUMNS, real);
            } else {
                uint4 words = {0u, 0u, 0u, 0u};
                if (real) words = fetch_chunk<false>(chunk_from + box * BOX_COLUMNS);
                *reinterpret_cast<uint4*>(chunk_to) = words;
            }
        }
    }
}

// What a block keeps in shared memory.
struct SharedTiles {
    BoxedTile<BLOCK_M> smem_q[WARPGROUPS];
    BoxedTile<BLOCK_N> smem_k[NUM_STAGES];
    BoxedTile<BLOCK_N> smem_v[NUM_STAGES];
    GroupTile tiles[NUM_STAGES];  // there with the keys
    KeyRange ranges[WARPGROUPS];  // the loading warp's own, which has few registers
    // full: what was loaded is there. empty: nobody reads it any more.
    Mbarrier query_full, query_empty;
    // The query tile that the loading warp has taken, without rows where none was left. That of two rounds before is no longer
    // read: the queries after it are in.
    QueryTile taken[2];
    Mbarrier taken_full[2];
    QueryTile computed[WARPGROUPS * WARPGROUP / 32];  // by each warp
    Mbarrier key_full[NUM_STAGES], key_empty[NUM_STAGES];
    Mbarrier value_full[NUM_STAGES], value_empty[NUM_STAGES];
    CopyRequest requests[REQUESTS];
    Mbarrier request_full[REQUESTS], request_empty[REQUESTS];
};
constexpr int SMEM_BYTES = 115456;
static_assert(sizeof(SharedTiles) <= SMEM_BYTES && SMEM_BYTES - sizeof(SharedTiles) < 768, "what the legality rules count");

// A place in a ring of stages, and the parity of the phase in which it is filled there.
template <int STAGES>
struct RingPlace {
    int stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage < STAGES) return;
        stage = 0;
        parity ^= 1;
    }
};

// Named barriers.
constexpr int COPIED = 1, TURN = 2;

// The same value in all lanes, of the first, and known to be.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(WARP, value, 0); }
__device__ __forceinline__ QueryTile uniform(const QueryTile& at) {
    return {uniform(at.batch), uniform(at.head), uniform(at.kv_head), uniform(at.row_start), uniform(at.row_stop)};
}

// The next query tile after those that blocks begin with that none has taken; past the last: there is none.
__device__ __forceinline__ unsigned take_tile(const TensorMaps& maps) {
    if (maps.tiles_taken == nullptr) return maps.query_tiles;
    return gridDim.x + atomicAdd(maps.tiles_taken, 1u);
}

// load: what one warp of the last warpgroup does. It finds the tiles and has the copy engine fetch them, or the copying warps where
// the engine cannot. All its lanes compute the same, and say so by votes and shuffles: then addresses and places stay in uniform
// registers, where the copy engine wants them. One lane writes, arrives and asks for copies.
__device__ __forceinline__ void load(const Arguments& args, const TensorMaps& maps, SharedTiles& shared) {
    const bool leads = threadIdx.x % 32 == 0;
    const auto wait = [&](Mbarrier* barrier, int parity) {
        mbarrier_wait(barrier, parity);
        __syncwarp();  // nobody may still ask when the lane that leads goes on, and with it the barrier's phases
    };
    RingPlace<REQUESTS> request_place;
    const auto request_rows = [&](const CopyRequest& request) {
        wait(&shared.request_empty[request_place.stage], request_place.parity ^ 1);
        if (leads) shared.requests[request_place.stage] = request;
        mbarrier_arrive_if(&shared.request_full[request_place.stage], leads);
        request_place.advance();
    };
    const auto load_tile = [&](const QueryTile& at, const Tile& tile, CopyKind kind, int stage, BoxedTile<BLOCK_N>& to,
                               Mbarrier* barrier) {
        const bool gathered = HAS_GATHERED && __any_sync(WARP, tile.kind == GATHERED);
        if (__any_sync(WARP, tile.stop == 0)) {
            mbarrier_arrive_if(barrier, leads);
        } else if (gathered ? maps.gathers : maps.usable) {
            const TensorMap* map = maps.tokens(kind == KEY, gathered);
            const int start = uniform(tile.start);
            if (!leads) return;
            mbarrier_arrive_expect(barrier, sizeof(to));
#pragma unroll
            for (int box = 0; box < BOXES; ++box) {
                bulk_load(to.boxes[box], map, barrier, box * BOX_COLUMNS, start, at.kv_head, at.batch);
            }
        } else {
            request_rows({kind, at.batch, at.kv_head, stage, tile});
        }
    };
    const auto load_query = [&](const QueryTile& at) {
        if (maps.usable) {
            if (!leads) return;
            mbarrier_arrive_expect(&shared.query_full, sizeof(shared.smem_q));
#pragma unroll
            for (int group = 0; group < WARPGROUPS; ++group) {
#pragma unroll
                for (int box = 0; box < BOXES; ++box) {
                    bulk_load(shared.smem_q[group].boxes[box], &maps.query, &shared.query_full, box * BOX_COLUMNS,
                              at.row_start + group * BLOCK_M, at.head, at.batch);
                }
            }
            return;
        }
#pragma unroll 1
        for (int group = 0; group < WARPGROUPS; ++group) {
            request_rows({QUERY, at.batch, at.head, group, {at.row_start + group * BLOCK_M, at.row_stop, FULL}});
        }
    };
    RingPlace<NUM_STAGES> place;
    unsigned index = blockIdx.x;
    for (unsigned round = 0;; ++round) {
        QueryTile at = {0, 0, 0, 0, 0};
        const bool is_none = index >= maps.query_tiles;
        if (!is_none) at = uniform(query_tile(args, index));
        if (leads) shared.taken[round % 2] = at;
        mbarrier_arrive_if(&shared.taken_full[round % 2], leads);
        if (is_none) break;
        if constexpr (PERSISTENT) index = uniform(int(leads ? take_tile(maps) : 0u));  // early: it takes a while
        GroupTiles tiles(args, at, shared.ranges);
        GroupTile current, next;
        const bool any = __any_sync(WARP, tiles.next(current));
        if (!any) current.clear(IDLE);
        bool more = any && __any_sync(WARP, tiles.next(next));
        for (bool is_first = true;; is_first = false) {
            const bool is_last = !more;
            if (is_last) current.mark_last();
            wait(&shared.key_empty[place.stage], place.parity ^ 1);
            if (leads) shared.tiles[place.stage] = current;
            const Tile tile = current.tile;
            load_tile(at, tile, KEY, place.stage, shared.smem_k[place.stage], &shared.key_full[place.stage]);
            if (is_first) {  // after the keys, which need not wait until the queries before are done with
                wait(&shared.query_empty, round % 2 ^ 1);
                load_query(at);
            }
            // What comes is found two tiles ahead, while a stage is waited for.
            current = next;
            more = more && __any_sync(WARP, tiles.next(next));
            wait(&shared.value_empty[place.stage], place.parity ^ 1);
            load_tile(at, tile, VALUE, place.stage, shared.smem_v[place.stage], &shared.value_full[place.stage]);
            place.advance();
            if (is_last) break;
        }
        if constexpr (!PERSISTENT) break;
    }
    if (maps.copies) request_rows({STOP, 0, 0, 0, {0, 0, FULL}});
}

// load: what the copying warps do.
__device__ __forceinline__ void copy(const Arguments& args, const TensorMaps& maps, SharedTiles& shared) {
    const int copier = threadIdx.x % WARPGROUP - (WARPGROUP - COPIERS);
    const auto copy_tile = [&](const CopyRequest& request, const void* tensor, int64_t stride_b, int64_t stride_h,
                               int64_t stride_n, auto& to) {
        const Element* from = static_cast<const Element*>(tensor) + request.batch * stride_b + request.head * stride_h;
        if (maps.aligned) {
            copy_rows<true>(args, from, stride_n, request.tile, to, copier);
        } else {
            copy_rows<false>(args, from, stride_n, request.tile, to, copier);
        }
        cp_async_commit();
        cp_async_wait<0>();
        fence_proxy_async();
        named_barrier_sync(COPIED, COPIERS);
    };
    for (RingPlace<REQUESTS> place;; place.advance()) {
        mbarrier_wait(&shared.request_full[place.stage], place.parity);
        const CopyRequest request = shared.requests[place.stage];
        Mbarrier* barrier = nullptr;  // arrived at when all is there that it guards
        if (request.kind == STOP) return;
        if (request.kind == QUERY) {
            copy_tile(request, args.query, args.q_stride_b, args.q_stride_h, args.q_stride_n, shared.smem_q[request.place]);
            if (request.place == WARPGROUPS - 1) barrier = &shared.query_full;
        } else if (request.kind == KEY) {
            copy_tile(request, args.key, args.k_stride_b, args.k_stride_h, args.k_stride_n, shared.smem_k[request.place]);
            barrier = &shared.key_full[request.place];
        } else {
            copy_tile(request, args.value, args.v_stride_b, args.v_stride_h, args.v_stride_n, shared.smem_v[request.place]);
            barrier = &shared.value_full[request.place];
        }
        if (copier != 0) continue;
        if (barrier != nullptr) mbarrier_arrive(barrier);
        mbarrier_arrive(&shared.request_empty[place.stage]);
    }
}

// Scores or output of a warpgroup: thread 32w + 4g + t holds in [4n + 2 * half + e] row 16w + g + 8 * half, column 8n + 2t + e.
using Scores = float[8 * KEY_BLOCKS];
using Output = float[8 * DIM_BLOCKS];
using Probabilities = uint32_t[KEY_BLOCKS][4];

// What is kept of each row that a lane holds a part of. row_max in powers of 2; row_sum is this lane's share.
struct RowState {
    float row_max[2], row_sum[2];
};

// scores: acc_s = Q K^T, [BLOCK_M, BLOCK_N], not scaled; issued, not waited for.
__device__ __forceinline__ void issue_keys(const BoxedTile<BLOCK_M>& smem_q, const BoxedTile<BLOCK_N>& smem_k, Scores& acc_s) {
    wgmma_fence();
    const SharedMatrix query = uniform(shared_matrix(&smem_q, 0)), key = shared_matrix(&smem_k, 0);
#pragma unroll
    for (int d = 0; d < DIM_BLOCKS; ++d) {
        const int box = d / 4, within = d % 4 * 32;  // 16 columns are 32 bytes
        wgmma_keys<Element, BLOCK_N>(acc_s, query.plus(box * int(sizeof(smem_q.boxes[0])) + within),
                                     key.plus(box * int(sizeof(smem_k.boxes[0])) + within), d > 0);
    }
    wgmma_commit();
}

// accumulate: acc_o += P V, [BLOCK_M, HEAD_DIM]; issued, not waited for.
__device__ __forceinline__ void issue_values(const Probabilities& p, const BoxedTile<BLOCK_N>& smem_v, Output& acc_o) {
    wgmma_fence();
    const SharedMatrix value = shared_matrix(&smem_v, sizeof(smem_v.boxes[0]));
#pragma unroll
    for (int n = 0; n < KEY_BLOCKS; ++n) wgmma_values<Element, HEAD_DIM>(acc_o, p[n], value.plus(n * 16 * BOX_COLUMNS * 2));
    wgmma_commit();
}

// Scores of keys outside each row's interval become -inf.
__device__ __forceinline__ void apply_intervals(const Arguments& args, const QueryTile& at, const Tile& tile, int first_row,
                                                Scores& acc_s) {
    const int lane_idx = threadIdx.x % 32, first_column = tile.start + lane_idx % 4 * 2;
    int begin[2], end[2];  // of columns 8n + e
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = first_row + half * 8 + lane_idx / 4;
        if constexpr (HAS_DOCUMENT) row = smaller(row, at.row_stop - 1);  // rows past the end have no document
        const RowMask mask = row_mask(args, at.batch, at.head, row);
        begin[half] = (HAS_WINDOW ? mask.window_begin : mask.begin) - first_column;
        end[half] = smaller(HAS_WINDOW ? mask.window_end : mask.end, tile.stop) - first_column;
    }
    if (__any_sync(WARP, larger(begin[0], begin[1]) > 0)) {
#pragma unroll
        for (int i = 0; i < 8 * KEY_BLOCKS; ++i) {
            if (i / 4 * 8 + i % 2 < begin[i / 2 % 2]) acc_s[i] = NEGATIVE_INFINITY;
        }
    }
    if (__any_sync(WARP, smaller(end[0], end[1]) < BLOCK_N)) {
#pragma unroll
        for (int i = 0; i < 8 * KEY_BLOCKS; ++i) {
            if (i / 4 * 8 + i % 2 >= end[i / 2 % 2]) acc_s[i] = NEGATIVE_INFINITY;
        }
    }
}

// Scores of pairs that are not active become -inf.
__device__ __forceinline__ void apply_mask(const Visible& visible, Scores& acc_s) {
#pragma unroll
    for (int i = 0; i < 8 * KEY_BLOCKS; ++i) {
        const int half = i / 2 % 2;
        if ((visible[0][half % VISIBLE_WORDS] >> visible_bit(half, i / 4, i % 2) & 1u) == 0u) acc_s[i] = NEGATIVE_INFINITY;
    }
}

// Scores of pairs that a tile's mask rules out become -inf. kind: this warpgroup's.
__device__ __forceinline__ void mask_scores(const Arguments& args, const QueryTile& at, const GroupTile& tile, int kind,
                                            int first_row, Scores& acc_s) {
    if (HAS_INTERVALS && (!HAS_OTHERS || kind == INTERVAL)) {
        return apply_intervals(args, at, tile.tile, first_row, acc_s);
    }
    Visible visible;
    visible_pairs(args, at, {tile.tile.start, tile.tile.stop, kind}, tile.covered_begin, tile.covered_end, first_row, visible);
    apply_mask(visible, acc_s);
}

// softmax, first half: the running maximum. Whether it grew past the threshold somewhere in the warp; then factor says by how
// much what was accumulated shrinks, and row_sum did.
__device__ __forceinline__ bool update_max(const Scores& acc_s, float scale_log2, RowState& rows, float (&factor)[2]) {
    float tile_max[2];
    bool grew = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = NEGATIVE_INFINITY;
#pragma unroll
        for (int n = 0; n < 2 * KEY_BLOCKS; ++n) {
            largest = fmaxf(largest, fmaxf(acc_s[4 * n + 2 * half], acc_s[4 * n + 2 * half + 1]));  // passes over NaN
        }
        tile_max[half] = largest * scale_log2;
        grew |= tile_max[half] > rows.row_max[half] + RESCALE_THRESHOLD;
    }
    if (!__any_sync(WARP, grew)) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float new_max = fmaxf(rows.row_max[half], tile_max[half]);
        new_max = fmaxf(new_max, __shfl_xor_sync(WARP, new_max, 1));
        new_max = fmaxf(new_max, __shfl_xor_sync(WARP, new_max, 2));
        factor[half] = exp2_approximate(rows.row_max[half] - new_max);
        rows.row_max[half] = new_max;
        rows.row_sum[half] *= factor[half];
    }
    return true;
}

// softmax, second half: acc_s becomes the probabilities 2^(scale_log2 * score - row_max), added to row_sum.
__device__ __forceinline__ void exponentiate(float scale_log2, Scores& acc_s, RowState& rows) {
#pragma unroll
    for (int i = 0; i < 8 * KEY_BLOCKS; ++i) {
        const int half = i / 2 % 2;
        acc_s[i] = exp2_approximate(acc_s[i] * scale_log2 - rows.row_max[half]);
        rows.row_sum[half] += acc_s[i];
    }
}

__device__ __forceinline__ void rescale(const float (&factor)[2], Output& acc_o) {
#pragma unroll
    for (int i = 0; i < 8 * DIM_BLOCKS; ++i) acc_o[i] *= factor[i / 2 % 2];
}

// Probabilities as the left operand of the product with V.
__device__ __forceinline__ void pack_probabilities(const Scores& acc_s, Probabilities& p) {
#pragma unroll
    for (int n = 0; n < KEY_BLOCKS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p[n][i] = pack<Element>(acc_s[8 * n + 2 * i], acc_s[8 * n + 2 * i + 1]);
    }
}

// epilogue: a warp's 16 rows of acc_o, times each row's factor, 8 bytes a lane at a time: two neighbours exchange a word, and the
// four lanes of a row write 32 bytes, a sector of memory.
__device__ __forceinline__ void store_rows(const Output& acc_o, const float (&factor)[2], Element* out, int64_t row_stride,
                                           bool aligned, int rows) {
    const int lane_idx = threadIdx.x % 32;
    const bool odd = lane_idx % 2 != 0;
    const int column = (lane_idx % 4 / 2 * 2 + (odd ? 4 : 0)) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane_idx / 4 + 8 * half;
        Element* row_out = out + row * row_stride + column;
        const auto word = [&](int n) {
            return pack<Element>(acc_o[4 * n + 2 * half] * factor[half], acc_o[4 * n + 2 * half + 1] * factor[half]);
        };
#pragma unroll
        for (int n = 0; n < 2 * DIM_BLOCKS; n += 2) {  // columns from 8n on: the even lane's, and from 8n + 8 on: the odd one's
            const uint32_t first = word(n), second = word(n + 1);
            const uint32_t received = __shfl_xor_sync(WARP, odd ? first : second, 1);
            if (row < rows) store_words(row_out + n * CHUNK, odd ? received : first, odd ? second : received, aligned);
        }
    }
}

// What the other warpgroups do.
__device__ __forceinline__ void compute(const Arguments& args, const TensorMaps& maps, SharedTiles& shared) {
    const int group = uniform(threadIdx.x / WARPGROUP);
    const int warp_row = threadIdx.x % WARPGROUP / 32 * 16, lane_idx = threadIdx.x % 32;
    const float scale_log2 = float(args.softmax_scale * 1.4426950408889634);  // log2(e): the softmax works in powers of 2
    // -inf * scale must be -inf, and the largest score the one with the largest product: else scores are scaled one by one.
    const bool scale_folds = scale_log2 > 0.0f;
    const float score_scale = scale_folds ? scale_log2 : 1.0f;
    const int plain_kind = scale_folds ? FULL : NO_KIND;  // of tiles whose scores are used as they are
    RingPlace<NUM_STAGES> place;

    // This warp reads what the barrier guards no more; if it did.
    const auto release = [&](Mbarrier* barrier, bool did = true) {
        __syncwarp();
        mbarrier_arrive_if(barrier, lane_idx == 0 && did);
    };
    const auto begin_turn = [&] {
        if constexpr (PING_PONG) named_barrier_sync(TURN + group, 2 * WARPGROUP);
    };
    const auto end_turn = [&] {
        if constexpr (PING_PONG) named_barrier_arrive(TURN + (group + 1) % WARPGROUPS, 2 * WARPGROUP);
    };
    if (PING_PONG && group == WARPGROUPS - 1) end_turn();  // the first warpgroup begins

    bool keys_there = false;  // as was found ahead of time, of the next tile
    int kind = IDLE;          // of the tile whose keys are there
    for (unsigned round = 0;; ++round) {
        mbarrier_wait(&shared.taken_full[round % 2], round / 2 % 2);
        if (__any_sync(WARP, shared.taken[round % 2].row_stop == 0)) return;
        // Read again where a mask or the end asks for it: the loop over tiles has no register to spare.
        QueryTile& at = shared.computed[threadIdx.x / 32];
        __syncwarp();
        if (lane_idx == 0) at = shared.taken[round % 2];
        __syncwarp();
        const auto first_row = [&] { return at.row_start + group * BLOCK_M + warp_row; };
        Scores acc_s;
        Output acc_o;
        Probabilities p;
        RowState rows = {{NO_MAX, NO_MAX}, {0.0f, 0.0f}};
        float factor[2];
#pragma unroll
        for (int i = 0; i < 8 * DIM_BLOCKS; ++i) acc_o[i] = 0.0f;

        const BoxedTile<BLOCK_M>& smem_q = shared.smem_q[group];
        RingPlace<NUM_STAGES> values = place;
        bool has_values = false;    // p waits for its product with the values of that stage
        bool values_there = false;  // as was found ahead of time
        const auto issue_waiting = [&] {
            if (!ASKS_AHEAD || !__all_sync(WARP, values_there)) {
                mbarrier_wait(&shared.value_full[values.stage], values.parity);
            }
            issue_values(p, shared.smem_v[values.stage], acc_o);
        };
        const auto accumulate = [&] {
            issue_waiting();
            wgmma_wait<0>(acc_o);
            release(&shared.value_empty[values.stage]);
            has_values = false;
        };
        mbarrier_wait(&shared.query_full, round % 2);
        for (;; place.advance()) {
            if (!ASKS_AHEAD || !__all_sync(WARP, keys_there)) {
                mbarrier_wait(&shared.key_full[place.stage], place.parity);
                kind = shared.tiles[place.stage].kinds[group];
            }
            keys_there = false;
            // All lanes read the same. Votes tell the compiler so: then the stage, and with it the products' descriptors, stay in
            // uniform registers. Full tiles, but for the last, ask for one alone.
            const bool is_special = __any_sync(WARP, kind != plain_kind);
            if (is_special && __any_sync(WARP, (kind & ~LAST) == IDLE)) {
                const bool is_last = __any_sync(WARP, (kind & LAST) != 0);
                if (PERSISTENT && is_last) release(&shared.query_empty);
                // Waiting values must not keep the stage that the loading warp needs to go on.
                if (has_values && values.stage == place.stage) accumulate();
                begin_turn();
                end_turn();
                release(&shared.key_empty[place.stage]);
                mbarrier_wait(&shared.value_full[place.stage], place.parity);
                release(&shared.value_empty[place.stage]);
                if (is_last) break;
                continue;
            }
            begin_turn();
            // scores of this tile, accumulate the one before
            issue_keys(smem_q, shared.smem_k[place.stage], acc_s);
            if (!has_values) {
                wgmma_wait<0>(acc_s);
            } else {
                issue_waiting();
            }
            end_turn();
            wgmma_wait<1>(acc_s);
            bool is_last = false;
            if (!is_special) {
                release(&shared.key_empty[place.stage]);
            } else {
                // What the tile says of itself may be overwritten once its keys are released.
                const GroupTile tile = shared.tiles[place.stage];
                release(&shared.key_empty[place.stage]);
                if (!scale_folds) {
#pragma unroll
                    for (int i = 0; i < 8 * KEY_BLOCKS; ++i) acc_s[i] *= scale_log2;
                }
                if (__any_sync(WARP, (kind & ~LAST) != FULL)) mask_scores(args, at, tile, kind & ~LAST, first_row(), acc_s);
                is_last = __any_sync(WARP, (kind & LAST) != 0);
                if (PERSISTENT && is_last) release(&shared.query_empty);
            }

            // softmax
            const bool grew = update_max(acc_s, score_scale, rows, factor);
            // The maximum beside this warpgroup's product with V, the exponentials beside others' products.
            wgmma_wait<0>(acc_o);
            release(&shared.value_empty[values.stage], has_values);
            if (grew) rescale(factor, acc_o);
            if constexpr (ASKS_AHEAD) {
                RingPlace<NUM_STAGES> next = place;
                next.advance();
                values_there = mbarrier_test(&shared.value_full[place.stage], place.parity);
                keys_there = mbarrier_test(&shared.key_full[next.stage], next.parity);
                if (keys_there) kind = shared.tiles[next.stage].kinds[group];
            }
            exponentiate(score_scale, acc_s, rows);
            pack_probabilities(acc_s, p);
            values = place;
            has_values = true;
            if (is_last) break;
        }
        if (has_values) accumulate();
        place.advance();

        // finish
        if (__any_sync(WARP, first_row() < at.row_stop)) {
            const int block_row = first_row();
            Element* out = static_cast<Element*>(args.out) + at.batch * args.o_stride_b + at.head * args.o_stride_h;
            float* lse = static_cast<float*>(args.lse) + (int64_t(at.batch) * args.num_heads + at.head) * args.seqlen_q;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float total = rows.row_sum[half];
                total += __shfl_xor_sync(WARP, total, 1);
                total += __shfl_xor_sync(WARP, total, 2);
                const bool empty = rows.row_max[half] == NO_MAX && total == 0.0f;  // no active key
                factor[half] = empty ? 0.0f : reciprocal_approximate(total);
                const int row = block_row + half * 8 + lane_idx / 4;
                if (lane_idx % 4 == 0 && row < at.row_stop) {
                    const float sum = (rows.row_max[half] + log2_approximate(total)) * 0.6931471805599453f;  // ln(2)
                    lse[row] = empty ? NEGATIVE_INFINITY : sum;
                }
            }
            store_rows(acc_o, factor, out + block_row * args.o_stride_n, args.o_stride_n, maps.aligned,
                       at.row_stop - block_row);
        }
        if constexpr (!PERSISTENT) return;
    }
}

__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    attention_forward(const __grid_constant__ Arguments args, const __grid_constant__ TensorMaps maps) {
    // setup
    DYNAMIC_SHARED_MEMORY(smem, 1024);
    SharedTiles& shared = *reinterpret_cast<SharedTiles*>(smem);
    if (threadIdx.x == 0) {
        constexpr int READERS = WARPGROUPS * WARPGROUP / 32;  // warps
        mbarrier_init(&shared.query_full, 1);
        mbarrier_init(&shared.query_empty, READERS);
        for (Mbarrier& taken : shared.taken_full) mbarrier_init(&taken, 1);
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            mbarrier_init(&shared.key_full[stage], 1);
            mbarrier_init(&shared.key_empty[stage], READERS);
            mbarrier_init(&shared.value_full[stage], 1);
            mbarrier_init(&shared.value_empty[stage], READERS);
        }
        for (int request = 0; request < REQUESTS; ++request) {
            mbarrier_init(&shared.request_full[request], 1);
            mbarrier_init(&shared.request_empty[request], 1);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    const int warp_idx = uniform(threadIdx.x / 32);
    if (warp_idx / 4 == WARPGROUPS) {
        registers_release<LOAD_REGISTERS>();
        if (warp_idx % 4 == 0) {
            load(args, maps, shared);
        } else if (maps.copies) {
            copy(args, maps, shared);
        }
    } else {
        registers_acquire<COMPUTE_REGISTERS>();
        compute(args, maps, shared);
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

cudaError_t launch_blocks(const Arguments& args, unsigned blocks, cudaStream_t stream) {
    int multiprocessors = 0;
    cudaError_t error = prepare(args.device, &multiprocessors);
    TensorMaps maps = map_tensors(args);
    maps.query_tiles = blocks;
    return error != cudaSuccess ? error : launch_grid(attention_forward, blocks, THREADS, SMEM_BYTES, stream, args, maps);
}

}  // namespace

__attribute__((visibility("hidden"))) int launch_kernel(const Arguments& args) {
    const int64_t tiles_q = (int64_t(args.seqlen_q) + QUERY_ROWS - 1) / QUERY_ROWS;
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
