// What the ranks of a communicator share: one piece of memory, with a place for each rank's data.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace stand_in {

constexpr int MAX_RANKS = 16;
constexpr size_t SLOT_BYTES = size_t{1} << 20;
constexpr size_t MAIL_BYTES = size_t{1} << 16;

// What a rank is about to do; all ranks of a communicator must say the same.
struct Description {
  uint64_t number;  // of the collective in its communicator
  uint64_t count;
  int32_t type, operation, root;
  char name[40];
};

// A letter from one rank to another, for sends and receives.
struct Mailbox {
  std::atomic<uint32_t> is_full;
  uint32_t num_bytes;
  char bytes[MAIL_BYTES];
};

struct RankPlace {
  std::atomic<uint64_t> num_barriers;
  std::atomic<int32_t> process;
  Description description;
  int32_t color, key;  // of a split
};

struct SharedMemory {
  std::atomic<int32_t> num_attached;
  std::atomic<int32_t> is_aborted;
  RankPlace places[MAX_RANKS];
  // Behind it: a slot for each rank, then a mailbox for each pair.
};

class Communicator {
 public:
  // Joins the ranks that have the same name; waits for all of them.
  Communicator(std::string name, int num_ranks, int rank);
  ~Communicator();

  bool is_joined() const { return memory_ != nullptr; }
  int num_ranks() const { return num_ranks_; }
  int rank() const { return rank_; }
  const std::string& name() const { return name_; }
  RankPlace& place(int rank) { return memory_->places[rank]; }
  char* slot(int rank) { return slots_ + rank * SLOT_BYTES; }
  Mailbox& mailbox(int from, int to) { return mailboxes_[from * num_ranks_ + to]; }

  // Waits for all ranks; false, with a message, if one does not come.
  bool barrier(const char* what);
  // Says what this rank does next, and compares; false, with a message, if another does another.
  bool agree(const Description& description);
  // Waits a moment for others; false, with a message, if there is no hope.
  bool wait(const char* what, double since_ms, int awaited_rank);
  // NCCL rule: kernels of this rank leave. Those of others learn nothing of it.
  void abort() { is_aborted_ = true; }
  bool is_aborted() const { return is_aborted_; }
  // NCCL rule (2.26 and newer, commDestroySync in init.cc): who finalizes, destroys or aborts a
  // communicator waits until every graph that has captured one of its collectives is gone, for ever
  // if need be.
  void wait_for_graphs(const char* function);
  // Held by each captured collective, as a graph holds NCCL's user object.
  std::shared_ptr<void> in_graph();

  std::mutex in_use;  // by one collective of this process at a time
  uint64_t num_collectives = 0;
  int num_splits = 0;

 private:
  std::string name_;
  int num_ranks_, rank_;
  uint64_t num_barriers_ = 0;
  SharedMemory* memory_ = nullptr;
  char* slots_ = nullptr;
  Mailbox* mailboxes_ = nullptr;
  size_t num_bytes_ = 0;
  std::atomic<bool> is_aborted_{false};
  std::shared_ptr<std::atomic<long>> num_in_graphs_ = std::make_shared<std::atomic<long>>(0);
};

}  // namespace stand_in
