// tilewright, generated: do not edit.
// forward_decode_cpu/gather 32x128
// attention_forward, float32, head_dim 64, cpu, mask terms: window stride
// digest b0ef8ea234c66fc5
//
// O = softmax(softmax_scale * Q K^T + mask) V and lse for few queries. A tile's rows are the queries of all heads that share
// a KV head, if the mask is the same for them. Its keys are dealt out in shares; scores are dot products with the keys where
// they lie; then each row's shares are merged, in their order.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__GNUC__) && !defined(__clang__) && defined(__AVX2__) && !defined(__AVX512F__)
// g++ takes 0.9 s to read immintrin.h and 0.1 s for these parts of it, which want to be included by none but that one.
#define _IMMINTRIN_H_INCLUDED
#include <smmintrin.h>
#include <avxintrin.h>
#include <f16cintrin.h>
#elif defined(__AVX__)
#include <immintrin.h>
#endif

constexpr int HEAD_DIM = 64;
constexpr int BLOCK_M = 32;  // rows of a tile
constexpr int BLOCK_N = 128;
constexpr int TILE_ALIGN = 1;           // keys are read one by one
constexpr int MOST_SHARES = 128;        // shares of all tiles together: enough for as many threads
constexpr int LEAST_KEYS = 512;         // keys of a share, below which merging it costs more than it saves

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

inline int larger(int a, int b) { return a > b ? a : b; }
inline int smaller(int a, int b) { return a < b ? a : b; }
inline int lowest_bit(uint32_t word) { return __builtin_ctz(word); }
constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int IntVector __attribute__((vector_size(LANES * 4)));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
// Minus, because x - 0 is x for every x and folds away; x + 0 is not, for -0, and costs an addition each time.
inline Vector broadcast(float value) { return value - Vector{}; }

constexpr int DIM_VECTORS = HEAD_DIM / LANES;
// Value columns in registers, in vectors: 4 rows of them, with AVX2's 16 registers or AVX-512's 32.
constexpr int VALUE_VECTORS = LANES < 16 ? 2 : DIM_VECTORS < 4 ? DIM_VECTORS : 4;

static_assert(HEAD_DIM % LANES == 0 && BLOCK_N % LANES == 0, "rows and tiles are whole vectors");

typedef float Element;
inline float to_float(Element value) { return value; }
inline Element to_element(float value) { return value; }

constexpr int ROOM_ROWS = sizeof(Element) == 4 ? 1 : BLOCK_N;  // floats are read where they are

// count, a multiple of 16, elements as floats.
inline void to_floats(const Element* from, float* to, int count) {
    for (int i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

// `rows` rows of elements as floats at row_stride: where they are if they are floats, else in `room`.
inline const float* rows_as_floats(const Element* from, int64_t stride, int rows, float* room, int64_t& row_stride) {
    (void)rows, (void)room;
    row_stride = stride;
    return from;
}

// to[i * to_stride + j] = from[j * from_stride + i] for i, j < 8.
inline void transpose_8x8(const float* from, int64_t from_stride, float* to, int to_stride) {
#if defined(__AVX__)
    __m256 rows[8], pairs[8];
    for (int j = 0; j < 4; ++j) {  // the halves of rows j and j + 4 side by side
        const __m256 low = _mm256_loadu_ps(from + j * from_stride), high = _mm256_loadu_ps(from + (j + 4) * from_stride);
        rows[j] = _mm256_permute2f128_ps(low, high, 0x20);
        rows[j + 4] = _mm256_permute2f128_ps(low, high, 0x31);
    }
    for (int half = 0; half < 8; half += 4) {
        pairs[half] = _mm256_unpacklo_ps(rows[half], rows[half + 1]);
        pairs[half + 1] = _mm256_unpackhi_ps(rows[half], rows[half + 1]);
        pairs[half + 2] = _mm256_unpacklo_ps(rows[half + 2], rows[half + 3]);
        pairs[half + 3] = _mm256_unpackhi_ps(rows[half + 2], rows[half + 3]);
        float* out = to + half * to_stride;
        _mm256_storeu_ps(out, _mm256_shuffle_ps(pairs[half], pairs[half + 2], 0x44));
        _mm256_storeu_ps(out + to_stride, _mm256_shuffle_ps(pairs[half], pairs[half + 2], 0xee));
        _mm256_storeu_ps(out + 2 * to_stride, _mm256_shuffle_ps(pairs[half + 1], pairs[half + 3], 0x44));
        _mm256_storeu_ps(out + 3 * to_stride, _mm256_shuffle_ps(pairs[half + 1], pairs[half + 3], 0xee));
    }
#else
    for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < 8; ++j) to[i * to_stride + j] = from[j * from_stride + i];
    }
#endif
}

inline Vector exp2_nonpositive(Vector x) {
    // Below 2^-126 the result is 0: exactly what -inf must give.
    const IntVector n = __builtin_convertvector(x - 0.5f, IntVector);
    const Vector f = x - __builtin_convertvector(n, Vector);
    Vector p = broadcast(1.540353039e-4f);
    p = p * f + 1.333355815e-3f;
    p = p * f + 9.618129108e-3f;
    p = p * f + 5.550410866e-2f;
    p = p * f + 2.402265070e-1f;
    p = p * f + 6.931471806e-1f;
    p = p * f + 1.0f;
    const IntVector power = (n + 127) << 23;
    const Vector result = p * reinterpret_cast<const Vector&>(power);
    return x < -126.0f ? Vector{} : result;
}

template <int ROWS>
struct RowVectors {
    Vector of[ROWS];
};

// Sums of lanes side by side: the low half of the result is made of a, the high half of b.
template <int... LANE>
inline Vector add_neighbours(Vector a, Vector b, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (2 * LANE)...) + __builtin_shufflevector(a, b, (2 * LANE + 1)...);
#else
    return __builtin_shuffle(a, b, IntVector{(2 * LANE)...}) + __builtin_shuffle(a, b, IntVector{(2 * LANE + 1)...});
#endif
}

// Of COUNT keys, each in its own 1 / COUNT of the lanes: the products of each row with them, summed but for those lanes.
// With as many keys as lanes, lane i is query[r] . keys[i].
template <int ROWS, int COUNT>
inline RowVectors<ROWS> lane_sums(const float* query, const float* const* keys) {
    RowVectors<ROWS> sums = {};
    if constexpr (COUNT == 1) {
#pragma GCC unroll 8
        for (int d = 0; d < HEAD_DIM; d += LANES) {
            const Vector key = load(keys[0] + d);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) sums.of[r] += load(query + r * HEAD_DIM + d) * key;
        }
    } else {
        const RowVectors<ROWS> low = lane_sums<ROWS, COUNT / 2>(query, keys);
        const RowVectors<ROWS> high = lane_sums<ROWS, COUNT / 2>(query, keys + COUNT / 2);
        constexpr std::make_integer_sequence<int, LANES> EVERY_LANE;
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) sums.of[r] = add_neighbours(low.of[r], high.of[r], EVERY_LANE);
    }
    return sums;
}

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

// The keys one query row may see. Intervals are half open and inside [0, seqlen_kv).
struct RowMask {
    int begin, end;                // bound & document
    int window_begin, window_end;  // the bracket's window
    const uint32_t* block_row;     // or_blocks, and_blocks: this row's bits
    const uint32_t* bits_row;      // and_bits
    const uint8_t* dense_row;      // scan
};

// row must be a real one: below seqlen_q.
inline RowMask row_mask(const Arguments& args, int batch, int head, int row) {
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

inline bool bit_at(const uint32_t* words, int index) { return (words[index >> 5] >> (index & 31)) & 1u; }

// Whether key is one of the scattered ones (strided columns, global tokens), whatever the row.
inline bool is_scattered(const Arguments& args, int key) {
    bool scattered = false;
    if constexpr (HAS_STRIDE) scattered |= unsigned(key) % unsigned(args.stride) == 0;
    if constexpr (HAS_TOKENS) scattered |= bit_at(static_cast<const uint32_t*>(args.token_bits), key);
    return scattered;
}

// The whole predicate for one pair. Reads no mask word for a key outside [begin, end).
inline bool is_active(const Arguments& args, const RowMask& mask, int key) {
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
inline int gathered_key(const Arguments& args, int place) {
    if (place >= args.num_gathered) return args.seqlen_kv;
    if (args.gather_indices == nullptr) return place * args.stride;
    return static_cast<const int*>(args.gather_indices)[place];
}

// The key in a tile's column; seqlen_kv or more where there is none.
inline int tile_key(const Arguments& args, const Tile& tile, int column) {
    return tile.kind == GATHERED ? gathered_key(args, tile.start + column) : tile.start + column;
}

// The union over a query tile's rows of what they may see, and the keys all of them see. Both ends of a row's interval
// never decrease from row to row (bands and documents), so the first and the last row decide.
struct KeyRange {
    int begin, end;            // some row may see these
    int full_begin, full_end;  // every row sees these
};

inline KeyRange bound_range(const RowMask& first, const RowMask& last) {
    return {first.begin, last.end, last.begin, first.end};
}

inline KeyRange window_range(const RowMask& first, const RowMask& last) {
    return {first.window_begin, last.window_end, last.window_begin, first.window_end};
}

class TileSequence {
  public:
    int covered_begin, covered_end;  // keys that the run of tiles covers
    int count;                       // numbers are from 0 to count - 1

    inline TileSequence(const Arguments& args, int batch, int head, int row_start, int row_stop)
        : args_(args) {
        const RowMask first = row_mask(args, batch, head, row_start);
        const RowMask last = row_mask(args, batch, head, row_stop - 1);
        bound_ = bound_range(first, last);
        run_ = bound_;
        if constexpr (HAS_WINDOW) run_ = window_range(first, last);
        if constexpr (HAS_SCATTERED && !HAS_WINDOW) run_.end = run_.begin;
        covered_begin = run_.begin / TILE_ALIGN * TILE_ALIGN;
        covered_end = larger(covered_begin, run_.end);
        run_tiles_ = (covered_end - covered_begin + BLOCK_N - 1) / BLOCK_N;
        count = run_tiles_;
        count += (args.num_gathered + BLOCK_N - 1) / BLOCK_N;
    }

    // False: no tile has this number.
    inline bool at(int number, Tile& tile) const {
        if (number < run_tiles_) {
            const int start = covered_begin + number * BLOCK_N;
            const bool full = start >= run_.full_begin && start + BLOCK_N <= run_.full_end;
            tile = {start, smaller(start + BLOCK_N, run_.end), full ? FULL : PARTIAL};
            return true;
        }
        const int start = (number - run_tiles_) * BLOCK_N, stop = smaller(start + BLOCK_N, args_.num_gathered);
        const int first_key = gathered_key(args_, start), last_key = gathered_key(args_, stop - 1);
        if (first_key >= bound_.end || last_key < bound_.begin) return false;
        if (first_key >= covered_begin && last_key < covered_end) return false;
        tile = {start, stop, GATHERED};
        return true;
    }

  private:
    const Arguments& args_;
    KeyRange bound_, run_;
    int run_tiles_;
};

// A row's softmax over some of its keys.
struct Partial {
    float max, sum;
    float acc_o[HEAD_DIM];
};

// What one thread works in.
struct Workspace {
    float query[BLOCK_M * HEAD_DIM];  // times softmax_scale * log2(e)
    float acc_s[BLOCK_M * BLOCK_N];   // scores, then probabilities
    float row_rescale[BLOCK_M];
    RowMask row_masks[BLOCK_M];
    Partial rows[BLOCK_M];
    const float *keys[BLOCK_N], *values[BLOCK_N];  // of the tile's columns
    float key_room[ROOM_ROWS][HEAD_DIM], value_room[ROOM_ROWS][HEAD_DIM];  // of 2-byte elements
    int tile_keys[BLOCK_N];
    float scattered_bias[BLOCK_N];  // 0 where the column's key is visible whatever the row's window, else -inf
};

// The rows of a tile: queries [row_start, row_stop) of heads [head, head + heads), which share a KV head. Row r is head
// r / (row_stop - row_start) and query r % (row_stop - row_start) of them.
struct Rows {
    int batch, head, heads, row_start, row_stop, count;
};

// How a call is dealt out: tiles of rows, each with as many shares of its keys.
struct Division {
    int heads_a_tile, rows_a_tile, shares;
    int64_t query_tiles, tiles;
};

static Rows rows_of(const Arguments& args, const Division& division, int64_t tile) {
    const int64_t batch_heads = tile / division.query_tiles, tiles_a_batch = args.num_heads / division.heads_a_tile;
    const int row_start = int(tile % division.query_tiles) * BLOCK_M;
    const int row_stop = smaller(row_start + BLOCK_M, args.seqlen_q);
    return {int(batch_heads / tiles_a_batch), int(batch_heads % tiles_a_batch) * division.heads_a_tile, division.heads_a_tile,
            row_start, row_stop, division.heads_a_tile * (row_stop - row_start)};
}

static Division divide(const Arguments& args) {
    const int group = args.num_heads / args.num_kv_heads;
    // A stride of 0: every head has the same mask.
    const bool masks_differ = args.block_stride_h != 0 || args.bits_stride_h != 0 || args.tile_stride_h != 0;
    Division division;
    division.heads_a_tile = masks_differ || int64_t(args.seqlen_q) * group > BLOCK_M ? 1 : group;
    division.rows_a_tile = division.heads_a_tile * smaller(args.seqlen_q, BLOCK_M);
    division.query_tiles = (int64_t(args.seqlen_q) + BLOCK_M - 1) / BLOCK_M;
    division.tiles = division.query_tiles * (args.num_heads / division.heads_a_tile) * args.batch;
    // By the call alone and not by how many threads there are, so that its bits are the same with any number of them.
    const int most = int(MOST_SHARES / division.tiles);
    division.shares = 1;
    for (int64_t tile = 0; most > 1 && tile < division.tiles; ++tile) {
        const Rows rows = rows_of(args, division, tile);
        const TileSequence tiles(args, rows.batch, rows.head, rows.row_start, rows.row_stop);
        division.shares = larger(division.shares, smaller(most, int(int64_t(tiles.count) * BLOCK_N / LEAST_KEYS)));
    }
    return division;
}

// load: where the tile's keys and values are as floats; columns past its end have 0.
static void find_rows(const Arguments& args, const Element* key, const Element* value, const Tile& tile, int columns,
                      Workspace& work) {
    static const float zeros[HEAD_DIM] = {};
    int64_t stride;
    for (int c = 0; c < columns; ++c) {
        const int at = c < tile.stop - tile.start ? tile_key(args, tile, c) : args.seqlen_kv;
        work.keys[c] = work.values[c] = zeros;
        if (at >= args.seqlen_kv) continue;
        work.keys[c] = rows_as_floats(key + at * args.k_stride_n, 0, 1, work.key_room[c % ROOM_ROWS], stride);
        work.values[c] = rows_as_floats(value + at * args.v_stride_n, 0, 1, work.value_room[c % ROOM_ROWS], stride);
    }
}

// scores: acc_s[r][c] = query[r] . keys[c] for ROWS rows and all columns.
template <int ROWS>
static inline void dot_scores(const float* query, const float* const* keys, int columns, float* acc_s) {
    for (int c = 0; c < columns; c += LANES) {
        const RowVectors<ROWS> scores = lane_sums<ROWS, LANES>(query, keys + c);
        for (int r = 0; r < ROWS; ++r) store(acc_s + r * BLOCK_N + c, scores.of[r]);
    }
}

// What a tile's columns are, whatever the row: their keys, and which are visible outside the rows' windows.
static void classify_columns(const Arguments& args, const Tile& tile, int columns, int covered_begin, int covered_end,
                             Workspace& work) {
    for (int c = 0; c < columns; ++c) {
        const int key = tile_key(args, tile, c);
        const bool covered = tile.kind >= SCATTERED && key >= covered_begin && key < covered_end;
        const bool mine = key < args.seqlen_kv && !covered && (tile.kind == GATHERED || key < tile.stop);
        const bool visible = mine && (!HAS_BRACKET || tile.kind == GATHERED || is_scattered(args, key));
        work.tile_keys[c] = key;
        work.scattered_bias[c] = visible ? 0.0f : NEGATIVE_INFINITY;
    }
}

// mask: -inf where a pair of the tile is not active.
static void mask_row(const Arguments& args, const RowMask& mask, const Tile& tile, int columns, const Workspace& work,
                     float* acc_s) {
    if constexpr (HAS_OR_BLOCKS || HAS_DENSE) {
        for (int c = 0; c < columns; ++c) {
            if (!is_active(args, mask, tile.start + c)) acc_s[c] = NEGATIVE_INFINITY;
        }
        return;
    }
    if (tile.kind == GATHERED) {
        for (int c = 0; c < columns; ++c) {
            const bool outside = (work.tile_keys[c] < mask.begin) | (work.tile_keys[c] >= mask.end);
            acc_s[c] = outside ? NEGATIVE_INFINITY : acc_s[c] + work.scattered_bias[c];
        }
        return;
    }
    // Columns from left to right: outside, scattered only, window, scattered only, outside.
    const int begin = smaller(larger(mask.begin - tile.start, 0), columns);
    const int end = larger(smaller(mask.end - tile.start, columns), begin);
    for (int c = 0; c < begin; ++c) acc_s[c] = NEGATIVE_INFINITY;
    for (int c = end; c < columns; ++c) acc_s[c] = NEGATIVE_INFINITY;
    if constexpr (HAS_BRACKET) {
        int window_begin = begin, window_end = begin;
        if constexpr (HAS_WINDOW) {
            if (tile.kind != SCATTERED) {
                window_begin = smaller(larger(mask.window_begin - tile.start, begin), end);
                window_end = larger(smaller(mask.window_end - tile.start, end), window_begin);
            }
        }
        for (int c = begin; c < window_begin; ++c) acc_s[c] += work.scattered_bias[c];
        for (int c = window_end; c < end; ++c) acc_s[c] += work.scattered_bias[c];
    }
    if constexpr (HAS_AND_BLOCKS || HAS_AND_BITS) {
        for (int c = begin; c < end; ++c) {
            bool active = true;
            if constexpr (HAS_AND_BLOCKS) active &= bit_at(mask.block_row, (tile.start + c) / args.sparse_block_kv);
            if constexpr (HAS_AND_BITS) active &= bit_at(mask.bits_row, tile.start + c);
            if (!active) acc_s[c] = NEGATIVE_INFINITY;
        }
    }
}

// online softmax: p = 2^(s - max), the running maximum and sum; returns the factor for what was accumulated before.
static inline float softmax_row(float* acc_s, int columns, float& row_max, float& row_sum) {
    Vector maximum = load(acc_s);
    for (int c = LANES; c < columns; c += LANES) {
        const Vector s = load(acc_s + c);
        maximum = s > maximum ? s : maximum;
    }
    float tile_max = maximum[0];
    for (int i = 1; i < LANES; ++i) tile_max = maximum[i] > tile_max ? maximum[i] : tile_max;
    const float new_max = tile_max > row_max ? tile_max : row_max;
    // No active key so far: subtract 0, so that -inf - (-inf) never happens and every p is 0.
    const float base = new_max == NEGATIVE_INFINITY ? 0.0f : new_max;
    Vector sum = {};
    for (int c = 0; c < columns; c += LANES) {
        const Vector p = exp2_nonpositive(load(acc_s + c) - base);
        store(acc_s + c, p);
        sum += p;
    }
    float tile_sum = 0.0f;
    for (int i = 0; i < LANES; ++i) tile_sum += sum[i];
    const float rescale = row_max == NEGATIVE_INFINITY ? 0.0f : std::exp2(row_max - base);
    row_sum = row_sum * rescale + tile_sum;
    row_max = new_max;
    return rescale;
}

// accumulate: acc_o[d...] = rescale * acc_o[d...] + p . value for ROWS rows and VECTORS vectors of value columns over all keys
// of the tile; the sums stay in registers meanwhile.
template <int ROWS, int VECTORS>
static inline void accumulate(const float* acc_s, const float* const* values, int columns, int d, const float* rescale,
                              Partial* rows) {
    Vector acc[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) acc[r][v] = load(rows[r].acc_o + d + v * LANES) * rescale[r];
    }
#pragma GCC unroll 4
    for (int c = 0; c < columns; ++c) {
        const float* value = values[c] + d;
        Vector of[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) of[v] = load(value + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const Vector p = broadcast(acc_s[r * BLOCK_N + c]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) acc[r][v] += p * of[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) store(rows[r].acc_o + d + v * LANES, acc[r][v]);
    }
}

// ROWS rows from row r on against the tile.
template <int ROWS>
static inline void attend_rows(const Arguments& args, const Tile& tile, int columns, int r, Workspace& work) {
    float* acc_s = work.acc_s + r * BLOCK_N;

    // scores
    dot_scores<ROWS>(work.query + r * HEAD_DIM, work.keys, columns, acc_s);

    // softmax
    for (int i = r; i < r + ROWS; ++i) {
        float* scores = work.acc_s + i * BLOCK_N;
        if (tile.kind != FULL) mask_row(args, work.row_masks[i], tile, columns, work, scores);
        work.row_rescale[i] = softmax_row(scores, columns, work.rows[i].max, work.rows[i].sum);
    }

    // accumulate
    constexpr int WIDTH = VALUE_VECTORS * LANES, REST = DIM_VECTORS % VALUE_VECTORS;
    for (int d = 0; d + WIDTH <= HEAD_DIM; d += WIDTH) {
        accumulate<ROWS, VALUE_VECTORS>(acc_s, work.values, tile.stop - tile.start, d, work.row_rescale + r, work.rows + r);
    }
    if constexpr (REST > 0) {
        accumulate<ROWS, REST>(acc_s, work.values, tile.stop - tile.start, HEAD_DIM - REST * LANES, work.row_rescale + r,
                               work.rows + r);
    }
}

static void attend_tile(const Arguments& args, const Element* key, const Element* value, const Tile& tile,
                        const TileSequence& tiles, int rows, Workspace& work) {
    const int columns = (tile.stop - tile.start + LANES - 1) / LANES * LANES;
    find_rows(args, key, value, tile, columns, work);
    if (tile.kind != FULL) classify_columns(args, tile, columns, tiles.covered_begin, tiles.covered_end, work);
    int r = 0;
    for (; r + 4 <= rows; r += 4) attend_rows<4>(args, tile, columns, r, work);
    for (; r + 2 <= rows; r += 2) attend_rows<2>(args, tile, columns, r, work);
    if (r < rows) attend_rows<1>(args, tile, columns, r, work);
}

// One share of a tile's keys; what comes out is in work.rows.
static void attend_share(const Arguments& args, const Division& division, const Rows& rows, int share, Workspace& work) {
    // setup
    const int queries = rows.row_stop - rows.row_start, kv_head = rows.head / (args.num_heads / args.num_kv_heads);
    const Element* key = static_cast<const Element*>(args.key) + rows.batch * args.k_stride_b + kv_head * args.k_stride_h;
    const Element* value = static_cast<const Element*>(args.value) + rows.batch * args.v_stride_b + kv_head * args.v_stride_h;
    const float scale = float(args.softmax_scale * 1.4426950408889634);  // log2(e): the softmax works in powers of 2
    for (int r = 0; r < rows.count; ++r) {
        const int head = rows.head + r / queries, row = rows.row_start + r % queries;
        const Element* query = static_cast<const Element*>(args.query) + rows.batch * args.q_stride_b +
                               head * args.q_stride_h + row * args.q_stride_n;
        for (int d = 0; d < HEAD_DIM; ++d) work.query[r * HEAD_DIM + d] = to_float(query[d]) * scale;
        work.row_masks[r] = row_mask(args, rows.batch, head, row);
        work.rows[r] = {NEGATIVE_INFINITY, 0.0f, {}};
    }

    // compute
    const TileSequence tiles(args, rows.batch, rows.head, rows.row_start, rows.row_stop);
    const int begin = int(int64_t(tiles.count) * share / division.shares);
    const int end = int(int64_t(tiles.count) * (share + 1) / division.shares);
    for (int number = begin; number < end; ++number) {
        Tile tile;
        if (tiles.at(number, tile)) attend_tile(args, key, value, tile, tiles, rows.count, work);
    }
}

// finish: merge a row's shares, in their order, and write it; a row without an active key gives 0 and -inf.
static void write_row(const Arguments& args, const Rows& rows, int r, const Partial* shares, int count, int stride) {
    const int queries = rows.row_stop - rows.row_start, head = rows.head + r / queries, row = rows.row_start + r % queries;
    float max = NEGATIVE_INFINITY, sum = 0.0f, acc_o[HEAD_DIM] = {};
    for (int i = 0; i < count; ++i) max = shares[i * int64_t(stride)].max > max ? shares[i * int64_t(stride)].max : max;
    for (int i = 0; i < count; ++i) {
        const Partial& share = shares[i * int64_t(stride)];
        const float factor = share.max == NEGATIVE_INFINITY ? 0.0f : std::exp2(share.max - max);
        sum += share.sum * factor;
        for (int d = 0; d < HEAD_DIM; ++d) acc_o[d] += share.acc_o[d] * factor;
    }
    const bool empty = max == NEGATIVE_INFINITY && sum == 0.0f;  // no active key
    const float inverse = empty ? 0.0f : 1.0f / sum;
    Element* out = static_cast<Element*>(args.out) + rows.batch * args.o_stride_b + head * args.o_stride_h +
                   row * args.o_stride_n;
    for (int d = 0; d < HEAD_DIM; ++d) out[d] = to_element(acc_o[d] * inverse);
    static_cast<float*>(args.lse)[(int64_t(rows.batch) * args.num_heads + head) * args.seqlen_q + row] =
        empty ? NEGATIVE_INFINITY : max * 0.6931471805599453f + std::log(sum);
}

struct KernelInfo {
    int registers;    // a thread
    int local_bytes;  // a thread: spills and indexed arrays
    int smem_bytes;   // a block, static and dynamic
    int max_threads;  // a block
};

constexpr int OUT_OF_MEMORY = 2;  // the value of cudaErrorMemoryAllocation, so that both targets report alike

static void* allocate(int64_t bytes) {
    void* memory = nullptr;
    return posix_memalign(&memory, 64, size_t(bytes)) == 0 ? memory : nullptr;
}

static int launch_kernel(const Arguments& args) {
    const Division division = divide(args);
    const int64_t items = division.tiles * division.shares;
    const int threads = items < args.num_threads ? int(items) : larger(args.num_threads, 1);
    const int stride = division.rows_a_tile;  // rows of a share
    Partial* partials = nullptr;              // of every share, where there are several
    if (division.shares > 1) {
        partials = static_cast<Partial*>(allocate(items * stride * int64_t(sizeof(Partial))));
        if (partials == nullptr) return OUT_OF_MEMORY;
    }
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        Workspace* work = static_cast<Workspace*>(allocate(sizeof(Workspace)));
        if (work == nullptr) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < items; ++item) {
            if (work == nullptr) continue;
            const Rows rows = rows_of(args, division, item / division.shares);
            attend_share(args, division, rows, int(item % division.shares), *work);
            if (partials != nullptr) {
                std::memcpy(partials + item * stride, work->rows, sizeof(Partial) * rows.count);
            } else {
                for (int r = 0; r < rows.count; ++r) write_row(args, rows, r, work->rows + r, 1, 0);
            }
        }
        if (partials != nullptr) {
#pragma omp for schedule(static)
            for (int64_t tile = 0; tile < division.tiles; ++tile) {
                const Rows rows = rows_of(args, division, tile);
                const Partial* first = partials + tile * division.shares * stride;
                for (int r = 0; r < rows.count; ++r) write_row(args, rows, r, first + r, division.shares, stride);
            }
        }
        std::free(work);
    }
    std::free(partials);
    return failed ? OUT_OF_MEMORY : 0;
}

static const char* error_name(int code) { return code == 0 ? "success" : code == OUT_OF_MEMORY ? "out of memory" : "unknown"; }

static int kernel_info(KernelInfo* info) {
    *info = {};
    return 0;
}

static PyObject* py_launch(PyObject*, PyObject* const* values, Py_ssize_t count) {
    if (count != 60) {
        PyErr_Format(PyExc_TypeError, "launch takes 60 arguments, got %zd", count);
        return nullptr;
    }
    Arguments args;
    args.query = PyLong_AsVoidPtr(values[0]);
    args.key = PyLong_AsVoidPtr(values[1]);
    args.value = PyLong_AsVoidPtr(values[2]);
    args.out = PyLong_AsVoidPtr(values[3]);
    args.lse = PyLong_AsVoidPtr(values[4]);
    args.batch = (int)PyLong_AsLong(values[5]);
    args.num_heads = (int)PyLong_AsLong(values[6]);
    args.num_kv_heads = (int)PyLong_AsLong(values[7]);
    args.seqlen_q = (int)PyLong_AsLong(values[8]);
    args.seqlen_kv = (int)PyLong_AsLong(values[9]);
    args.q_stride_b = PyLong_AsLongLong(values[10]);
    args.q_stride_h = PyLong_AsLongLong(values[11]);
    args.q_stride_n = PyLong_AsLongLong(values[12]);
    args.k_stride_b = PyLong_AsLongLong(values[13]);
    args.k_stride_h = PyLong_AsLongLong(values[14]);
    args.k_stride_n = PyLong_AsLongLong(values[15]);
    args.v_stride_b = PyLong_AsLongLong(values[16]);
    args.v_stride_h = PyLong_AsLongLong(values[17]);
    args.v_stride_n = PyLong_AsLongLong(values[18]);
    args.o_stride_b = PyLong_AsLongLong(values[19]);
    args.o_stride_h = PyLong_AsLongLong(values[20]);
    args.o_stride_n = PyLong_AsLongLong(values[21]);
    args.softmax_scale = PyFloat_AsDouble(values[22]);
    args.bound_left = (int)PyLong_AsLong(values[23]);
    args.bound_right = (int)PyLong_AsLong(values[24]);
    args.window_left = (int)PyLong_AsLong(values[25]);
    args.window_right = (int)PyLong_AsLong(values[26]);
    args.stride = (int)PyLong_AsLong(values[27]);
    args.row_begin = PyLong_AsVoidPtr(values[28]);
    args.row_end = PyLong_AsVoidPtr(values[29]);
    args.row_stride_b = PyLong_AsLongLong(values[30]);
    args.token_bits = PyLong_AsVoidPtr(values[31]);
    args.gather_indices = PyLong_AsVoidPtr(values[32]);
    args.num_gathered = (int)PyLong_AsLong(values[33]);
    args.block_bits = PyLong_AsVoidPtr(values[34]);
    args.block_stride_b = PyLong_AsLongLong(values[35]);
    args.block_stride_h = PyLong_AsLongLong(values[36]);
    args.block_words = (int)PyLong_AsLong(values[37]);
    args.sparse_block_q = (int)PyLong_AsLong(values[38]);
    args.sparse_block_kv = (int)PyLong_AsLong(values[39]);
    args.mask_bits = PyLong_AsVoidPtr(values[40]);
    args.bits_stride_b = PyLong_AsLongLong(values[41]);
    args.bits_stride_h = PyLong_AsLongLong(values[42]);
    args.bits_words = (int)PyLong_AsLong(values[43]);
    args.dense_mask = PyLong_AsVoidPtr(values[44]);
    args.dense_stride_b = PyLong_AsLongLong(values[45]);
    args.dense_stride_h = PyLong_AsLongLong(values[46]);
    args.kv_indices = PyLong_AsVoidPtr(values[47]);
    args.full_num_blocks = PyLong_AsVoidPtr(values[48]);
    args.kv_num_blocks = PyLong_AsVoidPtr(values[49]);
    args.active_bitmap = PyLong_AsVoidPtr(values[50]);
    args.full_bitmap = PyLong_AsVoidPtr(values[51]);
    args.tile_stride_b = PyLong_AsLongLong(values[52]);
    args.tile_stride_h = PyLong_AsLongLong(values[53]);
    args.tiles_kv = (int)PyLong_AsLong(values[54]);
    args.tile_words = (int)PyLong_AsLong(values[55]);
    args.tile_order = PyLong_AsVoidPtr(values[56]);
    args.device = (int)PyLong_AsLong(values[57]);
    args.num_threads = (int)PyLong_AsLong(values[58]);
    args.stream = PyLong_AsVoidPtr(values[59]);
    if (PyErr_Occurred()) return nullptr;
    int code = 0;
    Py_BEGIN_ALLOW_THREADS
    code = launch_kernel(args);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(code);
}

static PyObject* py_error_name(PyObject*, PyObject* code) {
    const long value = PyLong_AsLong(code);
    if (PyErr_Occurred()) return nullptr;
    return PyUnicode_FromString(error_name((int)value));
}

static PyObject* py_info(PyObject*, PyObject*) {
    KernelInfo info;
    const int code = kernel_info(&info);
    if (code != 0) {
        PyErr_Format(PyExc_RuntimeError, "the kernel could not be loaded: %s", error_name(code));
        return nullptr;
    }
    return Py_BuildValue("{s:i,s:i,s:i,s:i}", "registers", info.registers, "local_bytes", info.local_bytes,
                         "smem_bytes", info.smem_bytes, "max_threads", info.max_threads);
}

static PyMethodDef methods[] = {
    {"launch", (PyCFunction)(void (*)(void))py_launch, METH_FASTCALL, "Run the kernel; 0, or an error code."},
    {"error_name", py_error_name, METH_O, "The name of an error code."},
    {"info", py_info, METH_NOARGS, "Registers, local memory, shared memory and threads a block."},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "tw_b0ef8ea234c66fc5", nullptr, -1, methods};

PyMODINIT_FUNC PyInit_tw_b0ef8ea234c66fc5(void) { return PyModule_Create(&module_def); }
