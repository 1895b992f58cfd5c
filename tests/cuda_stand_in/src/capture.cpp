// Stream capture as a state machine: modes, joins, invalidation, and errors 900 to 908.
#include "stand_in.h"

#include <utility>

namespace stand_in {

static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

std::map<unsigned long long, Capture*>& captures() {
  static auto* found = new std::map<unsigned long long, Capture*>;
  return *found;
}

unsigned long long next_id() {
  static unsigned long long last = 0;
  return ++last;
}

void invalidate(Capture* capture, const char* why) {
  if (!capture->is_invalid) {
    log("capture %llu is invalidated by %s", capture->id, why);
    log_stack();
  }
  capture->is_invalid = true;
}

cudaError_t refuse_unsafe(const char* what) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool refused = false;
  for (auto& [id, capture] : captures()) {
    bool is_own = capture->thread == std::this_thread::get_id() &&
                  capture->mode != cudaStreamCaptureModeRelaxed;
    bool is_global = thread_mode == cudaStreamCaptureModeGlobal &&
                     capture->mode == cudaStreamCaptureModeGlobal;
    if (is_own || is_global) {
      invalidate(capture, what);
      refused = true;
    }
  }
  return refused ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

static bool has_blocking_stream(const Capture* capture) {
  for (auto* stream : capture->streams) {
    if (!(stream->flags & cudaStreamNonBlocking)) return true;
  }
  return false;
}

cudaError_t refuse_implicit(const Stream* stream, const char* what) {
  if (!is_legacy(stream)) return cudaSuccess;
  bool refused = false;
  for (auto& [id, capture] : captures()) {
    if (has_blocking_stream(capture)) {
      invalidate(capture, what);
      refused = true;
    }
  }
  return refused ? cudaErrorStreamCaptureImplicit : cudaSuccess;
}

cudaError_t refuse_in_any_capture(const char* what) {
  Lock lock(mutex());
  for (auto& [id, capture] : captures()) invalidate(capture, what);
  return captures().empty() ? cudaSuccess : cudaErrorStreamCaptureUnsupported;
}

// Every node must lead to the end of the stream that the capture began on.
static bool is_joined(const Capture* capture) {
  std::set<Node*> seen;
  std::vector<Node*> open(capture->origin->dependencies);
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    if (seen.insert(node).second) {
      open.insert(open.end(), node->dependencies.begin(), node->dependencies.end());
    }
  }
  return seen.size() == capture->graph->nodes.size();
}

}  // namespace stand_in

using namespace stand_in;

STAND_IN_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Lock lock(mutex());
  auto* stream = stream_of(handle);
  if (is_legacy(stream)) RETURN(cudaErrorStreamCaptureUnsupported);
  if (stream->capture) RETURN(cudaErrorIllegalState);
  auto* capture = new Capture{next_id(), mode, std::this_thread::get_id(), stream, new Graph,
                              {stream}};
  stream->capture = capture;
  stream->dependencies.clear();
  captures()[capture->id] = capture;
  live_graphs().insert(capture->graph);
  log("capture %llu begins in mode %d", capture->id, static_cast<int>(mode));
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Lock lock(mutex());
  *graph = nullptr;
  auto* stream = stream_of(handle);
  auto* capture = stream->capture;
  if (!capture) RETURN(cudaErrorIllegalState);
  if (capture->origin != stream) {
    invalidate(capture, "its end on another stream");
    RETURN(cudaErrorStreamCaptureUnmatched);
  }
  bool is_own = capture->thread == std::this_thread::get_id();
  if (capture->mode != cudaStreamCaptureModeRelaxed && !is_own) {
    invalidate(capture, "its end on another thread");
    RETURN(cudaErrorStreamCaptureWrongThread);
  }
  auto error = cudaSuccess;
  if (capture->is_invalid) {
    error = cudaErrorStreamCaptureInvalidated;
  } else if (!is_joined(capture)) {
    error = cudaErrorStreamCaptureUnjoined;
  }
  for (auto* member : capture->streams) {
    member->capture = nullptr;
    member->dependencies.clear();
  }
  captures().erase(capture->id);
  log("capture %llu ends with %d, %zu nodes", capture->id, static_cast<int>(error),
      capture->graph->nodes.size());
  if (error) {
    live_graphs().erase(capture->graph);
    delete capture->graph;
  } else {
    *graph = reinterpret_cast<cudaGraph_t>(capture->graph);
  }
  delete capture;
  RETURN(error);
}
STAND_IN_API cudaError_t cudaStreamIsCapturing(cudaStream_t handle,
                                               cudaStreamCaptureStatus* status) {
  Lock lock(mutex());
  auto* stream = stream_of(handle);
  if (is_legacy(stream)) {
    for (auto& [id, capture] : captures()) {
      if (has_blocking_stream(capture)) RETURN(cudaErrorStreamCaptureImplicit);
    }
  }
  *status = !stream->capture               ? cudaStreamCaptureStatusNone
            : stream->capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                           : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle,
                                                  cudaStreamCaptureStatus* status,
                                                  unsigned long long* id, cudaGraph_t* graph,
                                                  const cudaGraphNode_t** dependencies,
                                                  const cudaGraphEdgeData** edges, size_t* count) {
  Lock lock(mutex());
  if (auto error = cudaStreamIsCapturing(handle, status)) return error;
  if (edges) *edges = nullptr;
  if (*status != cudaStreamCaptureStatusActive) return cudaSuccess;
  auto* stream = stream_of(handle);
  if (id) *id = stream->capture->id;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(stream->capture->graph);
  if (dependencies) {
    *dependencies = reinterpret_cast<const cudaGraphNode_t*>(stream->dependencies.data());
  }
  if (count) *count = stream->dependencies.size();
  return cudaSuccess;
}
