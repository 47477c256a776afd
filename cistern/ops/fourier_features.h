#pragma once
// Random Fourier features of tokens (kernels/fourier_features.h).
#include <ATen/core/Tensor.h>

namespace cistern::ops {

struct FourierFeatureMap {
  at::Tensor scale, matrices;  // [H,1,d] or undefined: 1, [H,m,d]
  bool normalise = false;
  double factor = 1;
};

// factor [sin y, cos y], y = matrices (scale x / (|x| + kLengthEpsilon)) for each head, without the
// length where `normalise` is false: x [B,H,T,d] -> [B,H,T,2m], in float of x in bfloat16.
// Differentiable; with a gradient of
// the matrices, which are drawn and not learned, composed of torch's operations.
at::Tensor FourierFeatures(const at::Tensor& x, const FourierFeatureMap& map);

}  // namespace cistern::ops
