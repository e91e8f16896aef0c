// The arithmetic of a warpgroup's products, in float, in the order of k.
#include "products.h"

#include "floats.h"

namespace tilewright_host {

namespace {

// Where a chunk lies whose address would be `logical` without the swizzle: address bits 4 to 6 exchanged by bits 7 to 9.
const unsigned char* chunk_at(const unsigned char* logical) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(logical);
    return reinterpret_cast<const unsigned char*>(address ^ (address / ROW_BYTES % 8 * CHUNK_BYTES));
}

// d += a b for 8 x 8 of d: eight sums at once hide what an addition takes. Each is rounded after every product.
void multiply_block(float* d, int columns, const float (*a)[DEPTH], const float* b) {
    Floats sums[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) std::memcpy(&sums[r], d + r * columns, sizeof(Floats));
    for (int k = 0; k < DEPTH; ++k) {
        Floats right;
        std::memcpy(&right, b + k * MOST_COLUMNS, sizeof right);
#pragma GCC unroll 8
        for (int r = 0; r < 8; ++r) sums[r] += a[r][k] * right;
    }
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) std::memcpy(d + r * columns, &sums[r], sizeof(Floats));
}

template <typename Element>
void widen_chunk(const unsigned char* from, float* to) {
    uint16_t bits[PER_CHUNK];
    std::memcpy(bits, from, sizeof bits);
    widen<Element>(bits, to);
}

}  // namespace

const unsigned char* keys_chunk(const SharedMatrix& matrix, int row, int c) {
    return chunk_at(matrix.start + row * ROW_BYTES + c * CHUNK_BYTES);
}
const unsigned char* values_chunk(const SharedMatrix& matrix, int row, int column) {
    const int tile = column / TILE_COLUMNS, within = column % TILE_COLUMNS;
    return chunk_at(matrix.start + ptrdiff_t(tile) * matrix.chunk_bytes + row * ROW_BYTES + within * 2);
}

template <typename Element, bool KEYS>
void multiply(const Product& product) {
    static float a[ROWS][DEPTH], b[DEPTH][MOST_COLUMNS];  // one thread runs all this
    const int columns = product.to->columns;
    for (int row = 0; row < ROWS; ++row) {
        for (int c = 0; c < DEPTH / PER_CHUNK; ++c) {
            if (product.a_in_registers) {
                widen<Element>(&product.a_bits[row][c * PER_CHUNK], &a[row][c * PER_CHUNK]);
            } else {
                widen_chunk<Element>(keys_chunk(product.a, row, c), &a[row][c * PER_CHUNK]);
            }
        }
    }
    for (int n = 0; n < columns; n += 8) {
        if (KEYS) {
            float rows[8][DEPTH];
            for (int i = 0; i < 8; ++i) {
                for (int c = 0; c < DEPTH / PER_CHUNK; ++c) {
                    widen_chunk<Element>(keys_chunk(product.b, n + i, c), &rows[i][c * PER_CHUNK]);
                }
            }
            for (int k = 0; k < DEPTH; ++k) {
                for (int i = 0; i < 8; ++i) b[k][n + i] = rows[i][k];
            }
        } else {
            for (int k = 0; k < DEPTH; ++k) widen_chunk<Element>(values_chunk(product.b, k, n), &b[k][n]);
        }
    }
    float* d = product.to->values.data();
    if (!product.accumulate) std::memset(d, 0, size_t(ROWS * columns) * sizeof(float));
    for (int row = 0; row < ROWS; row += 8) {
        for (int n = 0; n < columns; n += 8) multiply_block(d + row * columns + n, columns, a + row, &b[0][n]);
    }
}
template void multiply<float16, true>(const Product&);
template void multiply<float16, false>(const Product&);
template void multiply<bfloat16, true>(const Product&);
template void multiply<bfloat16, false>(const Product&);

}  // namespace tilewright_host
