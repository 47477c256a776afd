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

// 0 .. count - 1 in the order of an epoch.
std::vector<int64_t> Shuffled(uint64_t seed, uint64_t stream, int64_t epoch, int64_t count) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), int64_t{0});
  Random random(seed, stream + uint64_t(epoch) * kStreams);
  Shuffle(random, count,
          [&](int64_t a, int64_t b) { std::swap(order[size_t(a)], order[size_t(b)]); });
  return order;
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
    // Left as they are, for an epoch that drops them: sorted they would always be the longest.
    const auto whole = last - (last - first) % rows;
    std::stable_sort(first, whole, [&](int64_t a, int64_t b) {
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
    order_ = Shuffled(seed, kOrderStream, epoch, count_);
    if (!lengths_.empty()) GroupByLength(seed, epoch, rows);
    epoch_ = epoch;
    rows_ = rows;
    seed_ = seed;
  }
  return order_[size_t(index % count_)];
}

TokenBatches::TokenBatches(std::vector<int64_t> lengths, int64_t tokens)
    : lengths_(std::move(lengths)) {
  std::vector<int64_t> sorted = lengths_;
  std::sort(sorted.begin(), sorted.end());
  int64_t begin = 0;
  for (int64_t i = 1; i < int64_t(sorted.size()); ++i) {
    if ((i + 1 - begin) * sorted[size_t(i)] <= tokens) continue;
    ends_.push_back(i);
    begin = i;
  }
  if (!sorted.empty()) ends_.push_back(int64_t(sorted.size()));
}

std::vector<int64_t> TokenBatches::At(uint64_t seed, int64_t index) const {
  const std::lock_guard lock(mutex_);
  const int64_t epoch = index / of_an_epoch();
  if (epoch != epoch_ || seed != seed_) {
    order_ = Shuffled(seed, kOrderStream, epoch, int64_t(lengths_.size()));
    std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) {
      return lengths_[size_t(a)] < lengths_[size_t(b)];
    });
    batches_ = Shuffled(seed, kBatchStream, epoch, of_an_epoch());
    epoch_ = epoch, seed_ = seed;
  }
  const auto batch = size_t(batches_[size_t(index % of_an_epoch())]);
  const int64_t begin = batch == 0 ? 0 : ends_[batch - 1];
  return {order_.begin() + begin, order_.begin() + ends_[batch]};
}

}  // namespace cistern
