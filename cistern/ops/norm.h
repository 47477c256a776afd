#pragma once
// What stands between the parts of a block: the sum of a residual stream, and its norm.
#include <ATen/core/Tensor.h>

namespace cistern::ops {

// weight [D]; bias [D], or undefined for RMSNorm (nn/linear.h).
struct NormOf {
  at::Tensor weight, bias;
  double eps;
};
struct SumAndNorm {
  at::Tensor sum, norm;
};

// sum = x + added, x [...,D] and added of its shape; x itself where `added` is undefined. norm:
// layer normalisation of the sum over its last dimension, or RMSNorm. Differentiable any number of
// times; O(elements) time. In float on the CPU both are one pass over memory, and so are the
// gradients: of the norm, and of the sum where it is used further on.
//
// to_bfloat16: the norm, rounded, for linear maps to read; else it is in the type of x. `added` may
// be bfloat16 where x is float.
SumAndNorm AddNorm(const at::Tensor& x, const at::Tensor& added, const NormOf& of,
                   bool to_bfloat16 = false);

// x + y of the same shape, in the type of x; one pass where that is float and y bfloat16. Its
// gradients are in the types of x and y. Differentiable any number of times.
at::Tensor AddResidual(const at::Tensor& x, const at::Tensor& y);

}  // namespace cistern::ops
