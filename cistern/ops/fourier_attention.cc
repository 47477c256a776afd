#include "cistern/ops/fourier_attention.h"

#include "cistern/kernels/linear_bidirectional.h"
#include "cistern/ops/fourier_features.h"
#include "cistern/ops/fourier_map.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace fourier_attention {

// What all three are given of the map and the divisor.
struct Map {
  OptionalTensor scale;
  OptionalTensor matrices;  // always given: optional ones may be constants
  bool normalise = false;
  double factor = 1;
  int64_t divisor = 0;
  double value = 0;

  LinearRule rule() const { return {FeatureMap::kFourier, 0, DivisorRule(divisor), value}; }
  bool divides() const { return rule().divisor != DivisorRule::kNone; }
  bool IsConstant(const OptionalTensor* field) const { return field == &matrices; }
};

Map MapOf(const FourierFeatureMap& map, const LinearRule& rule) {
  return {Given(map.scale), map.matrices,          map.normalise,
          map.factor,       int64_t(rule.divisor), rule.value};
}

// Checks of tokens [B,H,T,d_k] and a memory for values of this width.
void CheckMap(const char* op, const char* name, const Map& map, const at::Tensor& x,
              const at::Tensor& memory, const c10::SymInt& width) {
  CheckFourier(op, name, x, map.scale, map.matrices);
  TORCH_CHECK(map.divisor >= 0 && map.divisor <= int64_t(DivisorRule::kNone), op,
              " expected divisor 0 to 4, got ", map.divisor);
  TORCH_CHECK(memory.dim() == 4 && memory.sym_sizes().slice(0, 2) == x.sym_sizes().slice(0, 2) &&
                  memory.sym_size(2) == map.matrices->sym_size(1) * 2 && width > 0 &&
                  memory.sym_size(3) == width + (map.divides() ? 1 : 0),
              op, " expected memory of shape [B,H,2m,", map.divides() ? "d+1" : "d", "] for ", name,
              " ", x.sym_sizes(), ", values of width ", width, " and matrices ",
              map.matrices->sym_sizes(), ", got ", memory.sym_sizes());
  TORCH_CHECK(memory.scalar_type() == at::kDouble, op, " expected memory in double, got ",
              memory.scalar_type());
}

// For compositions: features in the type that is computed in, and the rule of what is made of them.
at::Tensor FeaturesOf(const Map& map, const at::Tensor& x, const at::Tensor& pad) {
  const auto type = ComputeTypeOf(x);
  at::Tensor y = x.to(type);
  // Whatever padding holds, NaN too, has no gradient.
  if (pad.defined()) y = y.masked_fill(pad, 0.0);
  return FourierFeatures(y, {map.scale ? map.scale->to(type) : at::Tensor(), map.matrices->to(type),
                             map.normalise, map.factor});
}
LinearRule RuleOfFeatures(const Map& map) {
  return {FeatureMap::kNone, 0, DivisorRule(map.divisor), map.value};
}

void PushScale(const Map& map, Tensors* grads) {
  if (map.scale) grads->push_back(at::empty_symint(map.scale->sym_sizes(), map.scale->options()));
}

// body(map, d_scale) with the map as tokens x stored as T take it. d_scale is null without a scale,
// and where there are no gradients; else what it then holds goes to the last of these.
template <class T, class Body>
void WithMap(const Map& map, const at::Tensor& x, const Tensors& grads, Body body) {
  using C = ComputeType<T>;
  const FourierTensors<T> given(x, map.scale, *map.matrices, map.normalise, map.factor);
  const FourierMap<C> taken = given.map();
  const at::Tensor d_scale = grads.empty() ? at::Tensor() : given.EmptyScaleGradient();
  body(&taken, d_scale.defined() ? MutableData<C>(d_scale) : nullptr);
  if (d_scale.defined()) grads.back().copy_(d_scale);
}

struct Arguments : Map {
  at::Tensor q, k, v, memory;
  Mask mask;
  bool save = false;
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
    return x.IsConstant(field);
  }

  static void Check(const Arguments& x) {
    constexpr const char* kOp = "[fourier_attention]";
    TORCH_CHECK(x.k.dim() == 4 && x.v.dim() == 4 &&
                    x.v.sym_sizes().slice(0, 3) == x.k.sym_sizes().slice(0, 3),
                kOp, " expected k of shape [B,H,T,d_k] and v [B,H,T,d], got ", x.k.sym_sizes(),
                " and ", x.v.sym_sizes());
    TORCH_CHECK(x.q.sym_sizes() == x.k.sym_sizes(), kOp, " expected q of shape ", x.k.sym_sizes(),
                ", got ", x.q.sym_sizes());
    CheckMap(kOp, "k", x, x.k, x.memory, x.v.sym_size(3));
    for (const at::Tensor& t : {x.q, x.k}) {
      TORCH_CHECK(t.scalar_type() == x.v.scalar_type(), kOp, " expected one dtype, got ",
                  t.scalar_type(), " beside v ", x.v.scalar_type());
    }
  }

  static Tensors Compose(const Arguments& x) {
    const at::Tensor pad = x.mask.HeadsPadding(x.q.size(2));
    const SumResult r =
        LinearAttention(FeaturesOf(x, x.q, pad), FeaturesOf(x, x.k, pad),
                        x.v.to(ComputeTypeOf(x.v)), x.memory, RuleOfFeatures(x), x.mask);
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
    PushScale(x, &grads);
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
      WithMap<T>(x, v, {}, [&](const auto* map, auto*) {
        LinearForward<T>(ShapeOf(x), x.rule(), InputRows<T>(q), InputRows<T>(k), InputRows<T>(v),
                         mask, y[kMemory].mutable_data_ptr<double>(), OutputRows<T>(y[kOut]),
                         x.save ? OutputRows<C>(y[kZ]) : Rows<C>{}, map);
      });
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
      WithMap<T>(x, v, grads, [&](const auto* map, auto* d_scale) {
        LinearBackward<T>(ShapeOf(x), x.rule(), InputRows<T>(q), InputRows<T>(k), InputRows<T>(v),
                          InputRows<T>(out), InputRows<C>(kept[kZ]), InputRows<T>(d_out), mask,
                          memory.const_data_ptr<double>(), G.mutable_data_ptr<double>(),
                          OutputRows<T>(grads[0]), OutputRows<T>(grads[1]), OutputRows<T>(grads[2]),
                          map, d_scale);
      });
    });
    return grads;
  }
};

// All tokens at once. x: k of a write, q of a read, which has no v; padding of q is never given.
struct AllArguments : Map {
  at::Tensor x, v, memory;
  Mask mask;
};

// What both have.
struct All {
  using Arguments = AllArguments;
  static constexpr size_t kOutputs = 1, kDifferentiable = 1;
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static bool IsConstant(const Arguments& a, const OptionalTensor* field) {
    return a.IsConstant(field);
  }
  static const at::Tensor& Tokens(const Arguments& a) { return a.x; }
  static c10::SymInt Width(const Arguments& a) {
    return a.memory.sym_size(3) - (a.divides() ? 1 : 0);
  }
  static SlotShape ShapeOf(const Arguments& a) {
    return {a.x.size(0), a.x.size(1), a.x.size(2), a.matrices->size(1) * 2, Width(a).expect_int()};
  }
  static void CheckBoth(const char* op, const Arguments& a) {
    TORCH_CHECK(a.x.dim() == 4 && a.memory.dim() == 4, op,
                " expected tokens [B,H,T,d_k] and memory [B,H,2m,...], got ", a.x.sym_sizes(),
                " and ", a.memory.sym_sizes());
    CheckMap(op, "tokens", a, a.x, a.memory, Width(a));
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
    return {LinearWrite(FeaturesOf(a, a.x, a.mask.HeadsPadding(a.x.size(2))),
                        a.v.to(ComputeTypeOf(a.v)), a.memory, RuleOfFeatures(a), a.mask)};
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
      WithMap<T>(a, a.x, {}, [&](const auto* map, auto*) {
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
      WithMap<T>(a, a.x, grads, [&](const auto* map, auto* d_scale) {
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
    return {LinearRead(FeaturesOf(a, a.x, {}), a.memory, RuleOfFeatures(a)).to(a.x.scalar_type())};
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
      WithMap<T>(a, a.x, {}, [&](const auto* map, auto*) {
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
      WithMap<T>(a, a.x, grads, [&](const auto* map, auto* d_scale) {
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

SumResult FourierAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& memory, const FourierFeatureMap& map,
                           const LinearRule& rule, const Mask& mask) {
  using fourier_attention::Op;
  const Op::Arguments x = {fourier_attention::MapOf(map, rule), q, k, v, memory, mask};
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
    Op::Arguments x = {fourier_attention::MapOf(map, rule), q, k, v, memory, mask};
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
  const Write::Arguments a = {fourier_attention::MapOf(map, rule), k, v, memory, mask};
  if (!NeedsGradient({map.matrices})) return std::get<0>(OpPair<Write>::Call(a));
  Write::Check(a);
  return Write::Compose(a)[0];
}

at::Tensor FourierRead(const at::Tensor& q, const at::Tensor& memory, const FourierFeatureMap& map,
                       const LinearRule& rule) {
  using fourier_attention::Read;
  const Read::Arguments a = {fourier_attention::MapOf(map, rule), q, {}, memory, {}};
  if (!NeedsGradient({map.matrices})) return std::get<0>(OpPair<Read>::Call(a));
  Read::Check(a);
  return Read::Compose(a)[0];
}

}  // namespace cistern::ops
