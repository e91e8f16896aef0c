#include "global_log.h"

#include <deque>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "clocks.h"

namespace tilewright_host {

namespace {

constexpr uint32_t ATOMIC = 0x80000000u;  // in GlobalAccess::thread: the last of an address's atomic operations wrote it

uint32_t grid_began;

// What was known of an address when it was acquired: its operations up to there.
struct Known {
    size_t address;  // in addresses
    size_t operations;
};

struct Operation {
    uint32_t thread, time, place;
    bool releases;
    uint32_t block_synced, warp_synced;  // of the thread, then: it releases what others of its block did before these
    std::vector<Known> known;            // what it had acquired itself
    std::vector<uint32_t> seen;          // and of each thread of its block, what its warp had seen through other barriers
};

// The atomic operations on one address since its last ordinary write, in order.
struct Address {
    GlobalAccess before;  // that write
    std::vector<Operation> operations;
    std::unordered_map<uint32_t, std::vector<size_t>> of_block;  // which of them release
};

struct Acquired {
    Known known;
    int thread;
    uint32_t time;
};

std::deque<Address> addresses;
std::unordered_map<const void*, size_t> number_of;
std::vector<Acquired> acquired;  // by this block

uint32_t running_thread() { return block.index * MAX_THREADS + uint32_t(block.current) + 1; }
uint32_t block_of(uint32_t thread) { return (thread - 1) / MAX_THREADS; }
uint32_t index_of(uint32_t thread) { return (thread - 1) % MAX_THREADS; }

std::string who(uint32_t thread) {
    return "thread " + std::to_string(index_of(thread)) + " of block " + std::to_string(block_of(thread));
}

// Whether what a thread did at a time was released before these were acquired, by itself or through others.
bool covers(const Known& known, uint32_t thread, uint32_t time, std::vector<Known>& visited) {
    for (const Known& other : visited) {
        if (other.address == known.address && other.operations >= known.operations) return false;
    }
    visited.push_back(known);
    const Address& address = addresses[known.address];
    if (const auto own = address.of_block.find(block_of(thread)); own != address.of_block.end()) {
        for (const size_t i : own->second) {
            const Operation& release = address.operations[i];
            if (i >= known.operations) break;
            if (time <= release.block_synced || (release.thread == thread && time <= release.time)) return true;
            if (index_of(release.thread) / WARP_SIZE == index_of(thread) / WARP_SIZE && time <= release.warp_synced) return true;
            if (!release.seen.empty() && time <= release.seen[index_of(thread)]) return true;
        }
    }
    for (size_t i = 0; i < known.operations; ++i) {
        if (!address.operations[i].releases) continue;
        for (const Known& further : address.operations[i].known) {
            if (covers(further, thread, time, visited)) return true;
        }
    }
    return false;
}

bool has_acquired(const Acquired& one) {
    return one.thread == block.current || one.time <= seen_of(current_warp(), one.thread);
}

// Whether the running thread sees what a thread did.
bool has_seen(uint32_t thread, uint32_t time) {
    if (thread == 0 || time <= grid_began) return true;
    if (block_of(thread) == block.index) {
        if (int(index_of(thread)) == block.current || time <= seen_of(current_warp(), int(index_of(thread)))) return true;
    }
    std::vector<Known> visited;
    for (const Acquired& one : acquired) {
        if (has_acquired(one) && covers(one.known, thread, time, visited)) return true;
    }
    return false;
}

[[noreturn]] void report_race(size_t byte, const char* doing, const char* done, const GlobalAccess& other, const char* name,
                              Where where) {
    const bool same = block_of(other.thread) == block.index;
    fault_at(where, "a race for byte %zu of %s: this thread %s what %s %s at %s, %s", byte, name, doing, who(other.thread).c_str(),
             done, recall(other.place).c_str(),
             same ? "with no barrier between" : "and this block has acquired nothing that that one released since");
}

Address& address_at(const void* address, const GlobalAccess& before) {
    const auto [found, is_new] = number_of.try_emplace(address, addresses.size());
    if (is_new) addresses.push_back({before, {}, {}});
    return addresses[found->second];
}

template <typename T>
void split(std::vector<T>& cells, size_t parts) {
    std::vector<T> fine(cells.size() * parts);
    for (size_t i = 0; i < fine.size(); ++i) fine[i] = cells[i / parts];
    cells.swap(fine);
}

}  // namespace

void begin_global_log() {
    grid_began = now++;
    addresses.clear();
    number_of.clear();
}

void begin_global_log_of_block() { acquired.clear(); }

void exchange_global_log(Aside& aside) { std::swap(acquired, kept_of<std::vector<Acquired>>(aside)); }

void GlobalLog::watch(size_t bytes, size_t granule, bool splits) {
    granule_ = granule;
    splits_ = splits;
    writes_.assign((bytes + granule - 1) / granule, GlobalAccess{});
    reads_.clear();
}

GlobalLog::Run GlobalLog::run(size_t offset, size_t bytes) {
    if (splits_ && ((offset | bytes) & (granule_ - 1)) != 0) {
        const size_t finer = size_t(1) << __builtin_ctzll(offset | bytes);
        split(writes_, granule_ / finer);
        split(reads_, granule_ / finer);
        granule_ = finer;
    }
    const size_t first = offset / granule_;
    return {first, (offset + bytes + granule_ - 1) / granule_ - first};
}

void GlobalLog::forget_order() {
    for (GlobalAccess& cell : writes_) cell = {cell.time == 0 ? 0u : 1u, cell.time == 0 ? 0u : 1u, 0};
    reads_.clear();
}

void GlobalLog::wrote(size_t offset, size_t bytes) {
    const Run cells = run(offset, bytes);
    for (size_t i = cells.first; i < cells.first + cells.count; ++i) writes_[i] = {1, now, 0};
}

// That the running thread sees the last write to a granule; atomic: for an atomic operation, which no other one disturbs.
void GlobalLog::check_write_seen(size_t index, const char* doing, const char* name, Where where, bool atomic) {
    const GlobalAccess& cell = writes_[index];
    if (cell.time <= grid_began) return;
    if ((cell.thread & ATOMIC) == 0) {
        if (!has_seen(cell.thread, cell.time)) report_race(index * granule_, doing, "wrote", cell, name, where);
        return;
    }
    const Address& address = addresses[cell.place];
    const GlobalAccess& before = address.before;
    if (!has_seen(before.thread, before.time)) report_race(index * granule_, doing, "wrote", before, name, where);
    if (atomic) return;
    for (const Operation& one : address.operations) {
        if (has_seen(one.thread, one.time)) continue;
        report_race(index * granule_, doing, "added to", {one.thread, one.time, one.place}, name, where);
    }
}

void GlobalLog::check_read_seen(size_t index, const char* doing, const char* name, Where where) {
    if (index >= reads_.size() || has_seen(reads_[index].thread, reads_[index].time)) return;
    report_race(index * granule_, doing, "read", reads_[index], name, where);
}

void GlobalLog::read(size_t offset, size_t bytes, const char* name, bool fresh, Where where) {
    const Run cells = run(offset, bytes);
    if (reads_.size() < writes_.size()) reads_.resize(writes_.size());
    for (size_t i = cells.first; i < cells.first + cells.count; ++i) {
        if (fresh && writes_[i].time == 0) {
            fault_at(where, "this thread reads byte %zu of %s, which nobody wrote", i * granule_, name);
        }
        check_write_seen(i, "reads", name, where, false);
        reads_[i] = {running_thread(), now, remember(where)};
    }
}

void GlobalLog::write(size_t offset, size_t bytes, uint32_t thread, const char* name, Where where) {
    const Run cells = run(offset, bytes);
    for (size_t i = cells.first; i < cells.first + cells.count; ++i) {
        check_write_seen(i, "writes", name, where, false);
        check_read_seen(i, "writes", name, where);
        writes_[i] = {block.index * MAX_THREADS + thread + 1, now, remember(where)};
    }
}

void GlobalLog::atomic(size_t offset, const void* location, bool adds, bool releases, bool acquires, const char* name, bool fresh,
                       Where where) {
    const Run cells = run(offset, 4);
    const char* doing = adds ? "adds to" : "acquires";
    for (size_t i = cells.first; i < cells.first + cells.count; ++i) {
        if (fresh && writes_[i].time == 0) {
            fault_at(where, "this thread %s byte %zu of %s, which nobody wrote", doing, i * granule_, name);
        }
        check_write_seen(i, doing, name, where, true);
        if (adds) check_read_seen(i, doing, name, where);
    }
    GlobalAccess& cell = writes_[cells.first];
    const bool continues = (cell.thread & ATOMIC) != 0 && cell.time > grid_began;
    if (!continues) number_of.erase(location);
    Address& address = address_at(location, cell);
    const uint32_t number = uint32_t(number_of[location]);
    if (acquires && !address.operations.empty()) {
        const Acquired& last = acquired.empty() ? Acquired{{~size_t(0), 0}, 0, 0} : acquired.back();
        const bool again = last.thread == block.current && last.known.address == number &&
                           last.known.operations == address.operations.size();
        if (!again) acquired.push_back({{number, address.operations.size()}, block.current, now});
    }
    if (!adds) return;
    Operation operation = {running_thread(), now, remember(where), releases, block_synced, warp_synced[current_warp()], {}, {}};
    if (releases) {
        if (clocked) {
            const uint32_t* times = seen[current_warp()].times + ALL_THREADS;
            operation.seen.assign(times, times + block.threads);
        }
        for (const Acquired& one : acquired) {
            if (has_acquired(one)) operation.known.push_back(one.known);
        }
        address.of_block[block.index].push_back(address.operations.size());
        ++now;  // what this thread does next is not released
    }
    address.operations.push_back(std::move(operation));
    for (size_t i = cells.first; i < cells.first + cells.count; ++i) writes_[i] = {ATOMIC | running_thread(), now, number};
}

}  // namespace tilewright_host
