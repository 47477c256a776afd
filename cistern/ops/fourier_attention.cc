#include "cistern/ops/fourier_attention.h"

#include "cistern/kernels/linear_bidirectional.h"
#include "cistern/ops/fourier_features.h"
#include "cistern/ops/fourier_map.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace fourier_attention {

struct Arguments {
  at::Tensor q, k, v, memory;
  OptionalTensor scale;
  OptionalTensor matrices;  // always given: optional ones may be constants
  Mask mask;
  bool normalise = false;
  double factor = 1;
  int64_t divisor = 0;
  double value = 0;
  bool save = false;
  LinearRule rule() const { return {FeatureMap::kFourier, 0, DivisorRule(divisor), value}; }
};

struct Op {
  static constexpr const char* kSchema =
      "fourier_attention(Tensor q, Tensor k, Tensor v, Tensor memory, Tensor? scale, Tensor? "
      "matrices, Tensor? starts=None, Tensor? lengths=None, bool normalise=False, float factor=1, "
      "int divisor=0, float value=1e-06, bool save=False) -> (Tensor, Tensor, Tensor)";
  using Arguments = fourier_attention::Arguments;
  static constexpr auto kFields = [](auto& x) {
    return std::tie(x.q, x.k, x.v, x.memory, x.scale, x.matrices, x.mask.starts, x.mask.lengths,
                    x.normalise, x.factor, x.divisor, x.value, x.save);
  };
  static constexpr size_t kOutputs = 3, kDifferentiable = 2;
  enum { kOut, kMemory, kZ };  // z as of linear_attention
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& x) { return x.v; }
  static bool IsConstant(const Arguments& x, const OptionalTensor* field) {
    return field == &x.matrices;
  }

  static void Check(const Arguments& x) {
    constexpr const char* kOp = "[fourier_attention]";
    TORCH_CHECK(x.k.dim() == 4 && x.v.dim() == 4 &&
                    x.v.sym_sizes().slice(0, 3) == x.k.sym_sizes().slice(0, 3),
                kOp, " expected k of shape [B,H,T,d_k] and v [B,H,T,d], got ", x.k.sym_sizes(),
                " and ", x.v.sym_sizes());
    TORCH_CHECK(x.q.sym_sizes() == x.k.sym_sizes(), kOp, " expected q of shape ", x.k.sym_sizes(),
                ", got ", x.q.sym_sizes());
    CheckFourier(kOp, "k", x.k, x.scale, x.matrices);
    TORCH_CHECK(x.divisor >= 0 && x.divisor <= int64_t(DivisorRule::kNone), kOp,
                " expected divisor 0 to 4, got ", x.divisor);
    const bool divides = x.rule().divisor != DivisorRule::kNone;
    TORCH_CHECK(x.memory.dim() == 4 &&
                    x.memory.sym_sizes().slice(0, 2) == x.k.sym_sizes().slice(0, 2) &&
                    x.memory.sym_size(2) == x.matrices->sym_size(1) * 2 &&
                    x.memory.sym_size(3) == x.v.sym_size(3) + (divides ? 1 : 0),
                kOp, " expected memory of shape [B,H,2m,", divides ? "d+1" : "d", "] for k ",
                x.k.sym_sizes(), ", v ", x.v.sym_sizes(), " and matrices ", x.matrices->sym_sizes(),
                ", got ", x.memory.sym_sizes());
    TORCH_CHECK(x.memory.scalar_type() == at::kDouble, kOp, " expected memory in double, got ",
                x.memory.scalar_type());
    for (const at::Tensor& t : {x.q, x.k}) {
      TORCH_CHECK(t.scalar_type() == x.v.scalar_type(), kOp, " expected one dtype, got ",
                  t.scalar_type(), " beside v ", x.v.scalar_type());
    }
  }

  // Features in the type that is computed in, of what is given.
  static Tensors Compose(const Arguments& x) {
    const auto type = ComputeTypeOf(x.v);
    const at::Tensor pad = x.mask.HeadsPadding(x.q.size(2)),
                     scale = x.scale ? x.scale->to(type) : at::Tensor(),
                     matrices = x.matrices->to(type);
    const auto phi = [&](const at::Tensor& given) {
      at::Tensor t = given.to(type);
      // Whatever padding holds, NaN too, has no gradient.
      if (pad.defined()) t = t.masked_fill(pad, 0.0);
      return FourierFeatures(t, scale, matrices, x.normalise, x.factor);
    };
    const SumResult r =
        LinearAttention(phi(x.q), phi(x.k), x.v.to(type), x.memory,
                        {FeatureMap::kNone, 0, DivisorRule(x.divisor), x.value}, x.mask);
    return {r.out.to(x.v.scalar_type()), r.memory};
  }

  static Tensors Empty(const Arguments& x) {
    const c10::SymInt z[] = {x.v.sym_size(0), x.v.sym_size(1), x.v.sym_size(2), 1};
    return {LikeHeads(x.v), LikePlain(x.memory),
            x.save ? EmptyHeads(z, x.v.options().dtype(ComputeTypeOf(x.v)))
                   : at::empty({0}, x.v.options())};
  }
  static Tensors EmptyGradients(const Arguments& x) {
    Tensors grads = {GradientLike(x.q), GradientLike(x.k), GradientLike(x.v), LikePlain(x.memory)};
    if (x.scale) grads.push_back(at::empty_symint(x.scale->sym_sizes(), x.scale->options()));
    return grads;
  }
  static Tensors InPlace(const Arguments& x) { return {LikeHeads(x.v), x.memory, at::Tensor()}; }

  static SlotShape ShapeOf(const Arguments& x) {
    return {x.k.size(0), x.k.size(1), x.k.size(2), x.matrices->size(1) * 2, x.v.size(3)};
  }

  static void Forward(const Arguments& x, const RowMask& mask, const Tensors& y) {
    const at::Tensor q = UnitStride(x.q), k = UnitStride(x.k), v = UnitStride(x.v);
    BeginState(x.memory, y[kMemory]);
    DispatchStored(v, [&]<class T>(T) {
      using C = ComputeType<T>;
      const FourierTensors<T> given(v, x.scale, *x.matrices, x.normalise, x.factor);
      const FourierMap<C> map = given.map();
      LinearForward<T>(ShapeOf(x), x.rule(), InputRows<T>(q), InputRows<T>(k), InputRows<T>(v),
                       mask, y[kMemory].mutable_data_ptr<double>(), OutputRows<T>(y[kOut]),
                       x.save ? OutputRows<C>(y[kZ]) : Rows<C>{}, &map);
    });
  }

  static Tensors Keep(const Arguments&, const Tensors& y) { return {y[kOut], at::Tensor(), y[kZ]}; }

  static Tensors Backward(const Arguments& x, const RowMask& mask, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor q = UnitStride(x.q), k = UnitStride(x.k), v = UnitStride(x.v),
                     out = UnitStride(kept[kOut]), d_out = UnitStride(OrZeros(g[kOut], v)),
                     memory = x.memory.contiguous(),
                     G = g[kMemory].defined()
                             ? g[kMemory].clone(at::MemoryFormat::Contiguous)
                             : at::zeros_like(x.memory, at::MemoryFormat::Contiguous);
    Tensors grads = EmptyGradients(x);
    grads[3] = G;
    DispatchStored(v, [&]<class T>(T) {
      using C = ComputeType<T>;
      const FourierTensors<T> given(v, x.scale, *x.matrices, x.normalise, x.factor);
      const FourierMap<C> map = given.map();
      const at::Tensor d_scale = given.EmptyScaleGradient();
      LinearBackward<T>(ShapeOf(x), x.rule(), InputRows<T>(q), InputRows<T>(k), InputRows<T>(v),
                        InputRows<T>(out), InputRows<C>(kept[kZ]), InputRows<T>(d_out), mask,
                        memory.const_data_ptr<double>(), G.mutable_data_ptr<double>(),
                        OutputRows<T>(grads[0]), OutputRows<T>(grads[1]), OutputRows<T>(grads[2]),
                        &map, d_scale.defined() ? MutableData<C>(d_scale) : nullptr);
      if (x.scale) grads[4].copy_(d_scale);
    });
    return grads;
  }
};

// All tokens at once. x: k of a write, q of a read, which has no v; padding of q is never given.
struct AllArguments {
  at::Tensor x, v, memory;
  OptionalTensor scale, matrices;
  Mask mask;
  bool normalise = false;
  double factor = 1;
  int64_t divisor = 0;
  double value = 0;
  LinearRule rule() const { return {FeatureMap::kFourier, 0, DivisorRule(divisor), value}; }
  bool divides() const { return rule().divisor != DivisorRule::kNone; }
};

// What both have.
struct All {
  using Arguments = AllArguments;
  static constexpr size_t kOutputs = 1, kDifferentiable = 1;
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static bool IsConstant(const Arguments& a, const OptionalTensor* field) {
    return field == &a.matrices;
  }
  static const at::Tensor& Tokens(const Arguments& a) { return a.x; }
  static c10::SymInt Width(const Arguments& a) {
    return a.memory.sym_size(3) - (a.divides() ? 1 : 0);
  }
  static SlotShape ShapeOf(const Arguments& a) {
    return {a.x.size(0), a.x.size(1), a.x.size(2), a.matrices->size(1) * 2, Width(a).expect_int()};
  }
  static void CheckBoth(const char* op, const Arguments& a) {
    TORCH_CHECK(a.x.dim() == 4, op, " expected tokens [B,H,T,d_k], got ", a.x.sym_sizes());
    CheckFourier(op, "tokens", a.x, a.scale, a.matrices);
    TORCH_CHECK(a.divisor >= 0 && a.divisor <= int64_t(DivisorRule::kNone), op,
                " expected divisor 0 to 4, got ", a.divisor);
    TORCH_CHECK(
        a.memory.dim() == 4 && a.memory.sym_sizes().slice(0, 2) == a.x.sym_sizes().slice(0, 2) &&
            a.memory.sym_size(2) == a.matrices->sym_size(1) * 2 && Width(a) > 0,
        op, " expected memory of shape [B,H,2m,", a.divides() ? "d+1" : "d", "] for tokens ",
        a.x.sym_sizes(), " and matrices ", a.matrices->sym_sizes(), ", got ", a.memory.sym_sizes());
    TORCH_CHECK(a.memory.scalar_type() == at::kDouble, op, " expected memory in double, got ",
                a.memory.scalar_type());
  }
  static at::Tensor FeaturesOf(const Arguments& a, const at::Tensor& x) {
    const auto type = ComputeTypeOf(x);
    return FourierFeatures(x.to(type), a.scale ? a.scale->to(type) : at::Tensor(),
                           a.matrices->to(type), a.normalise, a.factor);
  }
  static LinearRule RuleOfFeatures(const Arguments& a) {
    return {FeatureMap::kNone, 0, DivisorRule(a.divisor), a.value};
  }
  static void PushScale(const Arguments& a, Tensors* grads) {
    if (a.scale) grads->push_back(at::empty_symint(a.scale->sym_sizes(), a.scale->options()));
  }
  // body(map, d_scale) with the map as tokens stored as T take it; d_scale is null without a scale,
  // and what it holds then goes to `to`.
  template <class T, class Body>
  static void WithMap(const Arguments& a, const at::Tensor* to, Body body) {
    using C = ComputeType<T>;
    const FourierTensors<T> given(a.x, a.scale, *a.matrices, a.normalise, a.factor);
    const FourierMap<C> map = given.map();
    const at::Tensor d_scale = to == nullptr ? at::Tensor() : given.EmptyScaleGradient();
    body(&map, d_scale.defined() ? MutableData<C>(d_scale) : nullptr);
    if (d_scale.defined()) to->copy_(d_scale);
  }
};

struct Write : All {
  static constexpr const char* kSchema =
      "fourier_write(Tensor k, Tensor v, Tensor memory, Tensor? scale, Tensor? matrices, Tensor? "
      "starts=None, Tensor? lengths=None, bool normalise=False, float factor=1, int divisor=0, "
      "float value=1e-06) -> Tensor";
  static constexpr auto kFields = [](auto& a) {
    return std::tie(a.x, a.v, a.memory, a.scale, a.matrices, a.mask.starts, a.mask.lengths,
                    a.normalise, a.factor, a.divisor, a.value);
  };

  static void Check(const Arguments& a) {
    CheckBoth("[fourier_write]", a);
    TORCH_CHECK(a.v.dim() == 4 && a.v.sym_sizes().slice(0, 3) == a.x.sym_sizes().slice(0, 3) &&
                    a.v.sym_size(3) == Width(a) && a.v.scalar_type() == a.x.scalar_type(),
                "[fourier_write] expected v [B,H,T,d] for k ", a.x.sym_sizes(), " ",
                a.x.scalar_type(), " and memory ", a.memory.sym_sizes(), ", got ", a.v.sym_sizes(),
                " ", a.v.scalar_type());
    TORCH_CHECK(!a.mask.starts,
                "[fourier_write] a memory holds one document: packed rows have to be split before "
                "they are written");
  }

  static Tensors Compose(const Arguments& a) {
    const auto type = ComputeTypeOf(a.x);
    const at::Tensor pad = a.mask.HeadsPadding(a.x.size(2)), x = a.x.to(type);
    return {LinearWrite(FeaturesOf(a, pad.defined() ? x.masked_fill(pad, 0.0) : x), a.v.to(type),
                        a.memory, RuleOfFeatures(a), a.mask)};
  }

  static Tensors Empty(const Arguments& a) { return {LikePlain(a.memory)}; }
  static Tensors EmptyGradients(const Arguments& a) {
    Tensors grads = {GradientLike(a.x), GradientLike(a.v), LikePlain(a.memory)};
    PushScale(a, &grads);
    return grads;
  }

  static void Forward(const Arguments& a, const RowMask& mask, const Tensors& y) {
    const at::Tensor k = UnitStride(a.x), v = UnitStride(a.v);
    BeginState(a.memory, y[0]);
    DispatchStored(v, [&]<class T>(T) {
      WithMap<T>(a, nullptr, [&](const auto* map, auto*) {
        cistern::LinearWrite<T>(ShapeOf(a), a.rule(), InputRows<T>(k), InputRows<T>(v),
                                mask.lengths, y[0].mutable_data_ptr<double>(), map);
      });
    });
  }

  static Tensors Keep(const Arguments&, const Tensors&) { return {}; }

  static Tensors Backward(const Arguments& a, const RowMask& mask, const Tensors& g,
                          const Tensors&) {
    const at::Tensor k = UnitStride(a.x), v = UnitStride(a.v), G = g[0].contiguous();
    Tensors grads = EmptyGradients(a);
    grads[2] = G;
    DispatchStored(v, [&]<class T>(T) {
      WithMap<T>(a, a.scale ? &grads[3] : nullptr, [&](const auto* map, auto* d_scale) {
        LinearWriteBackward<T>(ShapeOf(a), a.rule(), InputRows<T>(k), InputRows<T>(v), mask.lengths,
                               G.const_data_ptr<double>(), OutputRows<T>(grads[0]),
                               OutputRows<T>(grads[1]), map, d_scale);
      });
    });
    return grads;
  }
};

struct Read : All {
  static constexpr const char* kSchema =
      "fourier_read(Tensor q, Tensor memory, Tensor? scale, Tensor? matrices, bool "
      "normalise=False, float factor=1, int divisor=0, float value=1e-06) -> Tensor";
  static constexpr auto kFields = [](auto& a) {
    return std::tie(a.x, a.memory, a.scale, a.matrices, a.normalise, a.factor, a.divisor, a.value);
  };

  static void Check(const Arguments& a) { CheckBoth("[fourier_read]", a); }
  static Tensors Compose(const Arguments& a) {
    return {LinearRead(FeaturesOf(a, a.x), a.memory, RuleOfFeatures(a)).to(a.x.scalar_type())};
  }

  static Tensors Empty(const Arguments& a) {
    const c10::SymInt sizes[] = {a.x.sym_size(0), a.x.sym_size(1), a.x.sym_size(2), Width(a)};
    return {EmptyHeads(sizes, a.x.options())};
  }
  static Tensors EmptyGradients(const Arguments& a) {
    Tensors grads = {GradientLike(a.x), LikePlain(a.memory)};
    PushScale(a, &grads);
    return grads;
  }

  static void Forward(const Arguments& a, const RowMask&, const Tensors& y) {
    const at::Tensor q = UnitStride(a.x), memory = a.memory.contiguous();
    DispatchStored(q, [&]<class T>(T) {
      WithMap<T>(a, nullptr, [&](const auto* map, auto*) {
        cistern::LinearRead<T>(ShapeOf(a), a.rule(), InputRows<T>(q),
                               memory.const_data_ptr<double>(), OutputRows<T>(y[0]), map);
      });
    });
  }

  static Tensors Keep(const Arguments&, const Tensors& y) { return y; }

  static Tensors Backward(const Arguments& a, const RowMask&, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor q = UnitStride(a.x), memory = a.memory.contiguous(), out = UnitStride(kept[0]),
                     d_out = UnitStride(g[0]);
    Tensors grads = EmptyGradients(a);
    DispatchStored(q, [&]<class T>(T) {
      WithMap<T>(a, a.scale ? &grads[2] : nullptr, [&](const auto* map, auto* d_scale) {
        LinearReadBackward<T>(ShapeOf(a), a.rule(), InputRows<T>(q),
                              memory.const_data_ptr<double>(), InputRows<T>(out),
                              InputRows<T>(d_out), OutputRows<T>(grads[0]),
                              grads[1].mutable_data_ptr<double>(), map, d_scale);
      });
    });
    return grads;
  }
};

}  // namespace fourier_attention

CISTERN_PRIMITIVE(fourier_attention::Op)
CISTERN_PRIMITIVE(fourier_attention::Write)
CISTERN_PRIMITIVE(fourier_attention::Read)

namespace fourier_attention {
namespace {

Arguments ArgumentsOf(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const at::Tensor& memory, const FourierFeatureMap& map,
                      const LinearRule& rule, const Mask& mask) {
  return {q,
          k,
          v,
          memory,
          Given(map.scale),
          map.matrices,
          mask,
          map.normalise,
          map.factor,
          int64_t(rule.divisor),
          rule.value};
}

}  // namespace
}  // namespace fourier_attention

SumResult FourierAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& memory, const FourierFeatureMap& map,
                           const LinearRule& rule, const Mask& mask) {
  using fourier_attention::Op;
  const Op::Arguments x = fourier_attention::ArgumentsOf(q, k, v, memory, map, rule, mask);
  if (NeedsGradient({map.matrices})) {
    Op::Check(x);
    const Tensors y = Op::Compose(x);
    return {y[0], y[1]};
  }
  auto [out, after, z] = OpPair<Op>::Call(x);
  return {out, after};
}

at::Tensor FourierExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         at::Tensor& memory, const FourierFeatureMap& map, const LinearRule& rule,
                         const Mask& mask) {
  using fourier_attention::Op;
  const bool alone = OwnedAlone(memory);
  at::Tensor out, z;
  if (alone && !NeedsGradient({map.matrices})) {
    Op::Arguments x = fourier_attention::ArgumentsOf(q, k, v, memory, map, rule, mask);
    std::tie(out, memory, z) = OpPair<Op>::CallInPlace(x);
    return out;
  }
  SumResult r = FourierAttention(q, k, v, memory, map, rule, mask);
  memory = r.memory;
  return r.out;
}

at::Tensor FourierWrite(const at::Tensor& k, const at::Tensor& v, const at::Tensor& memory,
                        const FourierFeatureMap& map, const LinearRule& rule, const Mask& mask) {
  using fourier_attention::Write;
  const Write::Arguments a = {k,
                              v,
                              memory,
                              Given(map.scale),
                              map.matrices,
                              mask,
                              map.normalise,
                              map.factor,
                              int64_t(rule.divisor),
                              rule.value};
  if (!NeedsGradient({map.matrices})) return std::get<0>(OpPair<Write>::Call(a));
  Write::Check(a);
  return Write::Compose(a)[0];
}

at::Tensor FourierRead(const at::Tensor& q, const at::Tensor& memory, const FourierFeatureMap& map,
                       const LinearRule& rule) {
  using fourier_attention::Read;
  const Read::Arguments a = {q,
                             {},
                             memory,
                             Given(map.scale),
                             map.matrices,
                             {},
                             map.normalise,
                             map.factor,
                             int64_t(rule.divisor),
                             rule.value};
  if (!NeedsGradient({map.matrices})) return std::get<0>(OpPair<Read>::Call(a));
  Read::Check(a);
  return Read::Compose(a)[0];
}

}  // namespace cistern::ops
