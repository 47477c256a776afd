#pragma once
// GELU in the exact form, x Phi(x) (kernels/gelu.h): for float on the CPU our kernel, elsewhere
// torch's.
#include <ATen/core/Tensor.h>

namespace cistern::ops {

// Any shape but [], any floating-point type. Differentiable, twice too.
at::Tensor Gelu(const at::Tensor& x);

}  // namespace cistern::ops
