// The runtime's own view of memory: what the files that watch it know of each other, and memory.cpp asks of them.
#pragma once

#include "threads.h"

// What AddressSanitizer offers where it is loaded.
extern "C" void __asan_poison_memory_region(const volatile void*, size_t) __attribute__((weak));
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t) __attribute__((weak));
extern "C" const void* __asan_region_is_poisoned(const void*, size_t) __attribute__((weak));

namespace tilewright_host {

constexpr int WHOLE_WARP = WARP_SIZE;  // in the place of a lane

// Whether the runtime watches. Where AddressSanitizer is loaded that one does: kernels are then compiled for it.
bool is_watching();

// Where an access came from in four bytes, and back: a line, or an address as its distance from this library's start.
uint32_t remember(Where where);
std::string recall(uint32_t place);

// Any access: the fault that it is, or nothing. lane: of the running warp, or WHOLE_WARP.
void touch(const void* address, size_t bytes, bool write, int lane, Where where);

// shared.cpp: the running block's shared memory; where its region starts until the kernel says how it is aligned.
constexpr size_t AROUND = 1 << 20;  // bytes: this far outside of shared memory still counts as a miss of it
extern unsigned char* smem;
extern size_t smem_bytes;
size_t shared_offset(const void* address, size_t bytes, const char* what, Where where);  // a fault where it isn't all inside

// shared_log.cpp: false where the address is nowhere near shared memory.
bool touch_shared(const void* address, size_t bytes, bool write, int lane, Where where);
void touch_shared_atomic(const void* address, Where where);  // of 4 bytes

// mbarriers.cpp: between these offsets lie the block's mbarriers, which nobody reads or writes like other memory.
extern size_t mbarriers_begin, mbarriers_end;
void check_no_mbarrier(size_t offset, size_t bytes, const char* doing, Where where);

// warpgroups.cpp: accumulators that registers hold only once they are waited for, and a thread's access to one.
extern int unsettled_accumulators;
void check_settled(const void* address, size_t bytes, bool write, Where where);

// tensors.cpp
void touch_tensor(const void* address, size_t bytes, bool write, int lane, Where where);
void touch_tensor_atomic(const void* address, bool adds, bool releases, bool acquires, Where where);  // of 4 bytes
void begin_tensors(bool worn);

}  // namespace tilewright_host
