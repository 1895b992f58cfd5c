// cuFFT: a transform is one kernel, as a product of cuBLAS is.
#include <cufft.h>
#include <cufftXt.h>

#include "stand_in.h"

using namespace stand_in;

namespace {

std::map<cufftHandle, cudaStream_t>& streams() {
  static auto* found = new std::map<cufftHandle, cudaStream_t>;
  return *found;
}

}  // namespace

STAND_IN_API cufftResult cufftCreate(cufftHandle* plan) {
  Lock lock(mutex());
  *plan = static_cast<cufftHandle>(next_id());
  streams()[*plan] = nullptr;
  return CUFFT_SUCCESS;
}
STAND_IN_API cufftResult cufftDestroy(cufftHandle plan) {
  Lock lock(mutex());
  streams().erase(plan);
  return CUFFT_SUCCESS;
}
STAND_IN_API cufftResult cufftSetStream(cufftHandle plan, cudaStream_t stream) {
  Lock lock(mutex());
  streams()[plan] = stream;
  return CUFFT_SUCCESS;
}
STAND_IN_API cufftResult cufftSetAutoAllocation(cufftHandle, int) { return CUFFT_SUCCESS; }
STAND_IN_API cufftResult cufftSetWorkArea(cufftHandle, void*) { return CUFFT_SUCCESS; }
STAND_IN_API cufftResult cufftXtMakePlanMany(cufftHandle, int, long long*, long long*, long long,
                                             long long, cudaDataType, long long*, long long,
                                             long long, cudaDataType, long long,
                                             size_t* work_bytes, cudaDataType) {
  *work_bytes = 0;
  return CUFFT_SUCCESS;
}
STAND_IN_API cufftResult cufftXtExec(cufftHandle plan, void*, void*, int) {
  cudaStream_t stream = nullptr;
  {
    Lock lock(mutex());
    stream = streams()[plan];
  }
  auto error = fail(launch(kernel_named("cufftXtExec"), dim3(1), dim3(1), stream), __func__);
  return error ? CUFFT_EXEC_FAILED : CUFFT_SUCCESS;
}
