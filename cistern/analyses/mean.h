#pragma once
// A mean as a sum and a count, so that those of parts merge.
#include <cmath>

#include "cistern/io/fields.h"

namespace cistern {

struct Mean {
  double sum = 0;
  int64_t count = 0;

  // The sum of `n` numbers; NaN and infinity: nothing.
  void Add(double x, int64_t n = 1) {
    if (std::isfinite(x)) sum += x, count += n;
  }
  void AddMean(const Mean& other) {  // as one number, however many it is of
    if (other.count > 0) Add(other.sum / double(other.count));
  }
  void Merge(const Mean& other) { sum += other.sum, count += other.count; }
  Json Value() const { return count > 0 ? Json(sum / double(count)) : Json(); }
};

}  // namespace cistern
