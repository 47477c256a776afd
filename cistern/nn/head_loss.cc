#include "cistern/nn/head_loss.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "cistern/base/error.h"
#include "cistern/kernels/vocab_loss.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/linear_product.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern {
namespace head_loss {
namespace {

using torch::autograd::variable_list;

constexpr int64_t kIgnore = -100;
constexpr int64_t kLogitBytes = 1 << 21;  // formed at once: what stays in the cache of a core

// The sum of the nats of these rows; their gradients in the place of the logits, where wanted.
double SumLoss(at::Tensor& logits, const at::Tensor& targets, double smoothing, double share,
               bool gradient) {
  const VocabLossShape shape{logits.size(0), logits.size(1), smoothing, share, gradient};
  std::vector<double> nats(size_t(shape.rows));
  const int64_t* y = targets.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < shape.rows; ++i)
    CISTERN_CHECK(y[i] == kIgnore || (y[i] >= 0 && y[i] < shape.vocabulary), "[head_loss] target ",
                  y[i], " is not within the vocabulary of ", shape.vocabulary);
  logits = logits.contiguous();
  ops::DispatchStored(
      logits, [&]<class T>(T) { VocabLoss(shape, ops::MutableData<T>(logits), y, nats.data()); });
  double sum = 0;
  for (const double x : nats) sum += x;
  return sum;
}

}  // namespace

struct Function : torch::autograd::Function<Function> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& hidden,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const at::Tensor& targets, double smoothing, bool recording) {
    RECORD_FUNCTION("cistern::head_loss", {});
    at::AutoDispatchBelowADInplaceOrView below;
    const auto device = hidden.device().type();
    const bool half = !hidden.is_meta() && at::autocast::is_autocast_enabled(device);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto product_type =
        half ? at::autocast::get_autocast_dtype(device) : hidden.scalar_type();
    const at::Tensor h = hidden.to(product_type), w = weight.to(product_type);
    const int64_t rows = h.size(0), vocabulary = w.size(0);
    const bool wanted[] = {recording && hidden.requires_grad(), recording && weight.requires_grad(),
                           recording && bias && bias->requires_grad()};
    const bool any = wanted[0] || wanted[1] || wanted[2];
    const at::Tensor counted = targets.ne(kIgnore);
    const int64_t real = hidden.is_meta() ? rows : counted.sum().item<int64_t>();
    const double share = 1.0 / double(std::max<int64_t>(1, real)),
                 uniform = smoothing / double(vocabulary);
    const at::Tensor d_hidden = wanted[0] ? at::empty_like(hidden) : at::Tensor();
    at::Tensor d_weight;
    const at::Tensor d_bias = wanted[2] ? at::zeros_like(*bias) : at::Tensor();
    const at::Tensor loss = at::zeros({}, hidden.options().dtype(at::kDouble));
    // Elsewhere, and with CISTERN_IMPL, the same by torch's operations.
    const bool kernel = ops::ActiveImpl() == ops::Impl::kKernel && hidden.device().is_cpu() &&
                        (weight.scalar_type() == at::kFloat || weight.scalar_type() == at::kDouble);
    // The kernel takes bfloat16 as the product gives it.
    const bool as_given = kernel && !bias && product_type == at::kBFloat16;
    const auto logit_type = as_given ? product_type : weight.scalar_type();
    const int64_t at_once =
        std::max<int64_t>(16, kLogitBytes / (vocabulary * int64_t(c10::elementSize(logit_type))));
    const at::Tensor plain_targets = kernel ? targets.contiguous() : targets;
    for (int64_t begin = 0; begin < rows; begin += at_once) {
      const int64_t count = std::min(at_once, rows - begin);
      const at::Tensor part = h.narrow(0, begin, count);
      at::Tensor logits = ops::LinearProduct(part, w).to(logit_type);
      if (bias) logits.add_(*bias);
      at::Tensor p;  // d logits = (softmax - target) / count
      if (kernel) {
        loss.add_(SumLoss(logits, plain_targets.narrow(0, begin, count), smoothing, share, any));
        p = logits;
      } else {
        const at::Tensor mask = counted.narrow(0, begin, count).unsqueeze(1),
                         target = targets.narrow(0, begin, count)
                                      .unsqueeze(1)
                                      .masked_fill(mask.logical_not(), 0);
        // The sum over the vocabulary from the largest probability, which is never small: one pass
        // of exp for the loss and its gradient.
        p = at::softmax(logits, 1);
        const at::Tensor log_sum = logits.amax(1, true) - p.amax(1, true).log();
        at::Tensor nats = log_sum - (1 - smoothing) * logits.gather(1, target);
        if (smoothing > 0) nats = nats - uniform * logits.sum(1, true);
        loss.add_(nats.masked_fill(mask.logical_not(), 0.0).sum(at::kDouble));
        if (any) {
          if (smoothing > 0) p.sub_(uniform);
          p.scatter_add_(1, target, at::full({count, 1}, smoothing - 1, p.options()));
          p.mul_(mask.to(p.scalar_type()) * share);
        }
      }
      if (!any) continue;
      if (wanted[2]) d_bias.add_(p.sum(0));
      const at::Tensor d_logits = p.to(product_type);
      if (wanted[0]) d_hidden.narrow(0, begin, count).copy_(ops::LinearProduct(d_logits, w.t()));
      if (wanted[1]) ops::AddTransposedProduct(d_logits, part, d_weight);
    }
    if (wanted[1])
      d_weight = d_weight.defined() ? d_weight.to(weight.scalar_type()).contiguous()
                                    : at::zeros_like(weight);
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

}  // namespace head_loss

at::Tensor HeadLoss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias,
                    const at::Tensor& targets, double label_smoothing) {
  CISTERN_CHECK(hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1) &&
                    targets.dim() == 1 && targets.size(0) == hidden.size(0) &&
                    (!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0))),
                "[head_loss] expected hidden [N,D], weight [V,D], bias [V] and targets [N], got ",
                StrCat(hidden.sizes()), ", ", StrCat(weight.sizes()),
                bias.defined() ? StrCat(", bias ", bias.sizes()) : std::string(), " and ",
                StrCat(targets.sizes()));
  const auto tangent = [](const at::Tensor& t) { return t.defined() && t._fw_grad(0).defined(); };
  CISTERN_CHECK(!tangent(hidden) && !tangent(weight) && !tangent(bias),
                "[head_loss] has no forward-mode derivative; form the logits for it");
  return head_loss::Function::apply(hidden, weight,
                                    bias.defined() ? std::optional(bias) : std::nullopt, targets,
                                    label_smoothing, at::GradMode::is_enabled());
}

}  // namespace cistern
