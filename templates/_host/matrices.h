// A warp's matrix instructions on the CPU: wmma fragments, ldmatrix, mma.m16n8k16. The work is done in matrices.cpp.
#pragma once

#include "runtime.h"
#include "types.h"

// Fragments are distributed as by PTX's mma.m16n8k16, a 16 x 16 x 16 product being two of these side by side: B and the
// accumulators have columns 0 to 7 in x[0] to x[3], 8 to 15 in x[4] to x[7]. On a GPU it may differ: rely on nothing.
namespace wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

// A lane's share of 16 x 16 elements. (A GPU's float16 operands have 16: every element is held twice.)
template <typename Element>
struct Share {
    using element_type = Element;
    static constexpr int num_elements = 8;
    Element x[num_elements];
};

template <typename Use, int M, int N, int K, typename Element, typename Layout = void>
struct fragment;
template <typename Layout>
struct fragment<matrix_a, 16, 16, 16, float16, Layout> : Share<float16> {};
template <typename Layout>
struct fragment<matrix_a, 16, 16, 16, bfloat16, Layout> : Share<bfloat16> {};
template <typename Layout>
struct fragment<matrix_b, 16, 16, 16, float16, Layout> : Share<float16> {};
template <typename Layout>
struct fragment<matrix_b, 16, 16, 16, bfloat16, Layout> : Share<bfloat16> {};
template <>
struct fragment<accumulator, 16, 16, 16, float> : Share<float> {};

}  // namespace wmma

namespace tilewright_host {

using Accumulator = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;

// How a 16 x 16 matrix of 2-byte elements is held (as A or B of a product) and lies in memory.
template <typename Fragment>
struct OperandKind;
template <typename Element>
struct OperandKind<wmma::fragment<wmma::matrix_a, 16, 16, 16, Element, wmma::row_major>> {
    static constexpr bool is_a = true, row_major = true;
};
template <typename Element>
struct OperandKind<wmma::fragment<wmma::matrix_a, 16, 16, 16, Element, wmma::col_major>> {
    static constexpr bool is_a = true, row_major = false;
};
template <typename Element>
struct OperandKind<wmma::fragment<wmma::matrix_b, 16, 16, 16, Element, wmma::row_major>> {
    static constexpr bool is_a = false, row_major = true;
};
template <typename Element>
struct OperandKind<wmma::fragment<wmma::matrix_b, 16, 16, 16, Element, wmma::col_major>> {
    static constexpr bool is_a = false, row_major = false;
};

// Each is called by all lanes of a warp at once; addresses, strides and layouts are the same in every lane.
// stride: elements from a row (or column, where not row_major) to the next. In all of them x has a lane's 8 elements.
void load_operand(void* x, const void* from, unsigned stride, bool is_a, bool row_major, bool from_shared, int line);
void load_accumulator(float* x, const float* from, unsigned stride, bool row_major, int line);
void store_accumulator(const float* x, float* to, unsigned stride, bool row_major, int line);
template <typename Element>
void multiply_fragments(float* d, const Element* a, const Element* b, const float* c, int line);

// matrices: 2 or 4. row: this lane's, of 16 bytes in shared memory.
void load_matrices(uint32_t* registers, int matrices, bool transposed, const void* row, int line);
template <typename Element>
void multiply_registers(float* d, const uint32_t* a, const uint32_t* b, const float* c, int line);

// Each lane by itself. A call, so that a fragment is not watched element by element.
void fill_share(float* x, float value);
void fill_share(float16* x, float16 value);
void fill_share(bfloat16* x, bfloat16 value);

}  // namespace tilewright_host

namespace wmma {

template <typename Element>
inline void fill_fragment(Share<Element>& to, Element value) {
    tilewright_host::fill_share(to.x, value);
}

// from: a multiple of 32 bytes; ldm: a multiple of 16 bytes.
template <typename Use, typename Element, typename Layout>
inline void load_matrix_sync(fragment<Use, 16, 16, 16, Element, Layout>& to, const Element* from, unsigned ldm,
                             int line = __builtin_LINE()) {
    using Kind = tilewright_host::OperandKind<fragment<Use, 16, 16, 16, Element, Layout>>;
    tilewright_host::load_operand(to.x, from, ldm, Kind::is_a, Kind::row_major, false, line);
}
inline void load_matrix_sync(tilewright_host::Accumulator& to, const float* from, unsigned ldm, layout_t layout,
                             int line = __builtin_LINE()) {
    tilewright_host::load_accumulator(to.x, from, ldm, layout == mem_row_major, line);
}
inline void store_matrix_sync(float* to, const tilewright_host::Accumulator& from, unsigned ldm, layout_t layout,
                              int line = __builtin_LINE()) {
    tilewright_host::store_accumulator(from.x, to, ldm, layout == mem_row_major, line);
}

// d = a b + c; d may be c.
template <typename Element, typename LayoutA, typename LayoutB>
inline void mma_sync(tilewright_host::Accumulator& d, const fragment<matrix_a, 16, 16, 16, Element, LayoutA>& a,
                     const fragment<matrix_b, 16, 16, 16, Element, LayoutB>& b, const tilewright_host::Accumulator& c,
                     int line = __builtin_LINE()) {
    tilewright_host::multiply_fragments<Element>(d.x, a.x, b.x, c.x, line);
}

}  // namespace wmma

// load_matrix_sync for an operand that lies in shared memory.
template <typename Use, typename Element, typename Layout>
inline void load_fragment(wmma::fragment<Use, 16, 16, 16, Element, Layout>& to, const Element* from, int stride,
                          int line = __builtin_LINE()) {
    using Kind = tilewright_host::OperandKind<wmma::fragment<Use, 16, 16, 16, Element, Layout>>;
    tilewright_host::load_operand(to.x, from, unsigned(stride), Kind::is_a, Kind::row_major, true, line);
}

// ldmatrix.m8n8.b16: lane l gives the address of row l % 8 of matrix l / 8, and gets elements 2 (l % 4) and the next of
// row l / 4 of each matrix; transposed: of column l / 4. x2 ignores the addresses of lanes 16 to 31, as from sm_80 on.
inline void ldmatrix_x4(uint32_t (&registers)[4], const void* shared_row, int line = __builtin_LINE()) {
    tilewright_host::load_matrices(registers, 4, false, shared_row, line);
}
inline void ldmatrix_x4_transposed(uint32_t (&registers)[4], const void* shared_row, int line = __builtin_LINE()) {
    tilewright_host::load_matrices(registers, 4, true, shared_row, line);
}
inline void ldmatrix_x2(uint32_t (&registers)[2], const void* shared_row, int line = __builtin_LINE()) {
    tilewright_host::load_matrices(registers, 2, false, shared_row, line);
}
inline void ldmatrix_x2_transposed(uint32_t (&registers)[2], const void* shared_row, int line = __builtin_LINE()) {
    tilewright_host::load_matrices(registers, 2, true, shared_row, line);
}

// mma.m16n8k16.row.col with float accumulators: d = a b + c; d may be c.
template <typename Element>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4],
                         int line = __builtin_LINE()) {
    tilewright_host::multiply_registers<Element>(d, a, b, c, line);
}
