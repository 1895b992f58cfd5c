// Missing dependencies: nodes that touch the same memory, or that meet other ranks, while neither
// waits for the other. A GPU shows such a race once in a thousand runs; here it follows from the
// graph.
#include "stand_in.h"

#include <algorithm>
#include <cstring>

namespace stand_in {

namespace {

struct Touch {
  Access access;
  size_t node;
};

// For each node, which others it comes after, as one bit each.
class Order {
 public:
  explicit Order(const Graph& graph)
      : num_words_((graph.nodes.size() + 63) / 64), before_(graph.nodes.size() * num_words_) {
    for (auto& node : graph.nodes) {
      for (auto* dependency : node->dependencies) {
        add(node->index, dependency->index);
      }
    }
  }

  bool knows(size_t one, size_t other) const {
    return is_before(one, other) || is_before(other, one);
  }

 private:
  // Nodes are in the order of their capture, so a dependency is complete when it is added.
  void add(size_t node, size_t dependency) {
    auto* words = &before_[node * num_words_];
    auto* more = &before_[dependency * num_words_];
    for (size_t word = 0; word < num_words_; word++) words[word] |= more[word];
    words[dependency / 64] |= uint64_t{1} << (dependency % 64);
  }
  bool is_before(size_t one, size_t other) const {
    return before_[other * num_words_ + one / 64] >> (one % 64) & 1;
  }

  size_t num_words_;
  std::vector<uint64_t> before_;
};

std::string& found_races() {
  static auto* text = new std::string;
  return *text;
}

std::string describe(const Node& node) {
  auto text = "node " + std::to_string(node.index) + " (" + node.name;
  return text + (node.operator_.empty() ? "" : ", " + node.operator_) + ")";
}

void note(const Node& one, const Node& other, size_t num_bytes) {
  found_races() += describe(one) + " and " + describe(other) + " touch the same " +
                   std::to_string(num_bytes) + " bytes, and neither waits for the other\n";
}

// Each rank may run collectives on parallel branches in another order, whatever communicators they
// have; then each waits for the other.
void note_loose_collectives(const Graph& graph, const Order& order) {
  const Node* last = nullptr;
  for (auto& node : graph.nodes) {
    if (!node->meets_others) continue;
    if (last && !order.knows(last->index, node->index)) {
      found_races() += describe(*last) + " and " + describe(*node) +
                       " meet other ranks, and neither waits for the other\n";
    }
    last = node.get();
  }
}

}  // namespace

Access reads(const void* from, size_t num_bytes) {
  auto* begin = static_cast<const char*>(from);
  return {begin, begin + num_bytes, false};
}

Access writes(const void* to, size_t num_bytes) {
  auto access = reads(to, num_bytes);
  access.writes = true;
  return access;
}

void note_races(const Graph& graph) {
  std::vector<Touch> touches;
  for (auto& node : graph.nodes) {
    for (auto& access : node->accesses) touches.push_back({access, node->index});
  }
  std::sort(touches.begin(), touches.end(), [](const Touch& one, const Touch& other) {
    return one.access.begin < other.access.begin;
  });
  Order order(graph);
  note_loose_collectives(graph, order);
  std::set<std::pair<size_t, size_t>> told;
  std::vector<Touch> open;  // begin before the one that is looked at, and may reach into it
  for (auto& touch : touches) {
    auto is_over = [&](const Touch& other) { return other.access.end <= touch.access.begin; };
    open.erase(std::remove_if(open.begin(), open.end(), is_over), open.end());
    for (auto& other : open) {
      if (other.node == touch.node || !(other.access.writes || touch.access.writes)) continue;
      if (order.knows(other.node, touch.node)) continue;
      auto pair = std::minmax(other.node, touch.node);
      if (!told.insert(pair).second) continue;
      auto end = std::min(other.access.end, touch.access.end);
      note(*graph.nodes[pair.first], *graph.nodes[pair.second], end - touch.access.begin);
    }
    open.push_back(touch);
  }
}

}  // namespace stand_in

using namespace stand_in;

// Moves up to `size` characters of what was found so far.
STAND_IN_API void stand_in_take_races(char* text, size_t size) {
  Lock lock(mutex());
  auto found = found_races().substr(0, size - 1);
  found_races().clear();
  memcpy(text, found.c_str(), found.size() + 1);
}
