// What has run on devices, and what the host has asked for: numbers for tables and tests.
#include "stand_in.h"

namespace stand_in {

namespace {

// As library.py reads it.
struct Counts {
  long kernels, copies, fills, others;  // that have run, also as nodes of graphs
  long moved_bytes;                     // read and written by copies, written by fills
  long graphs;                          // launched
  long calls;                           // that gave a stream work to run: kernels, copies, graphs
  long waits;                           // of the host, for a stream, an event or a device
  long launches;                        // of kernels, copies and fills, also into captures
};

Counts& counts() {
  static auto* made = new Counts{};
  return *made;
}

}  // namespace

size_t bytes_of(const std::vector<Access>& accesses) {
  size_t found = 0;
  for (auto& access : accesses) found += access.end - access.begin;
  return found;
}

void count_run(cudaGraphNodeType type, size_t num_bytes) {
  Lock lock(mutex());
  auto& found = counts();
  switch (type) {
    case cudaGraphNodeTypeKernel: found.kernels++; return;
    case cudaGraphNodeTypeMemcpy: found.copies++; break;
    case cudaGraphNodeTypeMemset: found.fills++; break;
    case cudaGraphNodeTypeGraph: found.graphs++; return;
    default: found.others++; return;
  }
  found.moved_bytes += static_cast<long>(num_bytes);
}

void count_launch(bool is_captured) {
  Lock lock(mutex());
  counts().launches++;
  counts().calls += !is_captured;
}

void count_wait() {
  Lock lock(mutex());
  counts().waits++;
}

}  // namespace stand_in

STAND_IN_API void stand_in_counts(long* into) {
  stand_in::Lock lock(stand_in::mutex());
  *reinterpret_cast<stand_in::Counts*>(into) = stand_in::counts();
}
