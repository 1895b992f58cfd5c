// Kernels: who registered them, their launch, and what tests attach behind them.
//
// A kernel computes nothing by itself. Real code allocates, launches and copies; what kernels
// would have computed is attached behind the last of them by Python (see compute.py).
#include "stand_in.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <unordered_map>

namespace stand_in {

static std::unordered_map<const void*, Kernel*>& registered() {
  static auto* kernels = new std::unordered_map<const void*, Kernel*>;
  return *kernels;
}

Kernel* kernel_named(const std::string& name) {
  static auto* kernels = new std::map<std::string, Kernel*>;
  Lock lock(mutex());
  auto*& kernel = (*kernels)[name];
  if (!kernel) kernel = new Kernel{name};
  return kernel;
}

static Kernel* kernel_of(const void* function) {
  Lock lock(mutex());
  auto found = registered().find(function);
  return found == registered().end() ? nullptr : found->second;
}

static bool fits(dim3 grid, dim3 block) {
  bool is_empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
  return !is_empty && grid.y <= 65535 && grid.z <= 65535 &&
         size_t{block.x} * block.y * block.z <= 1024;
}

// Computes what a token stands for; not 0 if that failed.
using Compute = int (*)(unsigned long long token);

static std::atomic<Compute> compute{nullptr};
// This thread is in an operator that is computed as a whole.
static thread_local bool is_in_operator = false;

// While numbers are computed, a kernel that belongs to no operator would leave garbage behind.
static bool is_computed(const Kernel* kernel) {
  bool waits_only = kernel->name.find("spin_kernel") != std::string::npos;  // torch.cuda._sleep
  if (!compute.load() || is_in_operator || waits_only) return true;
  fprintf(stderr, "[stand-in] nobody computes the kernel %s\n", kernel->name.c_str());
  return false;
}

cudaError_t launch(Kernel* kernel, dim3 grid, dim3 block, cudaStream_t stream, Action run,
                   std::vector<Access> accesses) {
  if (!is_computed(kernel)) return cudaErrorNotSupported;
  if (!fits(grid, block)) return cudaErrorInvalidConfiguration;
  return submit(stream_of(stream), cudaGraphNodeTypeKernel, kernel->name, std::move(run), kernel,
                std::move(accesses));
}

// The configuration between `<<<` and the call that it is for.
struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  CUstream_st* stream;
};

static std::vector<Configuration>& configurations() {
  static thread_local std::vector<Configuration> open;
  return open;
}

}  // namespace stand_in

using namespace stand_in;

STAND_IN_API void** __cudaRegisterFatBinary(void* binary) { return new void*(binary); }
STAND_IN_API void __cudaRegisterFatBinaryEnd(void**) {}
STAND_IN_API void __cudaUnregisterFatBinary(void**) {}
STAND_IN_API char __cudaInitModule(void**) { return 1; }
STAND_IN_API void __cudaRegisterFunction(void**, const char* function, char*, const char* name,
                                         int, uint3*, uint3*, dim3*, dim3*, int*) {
  Lock lock(mutex());
  registered()[function] = new Kernel{name};
}
STAND_IN_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                                  CUstream_st* stream) {
  configurations().push_back({grid, block, shared_bytes, stream});
  return 0;
}
STAND_IN_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                                    void* stream) {
  auto last = configurations().back();
  configurations().pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *static_cast<CUstream_st**>(stream) = last.stream;
  return cudaSuccess;
}
STAND_IN_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  auto* found = kernel_of(function);
  if (!found) RETURN(cudaErrorInvalidDeviceFunction);
  *kernel = reinterpret_cast<cudaKernel_t>(found);
  return cudaSuccess;
}
STAND_IN_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**,
                                            size_t, cudaStream_t stream) {
  RETURN(launch(reinterpret_cast<Kernel*>(kernel), grid, block, stream));
}
STAND_IN_API cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**,
                                          size_t, cudaStream_t stream) {
  auto* kernel = kernel_of(function);
  if (!kernel) RETURN(cudaErrorInvalidDeviceFunction);
  RETURN(launch(kernel, grid, block, stream));
}
STAND_IN_API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block,
                                                     void** arguments, size_t shared_bytes,
                                                     cudaStream_t stream) {
  return cudaLaunchKernel(function, grid, block, arguments, shared_bytes, stream);
}
STAND_IN_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration,
                                             const void* function, void** arguments) {
  return cudaLaunchKernel(function, configuration->gridDim, configuration->blockDim, arguments,
                          configuration->dynamicSmemBytes, configuration->stream);
}
STAND_IN_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*,
                                                                       int, size_t) {
  *count = 2;
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* count, const void*, int, size_t, unsigned) {
  *count = 2;
  return cudaSuccess;
}

// ---- what Python attaches ----

namespace stand_in {

static std::vector<unsigned long long>& forgotten() {
  static auto* tokens = new std::vector<unsigned long long>;
  return *tokens;
}

// Tells Python, when it asks, that nobody can run this any more. It is not called: a graph may be
// destroyed by a thread that has a lock which another thread with Python's lock waits for.
struct Token {
  unsigned long long number;
  explicit Token(unsigned long long number) : number(number) {}
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;
  ~Token() {
    Lock lock(mutex());
    forgotten().push_back(number);
  }
};

enum Attached { DONE = 0, CAPTURED = 1, INVALID = 2, NO_NODE = 3, FAILED = 4, QUEUED = 5 };

}  // namespace stand_in

STAND_IN_API void stand_in_set_compute(Compute function) { compute = function; }

// An operator begins or ends that is computed as a whole. Answers how many nodes the capture of
// its stream has so far, -1 if it is not captured.
STAND_IN_API void stand_in_end_operator() { is_in_operator = false; }
STAND_IN_API long stand_in_begin_operator(cudaStream_t handle) {
  is_in_operator = true;
  Lock lock(mutex());
  auto* capture = stream_of(handle)->capture;
  return capture ? static_cast<long>(capture->graph->nodes.size()) : -1;
}

// Has a token computed behind the last node of a captured stream at each launch, or else behind
// the work that the stream has now. The number of nodes before the operator tells whether it has
// made any: without one there is nothing to compute behind.
STAND_IN_API int stand_in_attach(cudaStream_t handle, unsigned long long number,
                                 long num_nodes_before) {
  auto token = std::make_shared<Token>(number);
  Action run = [token] {
    auto function = compute.load();
    return function && function(token->number) != 0 ? cudaErrorLaunchFailure : cudaSuccess;
  };
  auto* stream = stream_of(handle);
  {
    Lock lock(mutex());
    if (auto* capture = stream->capture) {
      if (capture->is_invalid) return INVALID;
      bool has_made = static_cast<long>(capture->graph->nodes.size()) > num_nodes_before;
      if (!has_made || stream->dependencies.size() != 1) return NO_NODE;
      stream->dependencies[0]->after.push_back(std::move(run));
      return CAPTURED;
    }
  }
  if (enqueue(stream, {"kernel", std::move(run), nullptr, nullptr})) return FAILED;
  return streams_are_lazy() ? QUEUED : DONE;
}

// The identity of the capture that a stream takes part in, 0 if there is none.
STAND_IN_API unsigned long long stand_in_capture_id(cudaStream_t handle) {
  Lock lock(mutex());
  auto* capture = stream_of(handle)->capture;
  return capture ? capture->id : 0;
}

// Says what an operator reads or writes, for the last node of a captured stream.
STAND_IN_API void stand_in_touch(cudaStream_t handle, const char* name, const void* address,
                                 size_t num_bytes, int is_written) {
  Lock lock(mutex());
  auto* stream = stream_of(handle);
  if (!stream->capture || stream->dependencies.size() != 1) return;
  auto* node = stream->dependencies[0];
  node->operator_ = name;
  node->accesses.push_back(is_written ? writes(address, num_bytes) : reads(address, num_bytes));
}

// Moves up to `limit` tokens that nobody can run any more.
STAND_IN_API size_t stand_in_take_forgotten(unsigned long long* tokens, size_t limit) {
  Lock lock(mutex());
  size_t count = 0;
  while (count < limit && !forgotten().empty()) {
    tokens[count++] = forgotten().back();
    forgotten().pop_back();
  }
  return count;
}
