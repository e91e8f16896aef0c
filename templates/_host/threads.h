// A block's threads while it runs: what block.cpp keeps of each, and what memory.cpp asks about the running one.
#pragma once

#include <cstdint>
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

// shared.cpp
void begin_grid(size_t smem_bytes);
void begin_block();
void end_block();
// memory.cpp: what the hooks call.
void watch_access(const void* address, size_t bytes, bool write, const void* pc);
extern const char* library_start;  // what an address in a report is counted from

}  // namespace tilewright_host
