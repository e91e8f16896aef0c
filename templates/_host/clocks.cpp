// Vector clocks, joined eight times at once: a kernel arrives at barriers thousands of times a block.
#include "clocks.h"

#include <cstring>
#include <unordered_map>
#include <utility>

namespace tilewright_host {

Clock seen[MAX_WARPS];
bool clocked;
uint32_t published;

namespace {

std::unordered_map<const void*, Clock> released;  // what released stores to shared memory publish, by address

typedef uint32_t Times __attribute__((vector_size(32), may_alias));

// How many of a clock's times this block uses, in vectors.
int vectors() { return (ALL_THREADS + block.threads + 7) / 8; }

}  // namespace

void Clock::clear() { std::memset(times, 0, sizeof times); }

void Clock::join(const Clock& other) {
    Times* mine = reinterpret_cast<Times*>(times);
    const Times* theirs = reinterpret_cast<const Times*>(other.times);
    for (int i = 0, count = vectors(); i < count; ++i) mine[i] = mine[i] > theirs[i] ? mine[i] : theirs[i];
}

void begin_clocks() {
    if (clocked) {
        for (Clock& clock : seen) clock.clear();
    }
    clocked = false;
    published = 0;
    released.clear();
}

void exchange_clocks(Aside& aside) {
    struct Kept {
        Clock seen[MAX_WARPS];
        bool clocked = false;
        uint32_t published = 0;
        std::unordered_map<const void*, Clock> released;
    };
    Kept& kept = kept_of<Kept>(aside);
    if (clocked || kept.clocked) std::swap(seen, kept.seen);
    std::swap(clocked, kept.clocked);
    std::swap(published, kept.published);
    std::swap(released, kept.released);
}

void start_clocks() { clocked = true; }

void publish(Clock& to) {
    const int warp = current_warp(), first = ALL_THREADS + warp * WARP_SIZE;
    to.join(seen[warp]);
    for (int lane = 0; lane < WARP_SIZE; ++lane) {
        uint32_t& time = to.times[first + lane];
        if (warp_synced[warp] > time) time = warp_synced[warp];
    }
    published = now++;
    to.times[ALL_THREADS + block.current] = published;
}

void release_at(const void* address) {
    start_clocks();
    Clock& clock = released[address];
    clock.clear();
    publish(clock);
}

void acquire_at(const void* address) {
    if (const auto found = released.find(address); found != released.end()) acquire(found->second);
}

void acquire(const Clock& from) { seen[current_warp()].join(from); }

void share_clocks() {
    const int warps = (block.threads + WARP_SIZE - 1) / WARP_SIZE;
    for (int agent = 0; agent < ALL_THREADS; ++agent) {
        uint32_t latest = 0;
        for (int warp = 0; warp < warps; ++warp) latest = seen[warp].times[agent] > latest ? seen[warp].times[agent] : latest;
        for (int warp = 0; warp < warps; ++warp) seen[warp].times[agent] = latest;
    }
}

}  // namespace tilewright_host
