#pragma once
// Normalisation of rows of floats whose result is stored in bfloat16, for linear maps to read.
#include <cstdint>

#include "cistern/kernels/bfloat16.h"

namespace cistern {

struct NormShape {
  int64_t rows, width;
  double eps;
};

// y = (x - m) r w + b with m = mean(x), r = 1 / sqrt(mean((x - m)^2) + eps) of each row; without a
// bias (null) RMSNorm: m = 0. One pass over memory.
//   x, y [rows,width], w, b [width]; stats [rows,2]: m and r, written
void Norm(const NormShape& shape, const float* x, const float* weight, const float* bias,
          BFloat16* y, float* stats);

// Its gradients from dy [rows,width] and the stats: dx [rows,width], d_weight and, where it is not
// null, d_bias [width]. bias: as in Norm. Sums over rows do not depend on the number of threads.
void NormBackward(const NormShape& shape, const float* x, const float* weight, const float* bias,
                  const float* stats, const BFloat16* dy, float* dx, float* d_weight,
                  float* d_bias);

// sum[i] = x[i] + y[i]; sum may be x.
void AddBFloat16(int64_t n, const float* x, const BFloat16* y, float* sum);

}  // namespace cistern
