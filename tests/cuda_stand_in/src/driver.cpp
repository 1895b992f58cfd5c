// The driver's calls that torch, Triton and graphfsdp make: modules, launches, and what may be
// asked of a graph. Devices are in devices.cpp.
#include "stand_in.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

using namespace stand_in;

namespace {

CUresult driver_error(cudaError_t error) { return static_cast<CUresult>(error); }

// What cudaGetDriverEntryPointByVersion hands out for functions that are not here.
CUresult is_not_played() {
  fputs("[stand-in] a driver function that is not played was called; CUDA_STAND_IN_LOG names it\n",
        stderr);
  return CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace

STAND_IN_API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

// ---- modules and their functions ----

STAND_IN_API CUresult cuModuleLoadData(CUmodule* module, const void*) {
  // CUDA rule: loading a module may allocate and wait for the device. So a kernel of Triton or NVRTC
  // cannot be launched for the first time in a capture.
  Lock lock(mutex());
  if (auto error = refuse_unsafe(__func__)) return driver_error(error);
  *module = reinterpret_cast<CUmodule>(new char);
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned,
                                         CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}
STAND_IN_API CUresult cuModuleLoad(CUmodule* module, const char*) {
  return cuModuleLoadData(module, nullptr);
}
STAND_IN_API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
STAND_IN_API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(kernel_named(name));
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : which == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                            : 0;
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
STAND_IN_API CUresult cuFuncGetName(const char** name, CUfunction function) {
  *name = reinterpret_cast<Kernel*>(function)->name.c_str();
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuKernelGetName(const char** name, CUkernel kernel) {
  *name = reinterpret_cast<Kernel*>(kernel)->name.c_str();
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, CUfunction, int,
                                                                  size_t) {
  *count = 2;
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) {
  *count = 16;
  return CUDA_SUCCESS;
}

STAND_IN_API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                                     unsigned grid_z, unsigned block_x, unsigned block_y,
                                     unsigned block_z, unsigned, CUstream stream, void**,
                                     void**) {
  auto* kernel = reinterpret_cast<Kernel*>(function);
  return driver_error(
      launch(kernel, dim3(grid_x, grid_y, grid_z), dim3(block_x, block_y, block_z), stream));
}
STAND_IN_API CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function,
                                       void** arguments, void** extra) {
  return cuLaunchKernel(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX,
                        c->blockDimY, c->blockDimZ, c->sharedMemBytes, c->hStream, arguments,
                        extra);
}
STAND_IN_API CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x,
                                                unsigned grid_y, unsigned grid_z,
                                                unsigned block_x, unsigned block_y,
                                                unsigned block_z, unsigned shared_bytes,
                                                CUstream stream, void** arguments) {
  return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes,
                        stream, arguments, nullptr);
}

// ---- memory ----

STAND_IN_API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t num_bytes,
                                           CUstream stream) {
  return driver_error(cudaMemcpyAsync(to, reinterpret_cast<void*>(from), num_bytes,
                                      cudaMemcpyDeviceToHost, stream));
}
STAND_IN_API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count,
                                       CUstream stream) {
  auto run = [=] {
    auto* words = reinterpret_cast<unsigned*>(to);
    for (size_t index = 0; index < count; index++) words[index] = value;
    return cudaSuccess;
  };
  return driver_error(submit(stream_of(stream), cudaGraphNodeTypeMemset, "memset", run));
}

// ---- captures and graphs ----

STAND_IN_API CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  return driver_error(cudaStreamCreateWithFlags(stream, flags));
}
STAND_IN_API CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus* status,
                                                cuuint64_t* id, CUgraph* graph,
                                                const CUgraphNode** dependencies,
                                                const CUgraphEdgeData** edges, size_t* count) {
  return driver_error(cudaStreamGetCaptureInfo(
      stream, reinterpret_cast<cudaStreamCaptureStatus*>(status),
      reinterpret_cast<unsigned long long*>(id), graph, dependencies,
      reinterpret_cast<const cudaGraphEdgeData**>(edges), count));
}
STAND_IN_API CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status,
                                                cuuint64_t* id, CUgraph* graph,
                                                const CUgraphNode** dependencies, size_t* count) {
  return cuStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, nullptr, count);
}
STAND_IN_API CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  return driver_error(cudaGraphGetNodes(graph, nodes, count));
}
STAND_IN_API CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  return driver_error(cudaGraphNodeGetType(node, reinterpret_cast<cudaGraphNodeType*>(type)));
}
STAND_IN_API CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode* dependencies,
                                                    CUgraphEdgeData*, size_t* count) {
  return driver_error(cudaGraphNodeGetDependencies(node, dependencies, nullptr, count));
}
STAND_IN_API CUresult cuGraphAddDependencies_v2(CUgraph handle, const CUgraphNode* from,
                                                const CUgraphNode* to, const CUgraphEdgeData*,
                                                size_t count) {
  Lock lock(mutex());
  if (!live_graphs().count(handle)) return CUDA_ERROR_INVALID_VALUE;
  for (size_t index = 0; index < count; index++) {
    auto* before = reinterpret_cast<Node*>(from[index]);
    auto& known = reinterpret_cast<Node*>(to[index])->dependencies;
    for (auto* other : known) {
      if (other == before) return CUDA_ERROR_INVALID_VALUE;  // as the driver says it
    }
    known.push_back(before);
  }
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode handle,
                                                    CUDA_KERNEL_NODE_PARAMS* parameters) {
  auto* node = reinterpret_cast<Node*>(handle);
  if (node->type != cudaGraphNodeTypeKernel) return CUDA_ERROR_INVALID_VALUE;
  memset(parameters, 0, sizeof *parameters);
  parameters->func = reinterpret_cast<CUfunction>(node->kernel);
  return CUDA_SUCCESS;
}

// ---- the functions that the runtime finds for others ----

STAND_IN_API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* status) {
  static void* self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  *function = nullptr;
  for (const char* suffix : {"_v3", "_v2", ""}) {
    auto full = std::string(name) + suffix;
    if (!*function && self) *function = dlsym(self, full.c_str());
  }
  if (!*function) {
    log("the driver function %s is not played", name);
    *function = reinterpret_cast<void*>(is_not_played);
  }
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
STAND_IN_API CUresult cuDriverGetVersion(int* version) {  // Triton 3.8 asks when it loads a kernel
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return static_cast<CUresult>(
      cudaStreamIsCapturing(stream, reinterpret_cast<cudaStreamCaptureStatus*>(status)));
}
STAND_IN_API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return static_cast<CUresult>(
      cudaThreadExchangeStreamCaptureMode(reinterpret_cast<cudaStreamCaptureMode*>(mode)));
}
STAND_IN_API CUresult cuGraphDebugDotPrint(CUgraph graph, const char* path, unsigned flags) {
  return driver_error(cudaGraphDebugDotPrint(graph, path, flags));
}
