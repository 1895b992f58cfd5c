// Device memory is host memory that is only reserved until somebody writes it; an address outside
// of what was allocated is an error. Copies and fills are real, but for large ones where kernels
// compute nothing either: there is nothing to move, and memory stays reserved only.
#include "stand_in.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <unordered_map>

namespace stand_in {

constexpr size_t DEVICE_PAGE = size_t{2} << 20;
constexpr size_t HOST_PAGE = 4096;
// Less may be a number that the host reads, and decides by.
constexpr size_t LARGE_BYTES = size_t{64} << 10;

static bool is_for_nothing(size_t num_bytes) {
  static const char* kernels = getenv("CUDA_STAND_IN_KERNELS");
  static const bool compute = !kernels || strcmp(kernels, "none") != 0;
  return !compute && num_bytes > LARGE_BYTES;
}

static std::map<char*, Block>& blocks() {
  static auto* found = new std::map<char*, Block>;
  return *found;
}

struct Usage {
  size_t limit = number_from_environment("CUDA_STAND_IN_MEMORY", size_t{8} << 30);
  size_t used = 0;
};

static Usage& usage() {
  static Usage numbers;
  return numbers;
}

size_t device_bytes() { return usage().limit; }
size_t used_bytes() { return usage().used; }

const Block* find_block(const void* address, char** begin) {
  auto* wanted = static_cast<char*>(const_cast<void*>(address));
  auto found = blocks().upper_bound(wanted);
  if (found == blocks().begin()) return nullptr;
  --found;
  if (wanted >= found->first + found->second.num_bytes) return nullptr;
  if (begin) *begin = found->first;
  return &found->second;
}

static cudaError_t allocate(void** address, size_t num_bytes, cudaMemoryType kind) {
  Lock lock(mutex());
  *address = nullptr;
  if (!num_bytes) return cudaSuccess;
  bool is_device = kind == cudaMemoryTypeDevice;
  size_t page = is_device ? DEVICE_PAGE : HOST_PAGE;
  size_t rounded = (num_bytes + page - 1) / page * page;
  if (is_device && usage().used + rounded > usage().limit) return cudaErrorMemoryAllocation;
  void* made = mmap(nullptr, rounded, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return cudaErrorMemoryAllocation;
  blocks()[static_cast<char*>(made)] = {rounded, kind, current_device()};
  if (is_device) usage().used += rounded;
  *address = made;
  return cudaSuccess;
}

static cudaError_t release(void* address) {
  Lock lock(mutex());
  if (!address) return cudaSuccess;
  auto found = blocks().find(static_cast<char*>(address));
  if (found == blocks().end()) return cudaErrorInvalidValue;
  if (found->second.kind == cudaMemoryTypeDevice) usage().used -= found->second.num_bytes;
  munmap(address, found->second.num_bytes);
  blocks().erase(found);
  return cudaSuccess;
}

// CUDA rule: allocating is unsafe in a capture, and freeing waits for the device besides.
static cudaError_t allocate_safely(void** address, size_t num_bytes, cudaMemoryType kind,
                                   const char* what) {
  Lock lock(mutex());
  if (auto error = refuse_unsafe(what)) return error;
  return allocate(address, num_bytes, kind);
}

static cudaError_t release_safely(void* address, const char* what) {
  {
    Lock lock(mutex());
    if (auto error = refuse_unsafe(what)) return error;
  }
  if (auto error = finish_all()) return error;
  return release(address);
}

static cudaError_t check(const void* address, size_t num_bytes, bool must_be_known) {
  Lock lock(mutex());
  char* begin = nullptr;
  auto* block = find_block(address, &begin);
  auto* end = static_cast<const char*>(address) + num_bytes;
  if (block && end > begin + block->num_bytes) {
    log("%p and %zu bytes end behind their block", address, num_bytes);
    return cudaErrorIllegalAddress;
  }
  if (!block && must_be_known) {
    log("there is no memory at %p", address);
    return cudaErrorIllegalAddress;
  }
  return cudaSuccess;
}

static cudaError_t copy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind kind) {
  if (!num_bytes) return cudaSuccess;
  bool is_between = kind == cudaMemcpyDeviceToDevice;
  if (auto error = check(to, num_bytes, is_between || kind == cudaMemcpyHostToDevice)) return error;
  if (auto error = check(from, num_bytes, is_between || kind == cudaMemcpyDeviceToHost)) {
    return error;
  }
  if (!is_for_nothing(num_bytes)) memmove(to, from, num_bytes);
  return cudaSuccess;
}

cudaError_t fill(void* to, int value, size_t num_bytes) {
  if (!num_bytes) return cudaSuccess;
  if (auto error = check(to, num_bytes, true)) return error;
  if (!is_for_nothing(num_bytes)) memset(to, value, num_bytes);
  return cudaSuccess;
}

static bool is_pageable(const void* address) {
  Lock lock(mutex());
  return !find_block(address);
}

// CUDA rule: a copy from pageable memory has read it when the call returns, and one to pageable
// memory has written it; in a capture both are done by the launch.
static cudaError_t submit_copy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind kind,
                               cudaStream_t handle) {
  auto* stream = stream_of(handle);
  bool is_late = streams_are_lazy() && !stream->capture;
  if (is_late && num_bytes && kind != cudaMemcpyDeviceToDevice && is_pageable(from)) {
    auto* bytes = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(bytes, bytes + num_bytes);
    auto run = [=] { return copy(to, staged->data(), num_bytes, cudaMemcpyDefault); };
    return submit(stream, cudaGraphNodeTypeMemcpy, "memcpy", run);
  }
  auto run = [=] { return copy(to, from, num_bytes, kind); };
  auto error = submit(stream, cudaGraphNodeTypeMemcpy, "memcpy", run, nullptr,
                      {reads(from, num_bytes), writes(to, num_bytes)});
  if (error) return error;
  bool is_to_pageable = is_late && kind != cudaMemcpyDeviceToDevice && is_pageable(to);
  return is_to_pageable ? finish(stream) : cudaSuccess;
}

// Variables of kernels get memory when somebody asks where they are.
struct Variable {
  size_t num_bytes;
  void* memory = nullptr;
};

static std::unordered_map<const void*, Variable>& variables() {
  static auto* found = new std::unordered_map<const void*, Variable>;
  return *found;
}

static char* memory_of(const void* symbol) {
  auto found = variables().find(symbol);
  if (found == variables().end()) return nullptr;
  auto& variable = found->second;
  if (!variable.memory) allocate(&variable.memory, variable.num_bytes, cudaMemoryTypeDevice);
  return static_cast<char*>(variable.memory);
}

}  // namespace stand_in

using namespace stand_in;

STAND_IN_API size_t stand_in_used_bytes() {
  Lock lock(mutex());
  return used_bytes();
}

STAND_IN_API cudaError_t cudaMalloc(void** address, size_t num_bytes) {
  RETURN(allocate_safely(address, num_bytes, cudaMemoryTypeDevice, __func__));
}
STAND_IN_API cudaError_t cudaFree(void* address) { RETURN(release_safely(address, __func__)); }
STAND_IN_API cudaError_t cudaHostAlloc(void** address, size_t num_bytes, unsigned) {
  RETURN(allocate_safely(address, num_bytes, cudaMemoryTypeHost, __func__));
}
STAND_IN_API cudaError_t cudaFreeHost(void* address) { RETURN(release_safely(address, __func__)); }
STAND_IN_API cudaError_t cudaHostRegister(void* address, size_t num_bytes, unsigned) {
  Lock lock(mutex());
  if (auto error = refuse_unsafe(__func__)) RETURN(error);
  blocks()[static_cast<char*>(address)] = {num_bytes, cudaMemoryTypeHost, current_device()};
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaHostUnregister(void* address) {
  {
    Lock lock(mutex());
    if (auto error = refuse_unsafe(__func__)) RETURN(error);
  }
  if (auto error = finish_all()) RETURN(error);
  Lock lock(mutex());
  blocks().erase(static_cast<char*>(address));
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaMemGetInfo(size_t* num_free, size_t* total) {
  Lock lock(mutex());
  *total = usage().limit;
  *num_free = usage().limit - usage().used;
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                                  const void* address) {
  Lock lock(mutex());
  memset(attributes, 0, sizeof *attributes);
  auto* block = find_block(address);
  attributes->type = block ? block->kind : cudaMemoryTypeUnregistered;
  attributes->device = block ? block->device : cudaInvalidDeviceId;
  if (block) {
    attributes->devicePointer = const_cast<void*>(address);
    bool is_host = block->kind == cudaMemoryTypeHost;
    attributes->hostPointer = is_host ? const_cast<void*>(address) : nullptr;
  }
  return cudaSuccess;
}

STAND_IN_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes,
                                         cudaMemcpyKind kind, cudaStream_t stream) {
  RETURN(submit_copy(to, from, num_bytes, kind, stream));
}
STAND_IN_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int,
                                             size_t num_bytes, cudaStream_t stream) {
  RETURN(submit_copy(to, from, num_bytes, cudaMemcpyDeviceToDevice, stream));
}
STAND_IN_API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from,
                                           size_t from_pitch, size_t width, size_t height,
                                           cudaMemcpyKind kind, cudaStream_t handle) {
  auto run = [=] {
    for (size_t row = 0; row < height; row++) {
      auto* target = static_cast<char*>(to) + row * to_pitch;
      auto* source = static_cast<const char*>(from) + row * from_pitch;
      if (auto error = copy(target, source, width, kind)) return error;
    }
    return cudaSuccess;
  };
  auto* stream = stream_of(handle);
  if (auto error = submit(stream, cudaGraphNodeTypeMemcpy, "memcpy", run)) RETURN(error);
  // Whether memory is pageable is not looked at: the call waits, which is always allowed.
  bool waits = !stream->capture && kind != cudaMemcpyDeviceToDevice;
  RETURN(waits ? finish(stream) : cudaSuccess);
}
STAND_IN_API cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes,
                                    cudaMemcpyKind kind) {
  auto* stream = stream_of(cudaStreamLegacy);
  {
    Lock lock(mutex());
    if (auto error = refuse_implicit(stream, __func__)) RETURN(error);
    if (auto error = refuse_unsafe(__func__)) RETURN(error);
  }
  auto run = [=] { return copy(to, from, num_bytes, kind); };
  auto error = submit(stream, cudaGraphNodeTypeMemcpy, "memcpy", run, nullptr,
                      {reads(from, num_bytes), writes(to, num_bytes)});
  if (error) RETURN(error);
  count_wait();
  RETURN(finish(stream));
}
STAND_IN_API cudaError_t cudaMemsetAsync(void* to, int value, size_t num_bytes,
                                         cudaStream_t stream) {
  auto run = [=] { return fill(to, value, num_bytes); };
  RETURN(submit(stream_of(stream), cudaGraphNodeTypeMemset, "memset", run, nullptr,
                {writes(to, num_bytes)}));
}
STAND_IN_API cudaError_t cudaMemset(void* to, int value, size_t num_bytes) {
  {
    Lock lock(mutex());
    if (auto error = refuse_unsafe(__func__)) RETURN(error);
  }
  return cudaMemsetAsync(to, value, num_bytes, cudaStreamLegacy);
}

STAND_IN_API void __cudaRegisterVar(void**, char* symbol, char*, const char*, int,
                                    size_t num_bytes, int, int) {
  Lock lock(mutex());
  variables()[symbol] = {num_bytes};
}
STAND_IN_API cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  Lock lock(mutex());
  *address = memory_of(symbol);
  RETURN(*address ? cudaSuccess : cudaErrorInvalidSymbol);
}
STAND_IN_API cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from,
                                            size_t num_bytes, size_t offset,
                                            cudaMemcpyKind kind) {
  char* memory = nullptr;
  {
    Lock lock(mutex());
    memory = memory_of(symbol);
  }
  if (!memory) RETURN(cudaErrorInvalidSymbol);
  return cudaMemcpy(memory + offset, from, num_bytes, kind);
}

// The runtime's own pools, of which torch uses none unless it is told to.
STAND_IN_API cudaError_t cudaMallocAsync(void** address, size_t num_bytes, cudaStream_t) {
  RETURN(allocate(address, num_bytes, cudaMemoryTypeDevice));
}
STAND_IN_API cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
  if (auto error = finish(stream_of(stream))) RETURN(error);
  RETURN(release(address));
}
