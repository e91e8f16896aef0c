// A block's shared memory: a log of who touched what when, and asynchronous copies that arrive late.
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "memory.h"

namespace tilewright_host {

const char* library_start;

namespace {

constexpr size_t COARSEST = 16;      // bytes: the largest access of a kernel
constexpr size_t SMEM_ALIGN = 1024;  // no kernel asks for more
constexpr size_t AROUND = 1 << 20;   // this far outside of shared memory still counts as a miss of it

// The newest write to one granule of shared memory. `place`: see remember().
struct Written {
    uint32_t time, place;
    uint32_t readers;  // the warps that read it since
    uint16_t thread;   // warp * 64 + lane
    bool in_flight;    // an asynchronous copy to it has not been waited for
};

// One warp's reads of a granule since the last write, as far as they can still matter.
struct Read {
    uint32_t time, lanes, place;
};

unsigned char* smem;  // of the running block; where its region starts until the kernel says how it is aligned
unsigned char* smem_region;
size_t smem_bytes, smem_offset;
std::vector<Written> writes;
std::vector<Read> reads;    // [warp][granule]
size_t granule = COARSEST;  // bytes whose accesses are told apart: so far no access was smaller, or lay across two
size_t granules;
uint32_t block_began;

// Where an access came from in four bytes: a line, or an address as its distance from this library's start.
uint32_t remember(Where where) {
    if (where.line != 0) return 0x80000000u | uint32_t(where.line);
    return uint32_t(static_cast<const char*>(where.pc) - library_start - 1) & 0x7fffffffu;
}

std::string recall(uint32_t place) {
    char text[32];
    std::snprintf(text, sizeof text, place >> 31 ? "kernel.cu:%u" : "[pc 0x%x]", place & 0x7fffffffu);
    return text;
}

std::string who(int thread) {
    const int warp = thread / 64, lane = thread % 64;
    if (lane == WHOLE_WARP) return "warp " + std::to_string(warp);
    return "thread " + std::to_string(warp * WARP_SIZE + lane);
}

[[noreturn]] void report_race(Where where, size_t index, const char* doing, const char* done, int thread, uint32_t place) {
    fault_at(where, "a race for byte %zu of shared memory: this thread %s what %s %s at %s, with no barrier between",
             index * granule, doing, who(thread).c_str(), done, recall(place).c_str());
}

// What the running thread may not do to this granule because of its last write; nothing when that is well ordered.
[[noreturn]] void report_written(const Written& cell, size_t index, Where where, const char* doing) {
    if (cell.in_flight) {
        fault_at(where, "this thread %s byte %zu of shared memory, and the asynchronous copy to it that %s began at %s has not been waited for",
                 doing, index * granule, who(cell.thread).c_str(), recall(cell.place).c_str());
    }
    report_race(where, index, doing, "wrote", cell.thread, cell.place);
}

// An access by one lane, or by the whole warp, and what is ordered before it.
struct Access {
    uint32_t warp, lane, lanes, synced, place;
    Where where;

    Access(int lane_, Where where_)
        : warp(uint32_t(current_warp())), lane(uint32_t(lane_)), lanes(lane_ == WHOLE_WARP ? ~0u : 1u << lane_),
          synced(std::max(block_synced, warp_synced[warp])), place(remember(where_)), where(where_) {}

    // Later than the last barrier with its writer, who is not this lane.
    bool conflicts(const Written& cell) const {
        if (cell.in_flight) return true;
        if (cell.time <= synced && (cell.time <= block_synced || cell.thread / 64 == warp)) return false;
        return cell.thread != warp * 64 + lane || lane == WHOLE_WARP;
    }
};

// Splits every granule. Nothing is lost: all accesses so far were to whole ones.
void refine(size_t to) {
    const size_t parts = granule / to;
    std::vector<Written> fine_writes(writes.size() * parts);
    std::vector<Read> fine_reads(reads.size() * parts);
    for (size_t i = 0; i < fine_writes.size(); ++i) fine_writes[i] = writes[i / parts];
    for (size_t i = 0; i < fine_reads.size(); ++i) fine_reads[i] = reads[i / parts];
    writes.swap(fine_writes);
    reads.swap(fine_reads);
    granule = to;
    granules = writes.size();
}

// The granules of an access: the first, and how many.
struct Run {
    size_t first, count;

    Run(size_t offset, size_t bytes) {
        if (((offset | bytes) & (granule - 1)) != 0) refine(size_t(1) << __builtin_ctzll(offset | bytes));
        first = offset / granule;
        count = bytes / granule;
    }
};

void shared_read(size_t offset, size_t bytes, const Access& access) {
    const Run run(offset, bytes);
    Written* cell = &writes[run.first];
    Read* mine = &reads[access.warp * granules + run.first];
    for (size_t i = 0; i < run.count; ++i, ++cell, ++mine) {
        if (cell->time <= block_began) {
            fault_at(access.where, "this thread reads byte %zu of shared memory, which nobody wrote", (run.first + i) * granule);
        }
        if (access.conflicts(*cell)) report_written(*cell, run.first + i, access.where, "reads");
        if (mine->time > access.synced && (mine->lanes & access.lanes) == access.lanes) continue;
        mine->lanes = (mine->time > access.synced ? mine->lanes : 0u) | access.lanes;
        mine->time = now;
        mine->place = access.place;
        cell->readers |= 1u << access.warp;
    }
}

void shared_write(size_t offset, size_t bytes, const Access& access, bool in_flight = false) {
    const Run run(offset, bytes);
    Written* cell = &writes[run.first];
    for (size_t i = 0; i < run.count; ++i, ++cell) {
        if (access.conflicts(*cell)) report_written(*cell, run.first + i, access.where, "writes");
        for (uint32_t left = cell->readers; left != 0; left &= left - 1) {
            const uint32_t reader = uint32_t(__builtin_ctz(left));
            const Read& read = reads[reader * granules + run.first + i];
            if (read.time <= block_synced) continue;
            const uint32_t others = reader != access.warp ? read.lanes
                                    : read.time > access.synced ? read.lanes & ~(access.lane == WHOLE_WARP ? 0u : access.lanes)
                                                                : 0u;
            if (others == 0) continue;
            const int first = read.lanes == ~0u ? WHOLE_WARP : __builtin_ctz(others);
            report_race(access.where, run.first + i, "writes", "read", int(reader * 64) + first, read.place);
        }
        *cell = {now, access.place, 0, uint16_t(access.warp * 64 + access.lane), in_flight};
    }
}

void land(const Copy& copy) {
    if (copy.real) {
        std::memcpy(copy.to, copy.from, copy.bytes);
    } else {
        std::memset(copy.to, 0, copy.bytes);
    }
    if (!is_watching()) return;
    const Run run(size_t(copy.to - smem), copy.bytes);
    for (size_t i = 0; i < run.count; ++i) {
        writes[run.first + i].in_flight = false;
        writes[run.first + i].time = now;
    }
}

}  // namespace

void begin_grid(size_t bytes) {
    if (Dl_info info; library_start == nullptr && dladdr(reinterpret_cast<const void*>(&begin_grid), &info) != 0) {
        library_start = static_cast<const char*>(info.dli_fbase);
    }
    const size_t room = AROUND + SMEM_ALIGN + bytes + AROUND;
    static size_t reserved;
    if (room > reserved) {
        if (smem_region != nullptr) munmap(smem_region, reserved);
        void* memory = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) std::abort();
        smem_region = static_cast<unsigned char*>(memory);
        reserved = room;
    }
    begin_tensors();
    smem_bytes = bytes;
    const size_t warps = (size_t(block.threads) + WARP_SIZE - 1) / WARP_SIZE;
    const size_t needed = (bytes + granule - 1) / granule;
    const bool worn = now > 3u << 30;  // long before the clock runs over
    if (worn) now = 1;
    if (worn || granules < needed || reads.size() < granules * warps) {
        granules = std::max(granules, needed);
        writes.assign(granules, Written{});
        reads.assign(granules * warps, Read{});
    }
}

void begin_block() {
    smem = smem_region + AROUND;
    smem_offset = 0;
    if (__asan_unpoison_memory_region != nullptr) __asan_unpoison_memory_region(smem_region, 2 * AROUND + SMEM_ALIGN + smem_bytes);
    std::memset(smem, 0xff, SMEM_ALIGN + smem_bytes);  // NaN in every element type
    block_began = block_synced = now++;
    std::fill(std::begin(warp_synced), std::end(warp_synced), block_began);
}

void end_block() {
    for (int t = 0; t < block.threads; ++t) {
        for (const Copy& copy : block.all[t].open) land(copy);
        for (const auto& group : block.all[t].groups) {
            for (const Copy& copy : group) land(copy);
        }
    }
}

unsigned char* shared_memory(size_t alignment) {
    if (smem_offset == 0) {
        // The region starts at a page.
        smem_offset = alignment >= SMEM_ALIGN ? SMEM_ALIGN : alignment;
        smem = smem_region + AROUND + smem_offset;
        if (__asan_poison_memory_region != nullptr) {
            __asan_poison_memory_region(smem_region, AROUND + smem_offset);
            __asan_poison_memory_region(smem + smem_bytes, AROUND);
        }
    }
    return smem;
}

bool is_shared(const void* address) { return size_t(static_cast<const unsigned char*>(address) - smem) < smem_bytes; }

bool touch_shared(const void* address, size_t bytes, bool write, int lane, Where where) {
    const size_t offset = size_t(static_cast<const unsigned char*>(address) - smem);
    if (offset < smem_bytes && offset + bytes <= smem_bytes) {
        if (write) {
            shared_write(offset, bytes, Access(lane, where));
        } else {
            shared_read(offset, bytes, Access(lane, where));
        }
        return true;
    }
    if (offset + AROUND >= smem_bytes + 2 * AROUND) return false;
    fault_at(where, "out of bounds: this thread %s %zu bytes at byte %lld of shared memory, which has %zu",
             write ? "writes" : "reads", bytes, static_cast<long long>(offset), smem_bytes);
}

void copy_async(void* to, const void* from, size_t bytes, bool real, int line) {
    const Where where = {nullptr, line};
    if (reinterpret_cast<uintptr_t>(to) % bytes != 0 || reinterpret_cast<uintptr_t>(from) % bytes != 0) {
        fault_at(where, "an asynchronous copy of %zu bytes from %p to %p; both must be multiples of its size", bytes, from, to);
    }
    const size_t offset = size_t(static_cast<unsigned char*>(to) - smem);
    if (!is_shared(to) || offset + bytes > smem_bytes) {
        fault_at(where, "out of bounds: an asynchronous copy of %zu bytes to byte %lld of shared memory, which has %zu", bytes,
                 static_cast<long long>(offset), smem_bytes);
    }
    if (!is_watching() && real && __asan_region_is_poisoned(from, bytes) != nullptr) {
        fault_at(where, "out of bounds: an asynchronous copy of %zu bytes from %p", bytes, from);
    }
    if (is_watching()) {
        if (real) touch(from, bytes, false, block.current % WARP_SIZE, where);
        shared_write(offset, bytes, Access(block.current % WARP_SIZE, where), true);
    }
    std::memset(to, 0xff, bytes);  // in flight: neither the old value nor the new one
    block.all[block.current].open.push_back(
        {static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes, real, line});
}

void copy_async_commit() {
    Thread& self = block.all[block.current];
    self.groups.push_back(std::move(self.open));
    self.open.clear();
}

void copy_async_wait(int pending) {
    auto& groups = block.all[block.current].groups;
    while (int(groups.size()) > pending) {
        for (const Copy& copy : groups.front()) land(copy);
        groups.erase(groups.begin());
    }
}

}  // namespace tilewright_host
