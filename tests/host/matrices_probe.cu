// One warp that converts, loads and multiplies matrices and lays its registers open, on the host and on a GPU.
// Built for one ELEMENT (float16, bfloat16) and WITH_WMMA or WITH_MMA: a GPU's device.cuh holds one of each.
#include "device.cuh"

#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Element = ELEMENT;
constexpr unsigned THREADS = 32;

// Memory to memory, value by value.
struct Conversions {
    const uint16_t* elements;
    float* floats;  // of elements
    const float* values;
    uint16_t* rounded;  // of values, by from_float
    uint32_t *words, *packed;  // of pairs of values, by to_word and by pack
    float* unpacked;           // of words
    float* powers;             // 2 ** values
    int count;                 // of elements, and of values; even
};

__global__ void converted(const Conversions args) {
    for (int i = int(threadIdx.x); i < args.count; i += int(THREADS)) {
        args.floats[i] = to_float(reinterpret_cast<const Element*>(args.elements)[i]);
        reinterpret_cast<Element*>(args.rounded)[i] = from_float<Element>(args.values[i]);
        args.powers[i] = exp2_approximate(args.values[i]);
        if (i % 2 != 0) continue;
        const uint32_t word = to_word<Element>(args.values + i);
        args.words[i / 2] = word;
        args.packed[i / 2] = pack<Element>(args.values[i], args.values[i + 1]);
        from_word<Element>(word, args.unpacked + i);
    }
}

#ifdef WITH_WMMA
// Lines of a matrix in memory, rows or columns, are this many elements apart.
constexpr int LINES = 16, STRIDE_A = 24, STRIDE_B = 40, STRIDE_C = 20, STRIDE_D = 28;

struct Product {
    const Element *a, *b;
    const float* c;
    float* d;
    int64_t skew_a;  // a's fragment starts so many elements into it
    unsigned stride_a;
    bool c_row_major, d_row_major, in_place, shared, lane_strides, not_copied;
};

template <typename T>
__device__ void copy(const T* from, T* to, int count) {
    for (int i = int(threadIdx.x); i < count; i += int(THREADS)) to[i] = from[i];
}

template <typename LayoutA, typename LayoutB>
__global__ void product(const Product args) {
    DYNAMIC_SHARED_MEMORY(smem, 128);
    Element* smem_a = reinterpret_cast<Element*>(smem);
    Element* smem_b = smem_a + LINES * STRIDE_A;
    float* smem_c = reinterpret_cast<float*>(smem_b + LINES * STRIDE_B);
    float* smem_d = smem_c + LINES * STRIDE_C;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, Element, LayoutA> a;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, Element, LayoutB> b;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> c, d;
    const auto layout_c = args.c_row_major ? wmma::mem_row_major : wmma::mem_col_major;
    const auto layout_d = args.d_row_major ? wmma::mem_row_major : wmma::mem_col_major;
    unsigned stride_a = args.stride_a;
    if (args.lane_strides && threadIdx.x >= 7) stride_a += 8;

    if (args.shared) {
        copy(args.a, smem_a, LINES * STRIDE_A);
        copy(args.b, smem_b, LINES * STRIDE_B);
        copy(args.c, smem_c, LINES * STRIDE_C);
        __syncwarp();
        load_fragment(a, (args.not_copied ? args.a : smem_a) + args.skew_a, int(stride_a));
        load_fragment(b, smem_b, STRIDE_B);
        wmma::load_matrix_sync(c, smem_c, STRIDE_C, layout_c);
    } else {
        wmma::load_matrix_sync(a, args.a + args.skew_a, stride_a);
        wmma::load_matrix_sync(b, args.b, STRIDE_B);
        wmma::load_matrix_sync(c, args.c, STRIDE_C, layout_c);
    }
    // Twice the product, by way of a fragment that starts as zeros.
    wmma::fill_fragment(d, 0.0f);
    if (args.in_place) {
        wmma::mma_sync(c, a, b, c);
        wmma::mma_sync(d, a, b, d);
        for (int i = 0; i < d.num_elements; ++i) d.x[i] += c.x[i];
    } else {
        wmma::mma_sync(d, a, b, c);
        wmma::mma_sync(c, a, b, d);
        d = c;
    }
    if (args.shared) {
        wmma::store_matrix_sync(smem_d, d, STRIDE_D, layout_d);
        __syncwarp();
        for (int i = int(threadIdx.x); i < LINES * 16; i += int(THREADS)) {
            const int at = i / 16 * STRIDE_D + i % 16;
            args.d[at] = smem_d[at];
        }
    } else {
        wmma::store_matrix_sync(args.d, d, STRIDE_D, layout_d);
    }
}

constexpr size_t PRODUCT_SMEM =
    LINES * ((STRIDE_A + STRIDE_B) * sizeof(Element) + (STRIDE_C + STRIDE_D) * sizeof(float));
#endif

#ifdef WITH_MMA
struct Registers {
    const uint32_t (*a)[4], (*b)[2];
    const float (*c)[4];
    float (*d)[4];
    bool in_place;
};

__global__ void multiplied(const Registers args) {
    const int lane = int(threadIdx.x);
    uint32_t a[4], b[2];
    float c[4], d[4];
    for (int i = 0; i < 4; ++i) a[i] = args.a[lane][i], c[i] = args.c[lane][i];
    for (int i = 0; i < 2; ++i) b[i] = args.b[lane][i];
    if (args.in_place) {
        mma_m16n8k16<Element>(c, a, b, c);
        for (int i = 0; i < 4; ++i) d[i] = c[i];
    } else {
        mma_m16n8k16<Element>(d, a, b, c);
    }
    for (int i = 0; i < 4; ++i) args.d[lane][i] = d[i];
}

constexpr int TILE = 40 * 24;  // elements

struct Tile {
    const uint16_t* elements;
    const int* offsets;  // of each lane's row, in elements
    uint32_t (*x4)[4], (*x4_transposed)[4], (*x2)[2], (*x2_transposed)[2];
    bool shared;
};

__global__ void loaded(const Tile args) {
    DYNAMIC_SHARED_MEMORY(smem, 128);
    uint16_t* tile = reinterpret_cast<uint16_t*>(smem);
    const int lane = int(threadIdx.x);
    for (int i = lane; i < TILE; i += int(THREADS)) tile[i] = args.elements[i];
    __syncwarp();
    const uint16_t* row = (args.shared ? tile : args.elements) + args.offsets[lane];
    uint32_t x4[4], x4_transposed[4], x2[2], x2_transposed[2];
    ldmatrix_x4(x4, row);
    ldmatrix_x4_transposed(x4_transposed, row);
    const uint16_t* row_of_two = lane < 16 ? row : nullptr;
    ldmatrix_x2(x2, row_of_two);
    ldmatrix_x2_transposed(x2_transposed, row_of_two);
    for (int i = 0; i < 4; ++i) args.x4[lane][i] = x4[i], args.x4_transposed[lane][i] = x4_transposed[i];
    for (int i = 0; i < 2; ++i) args.x2[lane][i] = x2[i], args.x2_transposed[lane][i] = x2_transposed[i];
}
#endif

}  // namespace

EXPORT const char* error_text(int code) { return cudaGetErrorString(cudaError_t(code)); }

EXPORT int run_conversions(const Conversions* args) { return launch_grid(converted, 1, THREADS, 0, nullptr, *args); }

#ifdef WITH_WMMA
EXPORT int run_product(const Product* args, bool a_row_major, bool b_row_major) {
    void (*kernel)(Product) = product<wmma::col_major, wmma::col_major>;
    if (a_row_major) {
        kernel = b_row_major ? product<wmma::row_major, wmma::row_major> : product<wmma::row_major, wmma::col_major>;
    } else if (b_row_major) {
        kernel = product<wmma::col_major, wmma::row_major>;
    }
    return launch_grid(kernel, 1, THREADS, PRODUCT_SMEM, nullptr, *args);
}
#endif

#ifdef WITH_MMA
EXPORT int run_multiplied(const Registers* args) { return launch_grid(multiplied, 1, THREADS, 0, nullptr, *args); }
EXPORT int run_loaded(const Tile* args) {
    return launch_grid(loaded, 1, THREADS, TILE * sizeof(uint16_t), nullptr, *args);
}
#endif
