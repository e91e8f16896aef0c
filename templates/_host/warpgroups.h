// What kernels of sm_90a say: barriers that count arrivals and bytes, bulk copies of boxes of a tensor, products of a
// warpgroup. The work is done in mbarriers.cpp, named_barriers.cpp, bulk.cpp and warpgroups.cpp.
#pragma once

#include "runtime.h"
#include "types.h"

constexpr int WARPGROUP = 128;   // threads
constexpr int BOX_COLUMNS = 64;  // of 2-byte elements: a box's rows are 128 bytes

struct alignas(8) Mbarrier {
    uint64_t word;
};
struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

// Rows of 128 bytes in shared memory, swizzled as bulk_load leaves them.
struct SharedMatrix {
    const unsigned char* start;
    int chunk_bytes;

    TILEWRIGHT_INLINE SharedMatrix plus(int bytes) const { return {start + bytes, chunk_bytes}; }
};
TILEWRIGHT_INLINE SharedMatrix shared_matrix(const void* start, int chunk_bytes) {
    return {static_cast<const unsigned char*>(start), chunk_bytes};
}

namespace tilewright_host {

// Each by the threads that the words below say. bytes: 0 where none are expected.
void init_mbarrier(void* barrier, int arrivals, int line);
void show_mbarriers();
void arrive_at_mbarrier(void* barrier, int bytes, const char* kind, int line, int times = 1);
void wait_for_mbarrier(void* barrier, int parity, int line);
bool test_mbarrier(void* barrier, int parity, int line);
void meet_at_named_barrier(int id, int threads, bool waits, int line);
void fence_generic_accesses();

bool describe_tensor(TensorMap* map, const void* base, const int64_t* sizes, const int64_t* strides, int box_rows);
void copy_box(void* to, const TensorMap* map, void* barrier, int column, int row, int head, int batch, int line);


void fence_registers(int line);
template <typename Element>
void multiply_keys(float* d, int columns, SharedMatrix a, SharedMatrix b, bool accumulate, int line);
template <typename Element>
void multiply_keys(float* d, int columns, const uint32_t* a, SharedMatrix b, bool accumulate, int line);
template <typename Element>
void multiply_values(float* d, int columns, const uint32_t* a, SharedMatrix b, int line);
void commit_products(int line);
void wait_for_products(int pending, float* settled, int count, int line);

}  // namespace tilewright_host

// Barriers in shared memory.
inline void mbarrier_init(Mbarrier* barrier, int arrivals, int line = __builtin_LINE()) {
    tilewright_host::init_mbarrier(barrier, arrivals, line);
}
inline void mbarrier_init_fence() { tilewright_host::show_mbarriers(); }
inline void mbarrier_arrive(Mbarrier* barrier, int line = __builtin_LINE()) {
    tilewright_host::arrive_at_mbarrier(barrier, 0, "mbarrier_arrive", line);
}
inline void mbarrier_arrive_if(Mbarrier* barrier, bool does, int line = __builtin_LINE()) {
    if (does) tilewright_host::arrive_at_mbarrier(barrier, 0, "mbarrier_arrive_if", line);
}
inline void mbarrier_arrive_times(Mbarrier* barrier, int times, bool does, int line = __builtin_LINE()) {
    if (does) tilewright_host::arrive_at_mbarrier(barrier, 0, "mbarrier_arrive_times", line, times);
}
inline void mbarrier_arrive_expect(Mbarrier* barrier, int bytes, int line = __builtin_LINE()) {
    tilewright_host::arrive_at_mbarrier(barrier, bytes, "mbarrier_arrive_expect", line);
}
inline void mbarrier_wait(Mbarrier* barrier, int parity, int line = __builtin_LINE()) {
    tilewright_host::wait_for_mbarrier(barrier, parity, line);
}
inline bool mbarrier_test(Mbarrier* barrier, int parity, int line = __builtin_LINE()) {
    return tilewright_host::test_mbarrier(barrier, parity, line);
}

// Named barriers.
inline void named_barrier_sync(int id, int threads, int line = __builtin_LINE()) {
    tilewright_host::meet_at_named_barrier(id, threads, true, line);
}
inline void named_barrier_arrive(int id, int threads, int line = __builtin_LINE()) {
    tilewright_host::meet_at_named_barrier(id, threads, false, line);
}

inline void fence_proxy_async() { tilewright_host::fence_generic_accesses(); }

// Registers change hands on a GPU alone.
template <int N>
inline void registers_release() {
    static_assert(N >= 24 && N <= 256 && N % 8 == 0, "a thread has 24 to 256 registers, in steps of 8");
}
template <int N>
inline void registers_acquire() {
    static_assert(N >= 24 && N <= 256 && N % 8 == 0, "a thread has 24 to 256 registers, in steps of 8");
}

// Bulk copies.
template <typename Element>
inline bool make_tensor_map(TensorMap* map, const void* base, const int64_t (&sizes)[4], const int64_t (&strides)[4],
                            int box_rows) {
    static_assert(sizeof(Element) == 2, "a box holds 2-byte elements");
    return tilewright_host::describe_tensor(map, base, sizes, strides, box_rows);
}
inline void bulk_load(void* to_shared, const TensorMap* map, Mbarrier* barrier, int column, int row, int head, int batch,
                      int line = __builtin_LINE()) {
    tilewright_host::copy_box(to_shared, map, barrier, column, row, head, batch, line);
}

// Products of a warpgroup.
inline void wgmma_fence(int line = __builtin_LINE()) { tilewright_host::fence_registers(line); }
template <typename Element, int N>
inline void wgmma_keys(float (&d)[N / 2], SharedMatrix a, SharedMatrix b, bool accumulate, int line = __builtin_LINE()) {
    static_assert(N >= 8 && N <= 256 && N % 8 == 0, "a product has 8 to 256 columns, in steps of 8");
    tilewright_host::multiply_keys<Element>(d, N, a, b, accumulate, line);
}
template <typename Element, int N>
inline void wgmma_keys(float (&d)[N / 2], const uint32_t (&a)[4], SharedMatrix b, bool accumulate, int line = __builtin_LINE()) {
    static_assert(N >= 8 && N <= 256 && N % 8 == 0, "a product has 8 to 256 columns, in steps of 8");
    tilewright_host::multiply_keys<Element>(d, N, a, b, accumulate, line);
}
template <typename Element, int N>
inline void wgmma_values(float (&d)[N / 2], const uint32_t (&a)[4], SharedMatrix b, int line = __builtin_LINE()) {
    static_assert(N >= 8 && N <= 256 && N % 8 == 0, "a product has 8 to 256 columns, in steps of 8");
    tilewright_host::multiply_values<Element>(d, N, a, b, line);
}
inline void wgmma_commit(int line = __builtin_LINE()) { tilewright_host::commit_products(line); }
template <int PENDING, int COUNT>
inline void wgmma_wait(float (&settled)[COUNT], int line = __builtin_LINE()) {
    static_assert(PENDING >= 0 && PENDING <= 7, "0 to 7 groups stay in flight");
    tilewright_host::wait_for_products(PENDING, settled, COUNT, line);
}
