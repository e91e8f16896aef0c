// Products of a warpgroup: begun together, done as late as may be, when their group is waited for.
#include <cstring>
#include <deque>
#include <memory>
#include <utility>

#include "clocks.h"
#include "products.h"
#include "shared_log.h"

namespace tilewright_host {

int unsettled_accumulators;

namespace {

constexpr int WARPS = 4;
constexpr uint32_t NOT_THERE_YET = 0x7fc0dead;  // a NaN: what registers of an accumulator hold meanwhile

struct Group {
    uint32_t time = 0;
    int line = 0;
    std::vector<Product> products;
};

struct Warpgroup {
    std::deque<Group> committed;  // oldest first
    Group open;
    std::vector<std::unique_ptr<Unsettled>> accumulators;
    bool fenced = false;  // since the last wait
} warpgroups[MAX_WARPGROUPS];

int current_group() { return block.current / WARPGROUP_SIZE; }

// Where thread t of the warpgroup holds d[4n], d[4n + 1]; its next two registers are 8 rows below.
int first_value(int thread, int n, int columns) {
    const int lane = thread % WARP_SIZE;
    return (thread / WARP_SIZE * WARP_ROWS + lane / 4) * columns + 8 * n + lane % 4 * 2;
}

void gather(Unsettled& from) {
    for (int t = 0; t < WARPGROUP_SIZE; ++t) {
        for (int n = 0; n < from.columns / 8; ++n) {
            float* to = &from.values[size_t(first_value(t, n, from.columns))];
            std::memcpy(to, from.registers[t] + 4 * n, 8);
            std::memcpy(to + 8 * from.columns, from.registers[t] + 4 * n + 2, 8);
        }
    }
}

void scatter(const Unsettled& to) {
    for (int t = 0; t < WARPGROUP_SIZE; ++t) {
        for (int i = 0; i < to.columns / 2; ++i) {
            if (__float_as_uint(to.registers[t][i]) == NOT_THERE_YET) continue;
            fault("wgmma_wait: thread %d of the warpgroup wrote element %d of an accumulator while its product at kernel.cu:%d was in "
                  "flight",
                  t, i, to.line);
        }
        for (int n = 0; n < to.columns / 8; ++n) {
            const float* from = &to.values[size_t(first_value(t, n, to.columns))];
            std::memcpy(to.registers[t] + 4 * n, from, 8);
            std::memcpy(to.registers[t] + 4 * n + 2, from + 8 * to.columns, 8);
        }
    }
}

// What a lane passes to begin a product.
struct Operands {
    float* d;
    int columns;
    const uint32_t* a_registers;  // or null, then a
    SharedMatrix a, b;
    bool accumulate;
    void (*multiply)(const Product& product);
};

// Each lane must pass the same matrices, and an accumulator of its own that is no other's in part.
const Operands& common_operands(void* const* lanes, const char* kind) {
    const Operands& first = *static_cast<const Operands*>(lanes[0]);
    for (int t = 1; t < WARPGROUP_SIZE; ++t) {
        const Operands& other = *static_cast<const Operands*>(lanes[t]);
        if (other.a.start == first.a.start && other.b.start == first.b.start && other.b.chunk_bytes == first.b.chunk_bytes &&
            other.accumulate == first.accumulate) {
            continue;
        }
        fault("%s: all threads must pass the same matrices and the same accumulate, and thread %d of the warpgroup differs from "
              "thread 0",
              kind, t);
    }
    return first;
}

Unsettled& accumulator_of(Warpgroup& group, void* const* lanes, const Operands& first, const char* kind) {
    for (const auto& known : group.accumulators) {
        const float *begin = known->registers[0], *end = begin + known->columns / 2;
        if (first.d >= end || first.d + first.columns / 2 <= begin) continue;
        if (first.d == begin && first.columns == known->columns) return *known;
        fault("%s: %d columns of d overlap an accumulator of %d columns, whose product at kernel.cu:%d has not been waited for",
              kind, first.columns, known->columns, known->line);
    }
    if (!group.fenced) fault("%s: no wgmma_fence() since threads could last write the registers of d", kind);
    group.accumulators.push_back(std::make_unique<Unsettled>());
    ++unsettled_accumulators;
    Unsettled& made = *group.accumulators.back();
    made.columns = first.columns;
    made.unfinished = 0;
    made.values.resize(size_t(ROWS * first.columns));
    for (int t = 0; t < WARPGROUP_SIZE; ++t) made.registers[t] = static_cast<const Operands*>(lanes[t])->d;
    if (first.accumulate) gather(made);
    const float poison = __uint_as_float(NOT_THERE_YET);
    for (float* registers : made.registers) {
        for (int i = 0; i < first.columns / 2; ++i) registers[i] = poison;
    }
    return made;
}

void check_start(const SharedMatrix& matrix, unsigned alignment, unsigned room, const char* which, const char* kind) {
    const uintptr_t past = reinterpret_cast<uintptr_t>(matrix.start) % TILE_BYTES;
    if (past % alignment == 0 && past < room) return;
    fault("%s: %s must start at a multiple of %u bytes, less than %u past a multiple of 1024, got byte %lld of shared memory, "
          "%u past one",
          kind, which, alignment, room, static_cast<long long>(matrix.start - smem), unsigned(past));
}

void read_chunk(const unsigned char* chunk, const char* kind, ProductRead& read) {
    const size_t offset = shared_offset(chunk, CHUNK_BYTES, kind, read.where);
    if (is_watching()) log_product_read(offset, read);
}

// Checks and logs what a product reads, as of now; it reads when it is done.
void log_operands(const Operands& operands, bool keys, uint32_t time, const char* kind) {
    const int group = current_group();
    ProductRead read = {group, group * WARPS, WARPS, time, {nullptr, block.all[block.current].line}};
    if (keys) {
        for (int row = 0; row < operands.columns; ++row) {
            for (int c = 0; c < DEPTH / PER_CHUNK; ++c) read_chunk(keys_chunk(operands.b, row, c), kind, read);
        }
    } else {
        for (int row = 0; row < DEPTH; ++row) {
            for (int n = 0; n < operands.columns; n += PER_CHUNK) read_chunk(values_chunk(operands.b, row, n), kind, read);
        }
    }
    if (operands.a_registers != nullptr) return;
    read.warps = 1;  // each warp reads its own rows of a
    for (int row = 0; row < ROWS; ++row) {
        read.first_warp = group * WARPS + row / WARP_ROWS;
        for (int c = 0; c < DEPTH / PER_CHUNK; ++c) read_chunk(keys_chunk(operands.a, row, c), kind, read);
    }
}

// As for mma.m16n8k16, each warp 16 rows.
void gather_a(void* const* lanes, Product& product) {
    for (int t = 0; t < WARPGROUP_SIZE; ++t) {
        const uint32_t* words = static_cast<const Operands*>(lanes[t])->a_registers;
        const int row = t / WARP_SIZE * WARP_ROWS + t % WARP_SIZE / 4, pair = t % 4 * 2;
        std::memcpy(&product.a_bits[row][pair], &words[0], 4);
        std::memcpy(&product.a_bits[row + 8][pair], &words[1], 4);
        std::memcpy(&product.a_bits[row][pair + 8], &words[2], 4);
        std::memcpy(&product.a_bits[row + 8][pair + 8], &words[3], 4);
    }
}

template <bool KEYS>
void begin_product(void* const* lanes, void*) {
    const char* const kind = KEYS ? "wgmma_keys" : "wgmma_values";
    Warpgroup& group = warpgroups[current_group()];
    const Operands& operands = common_operands(lanes, kind);
    const bool in_registers = operands.a_registers != nullptr;
    if (!in_registers) {
        check_start(operands.a, CHUNK_BYTES, ROW_BYTES - DEPTH * 2 + 1, "a", kind);
    } else if (!group.fenced) {
        fault("%s: no wgmma_fence() since threads could last write the registers of a", kind);
    }
    if (KEYS) {
        check_start(operands.b, CHUNK_BYTES, ROW_BYTES - DEPTH * 2 + 1, "b", kind);
    } else {
        check_start(operands.b, TILE_BYTES, 1, "b", kind);
        if (operands.columns > TILE_COLUMNS && operands.b.chunk_bytes % TILE_BYTES != 0) {
            fault("%s: chunk_bytes must be a multiple of 1024, got %d", kind, operands.b.chunk_bytes);
        }
    }
    start_clocks();
    if (group.open.products.empty()) group.open.time = now++;
    log_operands(operands, KEYS, group.open.time, kind);
    Unsettled& to = accumulator_of(group, lanes, operands, kind);
    to.line = group.open.line = block.all[block.current].line;
    ++to.unfinished;
    group.open.products.emplace_back();
    Product& product = group.open.products.back();
    product.to = &to;
    product.multiply = operands.multiply;
    product.accumulate = operands.accumulate;
    product.a_in_registers = in_registers;
    product.a = operands.a;
    product.b = operands.b;
    if (in_registers) gather_a(lanes, product);
}

void finish_oldest(Warpgroup& group) {
    const int number = current_group();
    for (const Product& product : group.committed.front().products) {
        product.multiply(product);
        --product.to->unfinished;
    }
    const uint32_t time = group.committed.front().time;
    for (int warp = number * WARPS; warp < (number + 1) * WARPS; ++warp) {
        uint32_t& known = seen[warp].times[TENSOR_CORES + number];
        if (time > known) known = time;
    }
    group.committed.pop_front();
}

struct Wait {
    float* settled;
    int count, pending;
};

void wait_for_groups(void* const* lanes, void*) {
    Warpgroup& group = warpgroups[current_group()];
    const Wait& first = *static_cast<const Wait*>(lanes[0]);
    while (int(group.committed.size()) > first.pending) finish_oldest(group);
    group.fenced = false;
    for (size_t i = 0; i < group.accumulators.size();) {
        const Unsettled& known = *group.accumulators[i];
        const float *begin = known.registers[0], *end = begin + known.columns / 2;
        if (begin >= first.settled + first.count || end <= first.settled) {
            ++i;
            continue;
        }
        if (begin < first.settled || end > first.settled + first.count) {
            fault("wgmma_wait: an accumulator of %d elements, of which %d are to be settled", known.columns / 2, first.count);
        }
        if (known.unfinished != 0) {
            fault("wgmma_wait: %d products of the accumulator are still in flight, the newest from kernel.cu:%d; wait for fewer pending "
                  "groups, or commit them before",
                  known.unfinished, known.line);
        }
        scatter(known);
        group.accumulators.erase(group.accumulators.begin() + ptrdiff_t(i));
        --unsettled_accumulators;
    }
}

}  // namespace

void exchange_warpgroups(Aside& aside) {
    struct Kept {
        Warpgroup warpgroups[MAX_WARPGROUPS];
        int unsettled = 0;
    };
    Kept& kept = kept_of<Kept>(aside);
    std::swap(warpgroups, kept.warpgroups);
    std::swap(unsettled_accumulators, kept.unsettled);
}

void begin_warpgroups() {
    unsettled_accumulators = 0;
    for (Warpgroup& group : warpgroups) {
        group.committed.clear();
        group.open.products.clear();
        group.accumulators.clear();
        group.fenced = false;
    }
}

void leave_warpgroup() {
    const Warpgroup& group = warpgroups[current_group()];
    const bool open = !group.open.products.empty();
    if (!open && group.committed.empty()) return;
    fault("a thread leaves the kernel while products of its warpgroup are in flight, which began at kernel.cu:%d",
          open ? group.open.line : group.committed.front().line);
}

void check_settled(const void* address, size_t bytes, bool write, Where where) {
    const int thread = block.current % WARPGROUP_SIZE;
    const char* at = static_cast<const char*>(address);
    for (const auto& known : warpgroups[current_group()].accumulators) {
        const char* begin = reinterpret_cast<const char*>(known->registers[thread]);
        if (at + bytes <= begin || at >= begin + size_t(known->columns) / 2 * sizeof(float)) continue;
        fault_at(where, "this thread %s an accumulator of the product at kernel.cu:%d, which no wgmma_wait has settled",
                 write ? "writes" : "reads", known->line);
    }
}

void fence_registers(int line) {
    const auto fence = [](void* const*, void*) { warpgroups[current_group()].fenced = true; };
    warpgroup_collective("wgmma_fence", line, nullptr, fence);
}

template <typename Element>
void multiply_keys(float* d, int columns, SharedMatrix a, SharedMatrix b, bool accumulate, int line) {
    Operands operands = {d, columns, nullptr, a, b, accumulate, multiply<Element, true>};
    warpgroup_collective("wgmma_keys", line, &operands, begin_product<true>);
}
template void multiply_keys<float16>(float*, int, SharedMatrix, SharedMatrix, bool, int);
template void multiply_keys<bfloat16>(float*, int, SharedMatrix, SharedMatrix, bool, int);

template <typename Element>
void multiply_keys(float* d, int columns, const uint32_t* a, SharedMatrix b, bool accumulate, int line) {
    Operands operands = {d, columns, a, {}, b, accumulate, multiply<Element, true>};
    warpgroup_collective("wgmma_keys", line, &operands, begin_product<true>);
}
template void multiply_keys<float16>(float*, int, const uint32_t*, SharedMatrix, bool, int);
template void multiply_keys<bfloat16>(float*, int, const uint32_t*, SharedMatrix, bool, int);

template <typename Element>
void multiply_values(float* d, int columns, const uint32_t* a, SharedMatrix b, int line) {
    Operands operands = {d, columns, a, {}, b, true, multiply<Element, false>};
    warpgroup_collective("wgmma_values", line, &operands, begin_product<false>);
}
template void multiply_values<float16>(float*, int, const uint32_t*, SharedMatrix, int);
template void multiply_values<bfloat16>(float*, int, const uint32_t*, SharedMatrix, int);

void commit_products(int line) {
    const auto commit = [](void* const*, void*) {
        Warpgroup& group = warpgroups[current_group()];
        if (group.open.products.empty()) group.open.time = now++;
        group.committed.push_back(std::move(group.open));
        group.open = Group{};
    };
    warpgroup_collective("wgmma_commit", line, nullptr, commit);
}

void wait_for_products(int pending, float* settled, int count, int line) {
    Wait wait = {settled, count, pending};
    warpgroup_collective("wgmma_wait", line, &wait, wait_for_groups);
}

}  // namespace tilewright_host
