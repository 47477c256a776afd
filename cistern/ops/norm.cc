#include "cistern/ops/norm.h"

#include "cistern/kernels/norm.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace norm {

struct Arguments {
  at::Tensor x, weight;
  OptionalTensor bias;
  double eps = 0;
  Mask mask;  // never given: every row is for itself
};

struct Op {
  static constexpr const char* kSchema =
      "norm_to_bfloat16(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor)";
  using Arguments = norm::Arguments;
  static constexpr auto kFields = [](auto& a) { return std::tie(a.x, a.weight, a.bias, a.eps); };
  static constexpr size_t kOutputs = 2, kDifferentiable = 1;
  enum { kOut, kStats };
  static constexpr int64_t kTime = 0;
  static const at::Tensor& Tokens(const Arguments& a) { return a.x; }

  static void Check(const Arguments& a) {
    TORCH_CHECK(a.x.dim() >= 1 && a.weight.dim() == 1 && a.weight.sym_size(0) == a.x.sym_size(-1),
                "[norm_to_bfloat16] expected weight [D] for x [...,D], got ", a.weight.sym_sizes(),
                " and ", a.x.sym_sizes());
    TORCH_CHECK(!a.bias || a.bias->sym_sizes() == a.weight.sym_sizes(),
                "[norm_to_bfloat16] expected bias ", a.weight.sym_sizes());
    TORCH_CHECK(a.x.scalar_type() == at::kFloat && a.weight.scalar_type() == at::kFloat &&
                    (!a.bias || a.bias->scalar_type() == at::kFloat),
                "[norm_to_bfloat16] expected float, got x ", a.x.scalar_type(), " and weight ",
                a.weight.scalar_type());
  }

  static Tensors Compose(const Arguments& a) {
    const int64_t width = a.weight.size(0);
    const at::Tensor y = a.bias ? at::layer_norm(a.x, {width}, a.weight, *a.bias, a.eps)
                                : at::rms_norm(a.x, {width}, a.weight, a.eps);
    return {y.to(at::kBFloat16)};
  }

  static Tensors Empty(const Arguments& a) {
    const c10::SymInt rows = a.x.sym_numel() / a.weight.sym_size(0).max(1);
    return {at::empty_symint(a.x.sym_sizes(), a.x.options().dtype(at::kBFloat16)),
            at::empty_symint({rows, 2}, a.x.options())};
  }
  static Tensors EmptyGradients(const Arguments& a) {
    Tensors g = {LikePlain(a.x), LikePlain(a.weight)};
    if (a.bias) g.push_back(LikePlain(*a.bias));
    return g;
  }

  static NormShape ShapeOf(const Arguments& a) {
    const int64_t width = a.weight.size(0);
    return {width == 0 ? 0 : a.x.numel() / width, width, a.eps};
  }

  static void Forward(const Arguments& a, const RowMask&, const Tensors& y) {
    const at::Tensor x = a.x.contiguous(), w = a.weight.contiguous(),
                     b = a.bias ? a.bias->contiguous() : at::Tensor();
    Norm(ShapeOf(a), x.const_data_ptr<float>(), w.const_data_ptr<float>(),
         b.defined() ? b.const_data_ptr<float>() : nullptr, MutableData<BFloat16>(y[kOut]),
         y[kStats].mutable_data_ptr<float>());
  }

  static Tensors Keep(const Arguments&, const Tensors& y) { return {at::Tensor(), y[kStats]}; }

  static Tensors Backward(const Arguments& a, const RowMask&, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor x = a.x.contiguous(), w = a.weight.contiguous(), dy = g[kOut].contiguous(),
                     b = a.bias ? a.bias->contiguous() : at::Tensor();
    Tensors grads = EmptyGradients(a);
    NormBackward(ShapeOf(a), x.const_data_ptr<float>(), w.const_data_ptr<float>(),
                 b.defined() ? b.const_data_ptr<float>() : nullptr,
                 kept[kStats].const_data_ptr<float>(), ConstData<BFloat16>(dy),
                 grads[0].mutable_data_ptr<float>(), grads[1].mutable_data_ptr<float>(),
                 b.defined() ? grads[2].mutable_data_ptr<float>() : nullptr);
    return grads;
  }
};

struct ResidualFunction : torch::autograd::Function<ResidualFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& y) {
    ctx->set_materialize_grads(false);
    return Sum(x, y);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grads) {
    const at::Tensor& g = grads[0];
    return {g, g.defined() ? g.to(at::kBFloat16) : g};
  }
  static at::Tensor Sum(const at::Tensor& x, const at::Tensor& y) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const at::Tensor a = x.contiguous(), b = y.contiguous(), sum = LikePlain(a);
    AddBFloat16(a.numel(), a.const_data_ptr<float>(), ConstData<BFloat16>(b),
                sum.mutable_data_ptr<float>());
    return sum;
  }
};

}  // namespace norm

CISTERN_PRIMITIVE(norm::Op)

at::Tensor NormToBFloat16(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                          double eps) {
  return std::get<0>(OpPair<norm::Op>::Call({x, weight, Given(bias), eps, {}}));
}

at::Tensor AddResidual(const at::Tensor& x, const at::Tensor& y) {
  if (ActiveImpl() != Impl::kKernel || x.scalar_type() != at::kFloat ||
      y.scalar_type() != at::kBFloat16 || !x.sizes().equals(y.sizes()) || !IsPlain(x) ||
      !IsPlain(y) || !NobodyWatchesOps() || HaveTangents({x, y}))
    return x + y;
  return NeedsGradient({x, y}) ? norm::ResidualFunction::apply(x, y)
                               : norm::ResidualFunction::Sum(x, y);
}

}  // namespace cistern::ops
