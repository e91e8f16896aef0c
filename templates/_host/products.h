// A warpgroup's product by itself: where its matrices lie, and the arithmetic.
#pragma once

#include <vector>

#include "warpgroups.h"

namespace tilewright_host {

constexpr int ROWS = 64, DEPTH = 16;  // of a product: rows of a and d, and the length of every sum
constexpr int MOST_COLUMNS = 256, TILE_COLUMNS = 64;
constexpr int ROW_BYTES = 128, CHUNK_BYTES = 16, TILE_BYTES = 1024, WARP_ROWS = 16;
constexpr int PER_CHUNK = CHUNK_BYTES / 2;  // elements

// d of a warpgroup from its first product until a thread may read it again.
struct Unsettled {
    float* registers[WARPGROUP_SIZE];
    int columns, unfinished;  // products
    int line;                 // of its newest product
    std::vector<float> values;
};

struct Product {
    Unsettled* to;
    void (*multiply)(const Product& product);
    bool accumulate, a_in_registers;
    SharedMatrix a, b;
    uint16_t a_bits[ROWS][DEPTH];
};

// Chunk c (8 of the 16 along the sums) of a row of a or, in wgmma_keys, of b; 8 columns of a row of b in wgmma_values.
const unsigned char* keys_chunk(const SharedMatrix& matrix, int row, int c);
const unsigned char* values_chunk(const SharedMatrix& matrix, int row, int column);

// Reads the operands and adds to the accumulator's values. KEYS: b holds rows of d's columns.
template <typename Element, bool KEYS>
void multiply(const Product& product);

}  // namespace tilewright_host
