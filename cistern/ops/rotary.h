#pragma once
// Rotary positions (kernels/rotary.h has the formula), differentiable in x alone: the table is a
// constant.
#include <ATen/core/Tensor.h>

namespace cistern::ops {

// x [B,H,T,d] turned by table [1 or B,T,d] of x's type (float for bfloat16): the cosines of each
// token's angles, then their sines. d is even. O(B H T d), one pass over memory.
at::Tensor Rotary(const at::Tensor& x, const at::Tensor& table);

}  // namespace cistern::ops
