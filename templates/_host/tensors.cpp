// Global memory: tensors whose every element is known, and who wrote each element of those that a kernel may write to.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "global_log.h"

namespace tilewright_host {

namespace {

constexpr size_t DEFAULT_SMEM = 48 << 10;      // what a kernel gets without asking for more
constexpr int64_t LARGEST_LOGGED = 64 << 20;   // bytes: of larger spans nobody remembers who wrote what
constexpr size_t COARSEST = 16;                // bytes: the largest access of a kernel

struct Tensor {
    std::string name;
    char* data;
    int64_t bytes;  // from the first element to the end of the last
    int64_t itemsize;
    std::vector<std::pair<int64_t, int64_t>> dims;  // stride in bytes and size, the largest stride first
    bool writable, dense;
    bool fresh;     // nothing is there to read before it is written
    GlobalLog log;  // of those that may be written
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

// The tensor that holds these bytes; a fault where none does, or none that may be written.
Tensor& tensor_at(const void* address, size_t bytes, bool write, Where where) {
    const char* at = static_cast<const char*>(address);
    for (size_t i = 0; i < tensors.size(); ++i) {
        const size_t t = i == 0 ? last_tensor : (i <= last_tensor ? i - 1 : i);
        Tensor& tensor = tensors[t];
        const int64_t offset = at - tensor.data;
        if (!is_inside(tensor, offset, int64_t(bytes))) continue;
        if (write && !tensor.writable) {
            fault_at(where, "this thread writes %zu bytes at byte %lld of %s, which is only to be read", bytes,
                     static_cast<long long>(offset), tensor.name.c_str());
        }
        last_tensor = t;
        return tensor;
    }
    if (!tensors.empty()) report_outside(at, bytes, write, where);
    static Tensor unwatched;
    return unwatched;
}

}  // namespace

void touch_tensor(const void* address, size_t bytes, bool write, int lane, Where where) {
    Tensor& tensor = tensor_at(address, bytes, write, where);
    if (!tensor.log.on()) return;
    const size_t offset = size_t(static_cast<const char*>(address) - tensor.data);
    if (write) {
        const int thread = lane == WHOLE_WARP ? current_warp() * WARP_SIZE : block.current;
        tensor.log.write(offset, bytes, uint32_t(thread), tensor.name.c_str(), where);
    } else {
        tensor.log.read(offset, bytes, tensor.name.c_str(), tensor.fresh, where);
    }
}

void touch_tensor_atomic(const void* address, bool adds, bool releases, bool acquires, Where where) {
    Tensor& tensor = tensor_at(address, 4, adds, where);
    if (!tensor.log.on()) return;
    const size_t offset = size_t(static_cast<const char*>(address) - tensor.data);
    tensor.log.atomic(offset, address, adds, releases, acquires, tensor.name.c_str(), tensor.fresh, where);
}

void begin_tensors(bool worn) {
    for (Tensor& tensor : tensors) {
        if (worn) tensor.log.forget_order();
    }
    begin_global_log();
}

void* device_malloc(size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, bytes ? bytes : 1) != 0) return nullptr;
    std::memset(memory, 0xff, bytes);
    if (!tensors.empty()) {
        tensors.push_back({"memory that the launch allocated", static_cast<char*>(memory), int64_t(bytes), 1, {}, true, true, true, {}});
        tensors.back().log.watch(bytes, COARSEST, true);
    }
    return memory;
}

void device_memset(void* memory, int value, size_t bytes) {
    std::memset(memory, value, bytes);
    for (Tensor& tensor : tensors) {
        if (memory < tensor.data || memory >= tensor.data + tensor.bytes || !tensor.log.on()) continue;
        tensor.log.wrote(size_t(static_cast<char*>(memory) - tensor.data), bytes);
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

// access: 0, only to be read; 1, may be written; 2, and nothing is there to read before it was.
EXPORTED void tilewright_host_watch(const char* name, void* data, int64_t itemsize, int dims, const int64_t* sizes,
                                    const int64_t* strides, int access) {
    Tensor tensor = {name, static_cast<char*>(data), itemsize, itemsize, {}, access != 0, false, access == 2, {}};
    int64_t elements = 1;
    for (int i = 0; i < dims; ++i) {
        if (sizes[i] == 0) return;
        elements *= sizes[i];
        if (sizes[i] > 1) tensor.dims.emplace_back(strides[i] * itemsize, sizes[i]);
        tensor.bytes += (sizes[i] - 1) * strides[i] * itemsize;
    }
    tensor.dense = tensor.bytes == elements * itemsize;
    std::sort(tensor.dims.rbegin(), tensor.dims.rend());
    // Bytes are room for anything.
    const size_t granule = itemsize == 1 ? COARSEST : size_t(itemsize);
    if (tensor.writable && tensor.bytes <= LARGEST_LOGGED) tensor.log.watch(size_t(tensor.bytes), granule, itemsize == 1);
    tensors.push_back(std::move(tensor));
    last_tensor = 0;
}

EXPORTED void tilewright_host_forget() {
    tensors.clear();
    last_tensor = 0;
}

EXPORTED void tilewright_host_smem_limit(int bytes) { smem_limit = bytes; }
