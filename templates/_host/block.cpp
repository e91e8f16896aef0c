// Threads, barriers and warp-wide operations.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

#include "threads.h"

#include "device.cuh"

namespace tilewright_host {

Block block;
uint32_t now = 1, block_synced, warp_synced[MAX_WARPS];

namespace {

// Lanes on their way to one warp-wide operation.
struct Meeting {
    unsigned mask = 0, arrived = 0;
    const char* kind = nullptr;
    int line = 0;
    void* operands[WARP_SIZE];
};

StackPointer launcher;  // where run_grid waits
KernelCall kernel_call;
const void* kernel_closure;
std::vector<int> ready;  // threads that may go on, the next one last
std::vector<std::vector<Meeting>> meetings;
struct {
    int arrived, votes, result;
    int first, line;  // the first to arrive, and where
    const char* kind;
} barrier;
int exited;
uint64_t seed = 1;
bool failed;
std::string report;

unsigned random_below(unsigned limit) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return unsigned(seed >> 33) % limit;
}

// Every thread of [first, first + count) but the running one may go on, from one drawn at random and in turn.
void make_ready(int first, int count, unsigned lanes = ~0u) {
    const int shift = int(random_below(unsigned(count)));
    for (int i = 0; i < count; ++i) {
        const int thread = first + (i + shift) % count;
        if (thread == block.current || (count == WARP_SIZE && (lanes >> (thread - first) & 1u) == 0)) continue;
        block.all[thread].state = State::Ready;
        ready.push_back(thread);
    }
}

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
                                     : std::string("wait in ") + thread.kind + " at kernel.cu:" + std::to_string(thread.line);
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

// Lets another thread run; returns when the caller may go on.
void wait_in(const char* kind, int line) {
    Thread& self = block.all[block.current];
    self.state = State::Waiting;
    self.kind = kind;
    self.line = line;
    if (ready.empty()) report_stuck();
    const int mine = block.current;
    block.current = ready.back();
    ready.pop_back();
    switch_stack(&self.stack, block.all[block.current].stack);
    block.current = mine;
}

void run_thread() {
    kernel_call(kernel_closure);
    block.all[block.current].state = State::Exited;
    ++exited;
    StackPointer finished;
    if (!ready.empty()) {
        block.current = ready.back();
        ready.pop_back();
        switch_stack(&finished, block.all[block.current].stack);
    }
    if (exited < block.threads) report_stuck();
    switch_stack(&finished, launcher);
    __builtin_unreachable();
}

void run_block(unsigned index) {
    block.index = index;
    begin_block();
    barrier.arrived = barrier.votes = exited = 0;
    ready.clear();
    for (auto& warp : meetings) warp.clear();
    for (int t = 0; t < block.threads; ++t) {
        Thread& thread = block.all[t];
        thread.open.clear();
        thread.groups.clear();
        thread.stack = new_fiber(block.stacks.top(t), run_thread);
    }
    block.current = -1;
    make_ready(0, block.threads);
    block.current = ready.back();
    ready.pop_back();
    block.running = true;
    switch_stack(&launcher, block.all[block.current].stack);
    block.running = false;
    end_block();
}

}  // namespace

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
    make_ready(0, block.threads);
    return barrier.result;
}

void warp_collective(unsigned mask, const char* kind, int line, void* operands, WarpExecute execute, void* context) {
    const int warp = current_warp(), lane = block.current % WARP_SIZE;
    if ((mask >> lane & 1u) == 0) fault_at({nullptr, line}, "%s with mask 0x%08x, which leaves out the lane that calls it", kind, mask);
    std::vector<Meeting>& open = meetings[warp];
    size_t m = 0;
    while (m < open.size() && open[m].mask != mask) ++m;  // lanes of other masks may still be on their way elsewhere
    if (m == open.size()) {
        open.emplace_back();
        open[m].mask = mask;
        open[m].kind = kind;
        open[m].line = line;
        for (void*& operand : open[m].operands) operand = nullptr;
    }
    Meeting& meeting = open[m];
    if (meeting.line != line || std::strcmp(meeting.kind, kind) != 0) {
        fault_at({nullptr, line}, "a warp diverges: this lane is in %s, lane %d in %s at kernel.cu:%d, both with mask 0x%08x", kind,
                 __builtin_ctz(meeting.arrived), meeting.kind, meeting.line, mask);
    }
    meeting.operands[lane] = operands;
    meeting.arrived |= 1u << lane;
    if (meeting.arrived != mask) return wait_in(kind, line);
    if (execute != nullptr) {
        block.all[block.current].line = line;  // for reports from inside execute
        execute(meeting.operands, context);
    }
    open.erase(open.begin() + ptrdiff_t(m));
    make_ready(warp * WARP_SIZE, WARP_SIZE, mask);
}

void warp_barrier(unsigned mask, int line) {
    const auto synchronise = [](void* const*, void* warp) { warp_synced[*static_cast<int*>(warp)] = now++; };
    int warp = current_warp();
    warp_collective(mask, "__syncwarp", line, &warp, synchronise, &warp);
}

void exchange(void* const* lanes, void*) {
    for (int lane = 0; lane < WARP_SIZE; ++lane) {
        if (lanes[lane] == nullptr) continue;
        Shuffle& own = *static_cast<Shuffle*>(lanes[lane]);
        if (lanes[own.lane] == nullptr) fault("lane %d asks for the value of lane %d, which the mask leaves out", lane, own.lane);
        own.result = static_cast<const Shuffle*>(lanes[own.lane])->value;
    }
}

void collect_votes(void* const* lanes, void*) {
    unsigned word = 0;
    for (int lane = 0; lane < WARP_SIZE; ++lane) {
        if (lanes[lane] != nullptr && *static_cast<const unsigned*>(lanes[lane]) != 0) word |= 1u << lane;
    }
    for (int lane = 0; lane < WARP_SIZE; ++lane) {
        if (lanes[lane] != nullptr) *static_cast<unsigned*>(lanes[lane]) = word;
    }
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

int run_grid(unsigned blocks, unsigned threads, size_t smem_bytes, KernelCall call, const void* closure) {
    if (blocks == 0 || threads == 0 || threads > MAX_THREADS) return cudaErrorInvalidConfiguration;
    kernel_call = call;
    kernel_closure = closure;
    block.count = blocks;
    block.threads = int(threads);
    if (block.all.size() < threads) block.all.resize(threads);
    meetings.resize((threads + WARP_SIZE - 1) / WARP_SIZE);
    failed = false;
    begin_grid(smem_bytes);
    for (unsigned index = 0; index < blocks && !failed; ++index) run_block(index);
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
