#include "cistern/ops/linear_product.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "cistern/kernels/few_rows_product.h"
#include "cistern/kernels/isa.h"
#include "cistern/kernels/transpose.h"
#include "cistern/kernels/transposed_product.h"
#include "cistern/ops/kept_weights.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace {

using torch::autograd::variable_list;

// From so many multiplications on: below it, oneDNN's cost of a call outweighs its kernel. The
// second where it is far faster.
constexpr int64_t kLarge = int64_t{1} << 24, kLargeOfFarFaster = int64_t{1} << 22;
constexpr int64_t kLargeInBFloat16 = int64_t{1} << 22;  // the same of training in bfloat16

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

bool AutocastsToBFloat16() {
  return at::autocast::is_autocast_enabled(at::kCPU) &&
         at::autocast::get_autocast_dtype(at::kCPU) == at::kBFloat16;
}

// Products under autocast whose weights are kept in bfloat16.
bool MultipliesKeptWeights() { return KeepsWeights() && AutocastsToBFloat16(); }

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
         NobodyWatchesOps() &&
         (!at::autocast::is_autocast_enabled(at::kCPU) || MultipliesKeptWeights());
}

at::Tensor FewRows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const at::Tensor rows = x.contiguous();
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.back() = weight.size(0);
  const at::Tensor y = at::empty(sizes, rows.options());
  const FewRowsShape shape = {rows.numel() / weight.size(1), weight.size(1), weight.size(0)};
  const auto run = [&]<class T, class W>(T, const W* w) {
    FewRowsProduct<T, W>(shape, rows.const_data_ptr<T>(), w,
                         bias.defined() ? bias.const_data_ptr<T>() : nullptr,
                         y.mutable_data_ptr<T>());
  };
  if (MultipliesKeptWeights() && y.scalar_type() == at::kFloat) {
    run(float{}, ConstData<BFloat16>(KeptInBFloat16(weight)));
  } else {
    DispatchType(y, [&]<class T>(T x) { run(x, weight.const_data_ptr<T>()); });
  }
  return y;
}

at::Tensor Call(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return OneDnn()->call(x.contiguous(), weight, bias, "none",
                        c10::List<std::optional<at::Scalar>>(), "");
}

double Seconds(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Whether oneDNN's products are far faster than MKL's, as they are where AVX-512 is of full width
// (AMD Zen 5: 2.3 times, Zen 4: 1.2). Measured once, in some milliseconds.
bool OneDnnIsFarFaster() {
  static const bool is = [] {
    const at::NoGradGuard no_grad;
    const at::Tensor x = at::ones({256, 256}), weight = at::ones({512, 256});
    double mkl = 1, one_dnn = 1;
    for (int i = 0; i < 6; ++i) {
      mkl = std::min(mkl, Seconds([&] { at::mm(x, weight.t()); }));
      one_dnn = std::min(one_dnn, Seconds([&] { Call(x, weight, {}); }));
    }
    return one_dnn * 1.6 < mkl;
  }();
  return is;
}

bool TakesOneDnn(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const int64_t products = x.dim() < 2 || weight.dim() != 2 ? 0 : x.numel() * weight.size(0);
  if (products < kLargeOfFarFaster) return false;
  const bool can = ActiveImpl() == Impl::kKernel && IsPlainFloat(x) && IsPlainFloat(weight) &&
                   (!bias.defined() || IsPlainFloat(bias)) && !HaveTangents({x, weight, bias}) &&
                   NobodyWatchesOps() && !at::autocast::is_autocast_enabled(at::kCPU) &&
                   at::globalContext().userEnabledMkldnn() && OneDnn();
  return can && (products >= kLarge || OneDnnIsFarFaster());
}

// For operands [T,N] and [T,K] of a product that no graph is recorded of.
bool TakesOneDnnTransposed(const at::Tensor& a, const at::Tensor& b) {
  return !NeedsGradient({a, b}) && TakesOneDnn(b, a.t(), {}) && OneDnnIsFarFaster();
}

// x^T of x [T,N], contiguous; torch's copy into another order takes several times as long.
at::Tensor Turned(const at::Tensor& x) {
  if (x.size(0) % kTransposeBlock != 0 || x.size(1) % kTransposeBlock != 0 || x.stride(1) != 1)
    return x.t().contiguous();
  const at::Tensor turned = at::empty({x.size(1), x.size(0)}, x.options());
  Transpose(x.size(0), x.size(1), x.const_data_ptr<float>(), x.stride(0),
            turned.mutable_data_ptr<float>());
  return turned;
}

// oneDNN adds up all rows in one chain, whose rounding grows with its length: so many at a time.
constexpr int64_t kChainRows = 512;

// a^T b, in memory of either order: oneDNN is faster where the narrower one of the two is copied.
at::Tensor ByOneDnn(const at::Tensor& a, const at::Tensor& b) {
  const bool turned = a.size(1) >= b.size(1);
  const at::Tensor &copied = turned ? b : a, &other = turned ? a : b;
  at::Tensor sum;
  for (int64_t begin = 0; begin < a.size(0); begin += kChainRows) {
    const int64_t count = std::min(kChainRows, a.size(0) - begin);
    const at::Tensor part =
        Call(Turned(copied.narrow(0, begin, count)), other.narrow(0, begin, count).t(), {});
    sum = sum.defined() ? sum.add_(part) : part;
  }
  return turned ? sum.t() : sum;
}

}  // namespace

namespace linear_product {

struct Function : torch::autograd::Function<Function> {
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
    if (ctx->needs_input_grad(1))
      d_weight = TransposedProduct(rows, x.reshape({-1, weight.size(1)}));
    if (ctx->saved_data["bias"].toBool()) d_bias = rows.sum(0);
    return {dx, d_weight, d_bias};
  }
};

}  // namespace linear_product

namespace {

// For operands [T,N] and [T,K] in bfloat16 of a product in float that no graph is recorded of.
bool TakesTransposed(const at::Tensor& a, const at::Tensor& b) {
  const auto served = [](const at::Tensor& t) {
    return t.scalar_type() == at::kBFloat16 && IsPlain(t) && t.dim() == 2 && t.stride(1) == 1 &&
           t.stride(0) >= t.size(1);
  };
  return CanMultiplyTransposed() && served(a) && served(b) && a.size(0) == b.size(0) &&
         ActiveImpl() == Impl::kKernel && NobodyWatchesOps() && !NeedsGradient({a, b}) &&
         !HaveTangents({a, b});
}

// sum [N,K], contiguous, = a^T b, or += that.
void ByTransposed(const at::Tensor& a, const at::Tensor& b, bool add, const at::Tensor& sum) {
  const auto matrix = [](const at::Tensor& t) {
    return BFloat16Matrix{ConstData<BFloat16>(t), t.stride(0)};
  };
  cistern::TransposedProduct({a.size(0), a.size(1), b.size(1)}, matrix(a), matrix(b), add,
                             sum.mutable_data_ptr<float>(), sum.size(1));
}

// Operands in bfloat16 are widened for a product on processors that do not multiply them: torch's
// own products take 10 to 40 times as long as float's there (docs/notes/bfloat16-2026-11.md).
bool WidensProducts() {
#if defined(__x86_64__)
  return !HasBFloat16();
#else
  return false;
#endif
}
bool IsWidened(const at::Tensor& x) {
  return WidensProducts() && x.scalar_type() == at::kBFloat16 && x.device().is_cpu();
}

// x W^T + b of operands of one type, outside of autocast.
at::Tensor LinearOf(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  if (!IsWidened(x)) return at::linear(x, weight, bias);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto wide = [](const at::Tensor& t) { return t.to(at::kFloat); };
  return at::linear(wide(x), wide(weight), bias ? OptionalTensor(wide(*bias)) : bias).to(x.dtype());
}

// Products of x and weights that train under autocast, and are taken out of autocast's hands: where
// they are widened, and where they are so large that a kernel of their gradients by the weights
// pays.
bool TrainsInBFloat16(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!NeedsGradient({weight}) || !AutocastsToBFloat16() || x.dim() < 2 || weight.dim() != 2 ||
      x.size(-1) != weight.size(1))
    return false;
  const bool gains = CanMultiplyTransposed() && x.numel() * weight.size(0) >= kLargeInBFloat16;
  if (!gains && !WidensProducts()) return false;
  return ActiveImpl() == Impl::kKernel && IsPlainFloat(weight) && IsPlain(x) &&
         (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16) &&
         (!bias.defined() || IsPlainFloat(bias)) && NobodyWatchesOps() &&
         !HaveTangents({x, weight, bias});
}

}  // namespace

namespace linear_product {

// x in bfloat16, weight and bias in float, and the weight in bfloat16, which takes no gradient.
struct BFloat16Function : torch::autograd::Function<BFloat16Function> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight, const OptionalTensor& bias,
                            const at::Tensor& rounded) {
    ctx->save_for_backward({x, weight, rounded});
    ctx->saved_data["bias"] = bias && bias->requires_grad();
    const at::AutoDispatchBelowADInplaceOrView guard;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return LinearOf(x, rounded, bias ? OptionalTensor(bias->to(at::kBFloat16)) : bias);
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &dy = grads[0];
    const at::Tensor rows = dy.reshape({-1, weight.size(0)});
    at::Tensor dx, d_weight, d_bias;
    if (ctx->needs_input_grad(0)) {
      // Derivatives of the gradient go on to the weight itself.
      const bool again = NeedsGradient({dy, weight});
      const at::Tensor w = again ? weight.to(at::kBFloat16) : saved[2];
      dx = IsWidened(dy) ? LinearOf(dy, w.t(), {}) : at::matmul(dy, w);
    }
    if (ctx->needs_input_grad(1))
      d_weight = TransposedProduct(rows, x.reshape({-1, weight.size(1)}));
    if (ctx->saved_data["bias"].toBool()) d_bias = rows.sum(0, false, at::kFloat);
    return {dx, d_weight, d_bias, at::Tensor()};
  }
};

}  // namespace linear_product

namespace {

// As autocast rounds them: weights once a step, whose memory is shared by all that meet them.
at::Tensor Rounded(const at::Tensor& t) {
  return at::autocast::cached_cast(at::kBFloat16, t, at::kCPU);
}

at::Tensor TrainInBFloat16(const at::Tensor& x, const at::Tensor& weight,
                           const OptionalTensor& bias) {
  return linear_product::BFloat16Function::apply(Rounded(x), weight, bias,
                                                 Rounded(weight).detach());
}

// The same without a gradient of its own.
at::Tensor WidenedProduct(const at::Tensor& x, const at::Tensor& weight,
                          const OptionalTensor& bias) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return LinearOf(Rounded(x), Rounded(weight), bias ? OptionalTensor(Rounded(*bias)) : bias);
}

}  // namespace

at::Tensor LinearProduct(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (TakesFewRows(x, weight, bias)) return FewRows(x, weight, bias);
  const OptionalTensor b = Given(bias);
  if (TrainsInBFloat16(x, weight, bias)) return TrainInBFloat16(x, weight, b);
  const bool kept = MultipliesKeptWeights() && weight.scalar_type() == at::kFloat &&
                    IsPlain(weight) && !NeedsGradient({x, weight, bias});
  if (AutocastsToBFloat16() && WidensProducts() && x.device().is_cpu())
    return WidenedProduct(x, kept ? KeptInBFloat16(weight) : weight, b);
  if (kept) return at::linear(x, KeptInBFloat16(weight), b);
  if (IsWidened(x) && IsWidened(weight)) return LinearOf(x, weight, b);
  if (!TakesOneDnn(x, weight, bias)) return at::linear(x, weight, b);
  return NeedsGradient({x, weight, bias}) ? linear_product::Function::apply(x, weight, b)
                                          : Call(x, weight, b);
}

bool StaysFloat(const at::Tensor& x) {
  return MultipliesKeptWeights() && x.numel() <= kFewRows * x.size(-1) &&
         ActiveImpl() == Impl::kKernel && IsPlainFloat(x) && NobodyWatchesOps();
}

at::Tensor TransposedProduct(const at::Tensor& a, const at::Tensor& b) {
  if (TakesTransposed(a, b)) {
    const at::Tensor product = at::empty({a.size(1), b.size(1)}, a.options().dtype(at::kFloat));
    ByTransposed(a, b, false, product);
    return product;
  }
  if (TakesOneDnnTransposed(a, b)) return ByOneDnn(a, b);
  if (IsWidened(a) && IsWidened(b)) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return at::mm(a.to(at::kFloat).t(), b.to(at::kFloat));
  }
  const at::Tensor product = at::mm(a.t(), b);
  return product.scalar_type() == at::kBFloat16 ? product.to(at::kFloat) : product;
}

void AddTransposedProduct(const at::Tensor& a, const at::Tensor& b, at::Tensor& sum) {
  if (!sum.defined()) {
    sum = TransposedProduct(a, b);
  } else if (TakesTransposed(a, b) && IsPlainFloat(sum) && sum.is_contiguous()) {
    ByTransposed(a, b, true, sum);
  } else if (a.scalar_type() == at::kBFloat16 || TakesOneDnnTransposed(a, b)) {
    sum.add_(TransposedProduct(a, b));
  } else {
    sum.addmm_(a.t(), b);
  }
}

}  // namespace cistern::ops
