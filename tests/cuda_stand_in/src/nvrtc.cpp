// NVRTC: torch compiles some of its kernels when they are first used. Nothing is compiled here,
// since no kernel computes by itself; the names of kernels are kept.
#include <nvrtc.h>

#include <cstring>

#include "stand_in.h"

namespace {

struct Program {
  std::string name;  // of the expression that was asked for last
};

constexpr const char* CODE = "nothing";

Program* get(nvrtcProgram handle) { return reinterpret_cast<Program*>(handle); }

nvrtcResult tell_size(size_t* size) {
  *size = strlen(CODE) + 1;
  return NVRTC_SUCCESS;
}

nvrtcResult tell(char* code) {
  strcpy(code, CODE);
  return NVRTC_SUCCESS;
}

}  // namespace

STAND_IN_API nvrtcResult nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return NVRTC_SUCCESS;
}
STAND_IN_API const char* nvrtcGetErrorString(nvrtcResult) { return "an error of the stand-in"; }
STAND_IN_API nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char*, const char* name,
                                            int, const char* const*, const char* const*) {
  *program = reinterpret_cast<nvrtcProgram>(new Program{name ? name : "jitted"});
  return NVRTC_SUCCESS;
}
STAND_IN_API nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  delete get(*program);
  *program = nullptr;
  return NVRTC_SUCCESS;
}
STAND_IN_API nvrtcResult nvrtcCompileProgram(nvrtcProgram, int, const char* const*) {
  return NVRTC_SUCCESS;
}
STAND_IN_API nvrtcResult nvrtcAddNameExpression(nvrtcProgram program, const char* expression) {
  get(program)->name = expression;
  return NVRTC_SUCCESS;
}
STAND_IN_API nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char*,
                                             const char** name) {
  *name = get(program)->name.c_str();
  return NVRTC_SUCCESS;
}
STAND_IN_API nvrtcResult nvrtcGetPTXSize(nvrtcProgram, size_t* size) { return tell_size(size); }
STAND_IN_API nvrtcResult nvrtcGetPTX(nvrtcProgram, char* code) { return tell(code); }
STAND_IN_API nvrtcResult nvrtcGetCUBINSize(nvrtcProgram, size_t* size) { return tell_size(size); }
STAND_IN_API nvrtcResult nvrtcGetCUBIN(nvrtcProgram, char* code) { return tell(code); }
STAND_IN_API nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram, size_t* size) {
  *size = 1;
  return NVRTC_SUCCESS;
}
STAND_IN_API nvrtcResult nvrtcGetProgramLog(nvrtcProgram, char* text) {
  *text = 0;
  return NVRTC_SUCCESS;
}
