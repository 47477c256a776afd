#include "cistern/nn/head_loss.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>

#include "cistern/base/error.h"

namespace cistern {
namespace {

using torch::autograd::variable_list;

constexpr int64_t kIgnore = -100;
constexpr int64_t kLogits = 1 << 19;  // formed at once: what stays in the cache of a core

struct HeadLossFunction : torch::autograd::Function<HeadLossFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& hidden,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const at::Tensor& targets, double smoothing, bool recording) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto device = hidden.device().type();
    const bool half = !hidden.is_meta() && at::autocast::is_autocast_enabled(device);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto product_type =
        half ? at::autocast::get_autocast_dtype(device) : hidden.scalar_type();
    const at::Tensor h = hidden.to(product_type), w = weight.to(product_type);
    const int64_t rows = h.size(0), vocabulary = w.size(0),
                  at_once = std::max<int64_t>(16, kLogits / vocabulary);
    const bool wanted[] = {recording && hidden.requires_grad(), recording && weight.requires_grad(),
                           recording && bias && bias->requires_grad()};
    const bool any = wanted[0] || wanted[1] || wanted[2];
    const at::Tensor counted = targets.ne(kIgnore);
    const int64_t real = hidden.is_meta() ? rows : counted.sum().item<int64_t>();
    const double share = 1.0 / double(std::max<int64_t>(1, real)),
                 uniform = smoothing / double(vocabulary);
    const at::Tensor d_hidden = wanted[0] ? at::empty_like(hidden) : at::Tensor();
    const at::Tensor d_weight = wanted[1] ? at::zeros_like(weight) : at::Tensor();
    const at::Tensor d_bias = wanted[2] ? at::zeros_like(*bias) : at::Tensor();
    const at::Tensor loss = at::zeros({}, hidden.options().dtype(at::kDouble));
    for (int64_t begin = 0; begin < rows; begin += at_once) {
      const int64_t count = std::min(at_once, rows - begin);
      const at::Tensor part = h.narrow(0, begin, count),
                       mask = counted.narrow(0, begin, count).unsqueeze(1);
      const at::Tensor target =
          targets.narrow(0, begin, count).unsqueeze(1).masked_fill(mask.logical_not(), 0);
      at::Tensor logits = at::matmul(part, w.t()).to(weight.scalar_type());
      if (bias) logits.add_(*bias);
      // The sum over the vocabulary from the largest probability, which is never small: one pass of
      // exp for the loss and its gradient.
      at::Tensor p = at::softmax(logits, 1);
      const at::Tensor log_sum = logits.amax(1, true) - p.amax(1, true).log();
      at::Tensor nats = log_sum - (1 - smoothing) * logits.gather(1, target);
      if (smoothing > 0) nats = nats - uniform * logits.sum(1, true);
      loss.add_(nats.masked_fill(mask.logical_not(), 0.0).sum(at::kDouble));
      if (!any) continue;
      // d logits = (softmax - target) / count, in the place of the probabilities.
      if (smoothing > 0) p.sub_(uniform);
      p.scatter_add_(1, target, at::full({count, 1}, smoothing - 1, p.options()));
      p.mul_(mask.to(p.scalar_type()) * share);
      if (wanted[2]) d_bias.add_(p.sum(0));
      const at::Tensor d_logits = p.to(product_type);
      if (wanted[0]) d_hidden.narrow(0, begin, count).copy_(at::matmul(d_logits, w));
      if (wanted[1]) {
        if (half) {
          d_weight.add_(at::matmul(d_logits.t(), part));
        } else {
          d_weight.addmm_(d_logits.t(), part);
        }
      }
    }
    ctx->save_for_backward({d_hidden, d_weight, d_bias});
    return (loss * share).to(weight.scalar_type());
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    CISTERN_CHECK(!at::GradMode::is_enabled(),
                  "[head_loss] is differentiable once; form the logits for second derivatives");
    variable_list out;
    for (const at::Tensor& d : saved)
      out.push_back(d.defined() ? d * grads[0].to(d.scalar_type()) : d);
    out.resize(6);
    return out;
  }
};

}  // namespace

at::Tensor HeadLoss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias,
                    const at::Tensor& targets, double label_smoothing) {
  CISTERN_CHECK(hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1) &&
                    targets.dim() == 1 && targets.size(0) == hidden.size(0) &&
                    (!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0))),
                "[head_loss] expected hidden [N,D], weight [V,D], bias [V] and targets [N], got ",
                StrCat(hidden.sizes()), ", ", StrCat(weight.sizes()),
                bias.defined() ? StrCat(", bias ", bias.sizes()) : std::string(), " and ",
                StrCat(targets.sizes()));
  return HeadLossFunction::apply(hidden, weight,
                                 bias.defined() ? std::optional(bias) : std::nullopt, targets,
                                 label_smoothing, at::GradMode::is_enabled());
}

}  // namespace cistern
