// Errors and the log. Texts of errors are those of the real runtime, which lies beside torch.
#include "stand_in.h"

#include <dlfcn.h>
#include <execinfo.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace stand_in {

static thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error, const char* function) {
  if (error != cudaSuccess) {
    if (error != cudaErrorNotReady) log("%s -> %d", function, static_cast<int>(error));
    last_error = error;
  }
  return error;
}

bool is_logging() {
  static const bool wanted = getenv("CUDA_STAND_IN_LOG") != nullptr;
  return wanted;
}

void log(const char* format, ...) {
  if (!is_logging()) return;
  va_list arguments;
  va_start(arguments, format);
  fputs("[stand-in] ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

void log_stack() {
  if (!is_logging()) return;
  void* frames[40];
  backtrace_symbols_fd(frames, backtrace(frames, 40), 2);
}

size_t number_from_environment(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}

static const char* text_of(cudaError_t error, const char* function) {
  static void* runtime = dlopen("libcudart.so.13", RTLD_LAZY | RTLD_NOLOAD);
  auto* tell = runtime ? reinterpret_cast<const char* (*)(cudaError_t)>(dlsym(runtime, function))
                       : nullptr;
  return tell ? tell(error) : "an error of the stand-in";
}

}  // namespace stand_in

using namespace stand_in;

STAND_IN_API const char* cudaGetErrorString(cudaError_t error) {
  return text_of(error, "cudaGetErrorString");
}
STAND_IN_API const char* cudaGetErrorName(cudaError_t error) {
  return text_of(error, "cudaGetErrorName");
}
STAND_IN_API cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}
STAND_IN_API cudaError_t cudaPeekAtLastError() { return last_error; }

// A symbol that torch needs and nobody has written: missing.S jumps here (see build.py).
extern "C" __attribute__((visibility("hidden"))) cudaError_t stand_in_is_missing(const char* name) {
  fprintf(stderr, "[stand-in] %s is not played: write it in tests/cuda_stand_in/src\n", name);
  // Only the runtime remembers its errors; a library tells its own alone.
  bool is_runtime = strncmp(name, "cuda", 4) == 0;
  return is_runtime ? fail(cudaErrorNotSupported, name) : cudaErrorNotSupported;
}
