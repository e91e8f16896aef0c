// A block's shared memory, and asynchronous copies that arrive late.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "global_log.h"
#include "shared_log.h"

namespace tilewright_host {

const char* library_start;
unsigned char* smem;
size_t smem_bytes;

namespace {

constexpr size_t SMEM_ALIGN = 1024;  // no kernel asks for more

unsigned char* smem_region;
size_t reserved, smem_offset;

void land(const Copy& copy) {
    if (copy.real) {
        std::memcpy(copy.to, copy.from, copy.bytes);
    } else {
        std::memset(copy.to, 0, copy.bytes);
    }
    if (is_watching()) log_landed(size_t(copy.to - smem), copy.bytes);
}

}  // namespace

void begin_grid(size_t bytes) {
    if (Dl_info info; library_start == nullptr && dladdr(reinterpret_cast<const void*>(&begin_grid), &info) != 0) {
        library_start = static_cast<const char*>(info.dli_fbase);
    }
    smem_bytes = bytes;
    const bool worn = now > 3u << 30;  // long before the clock runs over
    if (worn) {
        now = 1;
        forget_log();
    }
    begin_tensors(worn);
}

void exchange_shared(Aside& aside) {
    struct Kept {
        unsigned char *smem = nullptr, *region = nullptr;
        size_t reserved = 0, offset = 0;
    };
    Kept& kept = kept_of<Kept>(aside);
    std::swap(smem, kept.smem);
    std::swap(smem_region, kept.region);
    std::swap(reserved, kept.reserved);
    std::swap(smem_offset, kept.offset);
}

void begin_block() {
    const size_t room = AROUND + SMEM_ALIGN + smem_bytes + AROUND;
    if (room > reserved) {
        if (smem_region != nullptr) munmap(smem_region, reserved);
        void* memory = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) std::abort();
        smem_region = static_cast<unsigned char*>(memory);
        reserved = room;
    }
    smem = smem_region + AROUND;
    smem_offset = 0;
    if (__asan_unpoison_memory_region != nullptr) __asan_unpoison_memory_region(smem_region, 2 * AROUND + SMEM_ALIGN + smem_bytes);
    std::memset(smem, 0xff, SMEM_ALIGN + smem_bytes);  // NaN in every element type
    begin_log_of_block();
    begin_global_log_of_block();
    begin_clocks();
    begin_mbarriers();
    begin_named_barriers();
    begin_bulk_copies();
    begin_warpgroups();
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

size_t shared_offset(const void* address, size_t bytes, const char* what, Where where) {
    const size_t offset = size_t(static_cast<const unsigned char*>(address) - smem);
    if (offset < smem_bytes && offset + bytes <= smem_bytes) return offset;
    fault_at(where, "out of bounds: %s of %zu bytes at byte %lld of shared memory, which has %zu", what, bytes,
             static_cast<long long>(offset), smem_bytes);
}

void copy_async(void* to, const void* from, size_t bytes, bool real, int line) {
    const Where where = {nullptr, line};
    if (reinterpret_cast<uintptr_t>(to) % bytes != 0 || reinterpret_cast<uintptr_t>(from) % bytes != 0) {
        fault_at(where, "an asynchronous copy of %zu bytes from %p to %p; both must be multiples of its size", bytes, from, to);
    }
    const size_t offset = shared_offset(to, bytes, "an asynchronous copy", where);
    if (!is_watching() && real && __asan_region_is_poisoned(from, bytes) != nullptr) {
        fault_at(where, "out of bounds: an asynchronous copy of %zu bytes from %p", bytes, from);
    }
    if (is_watching()) {
        if (real) touch(from, bytes, false, block.current % WARP_SIZE, where);
        log_copy(offset, bytes, where);
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
