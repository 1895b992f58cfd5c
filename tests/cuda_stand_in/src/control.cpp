// What tests choose: whether streams are lazy, whether graphs run in random orders, and the seed.
#include "stand_in.h"

#include <random>

namespace stand_in {

namespace {

struct Choice {
  size_t streams = number_from_environment("CUDA_STAND_IN_STREAMS", 0);
  size_t order = number_from_environment("CUDA_STAND_IN_ORDER", 0);
  std::mt19937_64 random{streams * 1000003 + order};
};

Choice& choice() {
  static auto* made = new Choice;
  return *made;
}

}  // namespace

bool streams_are_lazy() { return choice().streams != 0; }
bool orders_are_random() { return choice().order != 0; }

size_t random_below(size_t limit) {
  Lock lock(mutex());
  return choice().random() % limit;
}

}  // namespace stand_in

using namespace stand_in;

// Seeds, or 0: streams run at once, graphs in the order of their capture.
STAND_IN_API void stand_in_choose(size_t streams, size_t order) {
  finish_all();
  Lock lock(mutex());
  choice().streams = streams;
  choice().order = order;
  choice().random.seed(streams * 1000003 + order);
}
