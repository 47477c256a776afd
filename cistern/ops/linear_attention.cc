#include "cistern/ops/linear_attention.h"

#include <torch/csrc/autograd/functions/utils.h>

#include "cistern/kernels/ref/linear_attention_ref.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace linear_attention {

using torch::autograd::variable_list;

// elu(x) + 1, without the loss of digits that adding one to expm1(x) has for x far below zero.
at::Tensor EluPlusOneOf(const at::Tensor& x) { return x.clamp_max(0).exp_().add_(at::relu(x)); }

// Its derivative is e^x below zero and one above: the smaller of the output and one.
struct EluPlusOneFunction : torch::autograd::Function<EluPlusOneFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor y = EluPlusOneOf(x);
    ctx->save_for_backward({y});
    return y;
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    return {ctx->get_saved_variables()[0].clamp_max(1) * grads[0]};
  }
};

at::Tensor Divisor(const at::Tensor& z, DivisorRule rule, double value) {
  switch (rule) {
    case DivisorRule::kPlus:
      return z + value;
    case DivisorRule::kAtLeast:
      return z.clamp_min(value);
    case DivisorRule::kMagnitude:
      return z.abs().clamp_min(value);
    case DivisorRule::kSignSafe:
      return at::where(z < 0, z.clamp_max(-value), z.clamp_min(value));
    case DivisorRule::kNone:
      break;
  }
  TORCH_CHECK(false, "[linear_attention] this rule has no divisor");
}

// Derivative of the divisor by z.
at::Tensor DivisorSlope(const at::Tensor& z, DivisorRule rule, double value) {
  switch (rule) {
    case DivisorRule::kAtLeast:
      return (z >= value).to(z.scalar_type());
    case DivisorRule::kMagnitude:
      return z.sign() * (z.abs() >= value);
    case DivisorRule::kSignSafe:
      return (z.abs() >= value).to(z.scalar_type());
    case DivisorRule::kPlus:
    case DivisorRule::kNone:
      break;
  }
  return at::ones_like(z);
}

at::Tensor Quotient(const at::Tensor& sums, DivisorRule rule, double value) {
  const int64_t width = sums.size(-1) - 1;
  return sums.narrow(-1, 0, width) / Divisor(sums.narrow(-1, width, 1), rule, value);
}

// The quotient with a gradient in few passes over memory: that of two narrow() would fill two
// tensors of all sums with zeros first.
struct QuotientFunction : torch::autograd::Function<QuotientFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& sums,
                            int64_t rule, double value) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor y = Quotient(sums, DivisorRule(rule), value);
    ctx->save_for_backward({sums, y});
    ctx->saved_data["rule"] = rule;
    ctx->saved_data["value"] = value;
    return y;
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto rule = DivisorRule(ctx->saved_data["rule"].toInt());
    const double value = ctx->saved_data["value"].toDouble();
    const at::Tensor z = saved[0].narrow(-1, saved[1].size(-1), 1),
                     d_values = grads[0] / Divisor(z, rule, value);
    const at::Tensor d_z = (d_values * saved[1]).sum(-1, true).neg() * DivisorSlope(z, rule, value);
    return {at::cat({d_values, d_z}, -1), at::Tensor(), at::Tensor()};
  }
};

struct Arguments {
  at::Tensor q, k, v, memory;
  Mask mask;
  int64_t map = 0;
  double map_eps = 0;
  int64_t divisor = 0;
  double value = 0;
  bool save = false;
  LinearRule rule() const { return {FeatureMap(map), map_eps, DivisorRule(divisor), value}; }
};

struct Linear {
  static constexpr const char* kSchema =
      "linear_attention(Tensor q, Tensor k, Tensor v, Tensor memory, Tensor? starts=None, Tensor? "
      "lengths=None, int map=0, float map_eps=0, int divisor=0, float value=1e-06, bool "
      "save=False) -> (Tensor, Tensor, Tensor)";
  using Arguments = linear_attention::Arguments;
  static constexpr auto kFields = [](auto& x) {
    return std::tie(x.q, x.k, x.v, x.memory, x.mask.starts, x.mask.lengths, x.map, x.map_eps,
                    x.divisor, x.value, x.save);
  };
  static constexpr size_t kOutputs = 3, kDifferentiable = 2;
  enum { kOut, kMemory, kZ };  // z [B,H,T,1]: phi(q) . z, if saved
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& x) { return x.v; }

  static SlotShape ShapeOf(const Arguments& x) {
    return {x.k.size(0), x.k.size(1), x.k.size(2), x.k.size(3), x.v.size(3)};
  }

  static void Check(const Arguments& x) {
    TORCH_CHECK(x.k.dim() == 4 && x.v.dim() == 4 &&
                    x.v.sym_sizes().slice(0, 3) == x.k.sym_sizes().slice(0, 3),
                "[linear_attention] expected k of shape [B,H,T,n] and v [B,H,T,d], got ",
                x.k.sym_sizes(), " and ", x.v.sym_sizes());
    TORCH_CHECK(x.q.sym_sizes() == x.k.sym_sizes(), "[linear_attention] expected q of shape ",
                x.k.sym_sizes(), ", got ", x.q.sym_sizes());
    TORCH_CHECK(x.map >= 0 && x.map <= int64_t(FeatureMap::kEluPlusOne) && x.divisor >= 0 &&
                    x.divisor <= int64_t(DivisorRule::kNone),
                "[linear_attention] expected map 0 to 1 and divisor 0 to 4, got ", x.map, " and ",
                x.divisor);
    TORCH_CHECK(x.map_eps == 0 || x.map != int64_t(FeatureMap::kNone),
                "[linear_attention] map_eps is added to what a map gives; map 0 is none");
    TORCH_CHECK(x.memory.dim() == 4 &&
                    x.memory.sym_sizes().slice(0, 2) == x.k.sym_sizes().slice(0, 2) &&
                    x.memory.sym_size(2) == x.k.sym_size(3) &&
                    x.memory.sym_size(3) ==
                        x.v.sym_size(3) + (x.rule().divisor == DivisorRule::kNone ? 0 : 1),
                "[linear_attention] expected memory of shape [B,H,n,",
                x.rule().divisor == DivisorRule::kNone ? "d" : "d+1", "] for k ", x.k.sym_sizes(),
                " and v ", x.v.sym_sizes(), ", got ", x.memory.sym_sizes());
    TORCH_CHECK(x.memory.scalar_type() == at::kDouble,
                "[linear_attention] expected memory in double, got ", x.memory.scalar_type());
    for (const at::Tensor& t : {x.q, x.k}) {
      TORCH_CHECK(t.scalar_type() == x.v.scalar_type(),
                  "[linear_attention] expected one dtype, got ", t.scalar_type(), " beside v ",
                  x.v.scalar_type());
    }
  }

  static Tensors Compose(const Arguments& x) {
    const LinearRule rule = x.rule();
    const auto type = ComputeTypeOf(x.v);
    const at::Tensor pad = x.mask.HeadsPadding(x.q.size(2));
    const auto phi = [&](const at::Tensor& given) {
      const at::Tensor t = given.to(type);
      // Whatever padding holds, NaN too, has no gradient.
      const at::Tensor y = pad.defined() ? t.masked_fill(pad, 0.0) : t;
      if (rule.map == FeatureMap::kNone) return y;
      return rule.map_eps > 0 ? EluPlusOne(y) + rule.map_eps : EluPlusOne(y);
    };
    const SumResult r =
        SumRead(phi(x.q), phi(x.k), WithOnes(x.v.to(type), rule.divisor), x.memory, x.mask);
    return {DivideSums(r.out, rule.divisor, rule.value).to(x.v.scalar_type()), r.memory};
  }

  static Tensors Empty(const Arguments& x) {
    const c10::SymInt z[] = {x.v.sym_size(0), x.v.sym_size(1), x.v.sym_size(2), 1};
    return {LikeHeads(x.v), LikePlain(x.memory),
            x.save ? EmptyHeads(z, x.v.options().dtype(ComputeTypeOf(x.v)))
                   : at::empty({0}, x.v.options())};
  }
  static Tensors EmptyGradients(const Arguments& x) {
    return {GradientLike(x.q), GradientLike(x.k), GradientLike(x.v), LikePlain(x.memory)};
  }

  static Tensors InPlace(const Arguments& x) { return {LikeHeads(x.v), x.memory, at::Tensor()}; }

  static void Forward(const Arguments& x, const RowMask& mask, const Tensors& y) {
    const at::Tensor q = UnitStride(x.q), k = UnitStride(x.k), v = UnitStride(x.v);
    BeginState(x.memory, y[kMemory]);
    DispatchStored(v, [&]<class T>(T) {
      LinearForward<T>(ShapeOf(x), x.rule(), InputRows<T>(q), InputRows<T>(k), InputRows<T>(v),
                       mask, y[kMemory].mutable_data_ptr<double>(), OutputRows<T>(y[kOut]),
                       x.save ? OutputRows<ComputeType<T>>(y[kZ]) : Rows<ComputeType<T>>{});
    });
  }

  static Tensors Keep(const Arguments&, const Tensors& y) { return {y[kOut], at::Tensor(), y[kZ]}; }

  static Tensors Backward(const Arguments& x, const RowMask& mask, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor q = UnitStride(x.q), k = UnitStride(x.k), v = UnitStride(x.v),
                     out = UnitStride(kept[kOut]), d_out = UnitStride(OrZeros(g[kOut], v)),
                     memory = x.memory.contiguous();
    const at::Tensor G = g[kMemory].defined()
                             ? g[kMemory].clone(at::MemoryFormat::Contiguous)
                             : at::zeros_like(x.memory, at::MemoryFormat::Contiguous);
    const at::Tensor dq = GradientLike(x.q), dk = GradientLike(x.k), dv = GradientLike(x.v);
    DispatchStored(v, [&]<class T>(T) {
      LinearBackward<T>(ShapeOf(x), x.rule(), InputRows<T>(q), InputRows<T>(k), InputRows<T>(v),
                        InputRows<T>(out), InputRows<ComputeType<T>>(kept[kZ]), InputRows<T>(d_out),
                        mask, memory.const_data_ptr<double>(), G.mutable_data_ptr<double>(),
                        OutputRows<T>(dq), OutputRows<T>(dk), OutputRows<T>(dv));
    });
    return {dq, dk, dv, G};
  }

  static Tensors ForwardReference(const Arguments& x, const RowMask& mask) {
    const at::Tensor q = AsDouble(x.q), k = AsDouble(x.k), v = AsDouble(x.v),
                     memory = x.memory.clone(at::MemoryFormat::Contiguous),
                     out = at::empty(v.sizes(), v.options());
    ref::LinearForward(ShapeOf(x), x.rule(), DataOrNull(q), DataOrNull(k), DataOrNull(v), mask,
                       memory.mutable_data_ptr<double>(), out.mutable_data_ptr<double>());
    return {out.to(x.v.scalar_type()), memory, at::empty({0}, x.v.options())};
  }

  static Tensors BackwardReference(const Arguments& x, const RowMask& mask, const Tensors& g,
                                   const Tensors&) {
    const at::Tensor q = AsDouble(x.q), k = AsDouble(x.k), v = AsDouble(x.v),
                     memory = AsDouble(x.memory), d_out = AsDouble(OrZeros(g[kOut], x.v)),
                     d_memory = AsDouble(g[kMemory]);
    const at::Tensor dq = at::zeros_like(q), dk = at::zeros_like(k), dv = at::zeros_like(v),
                     dm = at::zeros_like(memory);
    ref::LinearBackward(ShapeOf(x), x.rule(), DataOrNull(q), DataOrNull(k), DataOrNull(v), mask,
                        DataOrNull(memory), DataOrNull(d_out), DataOrNull(d_memory),
                        dq.mutable_data_ptr<double>(), dk.mutable_data_ptr<double>(),
                        dv.mutable_data_ptr<double>(), dm.mutable_data_ptr<double>());
    const auto dtype = x.v.scalar_type();
    return {dq.to(dtype), dk.to(dtype), dv.to(dtype), dm};
  }
};

}  // namespace linear_attention

CISTERN_PRIMITIVE(linear_attention::Linear)

SumResult LinearAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& memory, const LinearRule& rule, const Mask& mask) {
  auto [out, after, z] = OpPair<linear_attention::Linear>::Call(
      {q, k, v, memory, mask, int64_t(rule.map), rule.map_eps, int64_t(rule.divisor), rule.value});
  return {out, after};
}

at::Tensor LinearExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        at::Tensor& memory, const LinearRule& rule, const Mask& mask) {
  const bool alone = OwnedAlone(memory);
  linear_attention::Arguments x = {
      q, k, v, memory, mask, int64_t(rule.map), rule.map_eps, int64_t(rule.divisor), rule.value};
  using Op = OpPair<linear_attention::Linear>;
  at::Tensor out, z;
  std::tie(out, memory, z) = alone ? Op::CallInPlace(x) : Op::Call(x);
  return out;
}

at::Tensor EluPlusOne(const at::Tensor& x) {
  return torch::autograd::compute_requires_grad(x) && !HaveTangents(x)
             ? linear_attention::EluPlusOneFunction::apply(x)
             : linear_attention::EluPlusOneOf(x);
}

at::Tensor WithOnes(const at::Tensor& v, DivisorRule rule) {
  if (rule == DivisorRule::kNone) return v;
  return at::cat({v, at::ones({1}, v.options()).expand({v.size(0), v.size(1), v.size(2), 1})}, -1);
}

at::Tensor DivideSums(const at::Tensor& sums, DivisorRule rule, double value) {
  if (rule == DivisorRule::kNone) return sums * value;
  return torch::autograd::compute_requires_grad(sums) && !HaveTangents(sums)
             ? linear_attention::QuotientFunction::apply(sums, int64_t(rule), value)
             : linear_attention::Quotient(sums, rule, value);
}

}  // namespace cistern::ops
