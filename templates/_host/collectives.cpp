// Operations of a whole warp or warpgroup: threads meet, the last to arrive does the work for all.
#include <cstring>
#include <utility>
#include <vector>

#include "clocks.h"

#include "device.cuh"

namespace tilewright_host {

namespace {

// Lanes on their way to one warp-wide operation.
struct Meeting {
    unsigned mask = 0, arrived = 0;
    const char* kind = nullptr;
    int line = 0;
    void* operands[WARP_SIZE];
};

std::vector<Meeting> meetings[MAX_WARPS];
// A warpgroup on its way to one operation. All its threads are needed, so there is one at a time.
struct WarpgroupMeeting {
    int arrived = 0, first = 0, line = 0;
    const char* kind = nullptr;
    void* operands[WARPGROUP_SIZE];
} warpgroup_meetings[MAX_WARPGROUPS];

}  // namespace

void exchange_collectives(Aside& aside) {
    struct Kept {
        std::vector<Meeting> meetings[MAX_WARPS];
    };
    std::swap(meetings, kept_of<Kept>(aside).meetings);
}

void begin_collectives() {
    for (auto& warp : meetings) warp.clear();
    for (auto& meeting : warpgroup_meetings) meeting.arrived = 0;
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

void warpgroup_collective(const char* kind, int line, void* operands, WarpExecute execute, void* context) {
    const int group = block.current / WARPGROUP_SIZE, first = group * WARPGROUP_SIZE;
    if (first + WARPGROUP_SIZE > block.threads) {
        fault_at({nullptr, line}, "%s: a warpgroup is 128 threads from a warp that 4 divides, and this block ends at thread %d",
                 kind, block.threads - 1);
    }
    WarpgroupMeeting& meeting = warpgroup_meetings[group];
    if (meeting.arrived == 0) {
        meeting.kind = kind;
        meeting.line = line;
        meeting.first = block.current;
    } else if (meeting.line != line || std::strcmp(meeting.kind, kind) != 0) {
        fault_at({nullptr, line}, "a warpgroup diverges: this thread is in %s, thread %d in %s at kernel.cu:%d", kind,
                 meeting.first, meeting.kind, meeting.line);
    }
    meeting.operands[block.current - first] = operands;
    if (++meeting.arrived < WARPGROUP_SIZE) return wait_in(kind, line);
    meeting.arrived = 0;
    block.all[block.current].line = line;  // for reports from inside execute
    if (execute != nullptr) execute(meeting.operands, context);
    make_ready(first, WARPGROUP_SIZE);
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

}  // namespace tilewright_host
