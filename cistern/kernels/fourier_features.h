#pragma once
// Random Fourier features (Rahimi & Recht 2007, as in RFA: Peng et al. 2021, eq. 5; spec 2.5): the
// sines and cosines of a product with a fixed matrix for each head, in one pass over the tokens
// each way. Nothing of [B,H,T,m] lies in memory but the features.
#include <cstdint>

#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/rows.h"

namespace cistern {

struct FourierShape {
  int64_t batch, heads, length, width, features;  // B, H, T, d, m; any may be 0
  bool normalise;  // tokens are divided by their length + kLengthEpsilon first
  double factor;
};
constexpr double kLengthEpsilon = 1e-3;
constexpr int64_t kFourierPartRows = 512;  // tokens of a head that a thread takes at a time

// out = factor [sin y, cos y], y = matrix (scale x / |x|), without |x| where nothing is normalised.
// To 5e-7 of factor in float; NaN for what is not finite. O(T m d).
//   x         [B,H,T,d]; S is float, double or BFloat16
//   scale     [H,d], or null: 1
//   matrices  [H,m,d]
//   out       [B,H,T,2m]
template <class S>
void FourierFeatures(const FourierShape& shape, Rows<const S> x, const ComputeType<S>* scale,
                     const ComputeType<S>* matrices, Rows<S> out);

// The gradients of x and, where it is not null, of scale [H,d], from the output itself. The same
// bits for any number of threads.
template <class S>
void FourierFeaturesBackward(const FourierShape& shape, Rows<const S> x,
                             const ComputeType<S>* scale, const ComputeType<S>* matrices,
                             Rows<const S> out, Rows<const S> d_out, Rows<S> dx,
                             ComputeType<S>* d_scale);

}  // namespace cistern
