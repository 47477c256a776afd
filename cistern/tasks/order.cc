#include "cistern/tasks/order.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "cistern/base/random.h"

namespace cistern {

namespace {

constexpr uint64_t kStreams = 16, kOrderStream = 0x5,
                   kBatchStream = 0x6;  // of random numbers, an epoch

template <class Swap>
void Shuffle(Random& random, int64_t count, Swap swap) {
  for (int64_t i = count - 1; i > 0; --i) swap(i, random.Below(i + 1));
}

}  // namespace

void ShuffledOrder::GroupByLength(uint64_t seed, int64_t epoch, int64_t rows) const {
  constexpr int64_t kPool = 50;
  Random random(seed, kBatchStream + uint64_t(epoch) * kStreams);
  // A batch that the epoch before began takes its first examples as they are.
  for (int64_t begin = (rows - epoch * count_ % rows) % rows; begin < count_;
       begin += kPool * rows) {
    const auto first = order_.begin() + begin,
               last = order_.begin() + std::min(count_, begin + kPool * rows);
    std::stable_sort(first, last, [&](int64_t a, int64_t b) {
      return lengths_[size_t(a)] < lengths_[size_t(b)];
    });
    Shuffle(random, (last - first) / rows, [&](int64_t a, int64_t b) {
      std::swap_ranges(first + a * rows, first + (a + 1) * rows, first + b * rows);
    });
  }
}

int64_t ShuffledOrder::At(uint64_t seed, int64_t index, int64_t rows) const {
  const std::lock_guard lock(mutex_);
  const int64_t epoch = index / count_;
  if (epoch != epoch_ || seed != seed_ || rows != rows_) {
    order_.resize(size_t(count_));
    std::iota(order_.begin(), order_.end(), int64_t{0});
    Random random(seed, kOrderStream + uint64_t(epoch) * kStreams);
    Shuffle(random, count_,
            [&](int64_t a, int64_t b) { std::swap(order_[size_t(a)], order_[size_t(b)]); });
    if (!lengths_.empty()) GroupByLength(seed, epoch, rows);
    epoch_ = epoch;
    rows_ = rows;
    seed_ = seed;
  }
  return order_[size_t(index % count_)];
}

}  // namespace cistern
