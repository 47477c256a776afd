#include "cistern/ops/short_conv.h"

#include "cistern/kernels/ref/short_conv_ref.h"
#include "cistern/kernels/short_conv.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace short_conv {

template <class T>
Rows<const T> In(const at::Tensor& x) {
  return {ConstData<T>(x), x.stride(0), 0, x.stride(1)};
}
template <class T>
Rows<T> Out(const at::Tensor& x) {
  return {MutableData<T>(x), x.stride(0), 0, x.stride(1)};
}

struct Arguments {
  at::Tensor x, weight, state;
  Mask mask;
  int64_t ahead = 0;
};

struct Op {
  static constexpr const char* kSchema =
      "short_conv(Tensor x, Tensor weight, Tensor state, Tensor? starts=None, Tensor? "
      "lengths=None, int ahead=0) -> (Tensor, Tensor)";
  using Arguments = short_conv::Arguments;
  static constexpr auto kFields = [](auto& a) {
    return std::tie(a.x, a.weight, a.state, a.mask.starts, a.mask.lengths, a.ahead);
  };
  static constexpr size_t kOutputs = 2, kDifferentiable = 2;
  enum { kY, kAfter };
  static constexpr int64_t kTime = 1;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& a) { return a.x; }

  static ConvShape ShapeOf(const Arguments& a) {
    return {a.x.size(0), a.x.size(1), a.x.size(2), a.weight.size(1), a.ahead};
  }

  static void Check(const Arguments& a) {
    const at::Tensor &x = a.x, &weight = a.weight, &state = a.state;
    TORCH_CHECK(x.dim() == 3, "[short_conv] expected x of shape [B,T,C], got ", x.sym_sizes());
    TORCH_CHECK(weight.dim() == 2 && weight.sym_size(0) == x.sym_size(2) && weight.sym_size(1) >= 1,
                "[short_conv] expected weight of shape [C,K] with C=", x.sym_size(2), ", got ",
                weight.sym_sizes());
    TORCH_CHECK(state.dim() == 3 && state.sym_size(0) == x.sym_size(0) &&
                    state.sym_size(1) == weight.sym_size(1) - 1 &&
                    state.sym_size(2) == x.sym_size(2),
                "[short_conv] expected state of shape [B,K-1,C] for x ", x.sym_sizes(),
                " and weight ", weight.sym_sizes(), ", got ", state.sym_sizes());
    const auto type = weight.scalar_type();
    TORCH_CHECK(
        (type == x.scalar_type() || type == ComputeTypeOf(x)) && type == state.scalar_type(),
        "[short_conv] expected one dtype (or float beside x in bfloat16), got x ", x.scalar_type(),
        ", weight ", weight.scalar_type(), ", state ", state.scalar_type());
    TORCH_CHECK(a.ahead >= 0 && a.ahead < weight.sym_size(1),
                "[short_conv] expected ahead of 0 .. K-1 with K=", weight.sym_size(1), ", got ",
                a.ahead);
    TORCH_CHECK(a.ahead == 0 || !a.mask.starts,
                "[short_conv] a filter that sees tokens ahead does not stop at document starts: "
                "ahead must be 0, got ",
                a.ahead);
  }

  // One shifted product a tap.
  static Tensors Compose(const Arguments& a) {
    const int64_t taps = a.weight.size(1), length = a.x.size(1);
    at::Tensor pad = a.mask.Padding(length), input = a.x.to(a.weight.scalar_type());
    if (pad.defined()) pad = pad.unsqueeze(-1), input = input.masked_fill(pad, 0.0);
    at::Tensor padded = at::cat({a.state, input}, 1);  // row t + K-1 is token t
    if (a.ahead > 0) padded = at::constant_pad_nd(padded, {0, 0, 0, a.ahead});
    at::Tensor document;  // [B, K-1+T]
    if (a.mask.starts) {
      const at::Tensor counts = a.mask.Documents(length);
      document = at::cat({at::zeros({a.x.size(0), taps - 1}, counts.options()), counts}, 1);
    }
    at::Tensor y = at::zeros_like(input);
    for (int64_t j = 0; j < taps; ++j) {
      at::Tensor term = padded.narrow(1, j + a.ahead, length) * a.weight.select(1, j);
      if (document.defined()) {
        const at::Tensor same =
            document.narrow(1, j, length) == document.narrow(1, taps - 1, length);
        term = term.masked_fill(same.logical_not().unsqueeze(-1), 0.0);
      }
      y = y + term;
    }
    if (pad.defined()) y = y.masked_fill(pad, 0.0);
    // The last K-1 real rows, without what lies before the last document start.
    const at::Tensor end = a.mask.lengths
                               ? a.mask.lengths->clamp(0, length)
                               : at::full({a.x.size(0)}, length, a.x.options().dtype(at::kLong));
    const at::Tensor rows =
        end.unsqueeze(1) + at::arange(taps - 1, end.options());  // [B,K-1] rows of `padded`
    at::Tensor after = padded.gather(1, rows.unsqueeze(-1).expand({-1, -1, a.x.size(2)}));
    if (document.defined() && length > 0 && taps > 1) {
      const at::Tensor last =
          document.gather(1, (end + taps - 2).unsqueeze(1));  // document of the last real token
      after = after.masked_fill((document.gather(1, rows) != last).unsqueeze(-1), 0.0);
    }
    return {y.to(a.x.scalar_type()), after};
  }

  static Tensors Empty(const Arguments& a) { return {LikePlain(a.x), LikePlain(a.state)}; }
  static Tensors EmptyGradients(const Arguments& a) {
    return {LikePlain(a.x), LikePlain(a.weight), LikePlain(a.state)};
  }

  // Filter and state as the kernel takes them.
  static at::Tensor Wide(const at::Tensor& t, const at::Tensor& x) {
    return t.to(ComputeTypeOf(x)).contiguous();
  }

  static void Forward(const Arguments& a, const RowMask& mask, const Tensors& y) {
    const at::Tensor x = UnitStride(a.x), w = Wide(a.weight, x), state = Wide(a.state, x),
                     after = y[kAfter].scalar_type() == ComputeTypeOf(x) ? y[kAfter]
                                                                         : at::empty_like(state);
    DispatchStored(x, [&]<class S>(S) {
      using T = ComputeType<S>;
      cistern::ShortConv<S>(ShapeOf(a), In<S>(x), w.const_data_ptr<T>(), state.const_data_ptr<T>(),
                            mask, Out<S>(y[kY]), after.mutable_data_ptr<T>());
    });
    if (!after.is_same(y[kAfter])) y[kAfter].copy_(after);
  }

  static Tensors Keep(const Arguments&, const Tensors&) { return {}; }

  static Tensors Backward(const Arguments& a, const RowMask& mask, const Tensors& g,
                          const Tensors&) {
    const at::Tensor x = UnitStride(a.x), w = Wide(a.weight, x), state = Wide(a.state, x),
                     gy = UnitStride(OrZeros(g[kY], x)),
                     ga = g[kAfter].defined() ? Wide(g[kAfter], x) : at::Tensor(),
                     dx = LikePlain(a.x), dw = LikePlain(w), d_state = LikePlain(state);
    DispatchStored(x, [&]<class S>(S) {
      using T = ComputeType<S>;
      ShortConvBackward<S>(ShapeOf(a), In<S>(gy), ga.defined() ? ga.const_data_ptr<T>() : nullptr,
                           In<S>(x), w.const_data_ptr<T>(), state.const_data_ptr<T>(), mask,
                           Out<S>(dx), dw.mutable_data_ptr<T>(), d_state.mutable_data_ptr<T>());
    });
    return {dx, dw.to(a.weight.scalar_type()), d_state.to(a.state.scalar_type())};
  }

  static Tensors ForwardReference(const Arguments& a, const RowMask& mask) {
    const at::Tensor x = AsDouble(a.x), w = AsDouble(a.weight), state = AsDouble(a.state),
                     y = at::empty_like(x), after = at::empty_like(state);
    ref::ShortConv(ShapeOf(a), DataOrNull(x), DataOrNull(w), DataOrNull(state), mask,
                   y.mutable_data_ptr<double>(), after.mutable_data_ptr<double>());
    return {y.to(a.x.scalar_type()), after.to(a.x.scalar_type())};
  }

  static Tensors BackwardReference(const Arguments& a, const RowMask& mask, const Tensors& g,
                                   const Tensors&) {
    const at::Tensor x = AsDouble(a.x), w = AsDouble(a.weight), state = AsDouble(a.state),
                     gy = OrZeros(AsDouble(g[kY]), x), ga = OrZeros(AsDouble(g[kAfter]), state),
                     dx = at::empty_like(x), dw = at::empty_like(w), ds = at::empty_like(state);
    ref::ShortConvBackward(ShapeOf(a), DataOrNull(gy), DataOrNull(ga), DataOrNull(x), DataOrNull(w),
                           DataOrNull(state), mask, dx.mutable_data_ptr<double>(),
                           dw.mutable_data_ptr<double>(), ds.mutable_data_ptr<double>());
    const auto dtype = a.x.scalar_type();
    return {dx.to(dtype), dw.to(dtype), ds.to(dtype)};
  }
};

}  // namespace short_conv

CISTERN_PRIMITIVE(short_conv::Op)

std::tuple<at::Tensor, at::Tensor> ShortConv(const at::Tensor& x, const at::Tensor& weight,
                                             const at::Tensor& state, const Mask& mask,
                                             int64_t ahead) {
  return OpPair<short_conv::Op>::Call({x, weight, state, mask, ahead});
}

}  // namespace cistern::ops
