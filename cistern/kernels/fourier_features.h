#pragma once
// Random Fourier features (Rahimi & Recht 2007, as in RFA: Peng et al. 2021, eq. 5; spec 2.5): the
// sines and cosines of a product with a fixed matrix for each head, in one pass over the tokens
// each way. Nothing of [B,H,T,m] lies in memory but the features. Causal attention forms them
// within its walk (linear_attention.h).
#include <cstdint>

#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/rows.h"

namespace cistern {

// factor [sin y, cos y], y = matrix (scale x / |x|), without |x| where nothing is normalised, for
// tokens x [d] of a head -> [2m].
template <class T>
struct FourierMap {
  const T* scale;           // [H,d], or null: 1
  const T* matrices;        // [H,m,d]
  int64_t width, features;  // d, m; either may be 0
  bool normalise;           // tokens are divided by their length + kLengthEpsilon first
  double factor;
};
constexpr double kLengthEpsilon = 1e-3;

struct FourierShape {
  int64_t batch, heads, length;  // B, H, T; any may be 0
};
constexpr int64_t kFourierPartRows = 512;  // tokens of a head that a thread takes at a time

// To 5e-7 of factor in float; NaN for what is not finite. O(T m d).
//   x    [B,H,T,d]; S is float, double or BFloat16
//   out  [B,H,T,2m], in float of tokens in bfloat16
template <class S>
void FourierFeatures(const FourierShape& shape, const FourierMap<ComputeType<S>>& map,
                     Rows<const S> x, Rows<ComputeType<S>> out);

// The gradients of x and, where it is not null, of scale [H,d], from the output itself. The same
// bits for any number of threads.
template <class S>
void FourierFeaturesBackward(const FourierShape& shape, const FourierMap<ComputeType<S>>& map,
                             Rows<const S> x, Rows<const ComputeType<S>> out,
                             Rows<const ComputeType<S>> d_out, Rows<S> dx, ComputeType<S>* d_scale);

// d_scale [H,d] = the sums over rows of the batch and parts of a sequence of items [B,H,parts,d],
// in this order.
template <class T>
void SumScales(const FourierShape& shape, int64_t parts, int64_t width, const double* items,
               T* d_scale);

}  // namespace cistern
