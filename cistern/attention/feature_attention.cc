#include "cistern/attention/feature_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <cmath>

#include "cistern/base/error.h"
#include "cistern/ops/sum_memory.h"

namespace cistern {
namespace {

using Rule = Denominator::Rule;
using torch::autograd::variable_list;

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

// Derivative of the divisor by z.
at::Tensor DivisorSlope(const at::Tensor& z, const Denominator& denominator) {
  switch (denominator.rule) {
    case Rule::kAtLeast:
      return (z >= denominator.value).to(z.scalar_type());
    case Rule::kMagnitude:
      return z.sign() * (z.abs() >= denominator.value);
    case Rule::kSignSafe:
      return (z.abs() >= denominator.value).to(z.scalar_type());
    case Rule::kPlus:
    case Rule::kNone:
      break;
  }
  return at::ones_like(z);
}

at::Tensor Quotient(const at::Tensor& sums, const Denominator& denominator) {
  const int64_t width = sums.size(-1) - 1;
  return sums.narrow(-1, 0, width) / Divisor(sums.narrow(-1, width, 1), denominator);
}

// The quotient with a gradient in few passes over memory: that of two narrow() would fill two
// tensors of all sums with zeros first.
struct QuotientFunction : torch::autograd::Function<QuotientFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& sums,
                            const Denominator& denominator) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor y = Quotient(sums, denominator);
    ctx->save_for_backward({sums, y});
    ctx->saved_data["rule"] = int64_t(denominator.rule);
    ctx->saved_data["value"] = denominator.value;
    return y;
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Denominator denominator = {Rule(ctx->saved_data["rule"].toInt()),
                                     ctx->saved_data["value"].toDouble()};
    const at::Tensor z = saved[0].narrow(-1, saved[1].size(-1), 1),
                     d_values = grads[0] / Divisor(z, denominator);
    const at::Tensor d_z = (d_values * saved[1]).sum(-1, true).neg() * DivisorSlope(z, denominator);
    return {at::cat({d_values, d_z}, -1), at::Tensor()};
  }
};

// [..,d+1], or [..,d] where nothing is divided, -> [..,d].
at::Tensor Divide(const at::Tensor& sums, const Denominator& denominator) {
  if (denominator.rule == Rule::kNone) return sums * denominator.value;
  return torch::autograd::compute_requires_grad(sums) ? QuotientFunction::apply(sums, denominator)
                                                      : Quotient(sums, denominator);
}

// The values with the column of ones that becomes z.
at::Tensor WithOnes(const at::Tensor& v, const Denominator& denominator) {
  if (denominator.rule == Rule::kNone) return v;
  return at::cat({v, at::ones({1}, v.options()).expand({v.size(0), v.size(1), v.size(2), 1})}, -1);
}

}  // namespace

at::Tensor EmptyFeatureSums(int64_t batch, const AttentionDims& dims, int64_t features,
                            const Denominator& denominator, const at::TensorOptions& options) {
  const int64_t width = dims.dim / dims.heads + (denominator.rule == Rule::kNone ? 0 : 1);
  return ops::EmptySums(batch, dims.heads, features, width, options);
}

at::Tensor FeatureExtend(const at::Tensor& phi_q, const at::Tensor& phi_k, const at::Tensor& v,
                         at::Tensor& memory, const ops::Mask& mask, const Denominator& denominator,
                         const at::Tensor& log_gate) {
  const ops::SumResult result =
      ops::SumRead(phi_q, phi_k, WithOnes(v, denominator), memory, mask, log_gate);
  memory = result.memory;
  return Divide(result.out, denominator);
}

void FeatureWrite(const at::Tensor& phi_k, const at::Tensor& v, at::Tensor& memory,
                  const ops::Mask& mask, const Denominator& denominator,
                  const at::Tensor& log_gate) {
  memory = ops::SumWrite(phi_k, WithOnes(v, denominator), memory, mask, log_gate);
}

at::Tensor FeatureRead(const at::Tensor& phi_q, const at::Tensor& memory,
                       const Denominator& denominator) {
  return Divide(at::matmul(phi_q, memory.to(phi_q.scalar_type())), denominator);
}

at::Tensor Normalised(const at::Tensor& x) {
  return x / (at::linalg_vector_norm(x, 2, {-1}, true) + 1e-3);
}

at::Tensor WeightedValues(const at::Tensor& weights, const at::Tensor& v,
                          const Denominator& denominator) {
  const at::Tensor sum = (weights.transpose(2, 3) * v).sum(2, true);  // [B,H,1,d]
  const double value = denominator.value;
  if (denominator.rule == Rule::kNone) return sum * value;
  // Number by number, so that nothing is shared with Divisor.
  const at::Tensor divisor = weights.sum(3, true).contiguous();  // [B,H,1,1]
  double* z = divisor.mutable_data_ptr<double>();
  for (int64_t i = 0; i < divisor.numel(); ++i) {
    switch (denominator.rule) {
      case Rule::kPlus:
        z[i] += value;
        break;
      case Rule::kAtLeast:
        z[i] = z[i] < value ? value : z[i];
        break;
      case Rule::kMagnitude:
        z[i] = std::abs(z[i]) < value ? value : std::abs(z[i]);
        break;
      case Rule::kSignSafe:
        if (std::abs(z[i]) < value) z[i] = z[i] < 0 ? -value : value;
        break;
      case Rule::kNone:
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
