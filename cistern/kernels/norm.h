#pragma once
// Normalisation of rows of floats, together with the sum that stands before it in a residual
// stream.
#include <cstdint>

#include "cistern/kernels/bfloat16.h"

namespace cistern {

struct NormShape {
  int64_t rows, width;
  double eps;
};
// weight [width], bias [width]; without a bias (null) RMSNorm.
struct NormWeights {
  const float *weight, *bias;
};

// y = (s - m) r w + b of each row s of s = x + added, with m = mean(s), r = 1 / sqrt(mean((s -
// m)^2)
// + eps); RMSNorm: m = 0. Without `added` (null) s is x, and `sum` is not written. One pass over
// memory.
//   x, added, sum, y [rows,width]; stats [rows,2]: m and r, written
// Added, Out: float or BFloat16.
template <class Added, class Out>
void Norm(const NormShape& shape, const NormWeights& weights, const float* x, const Added* added,
          float* sum, Out* y, float* stats);

// Its gradients, of dy [rows,width] by y and d_sum [rows,width] by the sum (null: none), from the
// sum and the stats: dx [rows,width], which is that of `added` as well and is written to `d_added`
// too where that is not null, d_weight and, where it is not null, d_bias [width]. Sums over rows do
// not depend on the number of threads.
struct NormGradients {
  float* dx;
  BFloat16* d_added;
  float *d_weight, *d_bias;
};
template <class Out>
void NormBackward(const NormShape& shape, const NormWeights& weights, const float* sum,
                  const float* stats, const Out* dy, const float* d_sum, const NormGradients& to);

// sum[i] = x[i] + y[i]; sum may be x.
void AddBFloat16(int64_t n, const float* x, const BFloat16* y, float* sum);

}  // namespace cistern
