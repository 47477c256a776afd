#pragma once
// Random numbers of a training pass, by counter: each follows from the pass's seed and from how
// many were drawn before it, so that threads that take different rows of one batch draw the same
// ones, and what depends on the row knows which row of the whole batch it is.
#include <cstdint>

#include "cistern/kernels/dropout.h"

namespace cistern::ops {

// One pass through a model in this thread, while it lives; `first_row` is the number of its first
// row in the batch that it is a part of.
class DrawScope {
 public:
  explicit DrawScope(uint64_t seed, int64_t first_row = 0);
  ~DrawScope();
  DrawScope(const DrawScope&) = delete;
  DrawScope& operator=(const DrawScope&) = delete;

 private:
  friend struct Draw;
  uint64_t seed_, count_ = 0;
  int64_t first_row_;
  DrawScope* outer_;
};

// The next draw of the scope, a number below 2^62; outside of one, of torch's generator.
struct Draw {
  static Draw Next();
  uint64_t seed = 0;
  int64_t first_row = 0;
};

// What a dropout of this rate drops; nothing is drawn for 0.
DropoutDraw DrawDropout(double rate);

}  // namespace cistern::ops
