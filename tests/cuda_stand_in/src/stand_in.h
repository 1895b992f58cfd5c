// What the files of the stand-in share: streams, events, captures, graphs, memory, kernels.
//
// Handles that programs hold (cudaStream_t, cudaEvent_t, cudaGraph_t, ...) are pointers to these
// structures. Everything is guarded by one lock, which is never held while work runs: work may
// compute in Python, which has a lock of its own.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define STAND_IN_API extern "C" __attribute__((visibility("default")))

namespace stand_in {

using Action = std::function<cudaError_t()>;

// ---- errors (errors.cpp) ----

// Remembers an error for cudaGetLastError, and returns it.
cudaError_t fail(cudaError_t error, const char* function);
#define RETURN(error) return ::stand_in::fail(static_cast<cudaError_t>(error), __func__)

bool is_logging();
void log(const char* format, ...) __attribute__((format(printf, 1, 2)));
void log_stack();
size_t number_from_environment(const char* name, size_t otherwise);

// ---- the lock (streams.cpp) ----

std::recursive_mutex& mutex();
using Lock = std::lock_guard<std::recursive_mutex>;

// ---- memory (memory.cpp) ----

struct Block {
  size_t num_bytes;
  cudaMemoryType kind;
  int device;
};

// The block that holds an address, or null; the lock must be held.
const Block* find_block(const void* address, char** begin = nullptr);
size_t device_bytes();
size_t used_bytes();
// Fills device memory; error 700 where there is none.
cudaError_t fill(void* to, int value, size_t num_bytes);

// ---- kernels (kernels.cpp) ----

// Memory that a node reads or writes.
struct Access {
  const char* begin;
  const char* end;
  bool writes;
};

struct Kernel {
  std::string name;
};

// The memory of copies, fills and collectives, as `submit` takes it.
Access reads(const void* from, size_t num_bytes);
Access writes(const void* to, size_t num_bytes);

// Puts a kernel on a stream; what it computes is attached behind it, but for what `run` does.
cudaError_t launch(Kernel* kernel, dim3 grid, dim3 block, cudaStream_t stream, Action run = nullptr,
                   std::vector<Access> accesses = {});
// One for each name, as for the kernels of libraries that are no files here.
Kernel* kernel_named(const std::string& name);

// ---- graphs (graphs.cpp) ----

struct Graph;

struct Node {
  cudaGraphNodeType type;
  std::string name;
  std::vector<Node*> dependencies;
  Action run;                  // null: computes nothing
  std::vector<Action> after;  // what was attached behind it
  Kernel* kernel = nullptr;
  bool meets_others = false;  // other ranks: it may wait long, and other nodes go on meanwhile
  size_t index = 0;           // in its graph
  std::string operator_;      // that has made it, as far as that is known
  std::vector<Access> accesses;
};

struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
  std::vector<std::shared_ptr<void>> held;  // user objects
};

std::set<const void*>& live_graphs();
// Notes which nodes touch the same memory, one of them writing, while neither waits for the other.
void note_races(const Graph& graph);  // races.cpp

// ---- streams and captures (streams.cpp, capture.cpp) ----

struct Stream;

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  Stream* origin;
  Graph* graph;
  std::set<Stream*> streams;
  bool is_invalid = false;
};

// A place in the work of a stream, which events and other streams wait for.
struct Mark {
  bool is_done = false;
  double at_ms = 0;
};

// One entry of a stream's queue.
struct Work {
  std::string name;
  Action run;                        // null: nothing to do
  std::shared_ptr<Mark> waits_for;  // null: nothing
  std::shared_ptr<Mark> marks;      // done with it; null: nobody asks
  bool meets_others = false;
};

struct Stream {
  unsigned flags = 0;
  int priority = 0;
  int device = 0;
  Capture* capture = nullptr;
  std::vector<Node*> dependencies;  // of the next node, while it is captured
  std::deque<Work> queue;           // empty where streams run at once
  bool is_running = false;
};

struct Event {
  unsigned flags = 0;
  bool is_recorded = false;
  std::shared_ptr<Mark> mark;         // null: recorded in a capture
  unsigned long long capture_id = 0;  // 0: recorded outside of captures
  std::vector<Node*> dependencies;
};

Stream* stream_of(cudaStream_t handle);
bool is_legacy(const Stream* stream);
int current_device();

// Puts work on a stream: a node of the graph where the stream is captured, else into its queue.
cudaError_t submit(Stream* stream, cudaGraphNodeType type, const std::string& name, Action run,
                   Kernel* kernel = nullptr, std::vector<Access> accesses = {},
                   bool meets_others = false);
// Puts work into the queue of a stream that is not captured.
cudaError_t enqueue(Stream* stream, Work work);
cudaError_t finish(Stream* stream);
cudaError_t finish_all();
cudaError_t finish(const std::shared_ptr<Mark>& mark);
// Runs one entry of some queue, if any can run: whoever only asks must see progress.
void run_one();
double now_ms();

std::map<unsigned long long, Capture*>& captures();
void invalidate(Capture* capture, const char* why);
// What CUDA calls potentially unsafe: the capture mode of the thread forbids it.
cudaError_t refuse_unsafe(const char* what);
// Work on the legacy stream would wait for captured streams that block it.
cudaError_t refuse_implicit(const Stream* stream, const char* what);
// No capture may be under way at all.
cudaError_t refuse_in_any_capture(const char* what);
unsigned long long next_id();

// ---- counts (counts.cpp) ----

size_t bytes_of(const std::vector<Access>& accesses);
void count_run(cudaGraphNodeType type, size_t num_bytes);
void count_launch(bool is_captured);
void count_wait();

// ---- what tests choose (control.cpp) ----

bool streams_are_lazy();
// A number below `limit`, from the seed that the test has chosen.
size_t random_below(size_t limit);
bool orders_are_random();

}  // namespace stand_in
