// The log of shared memory: of each few bytes the newest write and the reads since, and the fault where two are not ordered.
#include "shared_log.h"

#include <algorithm>
#include <string>
#include <unordered_map>

#include "clocks.h"

namespace tilewright_host {

namespace {

constexpr size_t COARSEST = 16;  // bytes: the largest access of a kernel
constexpr uint16_t BULK = 0x8000;
constexpr uint16_t SEVERAL = 0x7fff;  // in the place of a thread: of different warps

enum class Writing : uint8_t {
    Done,      // by a thread
    InFlight,  // an asynchronous or bulk copy to it has not been waited for
    Landed,    // a bulk copy's: for those who waited for its mbarrier
    Atomic,    // by a thread, or by several that nothing orders: those don't disturb each other
};

// The newest write to one granule of shared memory. `place`: see remember().
struct Written {
    uint32_t time, place;
    uint32_t readers;         // the warps that read it since
    uint16_t thread;          // warp * 64 + lane, or BULK and the mbarrier
    Writing state;
    uint8_t product_readers;  // the warpgroups whose products read it since
};

// One warp's reads of a granule since the last write, as far as they can still matter.
struct Read {
    uint32_t time, lanes, place;
};

// Lanes that read earlier than the others: they may have arrived at a barrier between. Among them the earliest counts.
struct EarlierRead {
    uint32_t time, lanes;
};

// The newest product of a warpgroup that reads a granule.
struct ReadByProduct {
    uint32_t time, place;
};

std::vector<Written> writes;
std::vector<Read> reads;                   // [warp][granule]
std::vector<EarlierRead> earlier;          // [warp][granule], once clocked
std::vector<ReadByProduct> product_reads;  // [warpgroup][granule], once there are products
size_t granule = COARSEST;                 // bytes whose accesses are told apart: so far no access was smaller, or lay across two
size_t granules;
uint32_t block_began;
std::unordered_map<size_t, Written> before_atomics;  // by offset: the ordinary write that atomic operations came after

std::string who(int thread) {
    const int warp = thread / 64, lane = thread % 64;
    if (thread == SEVERAL) return "threads of several warps";
    if (lane == WHOLE_WARP) return "warp " + std::to_string(warp);
    return "thread " + std::to_string(warp * WARP_SIZE + lane);
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
        if (cell.state == Writing::Done || cell.state == Writing::Atomic) {
            if (cell.time <= synced && (cell.time <= block_synced || cell.thread / 64 == warp)) return false;
            if (cell.thread == warp * 64 + lane && lane != WHOLE_WARP) return false;
        }
        return is_unseen(warp, cell);
    }

    // What neither a barrier of the block nor of the warp orders: of a thread, a whole warp, or a copy.
    [[gnu::noinline, gnu::cold]] static bool is_unseen(uint32_t warp, const Written& cell) {
        if (cell.time <= block_began) return false;
        if (cell.state == Writing::InFlight) return true;
        if (cell.state == Writing::Landed) return cell.time > seen[warp].times[BULK_COPIES + (cell.thread & ~BULK)];
        if (cell.thread == SEVERAL) {
            for (int thread = 0; thread < block.threads; ++thread) {
                if (cell.time > seen_of(int(warp), thread)) return true;
            }
            return false;
        }
        const int writer = cell.thread / 64 * WARP_SIZE, lane = cell.thread % 64;
        if (lane != WHOLE_WARP) return cell.time > seen_of(int(warp), writer + lane);
        for (int i = 0; i < WARP_SIZE; ++i) {
            if (cell.time > seen_of(int(warp), writer + i)) return true;
        }
        return false;
    }
};

[[noreturn]] void report_race(Where where, size_t index, const char* doing, const char* done, const std::string& whom,
                              uint32_t place) {
    fault_at(where, "a race for byte %zu of shared memory: this %s what %s %s at %s, with no barrier between", index * granule,
             doing, whom.c_str(), done, recall(place).c_str());
}

// What may not be done to this granule because of its last write; nothing when that is well ordered.
[[noreturn]] void report_written(const Written& cell, size_t index, Where where, const char* doing) {
    const std::string place = recall(cell.place);
    if (cell.state == Writing::Landed) {
        fault_at(where,
                 "a race for byte %zu of shared memory: this %s what the bulk copy from %s wrote, whose mbarrier was not waited "
                 "for", index * granule, doing, place.c_str());
    }
    if (cell.state == Writing::InFlight && (cell.thread & BULK) != 0) {
        fault_at(where, "this %s byte %zu of shared memory, and the bulk copy to it that began at %s has not been waited for",
                 doing, index * granule, place.c_str());
    }
    if (cell.state == Writing::InFlight) {
        fault_at(where,
                 "this %s byte %zu of shared memory, and the asynchronous copy to it that %s began at %s has not been waited for",
                 doing, index * granule, who(cell.thread).c_str(), place.c_str());
    }
    report_race(where, index, doing, cell.state == Writing::Atomic ? "added to" : "wrote", who(cell.thread), cell.place);
}

// Splits every granule. Nothing is lost: all accesses so far were to whole ones.
template <typename T>
void split(std::vector<T>& cells, size_t parts) {
    std::vector<T> fine(cells.size() * parts);
    for (size_t i = 0; i < fine.size(); ++i) fine[i] = cells[i / parts];
    cells.swap(fine);
}

void refine(size_t to) {
    const size_t parts = granule / to;
    split(writes, parts);
    split(reads, parts);
    split(earlier, parts);
    split(product_reads, parts);
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

// Lanes of a record that read at another time than now, and not again now.
[[gnu::noinline, gnu::cold]] void keep_earlier(size_t index, const Read& read, const Access& access) {
    if (earlier.size() < reads.size()) earlier.resize(reads.size());
    EarlierRead& kept = earlier[index];
    const uint32_t before = kept.time > access.synced ? kept.lanes & ~access.lanes : 0u;
    const uint32_t lanes = read.lanes & ~access.lanes;
    if (before == 0) kept.time = read.time;
    kept.lanes = before | lanes;
}

void log_read(size_t offset, size_t bytes, const Access& access) {
    const Run run(offset, bytes);
    Written* cell = &writes[run.first];
    Read* mine = &reads[access.warp * granules + run.first];
    // Between barriers of the warp its lanes' reads are one, unless somebody arrived at a barrier of another kind.
    const uint32_t since = std::max(access.synced, published);
    for (size_t i = 0; i < run.count; ++i, ++cell, ++mine) {
        if (cell->time <= block_began) {
            fault_at(access.where, "this thread reads byte %zu of shared memory, which nobody wrote", (run.first + i) * granule);
        }
        if (access.conflicts(*cell)) report_written(*cell, run.first + i, access.where, "thread reads");
        if (mine->time > since && (mine->lanes & access.lanes) == access.lanes) continue;
        if (mine->time > access.synced && mine->time <= since) {
            keep_earlier(access.warp * granules + run.first + i, *mine, access);
        }
        mine->lanes = (mine->time > since ? mine->lanes : 0u) | access.lanes;
        mine->time = now;
        mine->place = access.place;
        cell->readers |= 1u << access.warp;
    }
}

// The lanes whose reads of a granule the running thread's warp has not seen to be done.
uint32_t unseen_lanes(uint32_t reader, size_t index, uint32_t asked, const Access& access) {
    const Read& read = reads[index];
    uint32_t unseen = 0;
    for (uint32_t left = asked; left != 0; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        uint32_t time = read.lanes >> lane & 1u ? read.time : 0u;
        if (index < earlier.size() && (earlier[index].lanes >> lane & 1u) != 0) time = std::max(time, earlier[index].time);
        if (time > seen_of(int(access.warp), int(reader) * WARP_SIZE + lane)) unseen |= 1u << lane;
    }
    return unseen;
}

const char* name_of(Writing state, uint16_t thread) {
    return state == Writing::InFlight && (thread & BULK) != 0 ? "bulk copy writes" : "thread writes";
}

// Reads by a warp, or by products, that no barrier of the block orders before a write.
[[gnu::noinline, gnu::cold]] void check_warp_reads(uint32_t reader, size_t index, uint32_t others, const Access& access,
                                                   const char* doing) {
    const Read& read = reads[reader * granules + index];
    if (clocked) {
        const uint32_t own = reader == access.warp && access.lane != WHOLE_WARP ? access.lanes : 0u;
        others = unseen_lanes(reader, reader * granules + index, ~own, access);
    }
    if (others == 0) return;
    const int first = read.lanes == ~0u && others == ~0u ? WHOLE_WARP : __builtin_ctz(others);
    report_race(access.where, index, doing, "read", who(int(reader * 64) + first), read.place);
}

[[gnu::noinline, gnu::cold]] void check_product_reads(uint32_t warpgroups, size_t index, const Access& access,
                                                      const char* doing) {
    for (; warpgroups != 0; warpgroups &= warpgroups - 1) {
        const int warpgroup = __builtin_ctz(warpgroups);
        const ReadByProduct& read = product_reads[size_t(warpgroup) * granules + index];
        if (read.time <= block_began || read.time <= seen[access.warp].times[TENSOR_CORES + warpgroup]) continue;
        fault_at(access.where,
                 "a race for byte %zu of shared memory: this %s what a product of warpgroup %d reads that began at %s; nobody "
                 "who waited for that product has arrived here",
                 index * granule, doing, warpgroup, recall(read.place).c_str());
    }
}

// Reads since the last write, by anybody else, that nothing orders before the access.
void check_reads(const Written& cell, size_t index, const Access& access, const char* doing) {
    for (uint32_t left = cell.readers; left != 0; left &= left - 1) {
        const uint32_t reader = uint32_t(__builtin_ctz(left));
        const Read& read = reads[reader * granules + index];
        if (read.time <= block_synced) continue;
        const uint32_t own = access.lane == WHOLE_WARP ? 0u : access.lanes;
        const uint32_t others = reader != access.warp ? read.lanes : read.time > access.synced ? read.lanes & ~own : 0u;
        if (others != 0 || clocked) check_warp_reads(reader, index, others, access, doing);
    }
    if (cell.product_readers != 0) check_product_reads(cell.product_readers, index, access, doing);
}

template <Writing STATE>
void log_write(size_t offset, size_t bytes, const Access& access, uint16_t thread) {
    const Run run(offset, bytes);
    Written* cell = &writes[run.first];
    for (size_t i = 0; i < run.count; ++i, ++cell) {
        if (access.conflicts(*cell)) report_written(*cell, run.first + i, access.where, name_of(STATE, thread));
        check_reads(*cell, run.first + i, access, name_of(STATE, thread));
        *cell = {now, access.place, 0, thread, STATE, 0};
    }
}

// Whether a thread called fence_proxy_async after a time and before what `warp` has seen of it. self: the running thread, to which
// its own last fence is known, or -1.
bool has_fenced(int thread, uint32_t since, int warp, int self) {
    const std::vector<uint32_t>& fences = block.all[thread].fences;
    const auto fence = std::lower_bound(fences.begin(), fences.end(), since);
    return fence != fences.end() && (thread == self || *fence <= seen_of(warp, thread));
}

// Whether whoever wrote this by ordinary stores has.
bool is_fenced(const Written& cell, int warp, int self) {
    if (cell.state != Writing::Done || cell.time <= block_began) return true;
    const int lane = cell.thread % 64, first = cell.thread / 64 * WARP_SIZE + (lane == WHOLE_WARP ? 0 : lane);
    for (int thread = first, last = lane == WHOLE_WARP ? first + WARP_SIZE - 1 : first; thread <= last; ++thread) {
        if (!has_fenced(thread, cell.time, warp, self)) return false;
    }
    return true;
}

// What a bulk copy overwrites: whoever read it by ordinary loads has fenced those, or they may still be on their way.
void check_reads_fenced(const Written& cell, size_t index, const Access& access) {
    for (uint32_t left = cell.readers; left != 0; left &= left - 1) {
        const int reader = __builtin_ctz(left);
        const size_t record = size_t(reader) * granules + index;
        const Read& read = reads[record];
        const bool kept = record < earlier.size();
        for (uint32_t lanes = read.lanes | (kept ? earlier[record].lanes : 0u); lanes != 0; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes), thread = reader * WARP_SIZE + lane;
            const uint32_t time = read.lanes >> lane & 1u ? read.time : earlier[record].time;
            if (time <= block_began || has_fenced(thread, time, int(access.warp), block.current)) continue;
            fault_at(access.where,
                     "this bulk copy writes byte %zu of shared memory, which %s read by ordinary loads at %s, with no "
                     "fence_proxy_async() of that thread's between the two", index * granule, who(reader * 64 + lane).c_str(),
                     recall(read.place).c_str());
        }
    }
}

[[noreturn]] void report_unfenced(const Written& cell, size_t index, Where where, const char* doing) {
    fault_at(where,
             "this %s byte %zu of shared memory, which %s wrote by ordinary stores at %s, with no fence_proxy_async() of that "
             "thread's between the two", doing, index * granule, who(cell.thread).c_str(), recall(cell.place).c_str());
}

}  // namespace

void forget_log() {
    writes.clear();
    reads.clear();
}

void exchange_log(Aside& aside) {
    struct Kept {
        std::vector<Written> writes;
        std::vector<Read> reads;
        std::vector<EarlierRead> earlier;
        std::vector<ReadByProduct> product_reads;
        size_t granule = COARSEST, granules = 0;
        uint32_t block_began = 0;
        std::unordered_map<size_t, Written> before_atomics;
    };
    Kept& kept = kept_of<Kept>(aside);
    std::swap(writes, kept.writes);
    std::swap(reads, kept.reads);
    std::swap(earlier, kept.earlier);
    std::swap(product_reads, kept.product_reads);
    std::swap(granule, kept.granule);
    std::swap(granules, kept.granules);
    std::swap(block_began, kept.block_began);
    std::swap(before_atomics, kept.before_atomics);
}

void begin_log_of_block() {
    const size_t warps = (size_t(block.threads) + WARP_SIZE - 1) / WARP_SIZE;
    const size_t needed = (smem_bytes + granule - 1) / granule;
    if (writes.size() < needed || reads.size() < granules * warps) {
        granules = std::max(writes.size(), needed);
        writes.assign(granules, Written{});
        reads.assign(granules * warps, Read{});
        earlier.clear();
        product_reads.clear();
    }
    block_began = block_synced = now++;
    std::fill(std::begin(warp_synced), std::end(warp_synced), block_began);
    before_atomics.clear();
}

bool touch_shared(const void* address, size_t bytes, bool write, int lane, Where where) {
    const size_t offset = size_t(static_cast<const unsigned char*>(address) - smem);
    if (offset < smem_bytes && offset + bytes <= smem_bytes) {
        if (offset < mbarriers_end && offset + bytes > mbarriers_begin) {
            check_no_mbarrier(offset, bytes, write ? "writes" : "reads", where);
        }
        const Access access(lane, where);
        if (write) {
            log_write<Writing::Done>(offset, bytes, access, uint16_t(access.warp * 64 + access.lane));
        } else {
            log_read(offset, bytes, access);
        }
        return true;
    }
    if (offset + AROUND >= smem_bytes + 2 * AROUND) return false;
    fault_at(where, "out of bounds: this thread %s %zu bytes at byte %lld of shared memory, which has %zu",
             write ? "writes" : "reads", bytes, static_cast<long long>(offset), smem_bytes);
}

void touch_shared_atomic(const void* address, Where where) {
    const size_t offset = shared_offset(address, 4, "an atomic operation", where);
    if (offset < mbarriers_end && offset + 4 > mbarriers_begin) check_no_mbarrier(offset, 4, "adds to", where);
    const Access access(block.current % WARP_SIZE, where);
    const Run run(offset, 4);
    for (size_t i = run.first; i < run.first + run.count; ++i) {
        Written& cell = writes[i];
        if (cell.time <= block_began) {
            fault_at(where, "this thread adds to byte %zu of shared memory, which nobody wrote", i * granule);
        }
        uint16_t thread = uint16_t(access.warp * 64 + access.lane);
        if (access.conflicts(cell)) {
            if (cell.state != Writing::Atomic) report_written(cell, i, where, "thread adds to");
            thread = cell.thread / 64 == access.warp ? uint16_t(access.warp * 64 + WHOLE_WARP) : SEVERAL;
        }
        if (cell.state != Writing::Atomic) {
            before_atomics[i * granule] = cell;
        } else if (const auto found = before_atomics.find(i * granule); found != before_atomics.end()) {
            if (access.conflicts(found->second)) report_written(found->second, i, where, "thread adds to");
        }
        // Who read before still matters to the next atomic operation, which this one does not disturb.
        check_reads(cell, i, access, "thread adds to");
        cell = {now, access.place, cell.readers, thread, Writing::Atomic, cell.product_readers};
    }
}

void log_copy(size_t offset, size_t bytes, Where where) {
    const Access access(block.current % WARP_SIZE, where);
    log_write<Writing::InFlight>(offset, bytes, access, uint16_t(access.warp * 64 + access.lane));
}

void log_landed(size_t offset, size_t bytes) {
    const Run run(offset, bytes);
    for (size_t i = 0; i < run.count; ++i) {
        writes[run.first + i].state = Writing::Done;
        writes[run.first + i].time = now;
    }
}

void log_bulk_copy(size_t offset, size_t bytes, int mbarrier, Where where) {
    const Access access(block.current % WARP_SIZE, where);
    const Run run(offset, bytes);
    for (size_t i = run.first; i < run.first + run.count; ++i) {
        if (is_fenced(writes[i], int(access.warp), block.current)) continue;
        if (!access.conflicts(writes[i])) report_unfenced(writes[i], i, where, "bulk copy writes");
        report_written(writes[i], i, where, "bulk copy writes");
    }
    const std::vector<Written> before(writes.begin() + ptrdiff_t(run.first), writes.begin() + ptrdiff_t(run.first + run.count));
    log_write<Writing::InFlight>(offset, bytes, access, uint16_t(BULK | mbarrier));
    for (size_t i = 0; i < run.count; ++i) check_reads_fenced(before[i], run.first + i, access);
}

void log_bulk_landed(size_t offset, size_t bytes) {
    const Run run(offset, bytes);
    for (size_t i = 0; i < run.count; ++i) {
        writes[run.first + i].state = Writing::Landed;
        writes[run.first + i].time = now;
    }
}

void log_product_read(size_t offset, ProductRead& read) {
    const Run run(offset, COARSEST);
    if (product_reads.size() < MAX_WARPGROUPS * granules) product_reads.resize(MAX_WARPGROUPS * granules);
    for (size_t i = run.first; i < run.first + run.count; ++i) {
        Written& cell = writes[i];
        if (cell.time <= block_began) {
            fault_at(read.where, "this product reads byte %zu of shared memory, which nobody wrote", i * granule);
        }
        const uint32_t writer = uint32_t(cell.state) << 16 | cell.thread;
        if (cell.time != read.known_time || writer != read.known_writer) {
            for (int warp = read.first_warp; warp < read.first_warp + read.warps; ++warp) {
                if (Access::is_unseen(uint32_t(warp), cell)) report_written(cell, i, read.where, "product reads");
                if (!is_fenced(cell, warp, -1)) report_unfenced(cell, i, read.where, "product reads");
            }
            read.known_time = cell.time;
            read.known_writer = writer;
        }
        product_reads[size_t(read.warpgroup) * granules + i] = {read.time, remember(read.where)};
        cell.product_readers |= uint8_t(1u << read.warpgroup);
    }
}

}  // namespace tilewright_host
