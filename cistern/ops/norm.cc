#include "cistern/ops/norm.h"

#include <ATen/record_function.h>

#include "cistern/kernels/norm.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace norm {

using torch::autograd::variable_list;

at::Tensor Composed(const at::Tensor& x, const NormOf& norm, bool to_bfloat16) {
  const int64_t width = norm.weight.size(0);
  const at::Tensor y = norm.bias.defined()
                           ? at::layer_norm(x, {width}, norm.weight, norm.bias, norm.eps)
                           : at::rms_norm(x, {width}, norm.weight, norm.eps);
  return to_bfloat16 ? y.to(at::kBFloat16) : y;
}

const float* FloatsOrNull(const at::Tensor& x) {
  return x.defined() ? x.const_data_ptr<float>() : nullptr;
}

// Tensors of one call of the kernel, contiguous.
struct NormCall {
  NormCall(const at::Tensor& x, const NormOf& norm)
      : weight(norm.weight.contiguous()),
        bias(norm.bias.defined() ? norm.bias.contiguous() : norm.bias),
        shape{weight.numel() == 0 ? 0 : x.numel() / weight.numel(), weight.numel(), norm.eps} {}
  NormWeights weights() const { return {weight.const_data_ptr<float>(), FloatsOrNull(bias)}; }
  at::Tensor weight, bias;
  NormShape shape;
};

struct Results {
  at::Tensor sum, norm, stats;
};

Results ByKernel(const at::Tensor& x, const at::Tensor& added, const NormOf& norm,
                 bool to_bfloat16) {
  const NormCall call(x, norm);
  const at::Tensor from = x.contiguous(), plus = added.defined() ? added.contiguous() : added;
  const Results r = {
      added.defined() ? LikePlain(from) : from,
      at::empty(x.sizes(), x.options().dtype(to_bfloat16 ? at::kBFloat16 : at::kFloat)),
      at::empty({call.shape.rows, 2}, x.options())};
  const auto run = [&]<class Added, class Out>(const Added* a, Out* y) {
    Norm(call.shape, call.weights(), from.const_data_ptr<float>(), a,
         a == nullptr ? nullptr : r.sum.mutable_data_ptr<float>(), y,
         r.stats.mutable_data_ptr<float>());
  };
  const auto into = [&](auto* y) {
    if (!added.defined()) return run(static_cast<const float*>(nullptr), y);
    added.scalar_type() == at::kFloat ? run(ConstData<float>(plus), y)
                                      : run(ConstData<BFloat16>(plus), y);
  };
  to_bfloat16 ? into(MutableData<BFloat16>(r.norm)) : into(MutableData<float>(r.norm));
  return r;
}

struct Function : torch::autograd::Function<Function> {
  static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                               const OptionalTensor& added, const at::Tensor& weight,
                               const OptionalTensor& bias, double eps, bool to_bfloat16) {
    RECORD_FUNCTION("cistern::norm", {});
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor none;
    const NormOf norm = {weight, bias.value_or(none), eps};
    const Results r = ByKernel(x, added.value_or(none), norm, to_bfloat16);
    ctx->set_materialize_grads(false);
    // A sum that is x is x to autograd too.
    const at::Tensor& sum = added ? r.sum : x;
    ctx->save_for_backward({sum, weight, norm.bias, r.stats});
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["to_bfloat16"] = to_bfloat16;
    ctx->saved_data["added"] = !added                               ? kNothing
                               : added->scalar_type() == at::kFloat ? kFloats
                                                                    : kBFloats;
    return {sum, r.norm};
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor &d_sum = grads[0], &dy = grads[1];
    const auto added = ctx->saved_data["added"].toInt();
    if (!dy.defined()) return Gradients(d_sum, {}, {}, {}, added);
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& sum = saved[0];
    const NormOf norm = {saved[1], saved[2], ctx->saved_data["eps"].toDouble()};
    if (NeedsGradient(grads) || NeedsGradient({sum, norm.weight, norm.bias})) {
      const variable_list d = OfComposed(sum, norm, ctx->saved_data["to_bfloat16"].toBool(), dy);
      return Gradients(d_sum.defined() ? d[0] + d_sum : d[0], {}, d[1], d[2], added);
    }
    const NormCall call(sum, norm);
    const at::Tensor from = sum.contiguous(), g = dy.contiguous(),
                     g_sum = d_sum.defined() ? d_sum.contiguous() : d_sum, dx = LikePlain(sum),
                     d_weight = LikePlain(call.weight),
                     d_bias = norm.bias.defined() ? LikePlain(call.bias) : norm.bias,
                     rounded = added == kBFloats
                                   ? at::empty(sum.sizes(), sum.options().dtype(at::kBFloat16))
                                   : at::Tensor();
    const NormGradients to = {dx.mutable_data_ptr<float>(),
                              rounded.defined() ? MutableData<BFloat16>(rounded) : nullptr,
                              d_weight.mutable_data_ptr<float>(),
                              d_bias.defined() ? d_bias.mutable_data_ptr<float>() : nullptr};
    const auto run = [&](const auto* of) {
      NormBackward(call.shape, call.weights(), from.const_data_ptr<float>(),
                   saved[3].const_data_ptr<float>(), of, FloatsOrNull(g_sum), to);
    };
    g.scalar_type() == at::kFloat ? run(ConstData<float>(g)) : run(ConstData<BFloat16>(g));
    return Gradients(dx, rounded, d_weight, d_bias, added);
  }

 private:
  enum Added : int64_t { kNothing, kFloats, kBFloats };

  // In the order of forward's arguments. `rounded`: dx in bfloat16, where it is at hand.
  static variable_list Gradients(const at::Tensor& dx, const at::Tensor& rounded,
                                 const at::Tensor& d_weight, const at::Tensor& d_bias,
                                 int64_t added) {
    at::Tensor d_added;
    if (added == kFloats) d_added = dx;
    if (added == kBFloats)
      d_added = rounded.defined() || !dx.defined() ? rounded : dx.to(at::kBFloat16);
    return {dx, d_added, d_weight, d_bias, {}, {}};
  }

  // For derivatives of the gradients: autograd through other ops.
  static variable_list OfComposed(const at::Tensor& sum, const NormOf& norm, bool to_bfloat16,
                                  const at::Tensor& dy) {
    const at::AutoGradMode enable(true);
    variable_list inputs = {Apart(sum), Apart(norm.weight)};
    if (norm.bias.defined()) inputs.push_back(Apart(norm.bias));
    const NormOf apart = {inputs[1], norm.bias.defined() ? inputs[2] : norm.bias, norm.eps};
    variable_list d = torch::autograd::grad({Composed(inputs[0], apart, to_bfloat16)}, inputs, {dy},
                                            true, true, true);
    d.resize(3);
    return d;
  }
};

// Whether the kernels add y to floats.
bool TakesAdded(const at::Tensor& y) {
  return IsPlain(y) && (y.scalar_type() == at::kFloat || y.scalar_type() == at::kBFloat16);
}
bool TakesKernels(at::TensorList inputs) {
  return ActiveImpl() == Impl::kKernel && NobodyWatchesOps() && IsPlain(inputs[0]) &&
         inputs[0].scalar_type() == at::kFloat && !HaveTangents(inputs);
}

bool TakesNorm(const at::Tensor& x, const at::Tensor& added, const NormOf& norm) {
  const auto is_float = [](const at::Tensor& t) {
    return !t.defined() || (IsPlain(t) && t.scalar_type() == at::kFloat);
  };
  return TakesKernels({x, added, norm.weight, norm.bias}) && is_float(norm.weight) &&
         is_float(norm.bias) && (!added.defined() || TakesAdded(added));
}

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

SumAndNorm AddNorm(const at::Tensor& x, const at::Tensor& added, const NormOf& of,
                   bool to_bfloat16) {
  TORCH_CHECK(x.dim() >= 1 && of.weight.dim() == 1 && of.weight.sym_size(0) == x.sym_size(-1),
              "[norm] expected weight [D] for x [...,D], got ", of.weight.sym_sizes(), " and ",
              x.sym_sizes());
  TORCH_CHECK(!of.bias.defined() || of.bias.sym_sizes() == of.weight.sym_sizes(),
              "[norm] expected bias ", of.weight.sym_sizes(), ", got ", of.bias.sym_sizes());
  TORCH_CHECK(!added.defined() || added.sym_sizes() == x.sym_sizes(),
              "[norm] expected added of the shape of x, ", x.sym_sizes(), ", got ",
              added.sym_sizes());
  if (!norm::TakesNorm(x, added, of)) {
    const at::Tensor sum = added.defined() ? AddResidual(x, added) : x;
    return {sum, norm::Composed(sum, of, to_bfloat16)};
  }
  if (!NeedsGradient({x, added, of.weight, of.bias})) {
    const norm::Results r = norm::ByKernel(x, added, of, to_bfloat16);
    return {added.defined() ? r.sum : x, r.norm};
  }
  const norm::variable_list r =
      norm::Function::apply(x, Given(added), of.weight, Given(of.bias), of.eps, to_bfloat16);
  return {r[0], r[1]};
}

at::Tensor AddResidual(const at::Tensor& x, const at::Tensor& y) {
  TORCH_CHECK(y.sym_sizes() == x.sym_sizes(), "[residual] expected y of the shape of x, ",
              x.sym_sizes(), ", got ", y.sym_sizes());
  if (!norm::TakesKernels({x, y}) || !IsPlain(y) || y.scalar_type() != at::kBFloat16) return x + y;
  return NeedsGradient({x, y}) ? norm::ResidualFunction::apply(x, y)
                               : norm::ResidualFunction::Sum(x, y);
}

}  // namespace cistern::ops
