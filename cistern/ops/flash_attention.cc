#include "cistern/ops/flash_attention.h"

#include <ATen/ATen.h>
#include <ATen/SDPBackend.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <limits>

#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace flash_attention {

using torch::autograd::variable_list;

at::Tensor Explicit(const variable_list& x, const at::Tensor& bias, bool causal, double scale) {
  at::Tensor scores = at::matmul(x[0], x[1].transpose(2, 3)) * scale;
  if (causal) {
    scores = scores.masked_fill(
        at::ones(scores.sizes().slice(2), scores.options().dtype(at::kBool)).tril_().logical_not(),
        -std::numeric_limits<double>::infinity());
  }
  if (bias.defined()) scores = scores + bias;
  return at::matmul(at::softmax(scores, -1), x[2]);
}

struct Function : torch::autograd::Function<Function> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v, const OptionalTensor& bias,
                            bool causal, double scale) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [out, log_sums] =
        at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, bias, scale);
    ctx->save_for_backward({q, k, v, out, log_sums, bias.value_or(at::Tensor())});
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["scale"] = scale;
    ctx->set_materialize_grads(false);
    return out;
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor& g = grads[0];
    variable_list to(6);
    if (!g.defined()) return to;
    const variable_list kept = ctx->get_saved_variables();
    const bool causal = ctx->saved_data["causal"].toBool();
    const double scale = ctx->saved_data["scale"].toDouble();
    const variable_list x = {kept[0], kept[1], kept[2]};
    if (at::GradMode::is_enabled()) {
      const variable_list inputs = Apart(x);
      const auto dx = torch::autograd::grad({Explicit(inputs, kept[5], causal, scale)}, inputs, {g},
                                            true, true);
      std::copy(dx.begin(), dx.end(), to.begin());
    } else {
      std::tie(to[0], to[1], to[2]) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          g, x[0], x[1], x[2], kept[3], kept[4], 0.0, causal, Given(kept[5]), scale);
    }
    return to;
  }
};

}  // namespace flash_attention

at::Tensor FlashAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& bias, bool causal, double scale) {
  const bool on_cpu = q.device().is_cpu() && torch::autograd::compute_requires_grad(q, k, v);
  const auto flash = static_cast<int64_t>(at::SDPBackend::flash_attention);
  if (on_cpu && at::_fused_sdp_choice(q, k, v, Given(bias), 0.0, causal, scale) == flash)
    return flash_attention::Function::apply(q, k, v, Given(bias), causal, scale);
  return at::scaled_dot_product_attention(q, k, v, Given(bias), 0.0, causal, scale);
}

}  // namespace cistern::ops
