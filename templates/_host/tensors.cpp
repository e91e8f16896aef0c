// Global memory: tensors whose every element is known, and who wrote each element of those that a kernel may write to.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "memory.h"

namespace tilewright_host {

namespace {

constexpr size_t DEFAULT_SMEM = 48 << 10;      // what a kernel gets without asking for more
constexpr int64_t LARGEST_LOGGED = 256 << 20;  // bytes: of larger spans nobody remembers who wrote what
constexpr uint32_t NOBODY = 0, EARLIER_GRID = ~0u;

struct Tensor {
    std::string name;
    char* data;
    int64_t bytes;  // from the first element to the end of the last
    int64_t itemsize;
    std::vector<std::pair<int64_t, int64_t>> dims;  // stride in bytes and size, the largest stride first
    bool writable, dense;
    bool fresh;                     // allocated by the launch: nothing is there to read before it is written
    std::vector<uint32_t> writers;  // of each element in the span, in this grid: block * MAX_THREADS + thread + 1
};

std::vector<Tensor> tensors;
size_t last_tensor;
std::unordered_map<const void*, int> allowed;
int smem_limit = 227 << 10;

// Whether [offset, offset + bytes) of a tensor's span is elements of it.
bool is_inside(const Tensor& tensor, int64_t offset, int64_t bytes) {
    if (offset < 0 || offset + bytes > tensor.bytes) return false;
    if (tensor.dense) return true;
    for (const auto& [stride, size] : tensor.dims) {
        if (stride == tensor.itemsize) return offset + bytes <= stride * size;  // the innermost: a run of elements
        if (stride > 0) offset -= std::min(offset / stride, size - 1) * stride;
    }
    return offset + bytes <= tensor.itemsize;
}

[[noreturn]] void report_outside(const char* at, size_t bytes, bool write, Where where) {
    const char* what = write ? "writes" : "reads";
    const Tensor* nearest = nullptr;
    int64_t distance = INT64_MAX;
    for (const Tensor& tensor : tensors) {
        const int64_t offset = at - tensor.data;
        const int64_t away = offset < 0 ? -offset : std::max<int64_t>(0, offset - tensor.bytes + 1);
        if (away < distance) nearest = &tensor, distance = away;
    }
    fault_at(where, "out of bounds: this thread %s %zu bytes at byte %lld of %s, %s", what, bytes,
             static_cast<long long>(at - nearest->data), nearest->name.c_str(),
             distance == 0 ? "where no element of it lies" : ("which spans " + std::to_string(nearest->bytes) + " bytes").c_str());
}

// One thread writes an element, or several that no grid orders: then what stays there is chance.
void log_write(Tensor& tensor, int64_t offset, int64_t bytes, uint32_t writer, Where where) {
    for (int64_t i = offset / tensor.itemsize; i * tensor.itemsize < offset + bytes; ++i) {
        const uint32_t before = tensor.writers[size_t(i)];
        if (before != NOBODY && before != EARLIER_GRID && before != writer) {
            fault_at(where, "a race for byte %lld of %s: this thread writes what thread %u of block %u wrote",
                     static_cast<long long>(i * tensor.itemsize), tensor.name.c_str(), (before - 1) % MAX_THREADS,
                     (before - 1) / MAX_THREADS);
        }
        tensor.writers[size_t(i)] = writer;
    }
}

void check_written(const Tensor& tensor, int64_t offset, int64_t bytes, Where where) {
    for (int64_t i = offset / tensor.itemsize; i * tensor.itemsize < offset + bytes; ++i) {
        if (tensor.writers[size_t(i)] != NOBODY) continue;
        fault_at(where, "this thread reads byte %lld of %s, which nobody wrote", static_cast<long long>(i * tensor.itemsize),
                 tensor.name.c_str());
    }
}

}  // namespace

void touch_tensor(const void* address, size_t bytes, bool write, int lane, Where where) {
    const char* at = static_cast<const char*>(address);
    const int thread = lane == WHOLE_WARP ? current_warp() * WARP_SIZE : block.current;
    for (size_t i = 0; i < tensors.size(); ++i) {
        const size_t t = i == 0 ? last_tensor : (i <= last_tensor ? i - 1 : i);
        Tensor& tensor = tensors[t];
        const int64_t offset = at - tensor.data;
        if (!is_inside(tensor, offset, int64_t(bytes))) continue;
        if (write && !tensor.writable) {
            fault_at(where, "this thread writes %zu bytes at byte %lld of %s, which is only to be read", bytes,
                     static_cast<long long>(offset), tensor.name.c_str());
        }
        if (write && !tensor.writers.empty()) {
            log_write(tensor, offset, int64_t(bytes), block.index * MAX_THREADS + uint32_t(thread) + 1, where);
        }
        if (!write && tensor.fresh) check_written(tensor, offset, int64_t(bytes), where);
        last_tensor = t;
        return;
    }
    if (!tensors.empty()) report_outside(at, bytes, write, where);
}

void begin_tensors() {
    for (Tensor& tensor : tensors) {
        for (uint32_t& writer : tensor.writers) writer = writer == NOBODY ? NOBODY : EARLIER_GRID;
    }
}

void* device_malloc(size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, bytes ? bytes : 1) != 0) return nullptr;
    std::memset(memory, 0xff, bytes);
    if (!tensors.empty()) {
        Tensor tensor = {"memory that the launch allocated", static_cast<char*>(memory), int64_t(bytes), 1, {}, true, true, true, {}};
        tensor.itemsize = bytes % 4 == 0 ? 4 : 1;
        tensor.writers.assign(bytes / size_t(tensor.itemsize), NOBODY);
        tensors.push_back(std::move(tensor));
    }
    return memory;
}

void device_memset(void* memory, int value, size_t bytes) {
    std::memset(memory, value, bytes);
    for (Tensor& tensor : tensors) {
        if (memory < tensor.data || memory >= tensor.data + tensor.bytes || tensor.writers.empty()) continue;
        const auto first = tensor.writers.begin() + (static_cast<char*>(memory) - tensor.data) / tensor.itemsize;
        std::fill(first, first + int64_t(bytes) / tensor.itemsize, EARLIER_GRID);
    }
}

bool device_free(void* memory) {
    const auto same = [memory](const Tensor& tensor) { return tensor.data == memory; };
    tensors.erase(std::remove_if(tensors.begin(), tensors.end(), same), tensors.end());
    last_tensor = 0;
    std::free(memory);
    return true;
}

void allow_shared_memory(const void* kernel, int bytes) { allowed[kernel] = bytes; }

int allowed_shared_memory(const void* kernel) {
    const auto found = allowed.find(kernel);
    return std::max(int(DEFAULT_SMEM), found == allowed.end() ? 0 : found->second);
}

int shared_memory_limit() { return smem_limit; }

}  // namespace tilewright_host

using namespace tilewright_host;

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void tilewright_host_watch(const char* name, void* data, int64_t itemsize, int dims, const int64_t* sizes,
                                    const int64_t* strides, int writable) {
    Tensor tensor = {name, static_cast<char*>(data), itemsize, itemsize, {}, writable != 0, false, false, {}};
    int64_t elements = 1;
    for (int i = 0; i < dims; ++i) {
        if (sizes[i] == 0) return;
        elements *= sizes[i];
        if (sizes[i] > 1) tensor.dims.emplace_back(strides[i] * itemsize, sizes[i]);
        tensor.bytes += (sizes[i] - 1) * strides[i] * itemsize;
    }
    tensor.dense = tensor.bytes == elements * itemsize;
    std::sort(tensor.dims.rbegin(), tensor.dims.rend());
    if (tensor.writable && tensor.bytes <= LARGEST_LOGGED) tensor.writers.assign(size_t(tensor.bytes / itemsize), NOBODY);
    tensors.push_back(std::move(tensor));
    last_tensor = 0;
}

EXPORTED void tilewright_host_forget() {
    tensors.clear();
    last_tensor = 0;
}

EXPORTED void tilewright_host_smem_limit(int bytes) { smem_limit = bytes; }
