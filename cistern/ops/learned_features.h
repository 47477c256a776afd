#pragma once
// Learned features of tokens, T2R's (kernels/learned_features.h).
#include <ATen/core/Tensor.h>

namespace cistern::ops {

// relu(scale W x + b) for each head: x [B,H,T,d], W [H,n,d], b [H,n] -> [B,H,T,n], stored as x is.
// W and b are of the type of x, or of the one it is computed in (ComputeTypeOf). Differentiable in
// all three. Where the processor multiplies bfloat16 (MultipliesBFloat16), tokens in it are
// multiplied by torch.
at::Tensor LearnedFeatures(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& bias,
                           double scale);

}  // namespace cistern::ops
