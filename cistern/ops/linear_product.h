#pragma once
// The dense product of a linear map, by the faster of the libraries at hand.
#include <ATen/core/Tensor.h>

namespace cistern::ops {

// y = x W^T + b, as at::linear: x [...,in], W [out,in], b [out] or undefined. Differentiable any
// number of times.
//
// On AMD's processors with AVX-512, large products of floats and their gradients by x are oneDNN's,
// which has kernels of that width where MKL takes AVX2's (docs/notes/training-speed.md). All else,
// such as the gradient by W, small products, other dtypes and devices, autocast, transformations of
// torch.func and CISTERN_IMPL=composite, is at::linear.
at::Tensor LinearProduct(const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& bias = {});

}  // namespace cistern::ops
