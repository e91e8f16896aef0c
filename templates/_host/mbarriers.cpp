// Barriers in shared memory that count arrivals and the bytes of bulk copies.
#include "mbarriers.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "shared_log.h"
#include "warpgroups.h"

namespace tilewright_host {

size_t mbarriers_begin, mbarriers_end;

namespace {

constexpr int MOST_ARRIVALS = (1 << 20) - 1, MOST_BYTES = (1 << 20) - 1;  // PTX ISA, "Contents of the mbarrier object"

struct BulkBytes {
    size_t offset, bytes;
    int thread, line;
    bool landed;
};

struct Waiting {
    int thread, parity;
};

// An mbarrier and its current phase. The word in shared memory stays untouched.
struct Counted {
    size_t offset;
    int thread, line;  // who initialised it, where and when
    uint32_t born;
    bool shown;  // to the bulk copies
    int arrivals, missing;
    int64_t bytes;  // that are still to land; below 0 while copies are ahead of who expects them
    unsigned phase, awaited;        // how many phases are complete, and of how many that is known to somebody
    std::vector<BulkBytes> copies;  // begun in this phase
    BulkBytes last;                 // of the copies of complete phases, and how many phases those are
    unsigned last_phase;
    Clock arrived, complete;        // what this phase's and what the last phase's arrivals, and those before, published
    std::vector<Waiting> waiting;
    std::vector<unsigned> last_waited;  // [thread]: how many phases were complete when it last waited
};

std::vector<std::unique_ptr<Counted>> mbarriers;  // the first `used` are this block's
int used;

long long count(int64_t value) { return static_cast<long long>(value); }

Counted* mbarrier_at(size_t offset) {
    for (int i = 0; i < used; ++i) {
        if (mbarriers[size_t(i)]->offset == offset) return mbarriers[size_t(i)].get();
    }
    return nullptr;
}

size_t offset_of(const void* barrier, const char* kind, Where where) {
    const size_t offset = shared_offset(barrier, sizeof(Mbarrier), kind, where);
    if (reinterpret_cast<uintptr_t>(barrier) % alignof(Mbarrier) != 0) {
        fault_at(where, "%s: an mbarrier at byte %zu of shared memory, which must be a multiple of 8", kind, offset);
    }
    return offset;
}

// The mbarrier there, initialised before whatever the running thread does with it.
Counted& existing(const void* barrier, const char* kind, int line) {
    const Where where = {nullptr, line};
    const size_t offset = offset_of(barrier, kind, where);
    Counted* found = mbarrier_at(offset);
    if (found == nullptr) fault_at(where, "%s: nobody initialised the mbarrier at byte %zu of shared memory", kind, offset);
    if (found->thread != block.current && found->born > seen_of(current_warp(), found->thread)) {
        fault_at(where,
                 "%s: the mbarrier at byte %zu of shared memory, which thread %d initialised at kernel.cu:%d, with no barrier "
                 "between",
                 kind, offset, found->thread, found->line);
    }
    return *found;
}

// Ends the phase if nothing is missing: what its copies brought is there, its waiters go on, its arrivals count anew.
void complete(Counted& barrier, int number, Where where) {
    if (barrier.missing != 0 || barrier.bytes > 0) return;
    if (barrier.bytes < 0) {
        fault_at(where,
                 "bulk copies bring %lld bytes more than expected to phase %u of the mbarrier at byte %zu of shared memory",
                 count(-barrier.bytes), barrier.phase, barrier.offset);
    }
    for (const BulkBytes& copy : barrier.copies) {
        if (!copy.landed) {
            fault_at(where,
                     "phase %u of the mbarrier at byte %zu of shared memory is complete while the bulk copy of %zu bytes that thread %d "
                     "began at kernel.cu:%d is in flight: fewer bytes were expected than are copied",
                     barrier.phase, barrier.offset, copy.bytes, copy.thread, copy.line);
        }
        if (is_watching()) log_bulk_landed(copy.offset, copy.bytes);
    }
    if (!barrier.copies.empty()) {
        barrier.last = barrier.copies.back();
        barrier.last_phase = barrier.phase + 1;
    }
    barrier.copies.clear();
    barrier.arrived.times[BULK_COPIES + number] = now++;
    barrier.complete = barrier.arrived;
    barrier.missing = barrier.arrivals;
    const int parity = int(barrier.phase++ % 2);
    std::vector<int> woken;
    for (const Waiting& waiting : barrier.waiting) {
        if (waiting.parity == parity) woken.push_back(waiting.thread);
    }
    const auto goes = [parity](const Waiting& waiting) { return waiting.parity == parity; };
    barrier.waiting.erase(std::remove_if(barrier.waiting.begin(), barrier.waiting.end(), goes), barrier.waiting.end());
    wake(woken);
}

int number_of(const Counted& barrier) {
    int number = 0;
    while (mbarriers[size_t(number)].get() != &barrier) ++number;
    return number;
}

// What a thread does that knows a phase to be complete.
void pass(Counted& barrier) {
    barrier.awaited = barrier.last_waited[size_t(block.current)] = barrier.phase;
    acquire(barrier.complete);
}

bool test_mbarrier(void* barrier, int parity, int line, const char* kind) {
    Counted& found = existing(barrier, kind, line);
    if (parity != 0 && parity != 1) fault_at({nullptr, line}, "%s: parity must be 0 or 1, got %d", kind, parity);
    if (int(found.phase % 2) == parity) return false;
    pass(found);
    return true;
}

}  // namespace

void exchange_mbarriers(Aside& aside) {
    struct Kept {
        std::vector<std::unique_ptr<Counted>> mbarriers;
        int used = 0;
        size_t begin = 0, end = 0;
    };
    Kept& kept = kept_of<Kept>(aside);
    std::swap(mbarriers, kept.mbarriers);
    std::swap(used, kept.used);
    std::swap(mbarriers_begin, kept.begin);
    std::swap(mbarriers_end, kept.end);
}

void begin_mbarriers() {
    used = 0;
    mbarriers_begin = SIZE_MAX;
    mbarriers_end = 0;
}

void check_no_mbarrier(size_t offset, size_t bytes, const char* doing, Where where) {
    for (int i = 0; i < used; ++i) {
        const Counted& barrier = *mbarriers[size_t(i)];
        if (barrier.offset >= offset + bytes || barrier.offset + sizeof(Mbarrier) <= offset) continue;
        fault_at(where,
                 "this thread %s byte %zu of shared memory like any other, where thread %d initialised an mbarrier at "
                 "kernel.cu:%d",
                 doing, std::max(offset, barrier.offset), barrier.thread, barrier.line);
    }
}

void init_mbarrier(void* barrier, int arrivals, int line) {
    const Where where = {nullptr, line};
    const size_t offset = offset_of(barrier, "mbarrier_init", where);
    if (arrivals < 1 || arrivals > MOST_ARRIVALS) {
        fault_at(where, "mbarrier_init: arrivals must be 1 to %d, got %d", MOST_ARRIVALS, arrivals);
    }
    if (const Counted* before = mbarrier_at(offset); before != nullptr) {
        fault_at(where, "mbarrier_init: the mbarrier at byte %zu of shared memory is in use, initialised by thread %d at kernel.cu:%d",
                 offset, before->thread, before->line);
    }
    if (used == MAX_MBARRIERS) fault_at(where, "mbarrier_init: a block can have %d mbarriers here", MAX_MBARRIERS);
    start_clocks();
    if (size_t(used) == mbarriers.size()) mbarriers.push_back(std::make_unique<Counted>());
    Counted& made = *mbarriers[size_t(used++)];
    made.offset = offset;
    made.thread = block.current;
    made.line = line;
    made.born = now++;
    made.shown = false;
    made.arrivals = made.missing = arrivals;
    made.bytes = 0;
    made.phase = made.awaited = made.last_phase = 0;
    made.copies.clear();
    made.waiting.clear();
    made.last_waited.assign(size_t(block.threads), 0);
    made.arrived.clear();
    made.complete.clear();
    mbarriers_begin = std::min(mbarriers_begin, offset);
    mbarriers_end = std::max(mbarriers_end, offset + sizeof(Mbarrier));
}

void show_mbarriers() {
    for (int i = 0; i < used; ++i) mbarriers[size_t(i)]->shown |= mbarriers[size_t(i)]->thread == block.current;
}

void arrive_at_mbarrier(void* barrier, int bytes, const char* kind, int line, int times) {
    const Where where = {nullptr, line};
    Counted& found = existing(barrier, kind, line);
    if (bytes < 0 || bytes > MOST_BYTES) fault_at(where, "%s: bytes must be 0 to %d, got %d", kind, MOST_BYTES, bytes);
    if (times < 1) fault_at(where, "%s: a thread arrives once or more often, got %d", kind, times);
    if (found.missing < times) {
        fault_at(where,
                 "%s: one arrival too many in phase %u of the mbarrier at byte %zu of shared memory, which was initialised for %d "
                 "at kernel.cu:%d and waits for %lld bytes alone",
                 kind, found.phase, found.offset, found.arrivals, found.line, count(found.bytes));
    }
    found.bytes += bytes;
    found.missing -= times;
    publish(found.arrived);
    complete(found, number_of(found), where);
}

void wait_for_mbarrier(void* barrier, int parity, int line) {
    if (test_mbarrier(barrier, parity, line, "mbarrier_wait")) return;
    Counted& found = existing(barrier, "mbarrier_wait", line);
    found.waiting.push_back({block.current, parity});
    wait_in("mbarrier_wait", line);
    pass(found);
}

bool test_mbarrier(void* barrier, int parity, int line) { return test_mbarrier(barrier, parity, line, "mbarrier_test"); }

BulkTicket begin_bulk_bytes(const void* barrier, size_t offset, size_t bytes, int line) {
    Counted& found = existing(barrier, "bulk_load", line);
    if (!found.shown) {
        fault_at({nullptr, line},
                 "bulk_load: the mbarrier at byte %zu of shared memory was initialised at kernel.cu:%d with no "
                 "mbarrier_init_fence() after it",
                 found.offset, found.line);
    }
    found.copies.push_back({offset, bytes, block.current, line, false});
    return {number_of(found), found.copies.size() - 1};
}

void land_bulk_bytes(BulkTicket ticket) {
    Counted& barrier = *mbarriers[size_t(ticket.mbarrier)];
    BulkBytes& copy = barrier.copies[ticket.copy];
    copy.landed = true;
    barrier.bytes -= int64_t(copy.bytes);
    complete(barrier, ticket.mbarrier, {nullptr, copy.line});
}

void check_copies_awaited() {
    for (int i = 0; i < used; ++i) {
        const Counted& barrier = *mbarriers[size_t(i)];
        if (barrier.copies.empty() && barrier.last_phase <= barrier.awaited) continue;
        const BulkBytes& copy = barrier.copies.empty() ? barrier.last : barrier.copies.back();
        block.current = copy.thread;
        fault_at({nullptr, copy.line},
                 "nobody waited for the bulk copy to byte %zu of shared memory: the block may end before it lands",
                 copy.offset);
    }
}

void fence_generic_accesses() {
    published = now;  // reads from here on are other ones
    block.all[block.current].fences.push_back(now++);
}

std::string awaited_mbarrier(int thread) {
    for (int i = 0; i < used; ++i) {
        const Counted& barrier = *mbarriers[size_t(i)];
        for (const Waiting& waiting : barrier.waiting) {
            if (waiting.thread != thread) continue;
            const unsigned gone_by = barrier.phase - barrier.last_waited[size_t(thread)];
            return " (the mbarrier at byte " + std::to_string(barrier.offset) + " of shared memory: its phase " +
                   std::to_string(barrier.phase) + " lacks " + std::to_string(barrier.missing) + " of " +
                   std::to_string(barrier.arrivals) + " arrivals and " + std::to_string(barrier.bytes) + " bytes" +
                   (gone_by < 2 ? "" : "; since the thread last waited there " + std::to_string(gone_by) +
                                           " phases went by: it came too late for the one of its parity") + ")";
        }
    }
    return "";
}

}  // namespace tilewright_host
