// Who touched which bytes of shared memory and when, and whether that is ordered: what shared.cpp, bulk.cpp and
// warpgroups.cpp tell the log. Offsets are into the block's shared memory and within it.
#pragma once

#include "memory.h"

namespace tilewright_host {

void begin_log_of_block();
void forget_log();  // before the clock starts anew

// A copy of the running thread's own, by cp_async_16: in flight until it has landed.
void log_copy(size_t offset, size_t bytes, Where where);
void log_landed(size_t offset, size_t bytes);

// A bulk copy that the running thread starts. Landed, it is for those to read who waited for this mbarrier.
void log_bulk_copy(size_t offset, size_t bytes, int mbarrier, Where where);
void log_bulk_landed(size_t offset, size_t bytes);

// 16 bytes that a product reads from now on until its warpgroup has seen `time` of its own tensor cores.
struct ProductRead {
    int warpgroup;
    int first_warp, warps;  // that must have seen what is read
    uint32_t time;
    Where where;
    uint32_t known_time = 0, known_writer = 0;  // the write that was last found to be in order, for all of these warps
};
void log_product_read(size_t offset, ProductRead& read);

}  // namespace tilewright_host
