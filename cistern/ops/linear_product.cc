#include "cistern/ops/linear_product.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include "cistern/kernels/few_rows_product.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace {

using torch::autograd::variable_list;

// From so many multiplications on: below it, oneDNN's cost of a call outweighs its kernel.
constexpr int64_t kLarge = int64_t{1} << 24;

bool IsAmdWithAvx512() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f");
#else
  return false;
#endif
}

using OneDnnLinear = at::Tensor(const at::Tensor&, const at::Tensor&,
                                const std::optional<at::Tensor>&, std::string_view,
                                c10::List<std::optional<at::Scalar>>,
                                std::optional<std::string_view>);
using Handle = c10::TypedOperatorHandle<OneDnnLinear>;

// torch's operator, which takes plain tensors; none where this torch has no oneDNN.
const std::optional<Handle>& OneDnn() {
  static const std::optional<Handle> op = []() -> std::optional<Handle> {
    if (!IsAmdWithAvx512() || !at::hasMKLDNN()) return std::nullopt;
    const auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    if (!found) return std::nullopt;
    return found->typed<OneDnnLinear>();
  }();
  return op;
}

bool IsPlainFloat(const at::Tensor& x) { return x.scalar_type() == at::kFloat && IsPlain(x); }

// Up to so many rows the kernel that reads each weight once was faster than both libraries
// (docs/notes/decoding.md).
constexpr int64_t kFewRows = 32;

bool TakesFewRows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto type = weight.scalar_type();
  if (type != at::kFloat && type != at::kDouble) return false;
  const auto served = [&](const at::Tensor& t) { return t.scalar_type() == type && IsPlain(t); };
  if (weight.dim() != 2 || x.dim() < 1 || x.size(-1) != weight.size(1) || weight.numel() == 0 ||
      x.numel() > kFewRows * weight.size(1))
    return false;
  return ActiveImpl() == Impl::kKernel && served(x) && served(weight) && weight.is_contiguous() &&
         (!bias.defined() || (served(bias) && bias.dim() == 1 && bias.is_contiguous() &&
                              bias.size(0) == weight.size(0))) &&
         !NeedsGradient({x, weight, bias}) && !HaveTangents({x, weight, bias}) &&
         NobodyWatchesOps() && !at::autocast::is_autocast_enabled(at::kCPU);
}

at::Tensor FewRows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const at::Tensor rows = x.contiguous();
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.back() = weight.size(0);
  const at::Tensor y = at::empty(sizes, rows.options());
  DispatchType(y, [&]<class T>(T) {
    FewRowsProduct<T>({rows.numel() / weight.size(1), weight.size(1), weight.size(0)},
                      rows.const_data_ptr<T>(), weight.const_data_ptr<T>(),
                      bias.defined() ? bias.const_data_ptr<T>() : nullptr, y.mutable_data_ptr<T>());
  });
  return y;
}

bool TakesOneDnn(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (x.dim() < 2 || weight.dim() != 2 || x.numel() * weight.size(0) < kLarge) return false;
  return ActiveImpl() == Impl::kKernel && IsPlainFloat(x) && IsPlainFloat(weight) &&
         (!bias.defined() || IsPlainFloat(bias)) && !HaveTangents({x, weight, bias}) &&
         NobodyWatchesOps() && !at::autocast::is_autocast_enabled(at::kCPU) &&
         at::globalContext().userEnabledMkldnn() && OneDnn();
}

at::Tensor Call(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return OneDnn()->call(x.contiguous(), weight, bias, "none",
                        c10::List<std::optional<at::Scalar>>(), "");
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight, const OptionalTensor& bias) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["bias"] = bias && bias->requires_grad();
    return Call(x, weight, bias);
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &dy = grads[0];
    at::Tensor dx, d_weight, d_bias;
    if (ctx->needs_input_grad(0)) dx = LinearProduct(dy, weight.t());
    const at::Tensor rows = dy.reshape({-1, weight.size(0)});
    if (ctx->needs_input_grad(1)) d_weight = at::mm(rows.t(), x.reshape({-1, weight.size(1)}));
    if (ctx->saved_data["bias"].toBool()) d_bias = rows.sum(0);
    return {dx, d_weight, d_bias};
  }
};

}  // namespace

at::Tensor LinearProduct(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (TakesFewRows(x, weight, bias)) return FewRows(x, weight, bias);
  const OptionalTensor b = Given(bias);
  if (!TakesOneDnn(x, weight, bias)) return at::linear(x, weight, b);
  return NeedsGradient({x, weight, bias}) ? LinearFunction::apply(x, weight, b)
                                          : Call(x, weight, b);
}

}  // namespace cistern::ops
