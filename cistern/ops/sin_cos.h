#pragma once
// Sines and cosines as random Fourier features (kernels/sin_cos.h).
#include <ATen/core/Tensor.h>

namespace cistern::ops {

// factor [sin x, cos x] over the last dimension: [.., m] -> [.., 2m]. Differentiable.
at::Tensor SinCos(const at::Tensor& x, double factor);

}  // namespace cistern::ops
