#include "cistern/attention/feature_attention.h"

#include <ATen/ATen.h>

#include <cmath>

#include "cistern/base/error.h"
#include "cistern/kernels/fourier_features.h"
#include "cistern/ops/linear_attention.h"

namespace cistern {
namespace {

LinearRule RuleOf(const Denominator& denominator) {
  return {FeatureMap::kNone, 0, denominator.rule, denominator.value};
}
LinearRule FourierRuleOf(const Denominator& denominator) {
  return {FeatureMap::kFourier, 0, denominator.rule, denominator.value};
}
LinearRule EluRuleOf(const Denominator& denominator, double eps) {
  return {FeatureMap::kEluPlusOne, eps, denominator.rule, denominator.value};
}

}  // namespace

at::Tensor EmptyFeatureSums(int64_t batch, const AttentionDims& dims, int64_t features,
                            const Denominator& denominator, const at::TensorOptions& options) {
  const int64_t width =
      dims.dim / dims.heads + (denominator.rule == Denominator::Rule::kNone ? 0 : 1);
  return ops::EmptySums(batch, dims.heads, features, width, options);
}

at::Tensor FeatureExtend(const at::Tensor& phi_q, const at::Tensor& phi_k, const at::Tensor& v,
                         const ops::SlotHandles& memory, const ops::Mask& mask,
                         const Denominator& denominator, const at::Tensor& log_gate) {
  const auto [rule, value] = denominator;
  if (!log_gate.defined())
    return ops::LinearExtend(phi_q, phi_k, v, memory, RuleOf(denominator), mask);
  return ops::DivideSums(
      ops::SumReadExtend(phi_q, phi_k, ops::WithOnes(v, rule), memory.values, mask, log_gate), rule,
      value);
}

at::Tensor EluExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const ops::SlotHandles& memory, const ops::Mask& mask,
                     const Denominator& denominator, double eps) {
  return ops::LinearExtend(q, k, v, memory, EluRuleOf(denominator, eps), mask);
}

at::Tensor FourierExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const ops::SlotHandles& memory, const ops::FourierFeatureMap& map,
                         const ops::Mask& mask, const Denominator& denominator) {
  return ops::FourierExtend(q, k, v, memory, map, FourierRuleOf(denominator), mask);
}

void FourierWrite(const at::Tensor& k, const at::Tensor& v, at::Tensor& memory,
                  const ops::FourierFeatureMap& map, const ops::Mask& mask,
                  const Denominator& denominator) {
  memory = ops::FourierWrite(k, v, memory, map, FourierRuleOf(denominator), mask);
}

at::Tensor FourierRead(const at::Tensor& q, const at::Tensor& memory,
                       const ops::FourierFeatureMap& map, const Denominator& denominator) {
  return ops::FourierRead(q, memory, map, FourierRuleOf(denominator));
}

void FeatureWrite(const at::Tensor& phi_k, const at::Tensor& v, at::Tensor& memory,
                  const ops::Mask& mask, const Denominator& denominator,
                  const at::Tensor& log_gate) {
  memory = log_gate.defined()
               ? ops::SumWrite(phi_k, ops::WithOnes(v, denominator.rule), memory, mask, log_gate)
               : ops::LinearWrite(phi_k, v, memory, RuleOf(denominator), mask);
}

void EluWrite(const at::Tensor& k, const at::Tensor& v, at::Tensor& memory, const ops::Mask& mask,
              const Denominator& denominator, double eps) {
  memory = ops::LinearWrite(k, v, memory, EluRuleOf(denominator, eps), mask);
}

at::Tensor FeatureRead(const at::Tensor& phi_q, const at::Tensor& memory,
                       const Denominator& denominator) {
  return ops::LinearRead(phi_q, memory, RuleOf(denominator));
}

at::Tensor EluRead(const at::Tensor& q, const at::Tensor& memory, const Denominator& denominator,
                   double eps) {
  return ops::LinearRead(q, memory, EluRuleOf(denominator, eps));
}

at::Tensor Normalised(const at::Tensor& x) {
  return x / (at::linalg_vector_norm(x, 2, {-1}, true) + kLengthEpsilon);
}

at::Tensor WeightedValues(const at::Tensor& weights, const at::Tensor& v,
                          const Denominator& denominator) {
  const at::Tensor sum = (weights.transpose(2, 3) * v).sum(2, true);  // [B,H,1,d]
  const double value = denominator.value;
  if (denominator.rule == Denominator::Rule::kNone) return sum * value;
  // Number by number, so that nothing is shared with Divisor.
  const at::Tensor divisor = weights.sum(3, true).contiguous();  // [B,H,1,1]
  double* z = divisor.mutable_data_ptr<double>();
  for (int64_t i = 0; i < divisor.numel(); ++i) {
    switch (denominator.rule) {
      case Denominator::Rule::kPlus:
        z[i] += value;
        break;
      case Denominator::Rule::kAtLeast:
        z[i] = z[i] < value ? value : z[i];
        break;
      case Denominator::Rule::kMagnitude:
        z[i] = std::abs(z[i]) < value ? value : std::abs(z[i]);
        break;
      case Denominator::Rule::kSignSafe:
        if (std::abs(z[i]) < value) z[i] = z[i] < 0 ? -value : value;
        break;
      case Denominator::Rule::kNone:
        break;
    }
  }
  return sum / divisor;
}

void RefuseAttentionDropout(const MechanismInfo& info, const AttentionDims& dims) {
  if (dims.dropout <= 0) return;
  FailUsage("[", info.name,
            "] forms no attention probabilities that attention_dropout=", dims.dropout,
            " could drop; set attention_dropout=0, and dropout for the output of the layer");
}

}  // namespace cistern
