#pragma once
// A shuffled order of examples, epoch after epoch, as a pure function of (seed, index): what training sees does not depend on where it
// was interrupted.
#include <cstdint>
#include <mutex>
#include <vector>

namespace cistern {

class ShuffledOrder {
 public:
  explicit ShuffledOrder(int64_t count) : count_(count) {}
  // The example at place `index` of the endless sequence of shuffled epochs.
  int64_t At(uint64_t seed, int64_t index) const;

 private:
  int64_t count_;
  mutable std::mutex mutex_;
  mutable uint64_t seed_ = 0;
  mutable int64_t epoch_ = -1;
  mutable std::vector<int64_t> order_;
};

}  // namespace cistern
