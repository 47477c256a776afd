#pragma once
// Token ids drawn uniformly from a vocabulary (P001 Fig 4's random data; spec 5): each a function
// of (seed, row, place) alone, so that rows are the same in any order, in parts, and after
// resuming.
#include <cstdint>

#include "cistern/base/random.h"

namespace cistern {

// Of 0 .. vocab-1; off uniform by at most vocab / 2^64.
inline int64_t UniformId(uint64_t seed, uint64_t row, uint64_t place, int64_t vocab) {
  const auto draw = Philox(seed, row, place);
  return int64_t((uint64_t(draw[1]) << 32 | draw[0]) % uint64_t(vocab));
}

}  // namespace cistern
