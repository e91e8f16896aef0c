// Bulk copies: boxes of a tensor that land in shared memory some time after they were begun, and are counted by an mbarrier.
#include <cstring>
#include <utility>

#include "mbarriers.h"
#include "shared_log.h"
#include "warpgroups.h"

namespace tilewright_host {

int copies_in_flight;

namespace {

constexpr int ELEMENT_BYTES = 2, ROW_BYTES = BOX_COLUMNS * ELEMENT_BYTES, CHUNK_BYTES = 16;
constexpr int MOST_BOX_ROWS = 256;
constexpr int64_t MOST_SIZE = int64_t(1) << 32, STRIDE_LIMIT = int64_t(1) << 40;  // cuTensorMapEncodeTiled's, strides in bytes
constexpr uint64_t MADE = 0x70616d2d726f736e;                                    // what a description begins with
constexpr unsigned LATEST = 64;  // switches between threads: copies of no great hurry land within so many

// What a TensorMap holds.
struct Description {
    uint64_t made;
    const unsigned char* base;
    int64_t sizes[4], strides[4];  // columns, rows, heads, batch; strides in elements
    int box_rows;
};
static_assert(sizeof(Description) <= sizeof(TensorMap), "a tensor's description fits its map");

struct Box {
    unsigned char* to;
    Description tensor;
    int column, row, head, batch;
    BulkTicket ticket;
    int thread;
    uint64_t due;
};

std::vector<Box> in_flight;
uint64_t turn;  // counts the switches between threads

// Where a row of a box starts, and how many of its columns the tensor has from which on.
struct Row {
    const unsigned char* from;
    int first, columns;
};
Row row_of(const Description& tensor, int column, int row, int head, int batch) {
    const int64_t first = column < 0 ? -int64_t(column) : 0;
    const int64_t last = tensor.sizes[0] - column < BOX_COLUMNS ? tensor.sizes[0] - column : BOX_COLUMNS;
    if (row < 0 || row >= tensor.sizes[1] || first >= last) return {nullptr, 0, 0};
    const int64_t at = column + first + row * tensor.strides[1] + head * tensor.strides[2] + batch * tensor.strides[3];
    return {tensor.base + at * ELEMENT_BYTES, int(first), int(last - first)};
}

void land(const Box& box) {
    for (int r = 0; r < box.tensor.box_rows; ++r) {
        const Row row = row_of(box.tensor, box.column, box.row + r, box.head, box.batch);
        unsigned char bytes[ROW_BYTES] = {};
        if (row.columns != 0) std::memcpy(bytes + row.first * ELEMENT_BYTES, row.from, size_t(row.columns) * ELEMENT_BYTES);
        unsigned char* to = box.to + r * ROW_BYTES;
        const uintptr_t swizzle = reinterpret_cast<uintptr_t>(to) / ROW_BYTES % 8;
        for (uintptr_t c = 0; c < ROW_BYTES / CHUNK_BYTES; ++c) {
            std::memcpy(to + (c ^ swizzle) * CHUNK_BYTES, bytes + c * CHUNK_BYTES, CHUNK_BYTES);
        }
    }
    const int running = block.current;
    block.current = box.thread;  // whose fault it is if the bytes are too many
    land_bulk_bytes(box.ticket);
    block.current = running;
}

void land_at(size_t index) {
    const Box box = in_flight[index];
    in_flight.erase(in_flight.begin() + ptrdiff_t(index));
    --copies_in_flight;
    land(box);
}

}  // namespace

void exchange_bulk_copies(Aside& aside) {
    struct Kept {
        std::vector<Box> in_flight;
        int count = 0;
        uint64_t turn = 0;
    };
    Kept& kept = kept_of<Kept>(aside);
    std::swap(in_flight, kept.in_flight);
    std::swap(copies_in_flight, kept.count);
    std::swap(turn, kept.turn);
}

void begin_bulk_copies() {
    in_flight.clear();
    copies_in_flight = 0;
    turn = 0;
}

bool land_copies(bool needed) {
    if (needed) {
        if (in_flight.empty()) return false;
        land_at(random_below(unsigned(in_flight.size())));
        return true;
    }
    ++turn;
    bool any = false;
    for (size_t i = 0; i < in_flight.size();) {
        if (in_flight[i].due > turn) {
            ++i;
        } else {
            land_at(i);
            any = true;
        }
    }
    return any;
}

bool describe_tensor(TensorMap* map, const void* base, const int64_t* sizes, const int64_t* strides, int box_rows) {
    Description made = {MADE, static_cast<const unsigned char*>(base), {}, {}, box_rows};
    if (reinterpret_cast<uintptr_t>(base) % CHUNK_BYTES != 0 || box_rows < 1 || box_rows > MOST_BOX_ROWS) return false;
    for (int i = 0; i < 4; ++i) {
        made.sizes[i] = sizes[i];
        made.strides[i] = strides[i];
        if (sizes[i] < 1 || sizes[i] > MOST_SIZE) return false;
        if (i == 0 && strides[i] != 1) return false;
        const bool fits = strides[i] >= 0 && strides[i] < STRIDE_LIMIT / ELEMENT_BYTES;
        if (i > 0 && (!fits || strides[i] * ELEMENT_BYTES % CHUNK_BYTES != 0)) return false;
    }
    std::memcpy(map->opaque, &made, sizeof made);
    return true;
}

void copy_box(void* to, const TensorMap* map, void* barrier, int column, int row, int head, int batch, int line) {
    const Where where = {nullptr, line};
    Box box = {static_cast<unsigned char*>(to), {}, column, row, head, batch, {}, block.current, 0};
    std::memcpy(&box.tensor, map->opaque, sizeof box.tensor);
    const Description& tensor = box.tensor;
    if (tensor.made != MADE) fault_at(where, "bulk_load: make_tensor_map did not make this tensor map");
    const size_t bytes = size_t(tensor.box_rows) * ROW_BYTES, offset = shared_offset(to, bytes, "bulk_load", where);
    const unsigned alignment = tensor.box_rows >= 8 ? 1024 : 128;
    if (reinterpret_cast<uintptr_t>(to) % alignment != 0) {
        fault_at(where, "bulk_load: a box of %d rows must start at a multiple of %u bytes, got byte %zu of shared memory",
                 tensor.box_rows, alignment, offset);
    }
    if (column % (CHUNK_BYTES / ELEMENT_BYTES) != 0) {
        fault_at(where, "bulk_load: a box must start at a column that is a multiple of %d, got %d",
                 CHUNK_BYTES / ELEMENT_BYTES, column);
    }
    if (head < 0 || head >= tensor.sizes[2] || batch < 0 || batch >= tensor.sizes[3]) {
        fault_at(where, "bulk_load: a box of head %d, batch %d of a tensor with %lld heads, %lld batches", head, batch,
                 static_cast<long long>(tensor.sizes[2]), static_cast<long long>(tensor.sizes[3]));
    }
    if (offset < mbarriers_end && offset + bytes > mbarriers_begin) check_no_mbarrier(offset, bytes, "has a bulk copy to", where);
    for (int r = 0; r < tensor.box_rows; ++r) {
        const Row from = row_of(tensor, column, row + r, head, batch);
        if (from.columns == 0) continue;
        const size_t length = size_t(from.columns) * ELEMENT_BYTES;
        if (is_watching()) {
            touch_tensor(from.from, length, false, block.current % WARP_SIZE, where);
        } else if (__asan_region_is_poisoned(const_cast<unsigned char*>(from.from), length) != nullptr) {
            fault_at(where, "out of bounds: bulk_load reads %zu bytes at %p", length, static_cast<const void*>(from.from));
        }
    }
    box.ticket = begin_bulk_bytes(barrier, offset, bytes, line);
    if (is_watching()) log_bulk_copy(offset, bytes, box.ticket.mbarrier, where);
    std::memset(to, 0xff, bytes);  // in flight: neither the old value nor the new one
    // At once, soon, or when nobody can go on without it.
    const unsigned hurry = random_below(3);
    box.due = hurry == 0 ? turn : hurry == 1 ? turn + random_below(LATEST) : UINT64_MAX;
    if (hurry == 0) return land(box);
    in_flight.push_back(box);
    ++copies_in_flight;
}

}  // namespace tilewright_host
