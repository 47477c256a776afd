#include "cistern/attention/feature_attention.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"
#include "cistern/ops/sum_memory.h"

namespace cistern {
namespace {

using Rule = Denominator::Rule;

at::Tensor Divisor(const at::Tensor& z, const Denominator& denominator) {
  const double value = denominator.value;
  switch (denominator.rule) {
    case Rule::kPlus:
      return z + value;
    case Rule::kAtLeast:
      return z.clamp_min(value);
    case Rule::kMagnitude:
      return z.abs().clamp_min(value);
    case Rule::kSignSafe:
      return at::where(z < 0, z.clamp_max(-value), z.clamp_min(value));
    case Rule::kNone:
      break;
  }
  Fail("[feature attention] this rule has no divisor");
}

// [..,d+1], or [..,d] where nothing is divided, -> [..,d].
at::Tensor Divide(const at::Tensor& sums, const Denominator& denominator) {
  if (denominator.rule == Rule::kNone) return sums * denominator.value;
  const int64_t width = sums.size(-1) - 1;
  return sums.narrow(-1, 0, width) / Divisor(sums.narrow(-1, width, 1), denominator);
}

// The values with the column of ones that becomes z.
at::Tensor WithOnes(const at::Tensor& v, const Denominator& denominator) {
  return denominator.rule == Rule::kNone ? v : at::constant_pad_nd(v, {0, 1}, 1.0);
}

}  // namespace

at::Tensor EmptyFeatureSums(int64_t batch, const AttentionDims& dims, int64_t features, const Denominator& denominator,
                            const at::TensorOptions& options) {
  const int64_t width = dims.dim / dims.heads + (denominator.rule == Rule::kNone ? 0 : 1);
  return ops::EmptySums(batch, dims.heads, features, width, options);
}

at::Tensor FeatureExtend(const at::Tensor& phi_q, const at::Tensor& phi_k, const at::Tensor& v, at::Tensor& memory, const ops::Mask& mask,
                         const Denominator& denominator, const at::Tensor& log_gate) {
  const ops::SumResult result = ops::SumRead(phi_q, phi_k, WithOnes(v, denominator), memory, mask, log_gate);
  memory = result.memory;
  return Divide(result.out, denominator);
}

void FeatureWrite(const at::Tensor& phi_k, const at::Tensor& v, at::Tensor& memory, const ops::Mask& mask, const Denominator& denominator,
                  const at::Tensor& log_gate) {
  memory = ops::SumWrite(phi_k, WithOnes(v, denominator), memory, mask, log_gate);
}

at::Tensor FeatureRead(const at::Tensor& phi_q, const at::Tensor& memory, const Denominator& denominator) {
  return Divide(at::matmul(phi_q, memory.to(phi_q.scalar_type())), denominator);
}

at::Tensor Normalised(const at::Tensor& x) { return x / (at::linalg_vector_norm(x, 2, {-1}, true) + 1e-3); }

at::Tensor WeightedValues(const at::Tensor& weights, const at::Tensor& v, const Denominator& denominator) {
  const at::Tensor sum = (weights.transpose(2, 3) * v).sum(2, true);
  if (denominator.rule == Rule::kNone) return sum * denominator.value;
  return sum / Divisor(weights.sum(3, true), denominator);
}

void RefuseAttentionDropout(const MechanismInfo& info, const AttentionDims& dims) {
  if (dims.dropout <= 0) return;
  FailUsage("[", info.name, "] forms no attention probabilities that attention_dropout=", dims.dropout,
            " could drop; set attention_dropout=0, and dropout for the output of the layer");
}

}  // namespace cistern
