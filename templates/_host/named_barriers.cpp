// Barriers of the hardware at which a part of a block meets: those who come late and those who only tell that they came.
#include <algorithm>
#include <utility>

#include "clocks.h"

#include "device.cuh"

namespace tilewright_host {

namespace {

constexpr int NAMED_BARRIERS = 16;

struct Named {
    int threads, arrived;
    int first, line;  // the first to arrive, and where
    uint32_t lanes[MAX_WARPS];
    Clock clock, complete;
    std::vector<int> waiting;
};

Named named[NAMED_BARRIERS];
bool named_used;

void check_whole_warps(const Named& barrier, int id, Where where) {
    for (int warp = 0; warp * WARP_SIZE < block.threads; ++warp) {
        if (barrier.lanes[warp] == 0u || barrier.lanes[warp] == ~0u) continue;
        fault_at(where, "named barrier %d takes whole warps, and lanes 0x%08x of warp %d alone arrived", id,
                 barrier.lanes[warp], warp);
    }
}

}  // namespace

void exchange_named_barriers(Aside& aside) {
    struct Kept {
        Named named[NAMED_BARRIERS] = {};
        bool used = false;
    };
    Kept& kept = kept_of<Kept>(aside);
    if (named_used || kept.used) std::swap(named, kept.named);
    std::swap(named_used, kept.used);
}

void begin_named_barriers() {
    for (Named& barrier : named) {
        barrier.arrived = 0;
        barrier.waiting.clear();
        if (named_used) barrier.clock.clear();
    }
    named_used = false;
}

void meet_at_named_barrier(int id, int threads, bool waits, int line) {
    const Where where = {nullptr, line};
    const char* const kind = waits ? "named_barrier_sync" : "named_barrier_arrive";
    if (id < 1 || id >= NAMED_BARRIERS) fault_at(where, "%s: the barrier must be 1 to %d, got %d", kind, NAMED_BARRIERS - 1, id);
    if (threads < WARP_SIZE || threads % WARP_SIZE != 0 || threads > block.threads) {
        fault_at(where, "%s: threads must be a multiple of 32, at most the block's %d, got %d", kind, block.threads, threads);
    }
    Named& barrier = named[id];
    if (barrier.arrived == 0) {
        barrier.threads = threads;
        barrier.first = block.current;
        barrier.line = line;
        std::fill(std::begin(barrier.lanes), std::end(barrier.lanes), 0u);
    } else if (barrier.threads != threads) {
        fault_at(where, "%s: named barrier %d for %d threads, which thread %d came to at kernel.cu:%d for %d", kind, id, threads,
                 barrier.first, barrier.line, barrier.threads);
    }
    uint32_t& lanes = barrier.lanes[current_warp()];
    const uint32_t lane = 1u << block.current % WARP_SIZE;
    if ((lanes & lane) != 0) {
        fault_at(where, "%s: this thread arrives at named barrier %d once more before the %d threads have, %d so far", kind,
                 id, threads, barrier.arrived);
    }
    lanes |= lane;
    start_clocks();
    named_used = true;
    publish(barrier.clock);
    if (++barrier.arrived < threads) {
        if (!waits) return;
        barrier.waiting.push_back(block.current);
        wait_in(kind, line);
    } else {
        check_whole_warps(barrier, id, where);
        barrier.arrived = 0;
        barrier.complete = barrier.clock;
        const std::vector<int> woken = std::move(barrier.waiting);
        barrier.waiting.clear();
        wake(woken);
    }
    if (waits) acquire(barrier.complete);
}

std::string awaited_named_barrier(int thread) {
    for (int id = 1; id < NAMED_BARRIERS; ++id) {
        const Named& barrier = named[id];
        if (std::find(barrier.waiting.begin(), barrier.waiting.end(), thread) == barrier.waiting.end()) continue;
        return " (named barrier " + std::to_string(id) + ": " + std::to_string(barrier.arrived) + " of " +
               std::to_string(barrier.threads) + " threads)";
    }
    return "";
}

}  // namespace tilewright_host
