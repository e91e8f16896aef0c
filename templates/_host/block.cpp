// Threads, the barrier of a whole block, and reports.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

#include "clocks.h"
#include "threads.h"

#include "device.cuh"

namespace tilewright_host {

Block block;
uint32_t now = 1, block_synced, warp_synced[MAX_WARPS];

namespace {

StackPointer launcher;  // where run_grid waits
KernelCall kernel_call;
const void* kernel_closure;
std::vector<int> ready;  // threads that may go on, the next one last
struct Barrier {
    int arrived, votes, result;
    int first, line;  // the first to arrive, and where
    const char* kind;
} barrier;
int exited;
unsigned pauses;                 // of threads that wait, in a row, since anything was written or anybody went on
unsigned running_together;       // blocks of a grid that runs all at once and are not done; 0: one runs after the other
unsigned waiting_blocks;         // in a row, since anything was written
uint64_t seed = 1;
bool failed;
std::string report;

[[noreturn]] void leave(const std::string& why) {
    report = why;
    failed = true;
    StackPointer abandoned;
    switch_stack(&abandoned, launcher);
    __builtin_unreachable();
}

std::string place(Where where) {
    char text[64];
    if (where.line != 0) {
        std::snprintf(text, sizeof text, "kernel.cu:%d", where.line);
    } else {
        const long offset = static_cast<const char*>(where.pc) - library_start;
        std::snprintf(text, sizeof text, "[pc 0x%lx]", offset - 1);  // of the call, not of what comes after it
    }
    return text;
}

std::string person(int thread) {
    return "block " + std::to_string(block.index) + ", thread " + std::to_string(thread) + " (warp " +
           std::to_string(thread / WARP_SIZE) + ", lane " + std::to_string(thread % WARP_SIZE) + ")";
}

// Nobody can go on: who waits where.
[[noreturn]] void report_stuck() {
    struct Group {
        std::string what;
        int count, first;
    };
    std::vector<Group> groups;
    for (int t = 0; t < block.threads; ++t) {
        const Thread& thread = block.all[t];
        const std::string what = thread.state == State::Exited
                                     ? std::string("left the kernel")
                                     : std::string("wait in ") + thread.kind + " at kernel.cu:" + std::to_string(thread.line) +
                                           awaited_mbarrier(t) + awaited_named_barrier(t);
        size_t g = 0;
        while (g < groups.size() && groups[g].what != what) ++g;
        if (g == groups.size()) groups.push_back({what, 0, t});
        ++groups[g].count;
    }
    std::string text = "threads wait for others that never come, in block " + std::to_string(block.index) + ": ";
    for (size_t g = 0; g < groups.size(); ++g) {
        text += (g ? "; " : "") + std::to_string(groups[g].count) + (groups[g].count == 1 ? " (thread " : " (the first is thread ") +
                std::to_string(groups[g].first) + ") " + groups[g].what;
    }
    leave(text);
}

// The thread to run next. Bulk copies land meanwhile, at the latest when nobody can go on without them.
int next_thread() {
    if (copies_in_flight != 0) {
        land_copies(false);
        while (ready.empty() && land_copies(true)) {
        }
    }
    if (ready.empty()) report_stuck();
    const int next = ready.back();
    ready.pop_back();
    return next;
}

void run_thread() {
    kernel_call(kernel_closure);
    leave_warpgroup();
    pauses = 0;
    block.all[block.current].state = State::Exited;
    StackPointer finished;
    if (++exited < block.threads) {
        block.current = next_thread();
        switch_stack(&finished, block.all[block.current].stack);
    }
    check_copies_awaited();
    switch_stack(&finished, launcher);
    __builtin_unreachable();
}

// Of a grid whose blocks run all at once: what is kept of one while another one runs.
struct BlockAside {
    Aside own, collectives, shared, log, global_log, clocks, mbarriers, named_barriers, bulk_copies, warpgroups;
};

void exchange(BlockAside& aside) {
    struct Kept {
        Block block;
        std::vector<int> ready;
        Barrier barrier;
        int exited;
        uint32_t block_synced, warp_synced[MAX_WARPS];
    };
    Kept& kept = kept_of<Kept>(aside.own);
    std::swap(block, kept.block);
    std::swap(ready, kept.ready);
    std::swap(barrier, kept.barrier);
    std::swap(exited, kept.exited);
    std::swap(block_synced, kept.block_synced);
    std::swap(warp_synced, kept.warp_synced);
    exchange_collectives(aside.collectives);
    exchange_shared(aside.shared);
    exchange_log(aside.log);
    exchange_global_log(aside.global_log);
    exchange_clocks(aside.clocks);
    exchange_mbarriers(aside.mbarriers);
    exchange_named_barriers(aside.named_barriers);
    exchange_bulk_copies(aside.bulk_copies);
    exchange_warpgroups(aside.warpgroups);
}

void start_block(unsigned index, unsigned count, unsigned threads) {
    block.index = index;
    block.count = count;
    block.threads = int(threads);
    if (block.all.size() < threads) block.all.resize(threads);
    begin_block();
    barrier.arrived = barrier.votes = exited = 0;
    ready.clear();
    begin_collectives();
    for (int t = 0; t < block.threads; ++t) {
        Thread& thread = block.all[t];
        thread.open.clear();
        thread.groups.clear();
        thread.fences.clear();
        thread.stack = new_fiber(block.stacks.top(t), run_thread);
    }
    block.current = -1;
    make_ready(0, block.threads);
}

// Whether the block is done; if not, all its threads wait for other blocks.
bool continue_block() {
    pauses = 0;
    block.current = ready.back();
    ready.pop_back();
    block.running = true;
    switch_stack(&launcher, block.all[block.current].stack);
    block.running = false;
    if (!failed && exited < block.threads) return false;
    end_block();
    return true;
}

// Blocks that all run at once take turns: each goes on until all its threads wait.
void run_together(unsigned blocks, unsigned threads) {
    static std::vector<BlockAside> asides;
    if (asides.size() < blocks) asides.resize(blocks);
    std::vector<unsigned> left;
    for (unsigned index = 0; index < blocks; ++index) left.insert(left.begin() + random_below(index + 1), index);
    running_together = blocks;
    waiting_blocks = 0;
    std::vector<bool> started(blocks);
    for (size_t turn = 0; running_together != 0 && !failed;) {
        const unsigned index = left[turn %= left.size()];
        exchange(asides[index]);
        if (!started[index]) start_block(index, blocks, threads);
        started[index] = true;
        if (continue_block()) {
            left.erase(left.begin() + ptrdiff_t(turn));
            --running_together;
        } else {
            ++turn;
        }
        if (failed) block.stacks.forget_poison();
        exchange(asides[index]);
    }
    running_together = 0;
}

}  // namespace

unsigned random_below(unsigned limit) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return unsigned(seed >> 33) % limit;
}

void make_ready(int first, int count, unsigned lanes) {
    const int shift = int(random_below(unsigned(count)));
    for (int i = 0; i < count; ++i) {
        const int thread = first + (i + shift) % count;
        if (thread == block.current || (count == WARP_SIZE && (lanes >> (thread - first) & 1u) == 0)) continue;
        block.all[thread].state = State::Ready;
        ready.push_back(thread);
    }
}

void wait_in(const char* kind, int line) {
    pauses = 0;
    Thread& self = block.all[block.current];
    self.state = State::Waiting;
    self.kind = kind;
    self.line = line;
    const int mine = block.current;
    block.current = next_thread();
    if (block.current == mine) return;  // a copy that landed just now was what it waited for
    switch_stack(&self.stack, block.all[block.current].stack);
    block.current = mine;
}

void note_write() { pauses = waiting_blocks = 0; }

// What no thread of this block brings now, only another block can bring: an earlier one, or any that runs at the same time.
void yield_to_others(int line) {
    const bool waits_alone = pauses++ > ready.size();
    if (waits_alone && land_copies(true)) pauses = 0;
    const bool stuck = waits_alone && pauses != 0;
    if (stuck && running_together == 0) {
        fault_at({nullptr, line},
                 "this thread waits for a value that never comes: no other thread of block %u of %u can go on, and here the blocks "
                 "after it start only once it is done; a block may only wait for those before it",
                 block.index, block.count);
    }
    if (stuck && ++waiting_blocks > running_together) {
        fault_at({nullptr, line},
                 "this thread waits for a value that never comes: no thread of the %u of %u blocks that are not done can go on",
                 running_together, block.count);
    }
    Thread& self = block.all[block.current];
    ready.insert(ready.begin(), block.current);
    const int mine = block.current;
    if (stuck) {
        switch_stack(&self.stack, launcher);
        block.current = mine;
        return;
    }
    block.current = next_thread();
    if (block.current == mine) return;
    switch_stack(&self.stack, block.all[block.current].stack);
    block.current = mine;
}

// Before all others or after them: so that who was waited for runs on in some orders and waits again in others.
void wake(const std::vector<int>& threads) {
    for (const int thread : threads) {
        block.all[thread].state = State::Ready;
        ready.push_back(thread);
    }
    if (random_below(2) == 0) std::rotate(ready.begin(), ready.end() - ptrdiff_t(threads.size()), ready.end());
}

Index thread_index() { return {unsigned(block.current), 0, 0}; }
Index block_index() { return {block.index, 0, 0}; }
Index block_size() { return {unsigned(block.threads), 1, 1}; }
Index grid_size() { return {block.count, 1, 1}; }

int block_barrier(const char* kind, int line, int vote) {
    if (barrier.arrived == 0) {
        barrier.first = block.current;
        barrier.line = line;
        barrier.kind = kind;
    } else if (barrier.line != line || std::strcmp(barrier.kind, kind) != 0) {
        fault_at({nullptr, line}, "threads meet in different barriers: this one in %s, thread %d in %s at kernel.cu:%d", kind,
                 barrier.first, barrier.kind, barrier.line);
    }
    barrier.votes |= vote;
    if (++barrier.arrived < block.threads) {
        wait_in(kind, line);
        return barrier.result;
    }
    barrier.result = barrier.votes;
    barrier.arrived = barrier.votes = 0;
    block_synced = now++;
    if (clocked) share_clocks();
    make_ready(0, block.threads);
    return barrier.result;
}

void fault_at(Where where, const char* format, ...) {
    char text[512];
    va_list values;
    va_start(values, format);
    std::vsnprintf(text, sizeof text, format, values);
    va_end(values);
    leave(std::string(text) + "; " + place(where) + ", " + person(block.current));
}

void fault(const char* format, ...) {
    char text[512];
    va_list values;
    va_start(values, format);
    std::vsnprintf(text, sizeof text, format, values);
    va_end(values);
    leave(std::string(text) + "; " + place({nullptr, block.all[block.current].line}) + ", " + person(block.current));
}

int run_grid(unsigned blocks, unsigned threads, size_t smem_bytes, KernelCall call, const void* closure, bool together) {
    if (blocks == 0 || threads == 0 || threads > MAX_THREADS) return cudaErrorInvalidConfiguration;
    kernel_call = call;
    kernel_closure = closure;
    failed = false;
    begin_grid(smem_bytes);
    if (together) {
        if (blocks > MULTIPROCESSORS) return cudaErrorInvalidConfiguration;
        run_together(blocks, threads);
    }
    for (unsigned index = 0; index < blocks && !together && !failed; ++index) {
        start_block(index, blocks, threads);
        continue_block();
    }
    if (!failed) return 0;
    block.stacks.forget_poison();
    return cudaErrorLaunchFailure;
}

const char* report_of(int code) {
    switch (code) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        default: return report.c_str();
    }
}

}  // namespace tilewright_host

extern "C" __attribute__((visibility("default"))) void tilewright_host_seed(uint64_t value) { tilewright_host::seed = value * 2 + 1; }
