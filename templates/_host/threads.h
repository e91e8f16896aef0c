// A block's threads while it runs: what block.cpp keeps of each, and what memory.cpp asks about the running one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fibers.h"
#include "runtime.h"

namespace tilewright_host {

struct Copy {
    unsigned char* to;
    const unsigned char* from;
    size_t bytes;
    bool real;
    int line;
};

enum class State { Ready, Waiting, Exited };

struct Thread {
    StackPointer stack;
    State state;
    const char* kind;  // what it waits in, and where
    int line;
    std::vector<Copy> open;                 // asynchronous copies not yet committed
    std::vector<std::vector<Copy>> groups;  // committed, oldest first
    std::vector<uint32_t> fences;           // when it called fence_proxy_async, oldest first
};

// The block that runs, or none: running is then false and nothing is watched.
struct Block {
    bool running = false;
    unsigned index = 0, count = 0;
    int threads = 0;
    int current = 0;  // the running thread
    std::vector<Thread> all;
    Stacks stacks;
};
extern Block block;

inline int current_warp() { return block.current / WARP_SIZE; }

// Time passes at every synchronisation. An access is ordered before what the running warp does now if it happened no later
// than the block's last barrier or, within one warp, the warp's last one.
extern uint32_t now, block_synced, warp_synced[MAX_WARPS];

// block.cpp: the running thread lets others run until it is woken, which whoever it waits for must do.
void wait_in(const char* kind, int line);
void make_ready(int first, int count, unsigned lanes = ~0u);  // all but the running one, from one drawn at random and in turn
void wake(const std::vector<int>& threads);
unsigned random_below(unsigned limit);
void yield_to_others(int line);    // where a thread waits for a value: a fault when nobody is left who could bring it
void note_write();                 // that memory of all has changed, for which somebody may wait

// What a file keeps of the running block, exchanged with what it keeps of another one of the grid.
using Aside = std::shared_ptr<void>;
template <typename State>
State& kept_of(Aside& aside) {
    if (aside == nullptr) aside = std::make_shared<State>();
    return *static_cast<State*>(aside.get());
}
void exchange_collectives(Aside& aside);
void exchange_shared(Aside& aside);
void exchange_log(Aside& aside);
void exchange_global_log(Aside& aside);
void exchange_clocks(Aside& aside);
void exchange_mbarriers(Aside& aside);
void exchange_named_barriers(Aside& aside);
void exchange_bulk_copies(Aside& aside);
void exchange_warpgroups(Aside& aside);

// What a block begins with and what may not be left when a thread or the block ends; and of a waiting thread, for what.
void begin_collectives();
void begin_clocks();
void begin_mbarriers();
void begin_named_barriers();
void begin_bulk_copies();
void begin_warpgroups();
void leave_warpgroup();
void check_copies_awaited();
std::string awaited_mbarrier(int thread);
std::string awaited_named_barrier(int thread);

// bulk.cpp: lets copies land whose time has come; where nobody can go on without, one whose time has not. Whether one did.
extern int copies_in_flight;
bool land_copies(bool needed);

// shared.cpp
void begin_grid(size_t smem_bytes);
void begin_block();
void end_block();
// memory.cpp: what the hooks call.
void watch_access(const void* address, size_t bytes, bool write, const void* pc);
extern const char* library_start;  // what an address in a report is counted from

}  // namespace tilewright_host
