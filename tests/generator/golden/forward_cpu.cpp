// tilewright, generated: do not edit.
// forward_cpu/gather 32x64 cached_panels=64 panel=16 row_unroll=4 schedule=dynamic
// attention_forward, float32, head_dim 64, cpu, mask terms: window stride
// digest 5bc2685326675b65
//
// O = softmax(softmax_scale * Q K^T + mask) V and lse, one query tile at a time: for each KV tile the scores, the online
// softmax and the accumulation. K is packed transposed, V as it is, in float32 panels that stay in a thread's cache.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

constexpr int HEAD_DIM = 64;
constexpr int BLOCK_M = 32;
constexpr int BLOCK_N = 64;
constexpr int ROW_UNROLL = 4;        // query rows of a micro-kernel
constexpr int PANEL = 16;             // keys, or value columns, of a micro-kernel
constexpr int CACHED_PANELS = 64;      // packed panels a thread keeps; 0: none
constexpr int TILE_ALIGN = PANEL;
constexpr int PANEL_SLOTS = CACHED_PANELS > BLOCK_N / PANEL ? CACHED_PANELS : BLOCK_N / PANEL;

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

constexpr int PANEL_VECTORS = PANEL / LANES;

static_assert(BLOCK_M % ROW_UNROLL == 0, "a query tile is a whole number of micro-kernels");
static_assert(BLOCK_N % PANEL == 0 && HEAD_DIM % PANEL == 0, "tiles and value columns are whole panels");

typedef float Element;
inline float to_float(Element value) { return value; }
inline Element to_element(float value) { return value; }

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

// Whether any pair of the tile is active; mask points at the first row.
inline bool any_active(const uint8_t* mask, int64_t row_stride, int rows, int start, int stop) {
    for (int row = 0; row < rows; ++row) {
        if (std::memchr(mask + row * row_stride + start, 1, stop - start) != nullptr) return true;
    }
    return false;
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

class TileIterator {
  public:
    int covered_begin, covered_end;  // keys that the run of tiles covers

    inline TileIterator(const Arguments& args, int batch, int head, int row_start, int row_stop)
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

    inline bool next(Tile& tile) {
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

// PANEL keys of one head, packed: key_t is [HEAD_DIM][PANEL], value is [PANEL][HEAD_DIM].
struct Panel {
    float key_t[HEAD_DIM * PANEL];
    float value[PANEL * HEAD_DIM];
};

// What one thread works in. Panels are cached by their number; scattered keys have panels of their own.
struct Workspace {
    float query[BLOCK_M * HEAD_DIM];  // times softmax_scale * log2(e)
    float acc_s[BLOCK_M * BLOCK_N];   // scores, then probabilities
    float acc_o[BLOCK_M * HEAD_DIM];
    float row_max[BLOCK_M], row_sum[BLOCK_M], row_rescale[BLOCK_M];
    RowMask row_masks[BLOCK_M];
    int tile_keys[BLOCK_N];
    float scattered_bias[BLOCK_N];  // 0 where the column's key is visible whatever the row's window, else -inf
    int64_t head_tag;
    int panel_tags[2][PANEL_SLOTS];
    Panel panels[2][PANEL_SLOTS];
};

// load: pack keys and values of one panel; past seqlen_kv they are 0.
static void pack_panel(const Arguments& args, const Element* key, const Element* value, const Tile& tile, int column,
                       Panel& panel) {
    for (int i = 0; i < PANEL; ++i) {
        const int at = tile_key(args, tile, column + i);
        if (at >= args.seqlen_kv) {
            for (int d = 0; d < HEAD_DIM; ++d) panel.key_t[d * PANEL + i] = panel.value[i * HEAD_DIM + d] = 0.0f;
            continue;
        }
        const Element* key_row = key + at * args.k_stride_n;
        const Element* value_row = value + at * args.v_stride_n;
        for (int d = 0; d < HEAD_DIM; ++d) panel.key_t[d * PANEL + i] = to_float(key_row[d]);
        for (int d = 0; d < HEAD_DIM; ++d) panel.value[i * HEAD_DIM + d] = to_float(value_row[d]);
    }
}

static const Panel& packed_panel(const Arguments& args, const Element* key, const Element* value, const Tile& tile,
                                 int column, Workspace& work) {
    const int number = (tile.start + column) / PANEL, slot = number % PANEL_SLOTS;
    const int cache = tile.kind == GATHERED;
    Panel& panel = work.panels[cache][slot];
    if (CACHED_PANELS == 0 || work.panel_tags[cache][slot] != number) {
        pack_panel(args, key, value, tile, column, panel);
        work.panel_tags[cache][slot] = number;
    }
    return panel;
}

// scores: acc_s[r][column + c] = query[r] . key[c] for ROW_UNROLL rows and one panel.
static inline void panel_scores(const float* query, const Panel& panel, float* acc_s) {
    Vector acc[ROW_UNROLL][PANEL_VECTORS] = {};
#pragma GCC unroll 4
    for (int d = 0; d < HEAD_DIM; ++d) {
        Vector keys[PANEL_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < PANEL_VECTORS; ++v) keys[v] = load(panel.key_t + d * PANEL + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROW_UNROLL; ++r) {
            const Vector q = broadcast(query[r * HEAD_DIM + d]);
#pragma GCC unroll 8
            for (int v = 0; v < PANEL_VECTORS; ++v) acc[r][v] += q * keys[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROW_UNROLL; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < PANEL_VECTORS; ++v) store(acc_s + r * BLOCK_N + v * LANES, acc[r][v]);
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

// accumulate: acc_o[r][d...] = rescale[r] * acc_o[r][d...] + p[r] . value for ROW_UNROLL rows and PANEL value columns over
// all keys of the tile; the sums stay in registers meanwhile.
static inline void accumulate(const float* acc_s, const Panel* const* panels, int columns, int d, const float* rescale,
                              float* acc_o) {
    Vector acc[ROW_UNROLL][PANEL_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROW_UNROLL; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < PANEL_VECTORS; ++v) acc[r][v] = load(acc_o + r * HEAD_DIM + d + v * LANES) * rescale[r];
    }
    for (int first = 0; first < columns; first += PANEL) {
        const float* value = panels[first / PANEL]->value + d;
#pragma GCC unroll 4
        for (int c = 0; c < PANEL; ++c) {
            Vector values[PANEL_VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < PANEL_VECTORS; ++v) values[v] = load(value + c * HEAD_DIM + v * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < ROW_UNROLL; ++r) {
                const Vector p = broadcast(acc_s[r * BLOCK_N + first + c]);
#pragma GCC unroll 8
                for (int v = 0; v < PANEL_VECTORS; ++v) acc[r][v] += p * values[v];
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROW_UNROLL; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < PANEL_VECTORS; ++v) store(acc_o + r * HEAD_DIM + d + v * LANES, acc[r][v]);
    }
}

static void attend_tile(const Arguments& args, const Element* key, const Element* value, const Tile& tile,
                        int covered_begin, int covered_end, int rows, Workspace& work) {
    const int columns = (tile.stop - tile.start + PANEL - 1) / PANEL * PANEL;
    const Panel* panels[BLOCK_N / PANEL];
    // Two panels of one tile never share a slot: slots are at least as many, and a tile's panels are consecutive.
    for (int c = 0; c < columns; c += PANEL) panels[c / PANEL] = &packed_panel(args, key, value, tile, c, work);

    // scores
    for (int c = 0; c < columns; c += PANEL) {
        for (int r = 0; r < rows; r += ROW_UNROLL) {
            panel_scores(work.query + r * HEAD_DIM, *panels[c / PANEL], work.acc_s + r * BLOCK_N + c);
        }
    }

    // softmax
    if (tile.kind != FULL) {
        classify_columns(args, tile, columns, covered_begin, covered_end, work);
        for (int r = 0; r < rows; ++r) {
            mask_row(args, work.row_masks[r], tile, columns, work, work.acc_s + r * BLOCK_N);
        }
    }
    for (int r = 0; r < rows; ++r) {
        work.row_rescale[r] = softmax_row(work.acc_s + r * BLOCK_N, columns, work.row_max[r], work.row_sum[r]);
    }

    // accumulate
    for (int r = 0; r < rows; r += ROW_UNROLL) {
        for (int d = 0; d < HEAD_DIM; d += PANEL) {
            accumulate(work.acc_s + r * BLOCK_N, panels, columns, d, work.row_rescale + r, work.acc_o + r * HEAD_DIM);
        }
    }
}

static void attend_query_tile(const Arguments& args, int batch, int head, int row_start, Workspace& work) {
    // setup
    const int row_stop = smaller(row_start + BLOCK_M, args.seqlen_q);
    const int rows = (row_stop - row_start + ROW_UNROLL - 1) / ROW_UNROLL * ROW_UNROLL;
    const int kv_head = head / (args.num_heads / args.num_kv_heads);
    const int64_t head_tag = int64_t(batch) * args.num_kv_heads + kv_head;
    if (work.head_tag != head_tag) {
        work.head_tag = head_tag;
        for (int& tag : work.panel_tags[0]) tag = -1;
        for (int& tag : work.panel_tags[1]) tag = -1;
    }
    const Element* query = static_cast<const Element*>(args.query) + batch * args.q_stride_b + head * args.q_stride_h;
    const Element* key = static_cast<const Element*>(args.key) + batch * args.k_stride_b + kv_head * args.k_stride_h;
    const Element* value = static_cast<const Element*>(args.value) + batch * args.v_stride_b + kv_head * args.v_stride_h;
    Element* out = static_cast<Element*>(args.out) + batch * args.o_stride_b + head * args.o_stride_h;
    float* lse = static_cast<float*>(args.lse) + (int64_t(batch) * args.num_heads + head) * args.seqlen_q;
    const float scale = float(args.softmax_scale * 1.4426950408889634);  // log2(e): the softmax works in powers of 2
    std::memset(work.query, 0, sizeof(float) * rows * HEAD_DIM);  // rows past the last one stay 0
    std::memset(work.acc_o, 0, sizeof(float) * rows * HEAD_DIM);
    for (int r = 0; r < row_stop - row_start; ++r) {
        const Element* query_row = query + (row_start + r) * args.q_stride_n;
        for (int d = 0; d < HEAD_DIM; ++d) work.query[r * HEAD_DIM + d] = to_float(query_row[d]) * scale;
    }
    for (int r = 0; r < rows; ++r) {
        work.row_masks[r] = row_mask(args, batch, head, smaller(row_start + r, row_stop - 1));
        work.row_max[r] = NEGATIVE_INFINITY;
        work.row_sum[r] = 0.0f;
    }

    // compute
    TileIterator tiles(args, batch, head, row_start, row_stop);
    Tile tile;
    while (tiles.next(tile)) {
        attend_tile(args, key, value, tile, tiles.covered_begin, tiles.covered_end, rows, work);
    }

    // finish
    for (int row = row_start; row < row_stop; ++row) {
        const int r = row - row_start;
        const bool empty = work.row_max[r] == NEGATIVE_INFINITY && work.row_sum[r] == 0.0f;  // no active key
        const float inverse = empty ? 0.0f : 1.0f / work.row_sum[r];
        for (int d = 0; d < HEAD_DIM; ++d) {
            out[row * args.o_stride_n + d] = to_element(work.acc_o[r * HEAD_DIM + d] * inverse);
        }
        lse[row] = empty ? NEGATIVE_INFINITY : work.row_max[r] * 0.6931471805599453f + std::log(work.row_sum[r]);
    }
}

struct KernelInfo {
    int registers;    // a thread
    int local_bytes;  // a thread: spills and indexed arrays
    int smem_bytes;   // a block, static and dynamic
    int max_threads;  // a block
};

constexpr int OUT_OF_MEMORY = 2;  // the value of cudaErrorMemoryAllocation, so that both targets report alike

static int launch_kernel(const Arguments& args) {
    const int64_t query_tiles = (args.seqlen_q + BLOCK_M - 1) / BLOCK_M;
    const int64_t count = query_tiles * args.num_heads * args.batch;
    const int threads = count < args.num_threads ? int(count) : larger(args.num_threads, 1);
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        Workspace* work = nullptr;
        if (posix_memalign(reinterpret_cast<void**>(&work), 64, sizeof(Workspace)) != 0) work = nullptr;
        if (work == nullptr) {
#pragma omp atomic write
            failed = 1;
        } else {
            work->head_tag = -1;
        }
#pragma omp for schedule(dynamic, 4)
        for (int64_t item = 0; item < count; ++item) {
            if (work == nullptr) continue;
            const int64_t batch_head = item / query_tiles;
            attend_query_tile(args, int(batch_head / args.num_heads), int(batch_head % args.num_heads),
                              int(item % query_tiles) * BLOCK_M, *work);
        }
        std::free(work);
    }
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

static PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "tw_5bc2685326675b65", nullptr, -1, methods};

PyMODINIT_FUNC PyInit_tw_5bc2685326675b65(void) { return PyModule_Create(&module_def); }
