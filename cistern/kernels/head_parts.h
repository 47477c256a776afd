#pragma once
// How threads share the walk over one head's tokens, where there are fewer heads than threads.
//
// The state goes on from token to token, so part p of the tokens waits for that of the parts before
// it. It does not wait for their threads: each thread walks over the tokens before its part for the
// state alone, with the same operations as the whole walk, then over its part. So the numbers are
// the same bits for any number of threads. A walk for the state alone takes a share c of a whole
// one's time, so the first parts are the longest: parts that end at (1 - (1 - c)^p) / (1 - (1 -
// c)^P) take the same time, and P threads take c / (1 - (1 - c)^P) of one thread's: for c = 0.48,
// 0.66 with two, 0.52 with four, and never less than c.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/base/parallel_region.h"
#include "cistern/kernels/slot_memory.h"
#include "cistern/kernels/workspace.h"

namespace cistern {

class HeadParts {
 public:
  HeadParts() = default;
  // state_share: c.
  explicit HeadParts(const SlotShape& shape, double state_share = kSlotStateShare)
      : state_share_(state_share) {
    const int64_t heads = shape.batch * shape.heads, threads = ThreadsHere();
    if (heads > 0 && heads < threads)
      count = std::max<int64_t>(1, std::min((threads + heads - 1) / heads, shape.length / kLeast));
  }
  // Where part p of `length` tokens begins; that of part `count` is `length`.
  size_t Begin(int64_t p, size_t length) const {
    if (p == count) return length;
    const double share = (1 - std::pow(1 - state_share_, static_cast<double>(p))) /
                         (1 - std::pow(1 - state_share_, static_cast<double>(count)));
    return static_cast<size_t>(static_cast<double>(length) * share);
  }
  // The same from the end, for walks in reverse: part p has the tokens [ReverseEnd(p + 1),
  // ReverseEnd(p)).
  size_t ReverseEnd(int64_t p, size_t length) const { return length - Begin(p, length); }

  int64_t count = 1;

 private:
  static constexpr int64_t kLeast = 512;  // tokens of a part on average
  static constexpr double kSlotStateShare = 0.48;
  double state_share_ = kSlotStateShare;
};

// The state of each part's walk: the caller's [heads, size] where a head has one part; else a copy
// for each part.
template <class T>
class PartStates {
 public:
  PartStates(const HeadParts& parts, int64_t heads, int64_t size, T* state)
      : parts_(parts.count), size_(size), heads_(heads), state_(state) {
    if (parts_ == 1) return;
    copies_.reserve(static_cast<size_t>(heads * parts_ * size));
    for (int64_t i = 0; i < heads * parts_; ++i)
      copies_.insert(copies_.end(), state + i / parts_ * size, state + (i / parts_ + 1) * size);
  }
  T* Of(int64_t head, int64_t part) {
    return parts_ == 1 ? state_ + head * size_ : copies_.data() + (head * parts_ + part) * size_;
  }
  // The caller's state becomes that of the last parts.
  void Finish() {
    if (parts_ == 1) return;
    for (int64_t head = 0; head < heads_; ++head)
      std::copy_n(Of(head, parts_ - 1), size_, state_ + head * size_);
  }

 private:
  int64_t parts_, size_, heads_;
  T* state_;
  std::vector<T> copies_;
};

// body(index, part) for every part of every head. grain: heads that a thread takes at least.
template <class Body>
void ForParts(int64_t heads, int64_t grain, const HeadParts& parts, Body&& body) {
  ParallelFor(heads * parts.count, parts.count > 1 ? 1 : grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i / parts.count, i % parts.count);
  });
}

// For each head x = open(index, workspace); then each of `bodies`, body(index, part, x), for all
// parts, before the next one begins. `workspace` is for what they leave each other. grain: heads
// that a thread takes at least.
template <class Open, class... Bodies>
void ForHeads(int64_t heads, int64_t grain, const HeadParts& parts, Open&& open,
              Bodies&&... bodies) {
  if (parts.count == 1) {
    ParallelFor(heads, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        auto x = open(i, Workspace::StagingOfThisThread());
        (bodies(i, int64_t{0}, x), ...);
      }
    });
    return;
  }
  std::vector<Workspace> workspaces(static_cast<size_t>(heads));
  std::vector<decltype(open(0, workspaces[0]))> all;
  for (int64_t i = 0; i < heads; ++i) all.push_back(open(i, workspaces[static_cast<size_t>(i)]));
  const auto run = [&](auto&& body) {
    ForParts(heads, 1, parts, [&](int64_t index, int64_t part) {
      body(index, part, all[static_cast<size_t>(index)]);
    });
  };
  (run(bodies), ...);
}

}  // namespace cistern
