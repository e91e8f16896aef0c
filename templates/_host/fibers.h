// Threads of execution that switch only when told to: a stack each, and one instruction sequence to change between two.
#pragma once

#include <cstddef>

namespace tilewright_host {

// What a suspended fiber is known by: its stack pointer, everything else lies on its stack.
using StackPointer = void*;

// Suspends the caller, whose place is stored in `from`, and goes on where `to` was suspended.
void switch_stack(StackPointer* from, StackPointer to);

// A fiber on the stack that ends at `top`, which starts `entry` when it is switched to first. entry never returns.
StackPointer new_fiber(void* top, void (*entry)());

// The stack of each of a block's threads, made once; below each lies a page that may not be touched.
class Stacks {
  public:
    static constexpr size_t STACK_BYTES = 256 * 1024;

    void* top(int thread);  // raises the number of stacks as needed
    bool holds(const void* address) const {
        return static_cast<size_t>(static_cast<const char*>(address) - base_) < bytes_;
    }
    void forget_poison() const;  // AddressSanitizer's, of frames that were left and never returned

  private:
    char* base_ = nullptr;
    size_t bytes_ = 0;
    int guarded_ = 0;  // how many stacks have their page
};

}  // namespace tilewright_host
