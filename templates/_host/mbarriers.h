// What a bulk copy and the barrier that counts its bytes tell each other.
#pragma once

#include "clocks.h"

namespace tilewright_host {

// The number of an mbarrier for the running thread to copy to, and of this copy among those of its phase.
struct BulkTicket {
    int mbarrier;
    size_t copy;
};
BulkTicket begin_bulk_bytes(const void* barrier, size_t offset, size_t bytes, int line);
void land_bulk_bytes(BulkTicket ticket);  // may complete the phase

}  // namespace tilewright_host
