// What the compiler's instrumentation calls: every memory access of a kernel, and every step of undefined behaviour.
// -fsanitize=thread emits the calls to __tsan_*; ThreadSanitizer itself, whose names these are, is not linked.
#include <cstring>

#include "threads.h"

using namespace tilewright_host;

#define ACCESS(address, bytes, write) \
    if (block.running) watch_access(address, bytes, write, __builtin_return_address(0))
#define HOOKS_OF_SIZE(size)                                                               \
    void __tsan_read##size(void* address) { ACCESS(address, size, false); }               \
    void __tsan_write##size(void* address) { ACCESS(address, size, true); }               \
    void __tsan_unaligned_read##size(void* address) { ACCESS(address, size, false); }     \
    void __tsan_unaligned_write##size(void* address) { ACCESS(address, size, true); }     \
    void __tsan_volatile_read##size(void* address) { ACCESS(address, size, false); }      \
    void __tsan_volatile_write##size(void* address) { ACCESS(address, size, true); }
// On the host's side alone, where one thread launches: plain operations are atomic enough.
#define ATOMICS_OF_SIZE(bits, type)                                                                              \
    type __tsan_atomic##bits##_load(const volatile type* from, int) { return *from; }                            \
    void __tsan_atomic##bits##_store(volatile type* to, type value, int) { *to = value; }                        \
    type __tsan_atomic##bits##_exchange(volatile type* to, type value, int) { type old = *to; *to = value; return old; } \
    type __tsan_atomic##bits##_fetch_add(volatile type* to, type value, int) { type old = *to; *to = type(old + value); return old; } \
    type __tsan_atomic##bits##_fetch_or(volatile type* to, type value, int) { type old = *to; *to = old | value; return old; }

extern "C" {

HOOKS_OF_SIZE(1)
HOOKS_OF_SIZE(2)
HOOKS_OF_SIZE(4)
HOOKS_OF_SIZE(8)
HOOKS_OF_SIZE(16)
ATOMICS_OF_SIZE(32, uint32_t)
ATOMICS_OF_SIZE(64, uint64_t)

void __tsan_read_range(void* address, unsigned long bytes) { ACCESS(address, bytes, false); }
void __tsan_write_range(void* address, unsigned long bytes) { ACCESS(address, bytes, true); }
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
    ACCESS(from, bytes, false);
    ACCESS(to, bytes, true);
    return std::memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, unsigned long bytes) {
    ACCESS(to, bytes, true);
    return std::memset(to, value, bytes);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

// UndefinedBehaviorSanitizer's handlers, in the form that -fsanitize= of one check each calls them. Each gets where it happened.
struct Location {
    const char* file;
    uint32_t line, column;
};

static void undefined(const void* data, const char* what) {
    if (block.running) fault_at({nullptr, int(static_cast<const Location*>(data)->line)}, "%s", what);
}

void __ubsan_handle_add_overflow(void* data, void*, void*) { undefined(data, "a sum of signed integers overflows"); }
void __ubsan_handle_sub_overflow(void* data, void*, void*) { undefined(data, "a difference of signed integers overflows"); }
void __ubsan_handle_mul_overflow(void* data, void*, void*) { undefined(data, "a product of signed integers overflows"); }
void __ubsan_handle_negate_overflow(void* data, void*) { undefined(data, "a negated signed integer overflows"); }
void __ubsan_handle_divrem_overflow(void* data, void*, void*) { undefined(data, "a division by 0, or one that overflows"); }
void __ubsan_handle_shift_out_of_bounds(void* data, void*, void*) {
    undefined(data, "a shift by a negative number of bits, or by as many as the value has");
}
void __ubsan_handle_out_of_bounds(void* data, void*) { undefined(data, "out of bounds: an index past the end of a local array"); }
void __ubsan_handle_type_mismatch_v1(void* data, void* pointer) {
    if (!block.running) return;
    struct Mismatch {
        Location location;
        const void* type;
        unsigned char log_alignment, kind;
    };
    const Mismatch& mismatch = *static_cast<const Mismatch*>(data);
    fault_at({nullptr, int(mismatch.location.line)}, "misaligned: an access at %p, which must be a multiple of %d bytes", pointer,
             1 << mismatch.log_alignment);
}

}  // extern "C"
