// cuBLAS: each call is one kernel that writes its workspace; what it would have computed is attached
// behind it by Python, as behind every kernel.
#include <cublasLt.h>
#include <cublas_v2.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "stand_in.h"

using namespace stand_in;

namespace {

struct Handle {
  cudaStream_t stream = nullptr;
  cublasPointerMode_t pointer_mode = CUBLAS_POINTER_MODE_HOST;
  cublasMath_t math_mode = CUBLAS_DEFAULT_MATH;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

Handle* get(cublasHandle_t handle) { return reinterpret_cast<Handle*>(handle); }

// Whoever else has got the memory of a workspace finds it overwritten: the first bytes are enough.
cublasStatus_t launch_on(cudaStream_t stream, const char* name, void* workspace, size_t num_bytes) {
  num_bytes = std::min(num_bytes, size_t{64});
  auto* kernel = kernel_named(name);
  Action scribble;
  std::vector<Access> accesses;
  if (workspace && num_bytes) {
    scribble = [=] { return fill(workspace, 0xA5, num_bytes); };
    accesses.push_back(writes(workspace, num_bytes));
  }
  auto error = launch(kernel, dim3(1), dim3(1), stream, scribble, accesses);
  return fail(error, name) ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t launch_for(const Handle* handle, const char* name) {
  return launch_on(handle->stream, name, handle->workspace, handle->workspace_bytes);
}

}  // namespace

STAND_IN_API cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  Lock lock(mutex());
  // It allocates on the device.
  if (refuse_unsafe("cublasCreate")) return CUBLAS_STATUS_NOT_INITIALIZED;
  *handle = reinterpret_cast<cublasHandle_t>(new Handle);
  return CUBLAS_STATUS_SUCCESS;
}
STAND_IN_API cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete get(handle);
  return CUBLAS_STATUS_SUCCESS;
}
STAND_IN_API cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  get(handle)->stream = stream;
  get(handle)->workspace = nullptr;  // one of its own again, which it keeps for itself
  return CUBLAS_STATUS_SUCCESS;
}
STAND_IN_API cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void* workspace,
                                                  size_t num_bytes) {
  get(handle)->workspace = workspace;
  get(handle)->workspace_bytes = num_bytes;
  return CUBLAS_STATUS_SUCCESS;
}
STAND_IN_API cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  get(handle)->math_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}
STAND_IN_API cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = get(handle)->math_mode;
  return CUBLAS_STATUS_SUCCESS;
}
STAND_IN_API cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle,
                                                    cublasPointerMode_t mode) {
  get(handle)->pointer_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}
STAND_IN_API cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle,
                                                    cublasPointerMode_t* mode) {
  *mode = get(handle)->pointer_mode;
  return CUBLAS_STATUS_SUCCESS;
}

// All that a product needs here is its handle, the first argument; C leaves the others alone. The
// header knows another type, so the symbol is named by hand.
#define ONE_KERNEL(name)                                                                       \
  extern "C" __attribute__((visibility("default"))) cublasStatus_t one_kernel_##name(          \
      cublasHandle_t handle) __asm__(#name);                                                   \
  cublasStatus_t one_kernel_##name(cublasHandle_t handle) {                                    \
    return launch_for(get(handle), #name);                                                     \
  }
ONE_KERNEL(cublasSgemm_v2)
ONE_KERNEL(cublasDgemm_v2)
ONE_KERNEL(cublasCgemm_v2)
ONE_KERNEL(cublasZgemm_v2)
ONE_KERNEL(cublasGemmEx)
ONE_KERNEL(cublasSgemmEx)
ONE_KERNEL(cublasGemmStridedBatchedEx)
ONE_KERNEL(cublasSgemmStridedBatched)
ONE_KERNEL(cublasDgemmStridedBatched)
ONE_KERNEL(cublasSgemmBatched)
ONE_KERNEL(cublasDgemmBatched)
ONE_KERNEL(cublasSgemv_v2)
ONE_KERNEL(cublasDgemv_v2)
ONE_KERNEL(cublasSdot_v2)
ONE_KERNEL(cublasDdot_v2)
ONE_KERNEL(cublasDotEx)
ONE_KERNEL(cublasSaxpy_v2)
ONE_KERNEL(cublasStrsm_v2)
ONE_KERNEL(cublasDtrsm_v2)

// ---- cublasLt: descriptors are memory that nobody reads ----

namespace {

constexpr size_t DESCRIPTOR_BYTES = 256;

template <class T>
cublasStatus_t make(T* descriptor) {
  *descriptor = static_cast<T>(calloc(1, DESCRIPTOR_BYTES));
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t drop(void* descriptor) {
  free(descriptor);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

STAND_IN_API size_t cublasLtGetVersion() { return 130100; }
STAND_IN_API cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(new Handle);
  return CUBLAS_STATUS_SUCCESS;
}
STAND_IN_API cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete reinterpret_cast<Handle*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}
STAND_IN_API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made,
                                                     cublasComputeType_t, cudaDataType_t) {
  return make(made);
}
STAND_IN_API cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t made) {
  return drop(made);
}
STAND_IN_API cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t,
                                                           cublasLtMatmulDescAttributes_t,
                                                           const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
STAND_IN_API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made,
                                                       cudaDataType, uint64_t, uint64_t,
                                                       int64_t) {
  return make(made);
}
STAND_IN_API cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t made) {
  return drop(made);
}
STAND_IN_API cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t,
                                                             cublasLtMatrixLayoutAttribute_t,
                                                             const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
STAND_IN_API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  return make(made);
}
STAND_IN_API cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made) {
  return drop(made);
}
STAND_IN_API cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
STAND_IN_API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
    cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
    cublasLtMatmulHeuristicResult_t results[], int* count) {
  memset(results, 0, sizeof results[0]);
  results[0].state = CUBLAS_STATUS_SUCCESS;
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}
STAND_IN_API cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*,
                                           const void*, cublasLtMatrixLayout_t, const void*,
                                           cublasLtMatrixLayout_t, const void*, const void*,
                                           cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t,
                                           const cublasLtMatmulAlgo_t*, void* workspace,
                                           size_t num_bytes, cudaStream_t stream) {
  return launch_on(stream, "cublasLtMatmul", workspace, num_bytes);
}

// cuDNN is not played, but torch asks for its version before it looks whether it is switched off.
STAND_IN_API size_t cudnnGetVersion() { return 91900; }
STAND_IN_API const char* cudnnGetErrorString(int) { return "cuDNN is not played"; }
