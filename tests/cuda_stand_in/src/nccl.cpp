// NCCL: every collective is one kernel; the ranks are processes that exchange through shared
// memory, piece by piece. Sums are made in the order of the ranks, and rounded after each.
#include <nccl.h>

#include <cstdio>
#include <cstring>
#include <random>

#include "nccl_memory.h"
#include "nccl_numbers.h"
#include "stand_in.h"

using namespace stand_in;

namespace {

struct Exchange {
  Communicator* communicator;
  const char* name;
  const char* from;
  char* to;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t operation;
  int root;
};

Communicator* get(const ncclComm_t handle) {
  return reinterpret_cast<Communicator*>(const_cast<ncclComm*>(handle));
}

// Elements of all pieces together that a slot takes; `num_pieces` of them lie side by side.
size_t piece_of(const Exchange& e, size_t num_pieces) {
  return SLOT_BYTES / num_pieces / width_of(e.type);
}

// Writes pieces into this rank's slot, waits for all, reads from theirs, waits again.
bool in_turns(const Exchange& e, size_t piece, const std::function<void(size_t, size_t)>& write,
              const std::function<void(size_t, size_t)>& read) {
  for (size_t start = 0; start < e.count; start += piece) {
    size_t count = std::min(piece, e.count - start);
    write(start, count);
    if (!e.communicator->barrier(e.name)) return false;
    read(start, count);
    if (!e.communicator->barrier(e.name)) return false;
  }
  return true;
}

bool reduce(const Exchange& e, bool for_everybody) {
  auto& c = *e.communicator;
  size_t width = width_of(e.type);
  auto write = [&](size_t start, size_t count) {
    memcpy(c.slot(c.rank()), e.from + start * width, count * width);
  };
  auto read = [&](size_t start, size_t count) {
    if (!for_everybody && c.rank() != e.root) return;
    std::vector<const char*> parts;
    for (int rank = 0; rank < c.num_ranks(); rank++) parts.push_back(c.slot(rank));
    combine(e.to + start * width, parts, count, e.type, e.operation);
  };
  return in_turns(e, piece_of(e, 1), write, read);
}

bool all_gather(const Exchange& e) {
  auto& c = *e.communicator;
  size_t width = width_of(e.type);
  auto write = [&](size_t start, size_t count) {
    memcpy(c.slot(c.rank()), e.from + start * width, count * width);
  };
  auto read = [&](size_t start, size_t count) {
    for (int rank = 0; rank < c.num_ranks(); rank++) {
      memcpy(e.to + (rank * e.count + start) * width, c.slot(rank), count * width);
    }
  };
  return in_turns(e, piece_of(e, 1), write, read);
}

// Each rank has a part for each: sums of them, or, all to all, the parts themselves.
bool scatter(const Exchange& e, bool reduces) {
  auto& c = *e.communicator;
  size_t width = width_of(e.type), piece = piece_of(e, c.num_ranks());
  auto write = [&](size_t start, size_t count) {
    for (int rank = 0; rank < c.num_ranks(); rank++) {
      auto* part = e.from + (rank * e.count + start) * width;
      memcpy(c.slot(c.rank()) + rank * piece * width, part, count * width);
    }
  };
  auto read = [&](size_t start, size_t count) {
    std::vector<const char*> parts;
    for (int rank = 0; rank < c.num_ranks(); rank++) {
      parts.push_back(c.slot(rank) + c.rank() * piece * width);
    }
    if (reduces) {
      combine(e.to + start * width, parts, count, e.type, e.operation);
      return;
    }
    for (int rank = 0; rank < c.num_ranks(); rank++) {
      memcpy(e.to + (rank * e.count + start) * width, parts[rank], count * width);
    }
  };
  return in_turns(e, piece, write, read);
}

bool broadcast(const Exchange& e) {
  auto& c = *e.communicator;
  size_t width = width_of(e.type);
  auto write = [&](size_t start, size_t count) {
    if (c.rank() == e.root) memcpy(c.slot(c.rank()), e.from + start * width, count * width);
  };
  auto read = [&](size_t start, size_t count) {
    memcpy(e.to + start * width, c.slot(e.root), count * width);
  };
  return in_turns(e, piece_of(e, 1), write, read);
}

// Whether this is a machine with an NVSwitch, where NCCL may register; a test chooses.
bool registers_in_captures() {
  const char* registers = getenv("NCCL_GRAPH_REGISTER");
  return number_from_environment("CUDA_STAND_IN_NVLS", 0) && !(registers && !strcmp(registers, "0"));
}

// What a kernel ends with. NCCL rule: one that was aborted leaves without an error, and without
// having written anything that is of use.
cudaError_t ended(const Communicator& c, bool is_done) {
  return is_done || c.is_aborted() ? cudaSuccess : cudaErrorLaunchFailure;
}

// Puts a collective on a stream. `num_read` and `num_written` are elements of this rank.
ncclResult_t collective(const Exchange& e, size_t num_read, size_t num_written,
                        cudaStream_t stream, std::function<bool(const Exchange&)> exchange) {
  if (!e.communicator || !e.communicator->is_joined()) return ncclInvalidArgument;
  bool is_captured = stream_of(stream)->capture;
  // NCCL rule: buffers of captured NVLS collectives are registered by an exchange of all local ranks
  // on the host, without a look at the abort flag (transport/nvls.cc, misc/shmutils.cc).
  if (is_captured && registers_in_captures() && !strcmp(e.name, "AllReduce")) {
    e.communicator->barrier("the registration of a captured AllReduce");
  }
  auto held = is_captured ? e.communicator->in_graph() : nullptr;
  Action run = [e, exchange, held] {
    std::lock_guard<std::mutex> alone(e.communicator->in_use);
    Description description{};
    description.number = ++e.communicator->num_collectives;
    description.count = e.count;
    description.type = e.type;
    description.operation = e.operation;
    description.root = e.root;
    snprintf(description.name, sizeof description.name, "%s", e.name);
    return ended(*e.communicator, e.communicator->agree(description) && exchange(e));
  };
  size_t width = width_of(e.type);
  auto name = std::string("ncclDevKernel_") + e.name;
  std::vector<Access> accesses = {reads(e.from, num_read * width),
                                  writes(e.to, num_written * width)};
  auto error = fail(submit(stream_of(stream), cudaGraphNodeTypeKernel, name, run,
                           kernel_named(name), std::move(accesses), /*meets_others=*/true),
                    e.name);
  return error ? ncclUnhandledCudaError : ncclSuccess;
}

// ---- sends and receives: a group of them is one kernel ----

struct Letter {
  bool is_send;
  char* bytes;
  size_t num_bytes;
  int peer;
};

struct Group {
  int depth = 0;
  Communicator* communicator = nullptr;
  cudaStream_t stream = nullptr;
  std::vector<Letter> letters;
};

thread_local Group group;

bool exchange_letters(Communicator& c, std::vector<Letter> letters) {
  std::vector<size_t> done(letters.size());
  auto start = now_ms();
  for (bool all_done = false; !all_done;) {
    all_done = true;
    bool has_moved = false;
    int awaited = c.rank();
    std::set<std::pair<int, bool>> busy;  // letters to one rank go one after the other
    for (size_t index = 0; index < letters.size(); index++) {
      auto& letter = letters[index];
      if (done[index] == letter.num_bytes) continue;
      all_done = false;
      awaited = letter.peer;
      if (!busy.insert({letter.peer, letter.is_send}).second) continue;
      auto& box = letter.is_send ? c.mailbox(c.rank(), letter.peer)
                                 : c.mailbox(letter.peer, c.rank());
      if (static_cast<bool>(box.is_full) == letter.is_send) continue;
      size_t rest = letter.num_bytes - done[index];
      if (letter.is_send) {
        box.num_bytes = static_cast<uint32_t>(std::min(rest, MAIL_BYTES));
        memcpy(box.bytes, letter.bytes + done[index], box.num_bytes);
      } else {
        memcpy(letter.bytes + done[index], box.bytes, std::min<size_t>(rest, box.num_bytes));
      }
      done[index] += std::min<size_t>(rest, box.num_bytes);
      box.is_full = letter.is_send;
      has_moved = true;
    }
    if (!all_done && !has_moved && !c.wait("sends and receives", start, awaited)) return false;
  }
  return true;
}

ncclResult_t end_letters() {
  auto letters = std::move(group.letters);
  auto* communicator = group.communicator;
  group.letters.clear();
  if (letters.empty()) return ncclSuccess;
  auto held = stream_of(group.stream)->capture ? communicator->in_graph() : nullptr;
  Action run = [communicator, letters, held] {
    std::lock_guard<std::mutex> alone(communicator->in_use);
    return ended(*communicator, exchange_letters(*communicator, letters));
  };
  std::vector<Access> accesses;
  for (auto& letter : letters) {
    accesses.push_back(letter.is_send ? reads(letter.bytes, letter.num_bytes)
                                      : writes(letter.bytes, letter.num_bytes));
  }
  const char* name = "ncclDevKernel_SendRecv";
  auto error = fail(submit(stream_of(group.stream), cudaGraphNodeTypeKernel, name, run,
                           kernel_named(name), std::move(accesses), /*meets_others=*/true),
                    name);
  return error ? ncclUnhandledCudaError : ncclSuccess;
}

ncclResult_t post(bool is_send, void* bytes, size_t num_bytes, int peer, ncclComm_t communicator,
                  cudaStream_t stream) {
  group.communicator = get(communicator);
  group.stream = stream;
  group.letters.push_back({is_send, static_cast<char*>(bytes), num_bytes, peer});
  return group.depth ? ncclSuccess : end_letters();
}

ncclResult_t make(ncclComm_t* handle, const std::string& name, int num_ranks, int rank) {
  auto* made = new Communicator(name, num_ranks, rank);
  *handle = reinterpret_cast<ncclComm_t>(made);
  return made->is_joined() ? ncclSuccess : ncclSystemError;
}

std::string name_of(const ncclUniqueId& id) { return std::string("/stand_in_nccl_") + id.internal; }

}  // namespace

// ---- communicators ----

STAND_IN_API ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
STAND_IN_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%08x%08x%08x", random(), random(), random());
  return ncclSuccess;
}
STAND_IN_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int num_ranks,
                                                 ncclUniqueId id, int rank, ncclConfig_t*) {
  return make(communicator, name_of(id), num_ranks, rank);
}
STAND_IN_API ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int num_ranks,
                                           ncclUniqueId id, int rank) {
  return make(communicator, name_of(id), num_ranks, rank);
}
STAND_IN_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* communicator, int num_ranks,
                                                   int rank, int, ncclUniqueId* ids,
                                                   ncclConfig_t*) {
  return make(communicator, name_of(ids[0]), num_ranks, rank);
}
STAND_IN_API ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key,
                                        ncclComm_t* communicator, ncclConfig_t*) {
  auto& c = *get(parent);
  c.place(c.rank()).color = color;
  c.place(c.rank()).key = key;
  int number = ++c.num_splits;
  if (!c.barrier("a split")) return ncclSystemError;
  std::vector<std::pair<int, int>> members;  // keys and ranks
  for (int rank = 0; rank < c.num_ranks(); rank++) {
    if (c.place(rank).color == color) members.push_back({c.place(rank).key, rank});
  }
  if (!c.barrier("a split")) return ncclSystemError;
  *communicator = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::sort(members.begin(), members.end());
  int rank = 0;
  while (members[rank].second != c.rank()) rank++;
  auto name = c.name() + "_" + std::to_string(number) + "_" + std::to_string(color);
  return make(communicator, name, static_cast<int>(members.size()), rank);
}
STAND_IN_API ncclResult_t ncclCommFinalize(ncclComm_t communicator) {
  get(communicator)->wait_for_graphs(__func__);
  return ncclSuccess;
}
STAND_IN_API ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  get(communicator)->wait_for_graphs(__func__);
  finish_all();
  delete get(communicator);
  return ncclSuccess;
}
STAND_IN_API ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  // Not freed: a thread may be inside. NCCL takes one that is null.
  if (!communicator) return ncclSuccess;
  get(communicator)->abort();
  get(communicator)->wait_for_graphs(__func__);
  return ncclSuccess;
}
STAND_IN_API ncclResult_t ncclCommCount(const ncclComm_t communicator, int* count) {
  *count = get(communicator)->num_ranks();
  return ncclSuccess;
}
STAND_IN_API ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int* rank) {
  *rank = get(communicator)->rank();
  return ncclSuccess;
}
STAND_IN_API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
STAND_IN_API ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}
STAND_IN_API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
STAND_IN_API const char* ncclGetErrorString(ncclResult_t) { return "an error of the stand-in"; }
STAND_IN_API const char* ncclGetLastError(ncclComm_t) { return ""; }
STAND_IN_API ncclResult_t ncclGroupStart() {
  group.depth++;
  return ncclSuccess;
}
STAND_IN_API ncclResult_t ncclGroupEnd() {
  return --group.depth ? ncclSuccess : end_letters();
}
STAND_IN_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* operation, void* scalar,
                                                   ncclDataType_t type,
                                                   ncclScalarResidence_t residence, ncclComm_t) {
  *operation = factor_operation(scalar, type, residence == ncclScalarDevice);
  return ncclSuccess;
}
STAND_IN_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

// ---- collectives ----

STAND_IN_API ncclResult_t ncclAllReduce(const void* from, void* to, size_t count,
                                        ncclDataType_t type, ncclRedOp_t operation,
                                        ncclComm_t communicator, cudaStream_t stream) {
  Exchange e{get(communicator), "AllReduce", static_cast<const char*>(from),
             static_cast<char*>(to), count, type, operation, -1};
  return collective(e, count, count, stream, [](const Exchange& x) { return reduce(x, true); });
}
STAND_IN_API ncclResult_t ncclReduce(const void* from, void* to, size_t count,
                                     ncclDataType_t type, ncclRedOp_t operation, int root,
                                     ncclComm_t communicator, cudaStream_t stream) {
  Exchange e{get(communicator), "Reduce", static_cast<const char*>(from),
             static_cast<char*>(to), count, type, operation, root};
  size_t num_written = e.communicator->rank() == root ? count : 0;
  return collective(e, count, num_written, stream,
                    [](const Exchange& x) { return reduce(x, false); });
}
STAND_IN_API ncclResult_t ncclBroadcast(const void* from, void* to, size_t count,
                                        ncclDataType_t type, int root, ncclComm_t communicator,
                                        cudaStream_t stream) {
  Exchange e{get(communicator), "Broadcast", static_cast<const char*>(from),
             static_cast<char*>(to), count, type, ncclSum, root};
  size_t num_read = e.communicator->rank() == root ? count : 0;
  return collective(e, num_read, count, stream, broadcast);
}
STAND_IN_API ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root,
                                    ncclComm_t communicator, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, communicator, stream);
}
STAND_IN_API ncclResult_t ncclAllGather(const void* from, void* to, size_t count,
                                        ncclDataType_t type, ncclComm_t communicator,
                                        cudaStream_t stream) {
  Exchange e{get(communicator), "AllGather", static_cast<const char*>(from),
             static_cast<char*>(to), count, type, ncclSum, -1};
  return collective(e, count, count * e.communicator->num_ranks(), stream, all_gather);
}
STAND_IN_API ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count,
                                            ncclDataType_t type, ncclRedOp_t operation,
                                            ncclComm_t communicator, cudaStream_t stream) {
  Exchange e{get(communicator), "ReduceScatter", static_cast<const char*>(from),
             static_cast<char*>(to), count, type, operation, -1};
  return collective(e, count * e.communicator->num_ranks(), count, stream,
                    [](const Exchange& x) { return scatter(x, true); });
}
STAND_IN_API ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count,
                                       ncclDataType_t type, ncclComm_t communicator,
                                       cudaStream_t stream) {
  Exchange e{get(communicator), "AlltoAll", static_cast<const char*>(from),
             static_cast<char*>(to), count, type, ncclSum, -1};
  size_t total = count * e.communicator->num_ranks();
  return collective(e, total, total, stream, [](const Exchange& x) { return scatter(x, false); });
}
STAND_IN_API ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                                   ncclComm_t communicator, cudaStream_t stream) {
  return post(true, const_cast<void*>(from), count * width_of(type), peer, communicator, stream);
}
STAND_IN_API ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer,
                                   ncclComm_t communicator, cudaStream_t stream) {
  return post(false, to, count * width_of(type), peer, communicator, stream);
}
