#include "cistern/ops/short_conv.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "cistern/kernels/ref/short_conv_ref.h"
#include "cistern/kernels/short_conv.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/op_pair.h"

namespace cistern::ops {
namespace short_conv {

using Tensor2 = std::tuple<at::Tensor, at::Tensor>;
using Tensor3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using torch::autograd::variable_list;

void Check(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& state,
           const OptionalTensor& starts, const OptionalTensor& lengths, int64_t ahead) {
  TORCH_CHECK(x.dim() == 3, "[short_conv] expected x of shape [B,T,C], got ", x.sym_sizes());
  TORCH_CHECK(weight.dim() == 2 && weight.sym_size(0) == x.sym_size(2) && weight.sym_size(1) >= 1,
              "[short_conv] expected weight of shape [C,K] with C=", x.sym_size(2), ", got ",
              weight.sym_sizes());
  TORCH_CHECK(state.dim() == 3 && state.sym_size(0) == x.sym_size(0) &&
                  state.sym_size(1) == weight.sym_size(1) - 1 && state.sym_size(2) == x.sym_size(2),
              "[short_conv] expected state of shape [B,K-1,C] for x ", x.sym_sizes(),
              " and weight ", weight.sym_sizes(), ", got ", state.sym_sizes());
  TORCH_CHECK(x.scalar_type() == weight.scalar_type() && x.scalar_type() == state.scalar_type(),
              "[short_conv] expected one dtype, got x ", x.scalar_type(), ", weight ",
              weight.scalar_type(), ", state ", state.scalar_type());
  TORCH_CHECK(
      !starts || (starts->dim() == 2 && starts->sym_size(0) == x.sym_size(0) &&
                  starts->sym_size(1) == x.sym_size(1) && starts->scalar_type() == at::kBool),
      "[short_conv] expected starts of shape [B,T] and dtype bool for x ", x.sym_sizes(), ", got ",
      starts ? starts->sym_sizes() : x.sym_sizes());
  TORCH_CHECK(!lengths || (lengths->dim() == 1 && lengths->sym_size(0) == x.sym_size(0) &&
                           lengths->scalar_type() == at::kLong),
              "[short_conv] expected lengths of shape [B] and dtype int64 for x ", x.sym_sizes(),
              ", got ", lengths ? lengths->sym_sizes() : x.sym_sizes());
  TORCH_CHECK(ahead >= 0 && ahead < weight.sym_size(1),
              "[short_conv] expected ahead of 0 .. K-1 with K=", weight.sym_size(1), ", got ",
              ahead);
  TORCH_CHECK(ahead == 0 || !starts,
              "[short_conv] a filter that sees tokens ahead does not stop at document starts: "
              "ahead must be 0, got ",
              ahead);
}

// Plain ATen: one shifted product a tap.
Tensor2 Composite(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& state,
                  const OptionalTensor& starts, const OptionalTensor& lengths, int64_t ahead) {
  const int64_t taps = weight.size(1), length = x.size(1);
  at::Tensor input = x, pad;
  if (lengths) {
    pad = (at::arange(length, lengths->options()).unsqueeze(0) >= lengths->unsqueeze(1))
              .unsqueeze(-1);
    input = x.masked_fill(pad, 0.0);
  }
  at::Tensor padded = at::cat({state, input}, 1);  // row t + K-1 is token t
  if (ahead > 0) padded = at::constant_pad_nd(padded, {0, 0, 0, ahead});
  at::Tensor document;  // [B, K-1+T]
  if (starts) {
    const at::Tensor counts = starts->to(at::kLong).cumsum(1);
    document = at::cat({at::zeros({x.size(0), taps - 1}, counts.options()), counts}, 1);
  }
  at::Tensor y = at::zeros_like(x);
  for (int64_t j = 0; j < taps; ++j) {
    at::Tensor term = padded.narrow(1, j + ahead, length) * weight.select(1, j);
    if (starts) {
      const at::Tensor same = document.narrow(1, j, length) == document.narrow(1, taps - 1, length);
      term = term.masked_fill(same.logical_not().unsqueeze(-1), 0.0);
    }
    y = y + term;
  }
  if (pad.defined()) y = y.masked_fill(pad, 0.0);
  // The last K-1 real rows, without what lies before the last document start.
  at::Tensor end = lengths ? lengths->clamp(0, length)
                           : at::full({x.size(0)}, length, x.options().dtype(at::kLong));
  const at::Tensor rows =
      end.unsqueeze(1) + at::arange(taps - 1, end.options());  // [B,K-1] rows of `padded`
  at::Tensor after = padded.gather(1, rows.unsqueeze(-1).expand({-1, -1, x.size(2)}));
  if (starts && length > 0 && taps > 1) {
    const at::Tensor last =
        document.gather(1, (end + taps - 2).unsqueeze(1));  // document of the last real token
    after = after.masked_fill((document.gather(1, rows) != last).unsqueeze(-1), 0.0);
  }
  return {y, after};
}

template <class T>
Rows<const T> In(const at::Tensor& x) {
  return {x.const_data_ptr<T>(), x.stride(0), 0, x.stride(1)};
}
template <class T>
Rows<T> Out(const at::Tensor& x) {
  return {x.mutable_data_ptr<T>(), x.stride(0), 0, x.stride(1)};
}

ConvShape ShapeOf(const at::Tensor& x, const at::Tensor& weight, int64_t ahead) {
  return {x.size(0), x.size(1), x.size(2), weight.size(1), ahead};
}

Tensor2 ForwardReference(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& state,
                         const OptionalTensor& starts, const OptionalTensor& lengths,
                         int64_t ahead) {
  const MaskView view(starts, lengths, x.size(1));
  const at::Tensor xd = AsDouble(x), wd = AsDouble(weight), sd = AsDouble(state);
  const at::Tensor y = at::empty_like(xd), after = at::empty_like(sd);
  ref::ShortConv(ShapeOf(x, weight, ahead), xd.const_data_ptr<double>(),
                 wd.const_data_ptr<double>(), sd.const_data_ptr<double>(), view.mask,
                 y.mutable_data_ptr<double>(), after.mutable_data_ptr<double>());
  return {y.to(x.scalar_type()), after.to(x.scalar_type())};
}

Tensor3 BackwardReference(const OptionalTensor& d_y, const OptionalTensor& d_after,
                          const at::Tensor& x, const at::Tensor& weight, const at::Tensor& state,
                          const MaskView& view, int64_t ahead) {
  const at::Tensor xd = AsDouble(x), wd = AsDouble(weight), sd = AsDouble(state);
  const at::Tensor gy = d_y ? AsDouble(*d_y) : at::zeros_like(xd),
                   ga = d_after ? AsDouble(*d_after) : at::zeros_like(sd);
  const at::Tensor dx = at::empty_like(xd), dw = at::empty_like(wd), ds = at::empty_like(sd);
  ref::ShortConvBackward(ShapeOf(x, weight, ahead), gy.const_data_ptr<double>(),
                         ga.const_data_ptr<double>(), xd.const_data_ptr<double>(),
                         wd.const_data_ptr<double>(), sd.const_data_ptr<double>(), view.mask,
                         dx.mutable_data_ptr<double>(), dw.mutable_data_ptr<double>(),
                         ds.mutable_data_ptr<double>());
  const auto dtype = x.scalar_type();
  return {dx.to(dtype), dw.to(dtype), ds.to(dtype)};
}

Tensor2 ForwardCpu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& state,
                   const OptionalTensor& starts, const OptionalTensor& lengths, int64_t ahead) {
  Check(x, weight, state, starts, lengths, ahead);
  if (!UsesKernel(x)) return Composite(x, weight, state, starts, lengths, ahead);
  if (ActiveImpl() == Impl::kReference)
    return ForwardReference(x, weight, state, starts, lengths, ahead);
  const MaskView view(starts, lengths, x.size(1));
  auto run = [&]<class T>(T) -> Tensor2 {
    const at::Tensor xc = UnitStride(x), wc = weight.contiguous(), sc = state.contiguous();
    const at::Tensor y = at::empty(x.sizes(), x.options()),
                     after = at::empty(state.sizes(), x.options());
    cistern::ShortConv<T>(ShapeOf(x, weight, ahead), In<T>(xc), wc.const_data_ptr<T>(),
                          sc.const_data_ptr<T>(), view.mask, Out<T>(y),
                          after.mutable_data_ptr<T>());
    return {y, after};
  };
  return x.scalar_type() == at::kFloat ? run(float{}) : run(double{});
}

Tensor3 BackwardCpu(const OptionalTensor& d_y, const OptionalTensor& d_after, const at::Tensor& x,
                    const at::Tensor& weight, const at::Tensor& state, const OptionalTensor& starts,
                    const OptionalTensor& lengths, int64_t ahead) {
  const MaskView view(starts, lengths, x.size(1));
  if (ActiveImpl() == Impl::kReference)
    return BackwardReference(d_y, d_after, x, weight, state, view, ahead);
  auto run = [&]<class T>(T) -> Tensor3 {
    const at::Tensor xc = UnitStride(x), wc = weight.contiguous(), sc = state.contiguous();
    const at::Tensor gy = d_y ? UnitStride(*d_y) : at::zeros_like(xc),
                     ga = d_after ? d_after->contiguous() : at::Tensor();
    const at::Tensor dx = at::empty(x.sizes(), x.options()),
                     dw = at::empty(weight.sizes(), x.options()),
                     ds = at::empty(state.sizes(), x.options());
    ShortConvBackward<T>(ShapeOf(x, weight, ahead), In<T>(gy),
                         ga.defined() ? ga.const_data_ptr<T>() : nullptr, In<T>(xc),
                         wc.const_data_ptr<T>(), sc.const_data_ptr<T>(), view.mask, Out<T>(dx),
                         dw.mutable_data_ptr<T>(), ds.mutable_data_ptr<T>());
    return {dx, dw, ds};
  };
  return x.scalar_type() == at::kFloat ? run(float{}) : run(double{});
}

Tensor2 ForwardMeta(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& state,
                    const OptionalTensor& starts, const OptionalTensor& lengths, int64_t ahead) {
  Check(x, weight, state, starts, lengths, ahead);
  return {at::empty_symint(x.sym_sizes(), x.options()),
          at::empty_symint(state.sym_sizes(), x.options())};
}

Tensor3 BackwardMeta(const OptionalTensor&, const OptionalTensor&, const at::Tensor& x,
                     const at::Tensor& weight, const at::Tensor& state, const OptionalTensor&,
                     const OptionalTensor&, int64_t) {
  return {at::empty_symint(x.sym_sizes(), x.options()),
          at::empty_symint(weight.sym_sizes(), x.options()),
          at::empty_symint(state.sym_sizes(), x.options())};
}

using ForwardSchema = Tensor2(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const OptionalTensor&, const OptionalTensor&, int64_t);
using BackwardSchema = Tensor3(const OptionalTensor&, const OptionalTensor&, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                               const OptionalTensor&, int64_t);
const c10::TypedOperatorHandle<ForwardSchema>& ForwardOp() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cistern::short_conv", "")
                             .typed<ForwardSchema>();
  return op;
}
const c10::TypedOperatorHandle<BackwardSchema>& BackwardOp() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cistern::short_conv_backward", "")
                             .typed<BackwardSchema>();
  return op;
}

struct ShortConvFunction : torch::autograd::Function<ShortConvFunction> {
  static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                               const at::Tensor& weight, const at::Tensor& state,
                               const OptionalTensor& starts, const OptionalTensor& lengths,
                               int64_t ahead) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward(
        {x, weight, state, starts.value_or(at::Tensor()), lengths.value_or(at::Tensor())});
    ctx->saved_data["ahead"] = ahead;
    ctx->set_materialize_grads(false);
    auto [y, after] = ForwardOp().call(x, weight, state, starts, lengths, ahead);
    return {y, after};
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list grads) {
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(6);
    const auto saved = ctx->get_saved_variables();
    auto [dx, dw, ds] =
        BackwardOp().call(Given(grads[0]), Given(grads[1]), saved[0], saved[1], saved[2],
                          Given(saved[3]), Given(saved[4]), ctx->saved_data["ahead"].toInt());
    return {dx, dw, ds, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

Tensor2 ForwardAutograd(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& state,
                        const OptionalTensor& starts, const OptionalTensor& lengths,
                        int64_t ahead) {
  if (!x.is_meta() && !UsesKernel(x)) {
    Check(x, weight, state, starts, lengths, ahead);
    return Composite(x, weight, state, starts, lengths, ahead);
  }
  RefuseTangents("[short_conv]", x, weight, state);
  if (!torch::autograd::compute_requires_grad(x, weight, state)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return ForwardOp().call(x, weight, state, starts, lengths, ahead);
  }
  const auto r = ShortConvFunction::apply(x, weight, state, starts, lengths, ahead);
  return {r[0], r[1]};
}

// Second derivatives: autograd through the composite.
Tensor3 BackwardAutograd(const OptionalTensor& d_y, const OptionalTensor& d_after,
                         const at::Tensor& x, const at::Tensor& weight, const at::Tensor& state,
                         const OptionalTensor& starts, const OptionalTensor& lengths,
                         int64_t ahead) {
  if (!torch::autograd::compute_requires_grad(d_y.value_or(at::Tensor()),
                                              d_after.value_or(at::Tensor()), x, weight, state)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return BackwardOp().call(d_y, d_after, x, weight, state, starts, lengths, ahead);
  }
  at::AutoGradMode enable(true);
  variable_list inputs = {x, weight, state}, outputs, grads;
  for (at::Tensor& input : inputs) {
    if (!input.requires_grad()) input = input.detach().requires_grad_();
  }
  auto [y, after] = Composite(inputs[0], inputs[1], inputs[2], starts, lengths, ahead);
  if (d_y) outputs.push_back(y), grads.push_back(*d_y);
  if (d_after) outputs.push_back(after), grads.push_back(*d_after);
  const auto g = torch::autograd::grad(outputs, inputs, grads, true, true, true);
  auto or_zeros = [&](size_t i) { return g[i].defined() ? g[i] : at::zeros_like(inputs[i]); };
  return {or_zeros(0), or_zeros(1), or_zeros(2)};
}

TORCH_LIBRARY_FRAGMENT(cistern, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "short_conv(Tensor x, Tensor weight, Tensor state, Tensor? starts=None, Tensor? "
      "lengths=None, int ahead=0) -> (Tensor, Tensor)",
      tags);
  m.def(
      "short_conv_backward(Tensor? d_y, Tensor? d_after, Tensor x, Tensor weight, Tensor state, "
      "Tensor? starts=None, Tensor? lengths=None, "
      "int ahead=0)"
      " -> (Tensor, Tensor, Tensor)",
      tags);
}
TORCH_LIBRARY_IMPL(cistern, CPU, m) {
  m.impl("short_conv", &ForwardCpu);
  m.impl("short_conv_backward", &BackwardCpu);
}
TORCH_LIBRARY_IMPL(cistern, Meta, m) {
  m.impl("short_conv", &ForwardMeta);
  m.impl("short_conv_backward", &BackwardMeta);
}
TORCH_LIBRARY_IMPL(cistern, Autograd, m) {
  m.impl("short_conv", &ForwardAutograd);
  m.impl("short_conv_backward", &BackwardAutograd);
}

}  // namespace short_conv

std::tuple<at::Tensor, at::Tensor> ShortConv(const at::Tensor& x, const at::Tensor& weight,
                                             const at::Tensor& state, const Mask& mask,
                                             int64_t ahead) {
  return short_conv::ForwardOp().call(x, weight, state, mask.starts, mask.lengths, ahead);
}

}  // namespace cistern::ops
