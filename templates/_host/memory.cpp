// Every access to memory comes by here.
#include "memory.h"

#include <cstdio>

namespace tilewright_host {

bool is_watching() { return __asan_poison_memory_region == nullptr; }

uint32_t remember(Where where) {
    if (where.line != 0) return 0x80000000u | uint32_t(where.line);
    return uint32_t(static_cast<const char*>(where.pc) - library_start - 1) & 0x7fffffffu;
}

std::string recall(uint32_t place) {
    char text[32];
    std::snprintf(text, sizeof text, place >> 31 ? "kernel.cu:%u" : "[pc 0x%x]", place & 0x7fffffffu);
    return text;
}

void touch(const void* address, size_t bytes, bool write, int lane, Where where) {
    if (touch_shared(address, bytes, write, lane, where)) {
        if (write) note_write();
        return;
    }
    if (block.stacks.holds(address)) {  // a thread's own variables
        if (unsettled_accumulators == 0) return;
        return check_settled(address, bytes, write, where);
    }
    if (write) note_write();
    touch_tensor(address, bytes, write, lane, where);
}

void watch_access(const void* address, size_t bytes, bool write, const void* pc) {
    touch(address, bytes, write, block.current % WARP_SIZE, {pc, 0});
}

namespace {

// For code that is compiled without instrumentation of either kind.
void warp_touches(int lane, const void* address, size_t bytes, bool write) {
    const Where where = {nullptr, block.all[block.current].line};
    if (is_watching()) return touch(address, bytes, write, lane == ANY_LANE ? WHOLE_WARP : lane, where);
    if (__asan_region_is_poisoned(address, bytes) == nullptr) return;
    fault_at(where, "out of bounds: a warp %s %zu bytes at %p", write ? "writes" : "reads", bytes, address);
}

}  // namespace

void warp_reads(int lane, const void* from, size_t bytes) { warp_touches(lane, from, bytes, false); }

void warp_writes(int lane, void* to, size_t bytes) { warp_touches(lane, to, bytes, true); }

}  // namespace tilewright_host
