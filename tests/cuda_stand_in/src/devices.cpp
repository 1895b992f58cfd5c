// Devices: as many as the environment says, each with the properties of an H100.
#include "stand_in.h"

#include <cstdio>
#include <cstring>

namespace stand_in {

static thread_local int thread_device = 0;

int current_device() { return thread_device; }

static int num_devices() {
  static const int number = static_cast<int>(number_from_environment("CUDA_STAND_IN_DEVICES", 4));
  return number;
}

constexpr int CUDA_VERSION_PLAYED = 13000;
constexpr const char* NAME = "stand-in for an H100";

static int attribute(int which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return 1024;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrMaxGridDimX:
      return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return 233472;
    case cudaDevAttrWarpSize:
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrClockRate:
      return 1980000;
    case cudaDevAttrMemoryClockRate:
      return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth:
      return 5120;
    case cudaDevAttrMultiProcessorCount:
      return 132;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return 2048;
    case cudaDevAttrComputeCapabilityMajor:
      return 9;
    case cudaDevAttrComputeCapabilityMinor:
      return 0;
    case cudaDevAttrL2CacheSize:
      return 50 << 20;
    case cudaDevAttrTextureAlignment:
      return 512;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCooperativeLaunch:
      return 1;
    default:
      return 0;
  }
}

}  // namespace stand_in

using namespace stand_in;

STAND_IN_API cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices();
  RETURN(num_devices() ? cudaSuccess : cudaErrorNoDevice);
}
STAND_IN_API cudaError_t cudaGetDevice(int* device) {
  *device = thread_device;
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) RETURN(cudaErrorInvalidDevice);
  thread_device = device;
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION_PLAYED;
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDA_VERSION_PLAYED;
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = attribute(which);
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  auto& p = *properties;
  memset(&p, 0, sizeof p);
  strcpy(p.name, NAME);
  memcpy(p.uuid.bytes, "stand-in GPU no", 15);
  p.uuid.bytes[15] = static_cast<char>(device);
  p.totalGlobalMem = device_bytes();
  p.sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  p.sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p.sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p.reservedSharedMemPerBlock = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  p.regsPerBlock = p.regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerBlock);
  p.warpSize = attribute(cudaDevAttrWarpSize);
  p.memPitch = 2147483647;
  p.maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  p.maxThreadsDim[0] = p.maxThreadsDim[1] = attribute(cudaDevAttrMaxBlockDimX);
  p.maxThreadsDim[2] = attribute(cudaDevAttrMaxBlockDimZ);
  p.maxGridSize[0] = attribute(cudaDevAttrMaxGridDimX);
  p.maxGridSize[1] = p.maxGridSize[2] = attribute(cudaDevAttrMaxGridDimY);
  p.maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  p.maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  p.multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  p.totalConstMem = 65536;
  p.major = attribute(cudaDevAttrComputeCapabilityMajor);
  p.minor = attribute(cudaDevAttrComputeCapabilityMinor);
  p.textureAlignment = attribute(cudaDevAttrTextureAlignment);
  p.l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  p.memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  p.asyncEngineCount = 3;
  p.unifiedAddressing = p.canMapHostMemory = p.concurrentKernels = 1;
  p.streamPrioritiesSupported = p.cooperativeLaunch = p.memoryPoolsSupported = 1;
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
STAND_IN_API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaProfilerStart() { return cudaSuccess; }
STAND_IN_API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- the driver's half ----

STAND_IN_API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
STAND_IN_API CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return index < num_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
STAND_IN_API CUresult cuDeviceGetCount(int* count) {
  *count = num_devices();
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = attribute(which);
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}
// A context is its device; the number only has to be none.
static CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(0x1000 + device));
}
STAND_IN_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = context_of(thread_device);
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
STAND_IN_API CUresult cuCtxGetDevice(CUdevice* device) {
  *device = thread_device;
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 1024;
  return CUDA_SUCCESS;
}
STAND_IN_API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
STAND_IN_API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which,
                                            CUdeviceptr address) {
  Lock lock(mutex());
  auto* block = find_block(reinterpret_cast<void*>(address));
  if (!block) return CUDA_ERROR_INVALID_VALUE;
  switch (which) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) =
          block->kind == cudaMemoryTypeDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      *static_cast<CUdeviceptr*>(value) = address;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(value) = block->device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(value) = context_of(block->device);
      return CUDA_SUCCESS;
    default:
      log("cuPointerGetAttribute: attribute %d is not played", static_cast<int>(which));
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}
