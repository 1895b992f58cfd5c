// Graphs: their nodes, what may be asked of them, and their launch.
//
// A launch runs the nodes in the order in which they were captured, or, where the test wants it,
// in a random order that the dependencies allow.
#include "stand_in.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>

namespace stand_in {

// A graph that can be launched: a copy, as of CUDA, which outlives the graph.
struct Executable {
  bool meets_others() const {
    return std::any_of(steps.begin(), steps.end(), [](const Step& step) { return step.meets_others; });
  }
  struct Step {
    cudaGraphNodeType type;
    size_t num_bytes;
    std::string name;
    std::vector<size_t> dependencies;
    Action run;
    std::vector<Action> after;
    bool meets_others;
  };
  std::vector<Step> steps;
  std::vector<std::shared_ptr<void>> held;
};

// What a graph keeps until it is destroyed, and each of its executables; counted by hand.
struct UserObject {
  void* object;
  cudaHostFn_t destroy;
  long num_references;

  void release(unsigned count) {
    num_references -= count;
    if (num_references > 0) return;
    // CUDA rule: on a thread of the driver's own, which waits for nobody's locks.
    std::thread(destroy, object).detach();
    delete this;
  }
};

using ExecutableHandle = std::shared_ptr<Executable>;

std::set<const void*>& live_graphs() {
  static auto* graphs = new std::set<const void*>;
  return *graphs;
}

static cudaError_t run(const Executable::Step& step) {
  count_run(step.type, step.num_bytes);
  if (step.run) {
    if (auto error = step.run()) return error;
  }
  for (auto& action : step.after) {
    if (auto error = action()) return error;
  }
  return cudaSuccess;
}

static cudaError_t report(const Executable& graph, size_t index, cudaError_t error) {
  if (error) {
    fprintf(stderr, "[stand-in] node %zu (%s) of a graph failed\n", index,
            graph.steps[index].name.c_str());
  }
  return error;
}

static cudaError_t run_as_captured(const Executable& graph) {
  for (size_t index = 0; index < graph.steps.size(); index++) {
    if (auto error = report(graph, index, run(graph.steps[index]))) return error;
  }
  return cudaSuccess;
}

// One launch in a random order. Nodes that meet other ranks run beside the others: which of
// several comes first is for each rank to choose.
class RandomRun {
 public:
  explicit RandomRun(const Executable& graph)
      : graph_(graph), num_open_(graph.steps.size()), followers_(graph.steps.size()) {
    for (size_t index = 0; index < graph.steps.size(); index++) {
      num_open_[index] = graph.steps[index].dependencies.size();
      for (auto before : graph.steps[index].dependencies) followers_[before].push_back(index);
      if (!num_open_[index]) ready_.push_back(index);
    }
  }

  cudaError_t run_all() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (size_t num_left = graph_.steps.size(); num_left > 0; num_left--) {
      changed_.wait(lock, [&] { return !ready_.empty() || (error_ && !num_beside_); });
      if (error_) break;
      std::swap(ready_[random_below(ready_.size())], ready_.back());
      auto index = ready_.back();
      ready_.pop_back();
      if (graph_.steps[index].meets_others) {
        num_beside_++;
        std::thread([this, index] { finish(index, run(graph_.steps[index]), true); }).detach();
        continue;
      }
      lock.unlock();
      auto error = run(graph_.steps[index]);
      finish(index, error, false);
      lock.lock();
    }
    changed_.wait(lock, [&] { return !num_beside_; });
    return error_;
  }

 private:
  void finish(size_t index, cudaError_t error, bool was_beside) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (report(graph_, index, error)) error_ = error;
    num_beside_ -= was_beside;
    for (auto next : followers_[index]) {
      if (--num_open_[next] == 0) ready_.push_back(next);
    }
    changed_.notify_all();
  }

  const Executable& graph_;
  std::vector<size_t> num_open_;
  std::vector<std::vector<size_t>> followers_;
  std::vector<size_t> ready_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_beside_ = 0;
  cudaError_t error_ = cudaSuccess;
};

static cudaError_t run(const Executable& graph) {
  return orders_are_random() ? RandomRun(graph).run_all() : run_as_captured(graph);
}

// Whether nodes wait for each other in a circle, which an added dependency may have closed.
static bool has_cycle(const Graph& graph) {
  std::vector<size_t> num_open(graph.nodes.size()), ready;
  std::vector<std::vector<size_t>> followers(graph.nodes.size());
  for (auto& node : graph.nodes) {
    num_open[node->index] = node->dependencies.size();
    for (auto* before : node->dependencies) followers[before->index].push_back(node->index);
    if (node->dependencies.empty()) ready.push_back(node->index);
  }
  size_t num_done = 0;
  for (; !ready.empty(); num_done++) {
    auto index = ready.back();
    ready.pop_back();
    for (auto next : followers[index]) {
      if (--num_open[next] == 0) ready.push_back(next);
    }
  }
  return num_done != graph.nodes.size();
}

}  // namespace stand_in

using namespace stand_in;

STAND_IN_API cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes,
                                           size_t* count) {
  Lock lock(mutex());
  if (!live_graphs().count(handle)) RETURN(cudaErrorInvalidValue);
  auto& found = reinterpret_cast<Graph*>(handle)->nodes;
  if (!nodes) {
    *count = found.size();
    return cudaSuccess;
  }
  for (size_t index = 0; index < *count; index++) {
    auto* node = index < found.size() ? found[index].get() : nullptr;
    nodes[index] = reinterpret_cast<cudaGraphNode_t>(node);
  }
  if (*count > found.size()) *count = found.size();
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = reinterpret_cast<Node*>(node)->type;
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node,
                                                      cudaGraphNode_t* dependencies,
                                                      cudaGraphEdgeData*, size_t* count) {
  auto& found = reinterpret_cast<Node*>(node)->dependencies;
  for (size_t index = 0; dependencies && index < *count && index < found.size(); index++) {
    dependencies[index] = reinterpret_cast<cudaGraphNode_t>(found[index]);
  }
  *count = found.size();
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t handle, const char* path, unsigned) {
  Lock lock(mutex());
  if (!live_graphs().count(handle)) RETURN(cudaErrorInvalidValue);
  FILE* file = fopen(path, "w");
  if (!file) RETURN(cudaErrorOperatingSystem);
  fputs("digraph dot {\n", file);
  for (auto& node : reinterpret_cast<Graph*>(handle)->nodes) {
    fprintf(file, "\"node_%zu\" [label=\"%s\"];\n", node->index, node->name.c_str());
    for (auto* before : node->dependencies) {
      fprintf(file, "\"node_%zu\" -> \"node_%zu\";\n", before->index, node->index);
    }
  }
  fputs("}\n", file);
  fclose(file);
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable,
                                                       cudaGraph_t handle, unsigned long long) {
  Lock lock(mutex());
  if (!live_graphs().count(handle)) RETURN(cudaErrorInvalidValue);
  if (has_cycle(*reinterpret_cast<Graph*>(handle))) RETURN(cudaErrorInvalidValue);
  note_races(*reinterpret_cast<Graph*>(handle));
  auto made = std::make_shared<Executable>();
  for (auto& node : reinterpret_cast<Graph*>(handle)->nodes) {
    std::vector<size_t> dependencies;
    for (auto* before : node->dependencies) dependencies.push_back(before->index);
    made->steps.push_back(
        {node->type, bytes_of(node->accesses), node->name, std::move(dependencies), node->run,
         node->after, node->meets_others});
  }
  made->held = reinterpret_cast<Graph*>(handle)->held;
  *executable = reinterpret_cast<cudaGraphExec_t>(new ExecutableHandle(made));
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                              unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
STAND_IN_API cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
  Lock lock(mutex());
  if (!live_graphs().erase(handle)) RETURN(cudaErrorInvalidValue);
  delete reinterpret_cast<Graph*>(handle);
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  // A launch that is still in a queue keeps what it runs.
  delete reinterpret_cast<ExecutableHandle*>(executable);
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaUserObjectCreate(cudaUserObject_t* made, void* object,
                                             cudaHostFn_t destroy, unsigned count, unsigned) {
  *made = reinterpret_cast<cudaUserObject_t>(new UserObject{object, destroy, count});
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaUserObjectRetain(cudaUserObject_t object, unsigned count) {
  Lock lock(mutex());
  reinterpret_cast<UserObject*>(object)->num_references += count;
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  Lock lock(mutex());
  reinterpret_cast<UserObject*>(object)->release(count);
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaGraphRetainUserObject(cudaGraph_t handle, cudaUserObject_t object,
                                                  unsigned count, unsigned flags) {
  Lock lock(mutex());
  if (!live_graphs().count(handle)) RETURN(cudaErrorInvalidValue);
  auto* held = reinterpret_cast<UserObject*>(object);
  if (!(flags & cudaGraphUserObjectMove)) held->num_references += count;
  reinterpret_cast<Graph*>(handle)->held.emplace_back(held, [count](void* gone) {
    Lock again(mutex());
    static_cast<UserObject*>(gone)->release(count);
  });
  return cudaSuccess;
}
STAND_IN_API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  auto graph = *reinterpret_cast<ExecutableHandle*>(executable);
  auto run_graph = [graph] { return run(*graph); };
  RETURN(submit(stream_of(stream), cudaGraphNodeTypeGraph, "graph", run_graph, nullptr, {},
                graph->meets_others()));
}
