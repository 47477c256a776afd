#pragma once
// Dropout of attention's probabilities (Srivastava et al. 2014) by counter: what is dropped follows
// from (seed, head, query, key) alone, so blocks, tiles, threads, the backward pass and all
// implementations drop the same, and nothing of the size of T S is kept.
#include <cmath>
#include <cstdint>

#include "cistern/base/random.h"

namespace cistern {

struct AttentionDropout {
  double rate = 0;  // 0 .. 1: the share that is dropped; what is kept is divided by 1 - rate
  uint64_t seed = 0;

  bool Any() const { return rate > 0; }
  // Of 32 random bits, those below are dropped.
  uint64_t Threshold() const { return uint64_t(std::llround(rate * 0x1p32)); }
  double KeptFactor() const { return rate < 1 ? 1 / (1 - rate) : 0; }
  // Whether the pair of a query and a key is kept. head: b H + h. Four keys share a Philox block.
  bool Keeps(uint64_t head, uint64_t query, uint64_t key) const {
    return Philox(seed, head, query << 32 | key / 4)[key % 4] >= Threshold();
  }
  // factors[j] = 0 or KeptFactor() of a query and keys 0 .. count - 1.
  template <class T>
  void Factors(int64_t head, int64_t query, int64_t count, T* factors) const {
    const uint64_t threshold = Threshold();
    const T kept = static_cast<T>(KeptFactor());
    for (int64_t j = 0; j < count; j += 4) {
      const auto words = Philox(seed, uint64_t(head), uint64_t(query) << 32 | uint64_t(j) / 4);
      for (int64_t w = 0; w < 4 && j + w < count; ++w)
        factors[j + w] = words[size_t(w)] < threshold ? T{0} : kept;
    }
  }
};

}  // namespace cistern
