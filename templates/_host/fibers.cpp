#include "fibers.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "runtime.h"

// What AddressSanitizer offers where it is loaded.
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t) __attribute__((weak));

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace tilewright_host {

#if defined(__x86_64__)

// The registers that the System V ABI has a callee keep.
asm(R"(
.text
.p2align 4
.hidden tilewright_switch_stack
.globl tilewright_switch_stack
.type tilewright_switch_stack,@function
tilewright_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    retq
.size tilewright_switch_stack,.-tilewright_switch_stack
)");
extern "C" void tilewright_switch_stack(StackPointer* from, StackPointer to);

void switch_stack(StackPointer* from, StackPointer to) { tilewright_switch_stack(from, to); }

StackPointer new_fiber(void* top, void (*entry)()) {
    uintptr_t* at = reinterpret_cast<uintptr_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15));
    *--at = 0;  // where entry would return to; keeps the stack as a call leaves it
    *--at = reinterpret_cast<uintptr_t>(entry);
    for (int i = 0; i < 6; ++i) *--at = 0;
    return at;
}

#elif defined(__aarch64__)

// x19 to x30 and d8 to d15, which AAPCS64 has a callee keep.
asm(R"(
.text
.p2align 4
.hidden tilewright_switch_stack
.globl tilewright_switch_stack
.type tilewright_switch_stack,%function
tilewright_switch_stack:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x2, sp
    str x2, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size tilewright_switch_stack,.-tilewright_switch_stack
)");
extern "C" void tilewright_switch_stack(StackPointer* from, StackPointer to);

void switch_stack(StackPointer* from, StackPointer to) { tilewright_switch_stack(from, to); }

StackPointer new_fiber(void* top, void (*entry)()) {
    uintptr_t* at = reinterpret_cast<uintptr_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15)) - 20;
    for (int i = 0; i < 20; ++i) at[i] = 0;
    at[11] = reinterpret_cast<uintptr_t>(entry);  // x30: where the switch returns to
    return at;
}

#else

// Elsewhere through the C library, which is right and some 50 times slower.
void switch_stack(StackPointer* from, StackPointer to) {
    ucontext_t here;
    *from = &here;
    swapcontext(&here, static_cast<ucontext_t*>(to));
}

StackPointer new_fiber(void* top, void (*entry)()) {
    ucontext_t* context = reinterpret_cast<ucontext_t*>((reinterpret_cast<uintptr_t>(top) - sizeof(ucontext_t)) & ~uintptr_t(63));
    getcontext(context);
    context->uc_stack.ss_sp = static_cast<char*>(top) - Stacks::STACK_BYTES / 2;
    context->uc_stack.ss_size = reinterpret_cast<char*>(context) - static_cast<char*>(context->uc_stack.ss_sp);
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    return context;
}

#endif

void* Stacks::top(int thread) {
    constexpr size_t GUARD = 4096;
    if (base_ == nullptr) {
        bytes_ = MAX_THREADS * STACK_BYTES;
        void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            std::perror("tilewright: no memory for the stacks of a block's threads");
            std::abort();
        }
        base_ = static_cast<char*>(memory);
    }
    // Only below stacks in use: each is two more mappings of a process that may hold many kernels, and Linux counts them.
    for (; guarded_ <= thread; ++guarded_) mprotect(base_ + guarded_ * STACK_BYTES, GUARD, PROT_NONE);
    // Stacks start at different distances from a page, or the busiest lines of all would share a few sets of the cache.
    return base_ + (thread + 1) * STACK_BYTES - size_t(thread % 64) * 320;
}

void Stacks::forget_poison() const {
    if (__asan_unpoison_memory_region == nullptr || base_ == nullptr) return;
    for (int i = 0; i < MAX_THREADS; ++i) __asan_unpoison_memory_region(base_ + i * STACK_BYTES, STACK_BYTES);
}

}  // namespace tilewright_host
