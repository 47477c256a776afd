#pragma once
// How fast this machine's matrix products are in float32 and in bfloat16. Having the instruction
// says little: an AMD Zen 4 gains twice the speed from it, an Intel Xeon was measured to lose a
// third.
#include <cstdint>

namespace cistern {

struct ProductSpeed {
  double float32 = 0, bfloat16 = 0;  // GFLOP/s, conversions of operands included
  // bfloat16 is worth its digits: at least a tenth faster.
  bool PrefersBFloat16() const { return bfloat16 > 1.1 * float32; }
};

// Of a feed-forward [rows,dim] -> [rows,hidden] -> [rows,dim], forward and backward, in each dtype
// as training runs it (ops/linear_product, BFloat16Scope), with the threads of the process; the
// fastest of some alternating rounds, so that a short disturbance decides nothing. About 12 rows
// dim hidden multiplications and additions a round; rounds end after about 0.3 s.
ProductSpeed MeasureProducts(int64_t rows, int64_t dim, int64_t hidden);

}  // namespace cistern
