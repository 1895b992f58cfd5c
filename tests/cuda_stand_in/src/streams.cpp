// Streams, their queues, and events.
//
// Streams run at once, each call doing its work before it returns; or, where the test wants it,
// lazily: work waits in the queue of its stream until something waits for it, and then entries of
// all streams run in a random order that respects events.
#include "stand_in.h"

#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace stand_in {

constexpr int MAX_DEVICES = 16;
static Stream legacy_streams[MAX_DEVICES];
static Stream thread_streams[MAX_DEVICES];

std::recursive_mutex& mutex() {
  static auto* lock = new std::recursive_mutex;
  return *lock;
}

static std::condition_variable_any& work_is_done() {
  static auto* condition = new std::condition_variable_any;
  return *condition;
}

static std::set<Stream*>& made_streams() {
  static auto* streams = new std::set<Stream*>;
  return *streams;
}

Stream* stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) {
    legacy_streams[current_device()].device = current_device();
    return &legacy_streams[current_device()];
  }
  if (handle == cudaStreamPerThread) {
    thread_streams[current_device()].device = current_device();
    return &thread_streams[current_device()];
  }
  return reinterpret_cast<Stream*>(handle);
}

bool is_legacy(const Stream* stream) {
  return stream >= legacy_streams && stream < legacy_streams + MAX_DEVICES;
}

static std::vector<Stream*> all_streams() {
  std::vector<Stream*> found(made_streams().begin(), made_streams().end());
  for (int device = 0; device < MAX_DEVICES; device++) {
    found.push_back(&legacy_streams[device]);
    found.push_back(&thread_streams[device]);
  }
  return found;
}

double now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

// Lets other threads have Python's lock while this one waits for them: they may compute in Python.
class WithoutPython {
 public:
  WithoutPython() {
    static auto holds = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    if (holds && save && holds()) state_ = save();
  }
  ~WithoutPython() {
    static auto restore =
        reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (state_) restore(state_);
  }

 private:
  void* state_ = nullptr;
};

static cudaError_t run(const Work& work) {
  auto error = work.run ? work.run() : cudaSuccess;
  if (error) log("%s failed with %d", work.name.c_str(), static_cast<int>(error));
  return error;
}

static void complete(const Work& work) {
  if (!work.marks) return;
  work.marks->at_ms = now_ms();
  work.marks->is_done = true;
}

// An error of work that ran later than its call is told by the next call that waits.
static cudaError_t& late_error() {
  static cudaError_t error = cudaSuccess;
  return error;
}

static bool is_ready(const Stream* stream) {
  if (stream->is_running || stream->queue.empty()) return false;
  auto& wanted = stream->queue.front().waits_for;
  return !wanted || wanted->is_done;
}

// Runs the first entry of a random stream that can go on; false if there is none.
static bool run_any(std::unique_lock<std::recursive_mutex>& lock) {
  std::vector<Stream*> ready;
  for (auto* stream : all_streams()) {
    if (is_ready(stream)) ready.push_back(stream);
  }
  if (ready.empty()) return false;
  auto* stream = ready[random_below(ready.size())];
  Work work = std::move(stream->queue.front());
  stream->queue.pop_front();
  stream->is_running = true;
  lock.unlock();
  bool meets_others = work.meets_others;
  auto run_to_end = [stream, work = std::move(work)] {
    auto error = run(work);
    Lock done(mutex());
    if (error && !late_error()) late_error() = error;
    complete(work);
    stream->is_running = false;
    work_is_done().notify_all();
  };
  if (meets_others) {  // the ranks may come to it in different orders
    std::thread(run_to_end).detach();
  } else {
    run_to_end();
  }
  lock.lock();
  return true;
}

static cudaError_t run_until(const std::function<bool()>& is_over) {
  std::unique_lock<std::recursive_mutex> lock(mutex());
  while (!is_over()) {
    if (run_any(lock)) continue;
    auto streams = all_streams();
    auto runs = [](const Stream* stream) { return stream->is_running; };
    if (std::none_of(streams.begin(), streams.end(), runs)) {
      fputs("[stand-in] streams wait for each other: nothing can run\n", stderr);
      abort();
    }
    lock.unlock();
    {
      WithoutPython others;
      std::unique_lock<std::recursive_mutex> waiting(mutex());
      work_is_done().wait_for(waiting, std::chrono::milliseconds(20));
    }
    lock.lock();
  }
  auto error = late_error();
  late_error() = cudaSuccess;
  return error;
}

void run_one() {
  if (!streams_are_lazy()) return;
  std::unique_lock<std::recursive_mutex> lock(mutex());
  run_any(lock);
}

cudaError_t finish(Stream* stream) {
  return run_until([=] { return stream->queue.empty() && !stream->is_running; });
}

cudaError_t finish_all() {
  return run_until([] {
    auto streams = all_streams();
    return std::all_of(streams.begin(), streams.end(), [](const Stream* stream) {
      return stream->queue.empty() && !stream->is_running;
    });
  });
}

static cudaError_t finish_device(int device) {
  return run_until([=] {
    auto streams = all_streams();
    return std::all_of(streams.begin(), streams.end(), [=](const Stream* stream) {
      return stream->device != device || (stream->queue.empty() && !stream->is_running);
    });
  });
}

cudaError_t finish(const std::shared_ptr<Mark>& mark) {
  return run_until([=] { return mark->is_done; });
}

// The end of what a stream has been given so far, for another stream to wait for.
static void wait_for_end(Stream* waiting, Stream* stream) {
  if (stream == waiting || (stream->queue.empty() && !stream->is_running)) return;
  auto mark = std::make_shared<Mark>();
  stream->queue.push_back({"end", nullptr, nullptr, mark});
  waiting->queue.push_back({"wait", nullptr, mark, nullptr});
}

cudaError_t enqueue(Stream* stream, Work work) {
  if (!streams_are_lazy()) {
    auto error = run(work);
    complete(work);
    return error;
  }
  {
    Lock lock(mutex());
    // CUDA rule: the legacy stream and streams that do not say otherwise wait for each other.
    if (is_legacy(stream)) {
      for (auto* other : made_streams()) {
        bool blocks = !(other->flags & cudaStreamNonBlocking);
        if (blocks && other->device == stream->device) wait_for_end(stream, other);
      }
    } else if (!(stream->flags & cudaStreamNonBlocking)) {
      wait_for_end(stream, &legacy_streams[stream->device]);
    }
    stream->queue.push_back(std::move(work));
  }
  // Some work runs as early as it can, some as late.
  for (size_t count = random_below(3); count > 0; count--) run_one();
  return cudaSuccess;
}

cudaError_t submit(Stream* stream, cudaGraphNodeType type, const std::string& name, Action run,
                   Kernel* kernel, std::vector<Access> accesses, bool meets_others) {
  {
    Lock lock(mutex());
    if (auto error = refuse_implicit(stream, name.c_str())) return error;
    if (auto* capture = stream->capture) {
      if (capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
      auto node = std::make_unique<Node>();
      node->type = type;
      node->name = name;
      node->dependencies = stream->dependencies;
      node->run = std::move(run);
      node->kernel = kernel;
      node->accesses = std::move(accesses);
      node->meets_others = meets_others;
      node->index = capture->graph->nodes.size();
      stream->dependencies = {node.get()};
      capture->graph->nodes.push_back(std::move(node));
      count_launch(true);
      return cudaSuccess;
    }
  }
  count_launch(false);
  count_run(type, bytes_of(accesses));
  return enqueue(stream, {name, std::move(run), nullptr, nullptr, meets_others});
}

static cudaError_t new_stream(cudaStream_t* handle, unsigned flags, int priority) {
  Lock lock(mutex());
  auto* stream = new Stream;
  stream->flags = flags;
  stream->priority = priority;
  stream->device = current_device();
  made_streams().insert(stream);
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

// The host asks for, or waits for, a stream: neither is allowed while it is captured.
static cudaError_t refuse_host(Stream* stream, const char* what) {
  Lock lock(mutex());
  if (stream->capture) {
    invalidate(stream->capture, what);
    return cudaErrorStreamCaptureUnsupported;
  }
  if (auto error = refuse_implicit(stream, what)) return error;
  return refuse_unsafe(what);
}

}  // namespace stand_in

using namespace stand_in;

// The stream of a device that is behind a handle, as a handle that means the same on every device:
// the legacy stream's is that of the current one.
STAND_IN_API cudaStream_t stand_in_stream(cudaStream_t handle, int device) {
  if (handle != nullptr && handle != cudaStreamLegacy) return handle;
  legacy_streams[device].device = device;
  return reinterpret_cast<cudaStream_t>(&legacy_streams[device]);
}

STAND_IN_API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return new_stream(stream, cudaStreamDefault, 0);
}
STAND_IN_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return new_stream(stream, flags, 0);
}
STAND_IN_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                                      int priority) {
  return new_stream(stream, flags, priority);
}
STAND_IN_API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  auto* stream = stream_of(handle);
  finish(stream);
  Lock lock(mutex());
  if (stream->capture) {
    invalidate(stream->capture, "cudaStreamDestroy");
    stream->capture->streams.erase(stream);
  }
  // Not freed: PyTorch never destroys its streams, and a stale handle is to fail, not to crash.
  made_streams().erase(stream);
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  *priority = stream_of(handle)->priority;
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  auto* stream = stream_of(handle);
  if (auto error = refuse_host(stream, __func__)) RETURN(error);
  run_one();
  Lock lock(mutex());
  RETURN(stream->queue.empty() && !stream->is_running ? cudaSuccess : cudaErrorNotReady);
}
STAND_IN_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  auto* stream = stream_of(handle);
  if (auto error = refuse_host(stream, __func__)) RETURN(error);
  count_wait();
  RETURN(finish(stream));
}
STAND_IN_API cudaError_t cudaDeviceSynchronize() {
  if (auto error = refuse_in_any_capture(__func__)) RETURN(error);
  count_wait();
  // CUDA rule: of the current device alone.
  RETURN(finish_device(current_device()));
}
STAND_IN_API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function,
                                            void* argument) {
  auto run = [=] {
    function(argument);
    return cudaSuccess;
  };
  RETURN(submit(stream_of(handle), cudaGraphNodeTypeHost, "host", run));
}
STAND_IN_API cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function,
                                               void* argument, unsigned) {
  auto* stream = stream_of(handle);
  if (stream->capture) {
    Lock lock(mutex());
    invalidate(stream->capture, __func__);
    RETURN(cudaErrorStreamCaptureUnsupported);
  }
  auto run = [=] {
    function(handle, cudaSuccess, argument);
    return cudaSuccess;
  };
  RETURN(enqueue(stream, {"callback", run, nullptr, nullptr}));
}

// ---- events ----

STAND_IN_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  auto* event = new Event;
  event->flags = flags;
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaEventCreate(cudaEvent_t* handle) {
  return cudaEventCreateWithFlags(handle, cudaEventDefault);
}
STAND_IN_API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete reinterpret_cast<Event*>(handle);
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on,
                                                  unsigned flags) {
  auto* event = reinterpret_cast<Event*>(handle);
  auto* stream = stream_of(on);
  auto mark = std::make_shared<Mark>();
  {
    Lock lock(mutex());
    if (auto error = refuse_implicit(stream, __func__)) RETURN(error);
    if (stream->capture && (flags & cudaEventRecordExternal)) {
      auto run = [=] {
        mark->is_done = true;
        mark->at_ms = now_ms();
        return cudaSuccess;
      };
      event->is_recorded = true;
      event->capture_id = 0;
      event->mark = mark;
      RETURN(submit(stream, cudaGraphNodeTypeEventRecord, "event record", run));
    }
    if (stream->capture) {
      if (stream->capture->is_invalid) RETURN(cudaErrorStreamCaptureInvalidated);
      event->is_recorded = true;
      event->capture_id = stream->capture->id;
      event->dependencies = stream->dependencies;
      event->mark = nullptr;
      return cudaSuccess;
    }
    event->is_recorded = true;
    event->capture_id = 0;
    event->dependencies.clear();
    event->mark = mark;
  }
  RETURN(enqueue(stream, {"event", nullptr, nullptr, mark}));
}
STAND_IN_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}
STAND_IN_API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t of, unsigned flags) {
  auto* event = reinterpret_cast<Event*>(of);
  auto* stream = stream_of(handle);
  std::unique_lock<std::recursive_mutex> lock(mutex());
  auto* own = stream->capture;
  if (own && own->is_invalid) RETURN(cudaErrorStreamCaptureInvalidated);
  if (own && (flags & cudaEventWaitExternal)) {
    auto run = [] { return cudaSuccess; };
    RETURN(submit(stream, cudaGraphNodeTypeWaitEvent, "wait event", run));
  }
  if (!event->is_recorded) return cudaSuccess;
  if (event->mark) {
    if (own) {
      invalidate(own, "a wait for an event from outside");
      RETURN(cudaErrorStreamCaptureIsolation);
    }
    auto mark = event->mark;
    lock.unlock();
    RETURN(streams_are_lazy() ? enqueue(stream, {"wait", nullptr, mark, nullptr}) : cudaSuccess);
  }
  auto found = captures().find(event->capture_id);
  if (found == captures().end()) {
    if (!own) RETURN(cudaErrorCapturedEvent);
    invalidate(own, "a wait for an event of a capture that has ended");
    RETURN(cudaErrorStreamCaptureIsolation);
  }
  auto* capture = found->second;
  if (capture->is_invalid) RETURN(cudaErrorStreamCaptureInvalidated);
  if (is_legacy(stream)) {
    invalidate(capture, "the legacy stream waits for it");
    RETURN(cudaErrorStreamCaptureImplicit);
  }
  if (own && own != capture) {
    invalidate(capture, "two captures meet");
    invalidate(own, "two captures meet");
    RETURN(cudaErrorStreamCaptureMerge);
  }
  if (!own) {  // the stream joins the capture
    stream->capture = capture;
    stream->dependencies.clear();
    capture->streams.insert(stream);
  }
  auto& known = stream->dependencies;
  for (auto* node : event->dependencies) {
    if (std::find(known.begin(), known.end(), node) == known.end()) known.push_back(node);
  }
  return cudaSuccess;
}

// The host asks for, or waits for, an event.
static cudaError_t refuse_host(Event* event, const char* what) {
  Lock lock(mutex());
  if (event->is_recorded && !event->mark) {
    auto found = captures().find(event->capture_id);
    if (found != captures().end()) invalidate(found->second, what);
    return cudaErrorCapturedEvent;
  }
  return refuse_unsafe(what);
}

STAND_IN_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  if (auto error = refuse_host(event, __func__)) RETURN(error);
  run_one();
  Lock lock(mutex());
  RETURN(!event->mark || event->mark->is_done ? cudaSuccess : cudaErrorNotReady);
}
STAND_IN_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  if (auto error = refuse_host(event, __func__)) RETURN(error);
  count_wait();
  auto mark = event->mark;
  RETURN(mark ? finish(mark) : cudaSuccess);
}
STAND_IN_API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  auto* start = reinterpret_cast<Event*>(from);
  auto* end = reinterpret_cast<Event*>(to);
  for (auto* event : {start, end}) {
    bool keeps_time = event->is_recorded && !(event->flags & cudaEventDisableTiming);
    if (!keeps_time) RETURN(cudaErrorInvalidResourceHandle);
    if (!event->mark) RETURN(cudaErrorCapturedEvent);
    if (!event->mark->is_done) RETURN(cudaErrorNotReady);
  }
  *ms = static_cast<float>(end->mark->at_ms - start->mark->at_ms);
  return cudaSuccess;
}
