// ABC's write of all tokens and read by all queries.
#include <limits>

#include "cistern/kernels/slot_bidirectional.h"
#include "cistern/ops/primitive.h"
#include "cistern/ops/slot_attention.h"
#include "cistern/ops/slot_checks.h"

namespace cistern::ops {
namespace abc_bidirectional {

struct WriteArguments {
  at::Tensor s, k, v, keys, values, z;
  Mask mask;
};

struct Write {
  static constexpr const char* kSchema =
      "abc_write(Tensor s, Tensor k, Tensor v, Tensor keys, Tensor values, Tensor z, Tensor? "
      "starts=None, Tensor? lengths=None) -> (Tensor, Tensor, Tensor)";
  using Arguments = WriteArguments;
  static constexpr auto kFields = [](auto& x) {
    return std::tie(x.s, x.k, x.v, x.keys, x.values, x.z, x.mask.starts, x.mask.lengths);
  };
  static constexpr size_t kOutputs = 3, kDifferentiable = 3;
  enum { kKeys, kValues, kZ };
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& x) { return x.v; }

  static SlotShape ShapeOf(const Arguments& x) {
    return {x.s.size(0), x.s.size(1), x.s.size(2), x.s.size(3), x.v.size(3)};
  }

  static void Check(const Arguments& x) {
    CheckSlots("[abc_write]", "s", x.s, "v", x.v, x.values, &x.z);
    CheckSlots("[abc_write]", "s", x.s, "k", x.k, x.keys, &x.z);
    TORCH_CHECK(x.k.sym_size(3) == x.v.sym_size(3) && x.s.scalar_type() == x.v.scalar_type() &&
                    x.k.scalar_type() == x.v.scalar_type(),
                "[abc_write] expected keys and values of one width and s, k, v of one dtype, got ",
                x.k.sym_sizes(), " and ", x.v.sym_sizes(), " of ", x.s.scalar_type(), ", ",
                x.k.scalar_type(), ", ", x.v.scalar_type());
    TORCH_CHECK(!x.mask.starts,
                "[abc_write] a state holds one document: packed rows have to be split before they "
                "are written");
  }

  static Tensors Compose(const Arguments& x) {
    const SlotState keys = SlotWrite(x.s, x.k, {x.keys, x.z}, x.mask),
                    values = SlotWrite(x.s, x.v, {x.values, x.z}, x.mask);
    return {keys.memory, values.memory, values.z};
  }

  static Tensors Empty(const Arguments& x) {
    return {LikePlain(x.keys), LikePlain(x.values), LikePlain(x.z)};
  }
  static Tensors EmptyGradients(const Arguments& x) {
    return {GradientLike(x.s), GradientLike(x.k),   GradientLike(x.v),
            LikePlain(x.keys), LikePlain(x.values), LikePlain(x.z)};
  }

  static void Forward(const Arguments& x, const RowMask& mask, const Tensors& y) {
    const at::Tensor s = UnitStride(x.s), k = UnitStride(x.k), v = UnitStride(x.v);
    BeginState(x.keys, y[kKeys]), BeginState(x.values, y[kValues]), BeginState(x.z, y[kZ]);
    DispatchStored(v, [&]<class T>(T) {
      const SlotWritten<T> written[] = {{InputRows<T>(k), y[kKeys].mutable_data_ptr<double>()},
                                        {InputRows<T>(v), y[kValues].mutable_data_ptr<double>()}};
      cistern::SlotWrite<T>(ShapeOf(x), InputRows<T>(s), written, mask.lengths,
                            y[kZ].mutable_data_ptr<double>());
    });
  }

  static Tensors Keep(const Arguments&, const Tensors& y) { return y; }

  static Tensors Backward(const Arguments& x, const RowMask& mask, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor s = UnitStride(x.s), k = UnitStride(x.k), v = UnitStride(x.v),
                     ds = GradientLike(x.s), dk = GradientLike(x.k), dv = GradientLike(x.v),
                     z_after = kept[kZ].contiguous(), d_keys = OrZeros(g[kKeys], x.keys),
                     d_values = OrZeros(g[kValues], x.values);
    at::Tensor h = (d_keys * kept[kKeys]).sum(-1) + (d_values * kept[kValues]).sum(-1);
    if (g[kZ].defined()) h = h - g[kZ];
    const auto type = ComputeTypeOf(v);
    const auto in_type = [type](const at::Tensor& t) {
      return t.to(type, false, true, at::MemoryFormat::Contiguous);
    };
    const at::Tensor G_keys = in_type(d_keys), G_values = in_type(d_values), h_tokens = in_type(h);
    DispatchStored(v, [&]<class T>(T) {
      const SlotWrittenGradients<T> written[] = {
          {InputRows<T>(k), G_keys.const_data_ptr<ComputeType<T>>(), OutputRows<T>(dk)},
          {InputRows<T>(v), G_values.const_data_ptr<ComputeType<T>>(), OutputRows<T>(dv)}};
      SlotWriteBackward<T>(ShapeOf(x), InputRows<T>(s), written, mask.lengths,
                           z_after.const_data_ptr<double>(),
                           h_tokens.const_data_ptr<ComputeType<T>>(), OutputRows<T>(ds));
    });
    // The share of what was there before; of an empty slot none.
    const at::Tensor w = (x.z - kept[kZ]).exp().masked_fill(at::isneginf(x.z), 0.0),
                     each = w.unsqueeze(-1);
    return {ds,
            dk,
            dv,
            each * d_keys,
            each * d_values,
            w * ((d_keys * x.keys).sum(-1) + (d_values * x.values).sum(-1) - h)};
  }
};

struct ReadArguments {
  at::Tensor q, keys, values;
  OptionalTensor z;
  double scale = 1;
  Mask mask = {};  // never given: every row is for itself
};

struct Read {
  static constexpr const char* kSchema =
      "abc_read(Tensor q, Tensor keys, Tensor values, Tensor? z=None, float scale=1) -> Tensor";
  using Arguments = ReadArguments;
  static constexpr auto kFields = [](auto& x) {
    return std::tie(x.q, x.keys, x.values, x.z, x.scale);
  };
  static bool IsConstant(const Arguments& x, const OptionalTensor* field) { return field == &x.z; }
  static constexpr size_t kOutputs = 1, kDifferentiable = 1;
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& x) { return x.q; }

  static SlotShape ShapeOf(const Arguments& x) {
    return {x.q.size(0), x.q.size(1), x.q.size(2), x.keys.size(2), x.q.size(3)};
  }

  static void Check(const Arguments& x) {
    TORCH_CHECK(x.q.dim() == 4 && x.keys.dim() == 4 &&
                    x.keys.sym_sizes().slice(0, 2) == x.q.sym_sizes().slice(0, 2) &&
                    x.keys.sym_size(3) == x.q.sym_size(3) &&
                    x.values.sym_sizes() == x.keys.sym_sizes() &&
                    (!x.z || x.z->sym_sizes() == x.keys.sym_sizes().slice(0, 3)),
                "[abc_read] expected q [B,H,T,d], keys and values [B,H,n,d] and z [B,H,n], got ",
                x.q.sym_sizes(), ", ", x.keys.sym_sizes(), " and ", x.values.sym_sizes());
    TORCH_CHECK(x.keys.scalar_type() == at::kDouble && x.values.scalar_type() == at::kDouble &&
                    (!x.z || x.z->scalar_type() == at::kDouble),
                "[abc_read] expected keys, values and z in double, got ", x.keys.scalar_type(),
                " and ", x.values.scalar_type());
  }

  static Tensors Compose(const Arguments& x) {
    const auto type = ComputeTypeOf(x.q);
    const at::Tensor keys = (x.keys * x.scale).to(type);
    at::Tensor logits = at::matmul(x.q.to(type), keys.transpose(2, 3));
    if (x.z) {
      const float lowest = std::numeric_limits<float>::lowest();
      logits = logits.masked_fill(at::isneginf(x.z->unsqueeze(2)), lowest);
    }
    return {SlotSoftmaxRead(logits, x.values).to(x.q.scalar_type())};
  }

  static Tensors Empty(const Arguments& x) { return {LikeHeads(x.q)}; }
  static Tensors EmptyGradients(const Arguments& x) {
    return {GradientLike(x.q), LikePlain(x.keys), LikePlain(x.values)};
  }

  // The slots for the kernels; keeps what they point to alive.
  struct Slots {
    explicit Slots(const Arguments& x) : keys(x.keys.contiguous()), values(x.values.contiguous()) {
      if (x.z) z = x.z->contiguous();
    }
    SlotKeys View(double scale) const {
      return {scale, keys.const_data_ptr<double>(), DataOrNull(z)};
    }
    at::Tensor keys, values, z;
  };

  static void Forward(const Arguments& x, const RowMask&, const Tensors& y) {
    const at::Tensor q = UnitStride(x.q);
    const Slots slots(x);
    DispatchStored(q, [&]<class T>(T) {
      SlotAttend<T>(ShapeOf(x), InputRows<T>(q), slots.View(x.scale),
                    slots.values.const_data_ptr<double>(), OutputRows<T>(y[0]));
    });
  }

  static Tensors Keep(const Arguments&, const Tensors&) { return {}; }

  static Tensors Backward(const Arguments& x, const RowMask&, const Tensors& g, const Tensors&) {
    const at::Tensor q = UnitStride(x.q), d_out = UnitStride(g[0]);
    const Slots slots(x);
    const at::Tensor dq = GradientLike(x.q), d_keys = LikePlain(slots.keys),
                     d_values = LikePlain(slots.values);
    DispatchStored(q, [&]<class T>(T) {
      SlotAttendBackward<T>(ShapeOf(x), InputRows<T>(q), slots.View(x.scale),
                            slots.values.const_data_ptr<double>(), InputRows<T>(d_out),
                            OutputRows<T>(dq), d_keys.mutable_data_ptr<double>(),
                            d_values.mutable_data_ptr<double>());
    });
    return {dq, d_keys, d_values};
  }
};

}  // namespace abc_bidirectional

CISTERN_PRIMITIVE(abc_bidirectional::Write)
CISTERN_PRIMITIVE(abc_bidirectional::Read)

AbcState AbcWrite(const at::Tensor& s, const at::Tensor& k, const at::Tensor& v,
                  const AbcState& state, const Mask& mask) {
  auto [keys, values, z] =
      OpPair<abc_bidirectional::Write>::Call({s, k, v, state.keys, state.values, state.z, mask});
  return {keys, values, z};
}

at::Tensor AbcRead(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                   const at::Tensor& z, double scale) {
  return std::get<0>(OpPair<abc_bidirectional::Read>::Call({q, keys, values, Given(z), scale}));
}

}  // namespace cistern::ops
