// A GPU's execution model on the CPU, for checks: a block's threads are fibers, and every memory access of theirs is watched.
// What device.cuh and the runtime's own files share; kernels use device.cuh alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tilewright_host {

constexpr int WARP_SIZE = 32;
constexpr int WARPGROUP_SIZE = 128;
constexpr int MAX_THREADS = 1024;
constexpr unsigned MULTIPROCESSORS = 3;  // few: what is persistent gets several tiles
constexpr int MAX_WARPS = MAX_THREADS / WARP_SIZE;
constexpr int ANY_LANE = -1;  // an access of the whole warp: which lane it falls to is not told

struct Index {
    unsigned x, y, z;
};

// Where in the source something happens: an instruction's address, or a line of kernel.cu where the caller knows it.
struct Where {
    const void* pc;
    int line;
};

// Ends the launch with this report, which names the block and the thread. Called from a kernel's thread.
[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fault_at(Where where, const char* format, ...) __attribute__((format(printf, 2, 3)));

// block.cpp: threads, barriers, collectives. The thread's index never changes under it: safe to remember.
Index thread_index() __attribute__((const));
Index block_index() __attribute__((const));
Index block_size() __attribute__((const));
Index grid_size() __attribute__((const));

int block_barrier(const char* kind, int line, int vote);  // the union of the votes
void warp_barrier(unsigned mask, int line);

// Every lane in mask calls it; the last one to arrive runs execute for all, and lanes[i] is what lane i passed, or nullptr.
// A fault where lanes meet in different operations, lines or masks, or where one never comes.
using WarpExecute = void (*)(void* const* lanes, void* context);
void warp_collective(unsigned mask, const char* kind, int line, void* operands, WarpExecute execute, void* context = nullptr);

// The same for the 128 threads of a warpgroup, all of them: lanes has 128.
void warpgroup_collective(const char* kind, int line, void* operands, WarpExecute execute, void* context = nullptr);

// Runs call(closure) once for every thread of every block. 0, or a CUDA error code; then last_report() says why.
using KernelCall = void (*)(const void* closure);
// together: all blocks at once, which may then wait for each other.
int run_grid(unsigned blocks, unsigned threads, size_t smem_bytes, KernelCall call, const void* closure, bool together);

// shared.cpp: the block's shared memory, at a multiple of `alignment` and of nothing larger.
unsigned char* shared_memory(size_t alignment);
bool is_shared(const void* address);

// For work inside execute: checked and logged like an access of the kernel. lane: 0 to 31 of the warp, or ANY_LANE.
void warp_reads(int lane, const void* from, size_t bytes);
void warp_writes(int lane, void* to, size_t bytes);

// Asynchronous copies of this thread: nothing arrives before its group is waited for.
void copy_async(void* to, const void* from, size_t bytes, bool real, int line);
void copy_async_commit();
void copy_async_wait(int pending);

// atomics.cpp: atomic operations of 4 bytes, or as wide as they say; what was there. Shared or global: where the operation may be.
int shared_atomic_add(int* to, int value, int line);
unsigned shared_atomic_or(unsigned* to, unsigned bits, int line);
uint64_t shared_load_acquire(const uint64_t* from, int line);
void shared_store_release(uint64_t* to, uint64_t value, int line);
unsigned global_atomic_add(unsigned* to, unsigned value, bool release, int line);
unsigned global_load_acquire(const unsigned* from, int line);
unsigned global_load_relaxed(const unsigned* from, int line);
void pause_thread(int line);

// The rest of CUDA's interface.
void* device_malloc(size_t bytes);
bool device_free(void* memory);
void device_memset(void* memory, int value, size_t bytes);
void allow_shared_memory(const void* kernel, int bytes);
int allowed_shared_memory(const void* kernel);
int shared_memory_limit();
const char* report_of(int code);

}  // namespace tilewright_host
