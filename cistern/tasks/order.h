#pragma once
// A shuffled order of examples, epoch after epoch, as a pure function of (seed, index): what
// training sees does not depend on where it was interrupted.
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace cistern {

class ShuffledOrder {
 public:
  explicit ShuffledOrder(int64_t count) : count_(count) {}
  // Examples of these lengths, those of a batch of about one length, so that little of it is
  // padding: the shuffled order is cut into pools of 50 batches, each sorted by length and cut into
  // batches, which are shuffled.
  explicit ShuffledOrder(std::vector<int64_t> lengths)
      : count_(int64_t(lengths.size())), lengths_(std::move(lengths)) {}
  // The example at place `index` of the endless sequence of shuffled epochs, of which batches of
  // `rows` are made.
  int64_t At(uint64_t seed, int64_t index, int64_t rows) const;

 private:
  void GroupByLength(uint64_t seed, int64_t epoch, int64_t rows) const;

  int64_t count_;
  std::vector<int64_t> lengths_;  // empty: any lengths together
  mutable std::mutex mutex_;
  mutable uint64_t seed_ = 0;
  mutable int64_t epoch_ = -1, rows_ = 0;
  mutable std::vector<int64_t> order_;
};

// Batches of examples of about one length, each of as many as have `tokens` tokens with their
// padding, at least one: in every epoch the shuffled examples are sorted by length and cut, and the
// batches are shuffled. A pure function of (seed, index) as well.
class TokenBatches {
 public:
  TokenBatches(std::vector<int64_t> lengths, int64_t tokens);
  // The examples of batch `index` of the endless sequence of epochs.
  std::vector<int64_t> At(uint64_t seed, int64_t index) const;
  int64_t of_an_epoch() const { return int64_t(ends_.size()); }

 private:
  std::vector<int64_t> lengths_, ends_;  // ends_: of the batches in the sorted examples
  mutable std::mutex mutex_;
  mutable uint64_t seed_ = 0;
  mutable int64_t epoch_ = -1;
  mutable std::vector<int64_t> order_, batches_;
};

}  // namespace cistern
