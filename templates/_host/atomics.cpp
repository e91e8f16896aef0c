// Atomic operations, and threads that wait for each other through them.
#include <cstdint>

#include "clocks.h"
#include "memory.h"

namespace tilewright_host {

namespace {

void check_aligned(const void* address, Where where) {
    if (reinterpret_cast<uintptr_t>(address) % 4 == 0) return;
    fault_at(where, "misaligned: an atomic operation at %p, which must be a multiple of 4 bytes", address);
}

void check_global(const void* address, bool adds, bool releases, bool acquires, Where where) {
    check_aligned(address, where);
    if (is_shared(address)) fault_at(where, "an atomic operation for global memory, on shared memory");
    if (is_watching()) return touch_tensor_atomic(address, adds, releases, acquires, where);
    if (__asan_region_is_poisoned(address, 4) == nullptr) return;
    fault_at(where, "out of bounds: an atomic operation at %p", address);
}

// after(what was there) takes its place.
template <typename After>
int update_shared(int* to, const After& after, int line) {
    const Where where = {nullptr, line};
    check_aligned(to, where);
    if (is_watching()) {
        touch_shared_atomic(to, where);
    } else {
        shared_offset(to, 4, "an atomic operation", where);
    }
    note_write();
    const int before = *to;
    *to = after(before);
    return before;
}

}  // namespace

int shared_atomic_add(int* to, int value, int line) {
    return update_shared(to, [=](int before) { return int(unsigned(before) + unsigned(value)); }, line);
}

unsigned shared_atomic_or(unsigned* to, unsigned bits, int line) {
    return unsigned(update_shared(reinterpret_cast<int*>(to), [=](int before) { return int(unsigned(before) | bits); }, line));
}

namespace {

void check_wide(const void* address, Where where) {
    if (reinterpret_cast<uintptr_t>(address) % 8 != 0) {
        fault_at(where, "misaligned: an atomic operation at %p, which must be a multiple of 8 bytes", address);
    }
    if (!is_watching()) return void(shared_offset(address, 8, "an atomic operation", where));
    for (int word = 0; word < 2; ++word) touch_shared_atomic(static_cast<const uint32_t*>(address) + word, where);
}

}  // namespace

uint64_t shared_load_acquire(const uint64_t* from, int line) {
    check_wide(from, {nullptr, line});
    acquire_at(from);
    return *from;
}

void shared_store_release(uint64_t* to, uint64_t value, int line) {
    check_wide(to, {nullptr, line});
    release_at(to);
    note_write();
    *to = value;
}

unsigned global_atomic_add(unsigned* to, unsigned value, bool release, int line) {
    check_global(to, true, release, false, {nullptr, line});
    note_write();
    const unsigned before = *to;
    *to = before + value;
    return before;
}

unsigned global_load_acquire(const unsigned* from, int line) {
    check_global(from, false, false, true, {nullptr, line});
    return *from;
}

unsigned global_load_relaxed(const unsigned* from, int line) {
    check_global(from, false, false, false, {nullptr, line});
    return *from;
}

void pause_thread(int line) { yield_to_others(line); }

}  // namespace tilewright_host
