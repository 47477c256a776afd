#include "cistern/ops/gated_slots.h"

#include "cistern/kernels/gated_slots.h"
#include "cistern/ops/primitive.h"
#include "cistern/ops/slot_checks.h"

namespace cistern::ops {
namespace gated_slots {

struct Arguments {
  at::Tensor q, k, v, logits, keys, values;
  Mask mask;
  double scale = 1, temperature = 1;
  bool save = false;
};

struct Op {
  static constexpr const char* kSchema =
      "gated_slots(Tensor q, Tensor k, Tensor v, Tensor logits, Tensor keys, Tensor values, "
      "Tensor? starts=None, Tensor? lengths=None, float scale=1, float temperature=1, bool "
      "save=False) -> (Tensor, Tensor, Tensor, Tensor)";
  using Arguments = gated_slots::Arguments;
  static constexpr auto kFields = [](auto& x) {
    return std::tie(x.q, x.k, x.v, x.logits, x.keys, x.values, x.mask.starts, x.mask.lengths,
                    x.scale, x.temperature, x.save);
  };
  static constexpr size_t kOutputs = 4, kDifferentiable = 3;
  enum { kOut, kKeys, kValues, kScores };  // scores: scale SumMatch(..), if saved
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& x) { return x.v; }

  static void Check(const Arguments& x) {
    CheckSlots("[gated_slots]", "logits", x.logits, "v", x.v, x.values, nullptr);
    CheckSlots("[gated_slots]", "logits", x.logits, "k", x.k, x.keys, nullptr);
    for (const at::Tensor& t : {x.q, x.k}) {
      TORCH_CHECK(t.sym_sizes() == x.v.sym_sizes(), "[gated_slots] expected q and k of shape ",
                  x.v.sym_sizes(), ", got ", t.sym_sizes());
    }
    for (const at::Tensor& t : {x.q, x.k, x.logits}) {
      TORCH_CHECK(t.scalar_type() == x.v.scalar_type(), "[gated_slots] expected one dtype, got ",
                  t.scalar_type(), " beside v ", x.v.scalar_type());
    }
    TORCH_CHECK(x.temperature > 0, "[gated_slots] expected temperature > 0, got ", x.temperature);
  }

  static Tensors Compose(const Arguments& x) {
    const auto type = ComputeTypeOf(x.v);
    at::Tensor logits = x.logits.to(type);
    // Whatever padding holds, NaN too, has no gradient.
    const at::Tensor pad = x.mask.HeadsPadding(logits.size(2));
    if (pad.defined()) logits = logits.masked_fill(pad, 0.0);
    const Gate gate = MakeGate(logits, x.temperature);
    const SumResult matched =
        SumMatch(x.q.to(type), gate.write, x.k.to(type), x.keys, x.mask, gate.log_gate);
    const SumResult read = SumRead(at::softmax(matched.out * x.scale, -1), gate.write, x.v.to(type),
                                   x.values, x.mask, gate.log_gate);
    return {read.out.to(x.v.scalar_type()), matched.memory, read.memory};
  }

  // One head after another: only kernels read it.
  static at::Tensor Scores(const Arguments& x) {
    return EmptyHeadByHead(x.logits.sym_sizes(), x.logits.options().dtype(ComputeTypeOf(x.logits)));
  }
  static Tensors Empty(const Arguments& x) {
    return {LikeHeads(x.v), LikePlain(x.keys), LikePlain(x.values),
            x.save ? Scores(x) : at::empty({0}, x.logits.options())};
  }
  static Tensors EmptyGradients(const Arguments& x) {
    return {GradientLike(x.q),      GradientLike(x.k), GradientLike(x.v),
            GradientLike(x.logits), LikePlain(x.keys), LikePlain(x.values)};
  }
  static Tensors InPlace(const Arguments& x) {
    return {LikeHeads(x.v), x.keys, x.values, at::Tensor()};
  }

  static SlotShape ShapeOf(const Arguments& x) {
    return {x.v.size(0), x.v.size(1), x.v.size(2), x.logits.size(3), x.v.size(3)};
  }

  static void Forward(const Arguments& x, const RowMask& mask, const Tensors& y) {
    const at::Tensor q = UnitStride(x.q), k = UnitStride(x.k), v = UnitStride(x.v),
                     logits = UnitStride(x.logits);
    BeginState(x.keys, y[kKeys]), BeginState(x.values, y[kValues]);
    DispatchStored(v, [&]<class T>(T) {
      GatedSlotsForward<T>(
          ShapeOf(x), {x.scale, x.temperature},
          {InputRows<T>(q), InputRows<T>(k), InputRows<T>(v), InputRows<T>(logits)}, mask,
          y[kKeys].mutable_data_ptr<double>(), y[kValues].mutable_data_ptr<double>(),
          OutputRows<T>(y[kOut]),
          x.save ? OutputRows<ComputeType<T>>(y[kScores]) : Rows<ComputeType<T>>{});
    });
  }

  static Tensors Keep(const Arguments&, const Tensors& y) {
    return {y[kKeys], y[kValues], y[kScores]};
  }

  static Tensors Backward(const Arguments& x, const RowMask& mask, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor q = UnitStride(x.q), k = UnitStride(x.k), v = UnitStride(x.v),
                     logits = UnitStride(x.logits), d_out = UnitStride(OrZeros(g[kOut], v)),
                     keys = x.keys.contiguous(), values = x.values.contiguous();
    at::Tensor h = at::zeros(keys.sizes().slice(0, 3), keys.options());
    const auto gradient = [&](const at::Tensor& d_memory, const at::Tensor& memory_end) {
      if (!d_memory.defined()) return at::zeros_like(memory_end, at::MemoryFormat::Contiguous);
      h += (d_memory * memory_end).sum(-1);
      return d_memory.clone(at::MemoryFormat::Contiguous);
    };
    const at::Tensor G_keys = gradient(g[kKeys], kept[0]), G_values = gradient(g[kValues], kept[1]);
    const at::Tensor dq = GradientLike(x.q), dk = GradientLike(x.k), dv = GradientLike(x.v),
                     dx = GradientLike(x.logits), dy = Scores(x), terms = Scores(x);
    DispatchStored(v, [&]<class T>(T) {
      using C = ComputeType<T>;
      GatedSlotsBackward<T>(
          ShapeOf(x), {x.scale, x.temperature},
          {InputRows<T>(q), InputRows<T>(k), InputRows<T>(v), InputRows<T>(logits)},
          InputRows<C>(kept[2]), InputRows<T>(d_out), mask, keys.const_data_ptr<double>(),
          values.const_data_ptr<double>(), G_keys.mutable_data_ptr<double>(),
          G_values.mutable_data_ptr<double>(), h.mutable_data_ptr<double>(), OutputRows<T>(dq),
          OutputRows<T>(dk), OutputRows<T>(dv), OutputRows<T>(dx), OutputRows<C>(dy),
          OutputRows<C>(terms));
    });
    return {dq, dk, dv, dx, G_keys, G_values};
  }
};

}  // namespace gated_slots

CISTERN_PRIMITIVE(gated_slots::Op)

Gate MakeGate(const at::Tensor& logits, double temperature) {
  const at::Tensor log_gate = at::log_sigmoid(logits) / temperature;
  return {log_gate, log_gate.expm1().neg()};
}

GatedSlotsResult GatedSlotsAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const at::Tensor& logits, const at::Tensor& keys,
                                     const at::Tensor& values, double scale, double temperature,
                                     const Mask& mask) {
  auto [out, keys_end, values_end, scores] =
      OpPair<gated_slots::Op>::Call({q, k, v, logits, keys, values, mask, scale, temperature});
  return {out, keys_end, values_end};
}

at::Tensor GatedSlotsExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& logits, at::Tensor& keys, at::Tensor& values,
                            double scale, double temperature, const Mask& mask) {
  const bool alone = OwnedAlone(keys) && OwnedAlone(values);
  gated_slots::Arguments x = {q, k, v, logits, keys, values, mask, scale, temperature};
  using Pair = OpPair<gated_slots::Op>;
  at::Tensor out, scores;
  std::tie(out, keys, values, scores) = alone ? Pair::CallInPlace(x) : Pair::Call(x);
  return out;
}

}  // namespace cistern::ops
