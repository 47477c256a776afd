#include "cistern/nn/positions.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/base/error.h"
#include "cistern/tensors/device.h"

namespace cistern {
namespace {

// angles [1 or B,T,half] in double: positions times 10000^(-i/steps), exact to far beyond a million
// tokens.
at::Tensor Angles(const at::Tensor& positions, int64_t half, int64_t steps) {
  const at::Tensor exponents = at::arange(half, positions.options().dtype(at::kDouble)) *
                               (-std::log(10000.0) / double(steps));
  return positions.to(at::kDouble).unsqueeze(-1) * exponents.exp();
}

}  // namespace

PositionEmbedding::PositionEmbedding(PositionKind kind, int64_t width, int64_t max_length,
                                     double std)
    : kind_(kind), max_length_(max_length) {
  if (kind == PositionKind::kLearned)
    weight_ = register_parameter("weight", NormalWeights({max_length, width}, std));
  const bool sinusoidal =
      kind == PositionKind::kSinusoidal || kind == PositionKind::kSinusoidalHalves;
  if (sinusoidal && width % 2 != 0)
    FailUsage("sinusoidal positions need an even width, got ", width);
}

at::Tensor PositionEmbedding::Forward(const at::Tensor& x, const at::Tensor& positions) const {
  if (kind_ == PositionKind::kLearned) {
    const int64_t last =
        positions.numel() > 0 && !positions.is_meta() ? positions.max().item<int64_t>() : 0;
    CISTERN_CHECK(last < max_length_, "position ", last,
                  " is beyond the learned table of max_length=", max_length_,
                  "; sinusoidal, rotary or no positions have no limit");
    return x + at::embedding(weight_, positions);
  }
  if (kind_ == PositionKind::kSinusoidal) {
    const int64_t half = x.size(-1) / 2;
    const at::Tensor angles = Angles(positions, half, half);
    return x + at::stack({angles.sin(), angles.cos()}, -1).flatten(-2).to(x.scalar_type());
  }
  if (kind_ == PositionKind::kSinusoidalHalves) {
    const int64_t half = x.size(-1) / 2;
    const at::Tensor angles = Angles(positions, half, std::max<int64_t>(1, half - 1));
    return x + at::cat({angles.sin(), angles.cos()}, -1).to(x.scalar_type());
  }
  return x;
}

at::Tensor RotaryTable(const at::Tensor& positions, int64_t width, at::ScalarType type) {
  const at::Tensor angles = Angles(positions, width / 2, width / 2);
  return at::cat({angles.cos(), angles.sin()}, -1).to(type);
}

}  // namespace cistern
