// What is ordered before what where not the whole block or a whole warp meets: vector clocks, for barriers that count
// arrivals, for bulk copies and for products of a warpgroup. A kernel without any of these never looks at them.
#pragma once

#include "threads.h"

namespace tilewright_host {

constexpr int MAX_WARPGROUPS = MAX_THREADS / WARPGROUP_SIZE;
constexpr int MAX_MBARRIERS = 64;  // of a block

// Whose work is told apart: each warpgroup's tensor cores, each mbarrier's bulk copies, each thread.
constexpr int TENSOR_CORES = 0, BULK_COPIES = MAX_WARPGROUPS, ALL_THREADS = BULK_COPIES + MAX_MBARRIERS;
constexpr int AGENTS = ALL_THREADS + MAX_THREADS;

// Of each agent, up to which time its work is done and known to be.
struct alignas(32) Clock {
    uint32_t times[AGENTS];

    void clear();
    void join(const Clock& other);
};

// What each warp knows beyond the last barriers of its block and of itself. Who arrives at a barrier publishes what the
// thread did and what its warp knows; who waited is told apart by warp only: what one lane has waited for, all have seen.
extern Clock seen[MAX_WARPS];
extern bool clocked;        // whether this block has used any of it
extern uint32_t published;  // when a thread last arrived anywhere

void start_clocks();
void publish(Clock& to);          // by the running thread: all it did so far, in its own order, and what its warp has seen
void acquire(const Clock& from);  // by the running thread's warp
void release_at(const void* address);  // by the running thread, with a store; and what a load of it acquires
void acquire_at(const void* address);
void share_clocks();              // at a barrier of the block: what any warp knows of copies and products, all know

// Up to which time the running thread's warp has seen what a thread did.
inline uint32_t seen_of(int warp, int thread) {
    uint32_t time = block_synced;
    if (thread / WARP_SIZE == warp && warp_synced[warp] > time) time = warp_synced[warp];
    if (clocked && seen[warp].times[ALL_THREADS + thread] > time) time = seen[warp].times[ALL_THREADS + thread];
    return time;
}

}  // namespace tilewright_host
