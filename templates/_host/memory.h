// The runtime's own view of memory: what shared.cpp and tensors.cpp know, and memory.cpp asks of both.
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

// Any access: the fault that it is, or nothing. lane: of the running warp, or WHOLE_WARP.
void touch(const void* address, size_t bytes, bool write, int lane, Where where);

// shared.cpp: false where the address is nowhere near shared memory.
bool touch_shared(const void* address, size_t bytes, bool write, int lane, Where where);

// tensors.cpp
void touch_tensor(const void* address, size_t bytes, bool write, int lane, Where where);
void begin_tensors();

}  // namespace tilewright_host
