#pragma once
// The dense product of a linear map, by the faster of the libraries at hand.
#include <ATen/core/Tensor.h>

namespace cistern::ops {

// y = x W^T + b, as at::linear: x [...,in], W [out,in], b [out] or undefined. Differentiable any
// number of times.
//
// Up to 32 rows of floats or doubles that no gradient is recorded of, as decoding has them,
// are a kernel's that reads each weight once, at the speed of memory (kernels/few_rows_product.h):
// there no bit of a row depends on the other rows. The weights have to be contiguous. Under
// autocast in bfloat16 it is the kernel's where the weights are kept (ops/kept_weights.h), with x
// and y in float; more rows meet the kept weights by at::linear.
//
// On AMD's processors with AVX-512, large products of floats and their gradients by x are oneDNN's,
// which has kernels of that width where MKL takes AVX2's (docs/notes/training-speed.md); their
// gradients by W where that is measured to be far faster. Under autocast in bfloat16, gradients by
// a W of floats are a kernel's where it gains (kernels/transposed_product.h; large products), in
// float, where autocast rounds them to bfloat16. Processors that do not multiply bfloat16 multiply
// its numbers as floats. All else, such as small products, other dtypes and devices,
// transformations of torch.func and CISTERN_IMPL=composite, is at::linear.
at::Tensor LinearProduct(const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& bias = {});

// Whether x [...,in], in float, stays so under autocast in bfloat16, because that kernel takes it.
bool StaysFloat(const at::Tensor& x);

// a^T b of a [T,N] and b [T,K], as at::mm, by the same choice: the gradient by W, of the gradient
// by y and of x. Of operands in bfloat16 it is in float. The memory of the result [N,K] may be that
// of its transpose.
at::Tensor TransposedProduct(const at::Tensor& a, const at::Tensor& b);
// sum += a^T b; an undefined sum begins with it. No gradient is recorded.
void AddTransposedProduct(const at::Tensor& a, const at::Tensor& b, at::Tensor& sum);

}  // namespace cistern::ops
