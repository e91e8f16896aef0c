// Who touched which elements of a tensor in global memory in this grid, and whether anything orders that: a kernel's boundary,
// barriers within a block, and from block to block what one releases by an atomic operation and another acquires.
#pragma once

#include "memory.h"

namespace tilewright_host {

void begin_global_log();           // of a grid
void begin_global_log_of_block();

// The newest write and the newest read of one element. thread: block * MAX_THREADS + thread + 1, or 0: nobody.
struct GlobalAccess {
    uint32_t thread = 0, time = 0, place = 0;
};

class GlobalLog {
  public:
    // granule: bytes whose accesses are told apart. splits: smaller accesses may come and split it.
    void watch(size_t bytes, size_t granule, bool splits);
    bool on() const { return !writes_.empty(); }

    // Offsets within the tensor. `name` is what reports call it; fresh: nothing is there to read before it is written.
    void read(size_t offset, size_t bytes, const char* name, bool fresh, Where where);
    void write(size_t offset, size_t bytes, uint32_t thread, const char* name, Where where);
    // An atomic operation on 4 bytes at `address`. adds: it writes too.
    void atomic(size_t offset, const void* address, bool adds, bool releases, bool acquires, const char* name, bool fresh,
                Where where);
    // What the launch itself wrote between grids.
    void wrote(size_t offset, size_t bytes);
    void forget_order();  // what is written stays so, from before this grid

  private:
    struct Run {
        size_t first, count;
    };
    Run run(size_t offset, size_t bytes);
    void check_write_seen(size_t index, const char* doing, const char* name, Where where, bool atomic);
    void check_read_seen(size_t index, const char* doing, const char* name, Where where);

    std::vector<GlobalAccess> writes_, reads_;  // reads_: once there is one
    size_t granule_ = 4;
    bool splits_ = false;
};

}  // namespace tilewright_host
