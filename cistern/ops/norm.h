#pragma once
// What stands between the linear maps of a layer where those take bfloat16 and the tokens
// themselves are floats: norms that round their result, and sums of both.
#include <ATen/core/Tensor.h>

namespace cistern::ops {

// Layer normalisation of x over its last dimension, or RMSNorm without a bias (nn/linear.h), in
// bfloat16. x, weight, bias: float. Differentiable any number of times; O(elements) time, memory
// for the result and two numbers a row.
at::Tensor NormToBFloat16(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                          double eps);

// x + y of the same shape, in the type of x; one pass where that is float and y bfloat16. Its
// gradients are in the types of x and y. Differentiable any number of times.
at::Tensor AddResidual(const at::Tensor& x, const at::Tensor& y);

}  // namespace cistern::ops
