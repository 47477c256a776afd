#include "cistern/tasks/order.h"

#include <numeric>
#include <utility>

#include "cistern/base/random.h"

namespace cistern {

int64_t ShuffledOrder::At(uint64_t seed, int64_t index) const {
  const std::lock_guard lock(mutex_);
  const int64_t epoch = index / count_;
  if (epoch != epoch_ || seed != seed_) {
    order_.resize(size_t(count_));
    std::iota(order_.begin(), order_.end(), int64_t{0});
    Random random(seed, 0x5u + uint64_t(epoch) * 16);
    for (int64_t i = count_ - 1; i > 0; --i) std::swap(order_[size_t(i)], order_[size_t(random.Below(i + 1))]);
    epoch_ = epoch;
    seed_ = seed;
  }
  return order_[size_t(index % count_)];
}

}  // namespace cistern
