#pragma once
// Dropout (Srivastava et al. 2014) by counter: what is dropped follows from a seed and from numbers
// alone, so blocks, tiles, threads, parts of a batch, the backward pass and all implementations
// drop the same, and nothing of it is kept.
#include <cmath>
#include <cstdint>

#include "cistern/base/random.h"
#include "cistern/kernels/bfloat16.h"

namespace cistern {

struct DropoutDraw {
  double rate = 0;  // 0 .. 1: the share that is dropped; what is kept is divided by 1 - rate
  uint64_t seed = 0;
  int64_t first_row = 0;  // number of the first row here in the batch that it is a part of

  bool Any() const { return rate > 0; }
  // Of 32 random bits, those below are dropped.
  uint64_t Threshold() const { return uint64_t(std::llround(rate * 0x1p32)); }
  double KeptFactor() const { return rate < 1 ? 1 / (1 - rate) : 0; }

  // Whether a probability of attention is kept, that of a pair of a query and a key. head: b H + h,
  // b counted in the whole batch. Four keys share a Philox block.
  bool Keeps(uint64_t head, uint64_t query, uint64_t key) const {
    return Philox(seed, head, query << 32 | key / 4)[key % 4] >= Threshold();
  }
  // factors[j] = 0 or KeptFactor() of a query and keys 0 .. count - 1.
  template <class T>
  void Factors(uint64_t head, int64_t query, int64_t count, T* factors) const {
    const uint64_t threshold = Threshold();
    const T kept = static_cast<T>(KeptFactor());
    for (int64_t j = 0; j < count; j += 4) {
      const auto words = Philox(seed, head, uint64_t(query) << 32 | uint64_t(j) / 4);
      for (int64_t w = 0; w < 4 && j + w < count; ++w)
        factors[j + w] = words[size_t(w)] < threshold ? T{0} : kept;
    }
  }

  // Whether value i of a row of values is kept; row: counted in the whole batch. 16 bits decide, so
  // that the rate is that of the nearest 65,536th; eight values, 16 apart, share a Philox block.
  bool KeepsValue(uint64_t row, uint64_t i) const {
    const uint32_t word = Philox(seed, row, i / 128 * 16 + i % 16)[i % 128 / 32];
    return (i % 32 < 16 ? word & 0xffff : word >> 16) >= ValueThreshold();
  }
  uint32_t ValueThreshold() const { return uint32_t(std::lround(rate * 0x1p16)); }
  // What is kept of values is multiplied by this, so that their mean stays.
  double KeptValueFactor() const {
    return ValueThreshold() < 0x10000 ? 1 / (1 - ValueThreshold() * 0x1p-16) : 0;
  }
};

// y[r,i] = x[r,i] * (0 or KeptValueFactor()), of x [rows,width]; row r has the number first_row +
// numbers[r], or first_row + r where numbers is null. y may be x; NaN stays NaN. T: float, double
// or BFloat16, whose arithmetic is in float. The gradient of x is the same of that of y.
template <class T>
void Dropout(const DropoutDraw& draw, int64_t rows, int64_t width, const int64_t* numbers,
             const T* x, T* y);

// The same in place, of a part of such rows: of `count` values from value `begin` on, counted from
// the first row's first; x and `beside` are of the part alone. What x loses, `beside` loses too,
// unless it is null.
void DropoutOfPart(const DropoutDraw& draw, int64_t width, int64_t begin, int64_t count, float* x,
                   float* beside);

}  // namespace cistern
