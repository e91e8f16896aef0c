// A warp's matrix instructions: gathered from the lanes into small matrices of floats, multiplied, scattered again.
// They run millions of times a launch, so the loops are short and of constant length.
#include "matrices.h"

#include "floats.h"

namespace tilewright_host {
namespace {

constexpr int SIZE = 16;  // rows of A, and the length of every sum
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr unsigned FRAGMENT_ALIGNMENT = 32;  // bytes; wmma's rule for addresses
constexpr unsigned STRIDE_ALIGNMENT = 16;    // bytes; wmma's rule for strides
constexpr unsigned ROW_BYTES = 16;           // ldmatrix's rows, and their alignment

// Which elements a lane holds, as PTX has it for mma.m16n8k16, in pairs of neighbours along k (A, B) or a row (C):
// A: pair p is at row group_of + 8 (p % 2), k = pair_of + 8 (p / 2).
// B: pair p is at k = pair_of + 8 (p % 2), column group_of + 8 (p / 2).
// C: pair p is at row group_of + 8 (p % 2), column pair_of + 8 (p / 2).
int group_of(int lane) { return lane >> 2; }
int pair_of(int lane) { return lane % 4 * 2; }

// A lane's share of an accumulator with COLUMNS columns: x has 4 elements for each 8 of them.
template <int COLUMNS>
void put_share(int lane, const float* x, float (&matrix)[SIZE][COLUMNS]) {
    const int group = group_of(lane), pair = pair_of(lane);
    for (int n = 0; n < COLUMNS; n += 8) {
        memcpy(&matrix[group][n + pair], x + n / 2, 8);
        memcpy(&matrix[group + 8][n + pair], x + n / 2 + 2, 8);
    }
}
template <int COLUMNS>
void take_share(int lane, const float (&matrix)[SIZE][COLUMNS], float* x) {
    const int group = group_of(lane), pair = pair_of(lane);
    for (int n = 0; n < COLUMNS; n += 8) {
        memcpy(x + n / 2, &matrix[group][n + pair], 8);
        memcpy(x + n / 2 + 2, &matrix[group + 8][n + pair], 8);
    }
}

// The operands of a product with COLUMNS columns.
template <typename Element, int COLUMNS>
struct Product {
    alignas(32) uint16_t a_bits[SIZE][SIZE], b_bits[SIZE][COLUMNS];
    alignas(32) float a[SIZE][SIZE], b[SIZE][COLUMNS], c[SIZE][COLUMNS];

    void gather(int lane, const void* lane_a, const void* lane_b, const float* lane_c) {
        const int group = group_of(lane), pair = pair_of(lane);
        uint32_t words[4];
        uint16_t halves[COLUMNS / 2];
        memcpy(words, lane_a, sizeof words);
        memcpy(halves, lane_b, sizeof halves);
        memcpy(&a_bits[group][pair], &words[0], 4);
        memcpy(&a_bits[group + 8][pair], &words[1], 4);
        memcpy(&a_bits[group][pair + 8], &words[2], 4);
        memcpy(&a_bits[group + 8][pair + 8], &words[3], 4);
        for (int n = 0; n < COLUMNS; n += 8) {
            b_bits[pair][n + group] = halves[n / 2];
            b_bits[pair + 1][n + group] = halves[n / 2 + 1];
            b_bits[pair + 8][n + group] = halves[n / 2 + 2];
            b_bits[pair + 9][n + group] = halves[n / 2 + 3];
        }
        put_share(lane, lane_c, c);
    }

    // c += a b. Products of 2-byte elements are exact in float; the sums are rounded one by one, in the order of k.
    void multiply() {
        for (int row = 0; row < SIZE; ++row) {
            for (int k = 0; k < SIZE; k += 8) widen<Element>(&a_bits[row][k], &a[row][k]);
            for (int n = 0; n < COLUMNS; n += 8) widen<Element>(&b_bits[row][n], &b[row][n]);
        }
        for (int row = 0; row < SIZE; row += 8) {
            for (int n = 0; n < COLUMNS; n += 8) multiply_block(row, n);
        }
    }

    // 8 x 8 elements of c: eight sums at once hide what an addition takes.
    void multiply_block(int row, int n) {
        Floats sums[8];
#pragma GCC unroll 8
        for (int r = 0; r < 8; ++r) memcpy(&sums[r], &c[row + r][n], sizeof(Floats));
        for (int k = 0; k < SIZE; ++k) {
            Floats right;
            memcpy(&right, &b[k][n], sizeof right);
#pragma GCC unroll 8
            for (int r = 0; r < 8; ++r) sums[r] += a[row + r][k] * right;
        }
#pragma GCC unroll 8
        for (int r = 0; r < 8; ++r) memcpy(&c[row + r][n], &sums[r], sizeof(Floats));
    }
};

struct Factors {
    float* d;
    const void *a, *b;
    const float* c;
};

// Everything is gathered before anything is scattered: d may be any of the operands.
template <typename Element, int COLUMNS>
void multiply(void* const* lanes, void*) {
    Product<Element, COLUMNS> product;
    for (int lane = 0; lane < WARP_SIZE; ++lane) {
        const Factors& factors = *static_cast<const Factors*>(lanes[lane]);
        product.gather(lane, factors.a, factors.b, factors.c);
    }
    product.multiply();
    for (int lane = 0; lane < WARP_SIZE; ++lane) {
        take_share(lane, product.c, static_cast<const Factors*>(lanes[lane])->d);
    }
}

// A fragment and the memory it is loaded from or stored to.
struct Access {
    void* x;
    void* memory;
    unsigned stride;
    bool row_major;
};

const char* name_of(bool row_major) { return row_major ? "row major" : "column major"; }

// What all lanes agree on. A fault where they don't, or where address or stride are not allowed.
const Access& common_access(void* const* lanes, const char* kind, unsigned itemsize) {
    const Access& first = *static_cast<const Access*>(lanes[0]);
    for (int lane = 1; lane < WARP_SIZE; ++lane) {
        const Access& other = *static_cast<const Access*>(lanes[lane]);
        if (other.memory != first.memory || other.stride != first.stride || other.row_major != first.row_major) {
            fault("%s: all lanes must pass one address, ldm, layout; got %p, %u, %s in lane 0, %p, %u, %s in lane %d",
                  kind, first.memory, first.stride, name_of(first.row_major), other.memory, other.stride,
                  name_of(other.row_major), lane);
        }
    }
    const unsigned past = uintptr_t(first.memory) % FRAGMENT_ALIGNMENT;
    if (past != 0) {
        fault("%s: the address must be a multiple of %u bytes, got %p, which is %u past one", kind, FRAGMENT_ALIGNMENT,
              first.memory, past);
    }
    if (first.stride < unsigned(SIZE) || first.stride * itemsize % STRIDE_ALIGNMENT != 0) {
        fault("%s: ldm must be a multiple of %u elements, at least %d, got %u", kind, STRIDE_ALIGNMENT / itemsize, SIZE,
              first.stride);
    }
    return first;
}

// IS_A: rows of bits are A's rows, else B's columns; k runs along them. They lie so in memory, or across.
template <bool IS_A, bool ACROSS, bool SHARED>
void load_operands(void* const* lanes, void*) {
    const Access& access = common_access(lanes, SHARED ? "load_fragment" : "wmma::load_matrix_sync", sizeof(uint16_t));
    uint16_t bits[SIZE][SIZE];
    for (int line = 0; line < SIZE; ++line) {
        const uint16_t* from = static_cast<const uint16_t*>(access.memory) + size_t(line) * access.stride;
        warp_reads(ANY_LANE, from, sizeof bits[0]);
        if (SHARED && !is_shared(from)) {  // asked second: the read itself tells what is just outside
            fault("load_fragment: the matrix must be in shared memory, got %p; or use wmma::load_matrix_sync", from);
        }
        if (!ACROSS) {
            memcpy(bits[line], from, sizeof bits[0]);
        } else {
            for (int i = 0; i < SIZE; ++i) bits[i][line] = from[i];
        }
    }
    for (int lane = 0; lane < WARP_SIZE; ++lane) {
        const int group = group_of(lane), pair = pair_of(lane);
        uint32_t words[4];
        memcpy(&words[0], &bits[group][pair], 4);
        memcpy(&words[IS_A ? 1 : 2], &bits[group + 8][pair], 4);
        memcpy(&words[IS_A ? 2 : 1], &bits[group][pair + 8], 4);
        memcpy(&words[3], &bits[group + 8][pair + 8], 4);
        memcpy(static_cast<const Access*>(lanes[lane])->x, words, sizeof words);
    }
}

void transpose(float (&matrix)[SIZE][SIZE]) {
    for (int i = 0; i < SIZE; ++i) {
        for (int j = 0; j < i; ++j) {
            const float upper = matrix[j][i];
            matrix[j][i] = matrix[i][j];
            matrix[i][j] = upper;
        }
    }
}

void load_accumulators(void* const* lanes, void*) {
    const Access& access = common_access(lanes, "wmma::load_matrix_sync", sizeof(float));
    float matrix[SIZE][SIZE];
    for (int line = 0; line < SIZE; ++line) {
        const float* from = static_cast<const float*>(access.memory) + size_t(line) * access.stride;
        warp_reads(ANY_LANE, from, sizeof matrix[0]);
        memcpy(matrix[line], from, sizeof matrix[0]);
    }
    if (!access.row_major) transpose(matrix);
    for (int lane = 0; lane < WARP_SIZE; ++lane) {
        take_share(lane, matrix, static_cast<float*>(static_cast<const Access*>(lanes[lane])->x));
    }
}

void store_accumulators(void* const* lanes, void*) {
    const Access& access = common_access(lanes, "wmma::store_matrix_sync", sizeof(float));
    float matrix[SIZE][SIZE];
    for (int lane = 0; lane < WARP_SIZE; ++lane) {
        put_share(lane, static_cast<const float*>(static_cast<const Access*>(lanes[lane])->x), matrix);
    }
    if (!access.row_major) transpose(matrix);
    for (int line = 0; line < SIZE; ++line) {
        float* to = static_cast<float*>(access.memory) + size_t(line) * access.stride;
        warp_writes(ANY_LANE, to, sizeof matrix[0]);
        memcpy(to, matrix[line], sizeof matrix[0]);
    }
}

// ldmatrix of one lane.
struct RowLoad {
    uint32_t* registers;
    const void* row;
};

template <int MATRICES, bool TRANSPOSED>
void load_rows(void* const* lanes, void*) {
    uint16_t elements[MATRICES][8][8];
    for (int lane = 0; lane < MATRICES * 8; ++lane) {
        const void* row = static_cast<const RowLoad*>(lanes[lane])->row;
        if (uintptr_t(row) % ROW_BYTES != 0) {
            fault("ldmatrix: a row must be at a multiple of %u bytes, got %p from lane %d", ROW_BYTES, row, lane);
        }
        warp_reads(lane, row, ROW_BYTES);
        if (!is_shared(row)) fault("ldmatrix: a row must be in shared memory, got %p from lane %d", row, lane);
        memcpy(elements[lane / 8][lane % 8], row, ROW_BYTES);
    }
    for (int lane = 0; lane < WARP_SIZE; ++lane) {
        const int group = group_of(lane), pair = pair_of(lane);
        uint32_t* registers = static_cast<const RowLoad*>(lanes[lane])->registers;
        for (int m = 0; m < MATRICES; ++m) {
            const auto& matrix = elements[m];
            if (TRANSPOSED) {
                registers[m] = matrix[pair][group] | uint32_t(matrix[pair + 1][group]) << 16;
            } else {
                memcpy(&registers[m], &matrix[group][pair], 4);
            }
        }
    }
}

template <bool SHARED>
WarpExecute operand_load(bool is_a, bool across) {
    if (is_a) return across ? load_operands<true, true, SHARED> : load_operands<true, false, SHARED>;
    return across ? load_operands<false, true, SHARED> : load_operands<false, false, SHARED>;
}

}  // namespace

void load_operand(void* x, const void* from, unsigned stride, bool is_a, bool row_major, bool from_shared, int line) {
    Access access = {x, const_cast<void*>(from), stride, row_major};
    const bool across = is_a != row_major;
    warp_collective(ALL_LANES, from_shared ? "load_fragment" : "wmma::load_matrix_sync", line, &access,
                    from_shared ? operand_load<true>(is_a, across) : operand_load<false>(is_a, across));
}

void load_accumulator(float* x, const float* from, unsigned stride, bool row_major, int line) {
    Access access = {x, const_cast<float*>(from), stride, row_major};
    warp_collective(ALL_LANES, "wmma::load_matrix_sync", line, &access, load_accumulators);
}

void store_accumulator(const float* x, float* to, unsigned stride, bool row_major, int line) {
    Access access = {const_cast<float*>(x), to, stride, row_major};
    warp_collective(ALL_LANES, "wmma::store_matrix_sync", line, &access, store_accumulators);
}

template <typename Element>
void multiply_fragments(float* d, const Element* a, const Element* b, const float* c, int line) {
    Factors factors = {d, a, b, c};
    warp_collective(ALL_LANES, "wmma::mma_sync", line, &factors, multiply<Element, 16>);
}
template void multiply_fragments<float16>(float*, const float16*, const float16*, const float*, int);
template void multiply_fragments<bfloat16>(float*, const bfloat16*, const bfloat16*, const float*, int);

template <typename Element>
void multiply_registers(float* d, const uint32_t* a, const uint32_t* b, const float* c, int line) {
    Factors factors = {d, a, b, c};
    warp_collective(ALL_LANES, "mma_m16n8k16", line, &factors, multiply<Element, 8>);
}
template void multiply_registers<float16>(float*, const uint32_t*, const uint32_t*, const float*, int);
template void multiply_registers<bfloat16>(float*, const uint32_t*, const uint32_t*, const float*, int);

void load_matrices(uint32_t* registers, int matrices, bool transposed, const void* row, int line) {
    RowLoad load = {registers, row};
    if (matrices == 4) {
        warp_collective(ALL_LANES, transposed ? "ldmatrix_x4_transposed" : "ldmatrix_x4", line, &load,
                        transposed ? load_rows<4, true> : load_rows<4, false>);
    } else {
        warp_collective(ALL_LANES, transposed ? "ldmatrix_x2_transposed" : "ldmatrix_x2", line, &load,
                        transposed ? load_rows<2, true> : load_rows<2, false>);
    }
}

template <typename Element>
static void fill(Element* x, Element value) {
    for (int i = 0; i < 8; ++i) x[i] = value;
}
void fill_share(float* x, float value) { fill(x, value); }
void fill_share(float16* x, float16 value) { fill(x, value); }
void fill_share(bfloat16* x, bfloat16 value) { fill(x, value); }

}  // namespace tilewright_host
