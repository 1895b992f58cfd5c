// Ranks find each other in a file of shared memory, wait for each other, and compare what they do.
#include "nccl_memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <thread>

#include "stand_in.h"

namespace stand_in {

static double limit_ms() {
  return 1e3 * number_from_environment("CUDA_STAND_IN_NCCL_LIMIT_S", 60);
}

static std::string describe(const Description& description) {
  char text[160];
  snprintf(text, sizeof text, "%s of %llu elements (type %d, operation %d, root %d) as number %llu",
           description.name, static_cast<unsigned long long>(description.count), description.type,
           description.operation, description.root,
           static_cast<unsigned long long>(description.number));
  return text;
}

Communicator::Communicator(std::string name, int num_ranks, int rank)
    : name_(std::move(name)), num_ranks_(num_ranks), rank_(rank) {
  if (num_ranks > MAX_RANKS) return;
  size_t header = (sizeof(SharedMemory) + 4095) / 4096 * 4096;
  size_t pairs = static_cast<size_t>(num_ranks) * num_ranks;
  num_bytes_ = header + num_ranks * SLOT_BYTES + pairs * sizeof(Mailbox);
  int file = shm_open(name_.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, static_cast<off_t>(num_bytes_)) != 0) {
    perror("[stand-in] shared memory of a communicator");
    return;
  }
  void* mapped = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return;
  memory_ = static_cast<SharedMemory*>(mapped);
  slots_ = static_cast<char*>(mapped) + header;
  mailboxes_ = reinterpret_cast<Mailbox*>(slots_ + num_ranks * SLOT_BYTES);
  place(rank_).process = getpid();
  memory_->num_attached++;
  if (!barrier("the first meeting")) {
    munmap(mapped, num_bytes_);
    memory_ = nullptr;
  }
  if (rank_ == 0) shm_unlink(name_.c_str());  // everybody has it, and it goes with the last
}

Communicator::~Communicator() {
  if (memory_) munmap(memory_, num_bytes_);
}

bool Communicator::wait(const char* what, double since_ms, int awaited_rank) {
  if (is_aborted_ || memory_->is_aborted) {
    fprintf(stderr, "[stand-in] rank %d: %s was aborted%s\n", rank_, what,
            is_aborted_ ? "" : ", since ranks do not fit each other");
    return false;
  }
  // NCCL rule: nobody is told that a rank has ended, and a kernel waits for ever; this limit is for
  // whoever looks for the reason.
  if (now_ms() - since_ms > limit_ms()) {
    auto process = place(awaited_rank).process.load();
    bool is_gone = process && kill(process, 0) != 0;
    fprintf(stderr, "[stand-in] rank %d waits in %s of communicator %s for rank %d, which %s\n",
            rank_, what, name_.c_str(), awaited_rank,
            is_gone ? "has ended" : "does not come: it does something else, or waits elsewhere");
    memory_->is_aborted = 1;
    return false;
  }
  std::this_thread::sleep_for(std::chrono::microseconds(50));
  return true;
}

bool Communicator::barrier(const char* what) {
  auto wanted = ++num_barriers_;
  place(rank_).num_barriers = wanted;
  auto start = now_ms();
  for (int other = 0; other < num_ranks_; other++) {
    for (int spins = 0; place(other).num_barriers < wanted; spins++) {
      if (spins < 100) {
        std::this_thread::yield();
      } else if (!wait(what, start, other)) {
        return false;
      }
    }
  }
  return true;
}

std::shared_ptr<void> Communicator::in_graph() {
  auto count = num_in_graphs_;
  ++*count;
  return std::shared_ptr<void>(nullptr, [count](void*) { --*count; });
}

void Communicator::wait_for_graphs(const char* function) {
  auto count = num_in_graphs_;
  auto start = now_ms();
  for (bool is_told = false; *count > 0;) {
    // A test that looks at this bounds it; NCCL does not.
    bool gives_up = now_ms() - start > 1e3 * number_from_environment("CUDA_STAND_IN_GRAPHS_LIMIT_S", 1 << 30);
    if (!is_told || gives_up) {
      fprintf(stderr, "[stand-in] %s of rank %d waits for graphs that hold %ld of its collectives%s\n",
              function, rank_, count->load(), gives_up ? ": for ever, but for this test" : "");
      is_told = true;
    }
    if (gives_up) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

bool Communicator::agree(const Description& description) {
  place(rank_).description = description;
  if (!barrier(description.name)) return false;
  for (int other = 0; other < num_ranks_; other++) {
    auto& its = place(other).description;
    if (memcmp(&its, &description, sizeof its) == 0) continue;
    fprintf(stderr,
            "[stand-in] ranks of communicator %s do not issue the same collectives: rank %d %s, "
            "rank %d %s\n",
            name_.c_str(), rank_, describe(description).c_str(), other, describe(its).c_str());
    memory_->is_aborted = 1;
    return false;
  }
  return barrier(description.name);  // before anybody describes the next one
}

}  // namespace stand_in
