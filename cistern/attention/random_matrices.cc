#include "cistern/attention/random_matrices.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "cistern/base/random.h"

namespace cistern {
namespace {

at::Tensor Gaussian(Random& random, int64_t rows, int64_t width) {
  at::Tensor x = at::empty({rows, width}, at::kDouble);
  double* p = x.mutable_data_ptr<double>();
  for (int64_t i = 0; i < rows * width; ++i) p[i] = random.Normal();
  return x;
}

}  // namespace

at::Tensor RandomMatrix(uint64_t seed, uint64_t index, int64_t features, int64_t width,
                        bool orthogonal) {
  at::NoGradGuard guard;
  Random random(seed, index);
  if (!orthogonal) return Gaussian(random, features, width).to(at::kFloat);
  std::vector<at::Tensor> blocks;
  for (int64_t row = 0; row < features; row += width) {
    const auto [q, r] = at::linalg_qr(Gaussian(random, width, width));
    const at::Tensor rows = (q * r.diagonal().sign()).transpose(0, 1);
    const at::Tensor lengths = at::linalg_vector_norm(Gaussian(random, width, width), 2, {1}, true);
    blocks.push_back((rows * lengths).narrow(0, 0, std::min(width, features - row)));
  }
  return at::cat(blocks).to(at::kFloat);
}

}  // namespace cistern
