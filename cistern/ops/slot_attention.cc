#include "cistern/ops/slot_attention.h"

#include "cistern/kernels/slot_attention.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace slot_attention {

void CheckState(const char* op, const at::Tensor& s, const at::Tensor& v, const at::Tensor& memory,
                const at::Tensor& z) {
  TORCH_CHECK(s.dim() == 4, op, " expected s of shape [B,H,T,n], got ", s.sym_sizes());
  TORCH_CHECK(v.dim() == 4 && v.sym_sizes().slice(0, 3) == s.sym_sizes().slice(0, 3), op,
              " expected v of shape [B,H,T,d] with the B, H, T of s ", s.sym_sizes(), ", got ",
              v.sym_sizes());
  TORCH_CHECK(memory.dim() == 4 && memory.sym_size(0) == s.sym_size(0) &&
                  memory.sym_size(1) == s.sym_size(1) && memory.sym_size(2) == s.sym_size(3) &&
                  memory.sym_size(3) == v.sym_size(3),
              op, " expected a memory of shape [B,H,n,d] for s ", s.sym_sizes(), " and v ",
              v.sym_sizes(), ", got ", memory.sym_sizes());
  TORCH_CHECK(z.dim() == 3 && z.sym_sizes() == memory.sym_sizes().slice(0, 3), op,
              " expected z of shape [B,H,n], got ", z.sym_sizes());
  TORCH_CHECK(memory.scalar_type() == at::kDouble && z.scalar_type() == at::kDouble, op,
              " expected the state in double, got ", memory.scalar_type(), " and ",
              z.scalar_type());
}

SlotShape ShapeOf(const at::Tensor& s, const at::Tensor& v) {
  return {s.size(0), s.size(1), s.size(2), s.size(3), v.size(3)};
}

// The gradient of a state's memory in the type of the tokens, for the kernel to move on.
at::Tensor GradientOf(const at::Tensor& d_memory, const at::Tensor& memory, at::ScalarType type) {
  return d_memory.defined() ? d_memory.to(type, false, true, at::MemoryFormat::Contiguous)
                            : at::zeros(memory.sizes(), memory.options().dtype(type));
}

// Adds dM . M_T of each slot to h.
void AddDot(const at::Tensor& d_memory, const at::Tensor& memory_end, at::Tensor& h) {
  if (d_memory.defined()) h = h + (d_memory * memory_end).sum(-1);
}

struct Latte {
  static constexpr const char* kName = "latte";
  static constexpr size_t kOutputs = 3;
  enum { kQ, kS, kV, kMemory, kZ };  // x; and the outputs: out, memory, z
  static const at::Tensor& Tokens(at::TensorList x) { return x[kV]; }

  static void Check(at::TensorList x) {
    TORCH_CHECK(x.size() == 5, "[latte] expected q, s, v, memory and z, got ", x.size(),
                " tensors");
    CheckState("[latte]", x[kS], x[kV], x[kMemory], x[kZ]);
    TORCH_CHECK(x[kQ].sym_sizes() == x[kS].sym_sizes(), "[latte] expected q of shape ",
                x[kS].sym_sizes(), ", got ", x[kQ].sym_sizes());
    TORCH_CHECK(
        x[kQ].scalar_type() == x[kS].scalar_type() && x[kS].scalar_type() == x[kV].scalar_type(),
        "[latte] expected one dtype, got q ", x[kQ].scalar_type(), ", s ", x[kS].scalar_type(),
        ", v ", x[kV].scalar_type());
  }

  static Tensors Compose(const Tensors& x, const Mask& mask, double) {
    at::Tensor q = x[kQ];
    if (mask.lengths) {  // whatever padding holds, NaN too, has no gradient
      const at::Tensor pad =
          at::arange(q.size(2), mask.lengths->options()).unsqueeze(0) >= mask.lengths->unsqueeze(1);
      q = q.masked_fill(pad.unsqueeze(1).unsqueeze(-1), 0.0);
    }
    const SlotResult r = SlotRead(at::softmax(q, -1), x[kS], x[kV], {x[kMemory], x[kZ]}, mask);
    return {r.out, r.state.memory, r.state.z};
  }

  static Tensors Empty(at::TensorList x, bool) {
    return {EmptyHeads(x[kV].sym_sizes(), x[kV].options()),
            at::empty_symint(x[kMemory].sym_sizes(), x[kMemory].options()),
            at::empty_symint(x[kZ].sym_sizes(), x[kZ].options())};
  }

  static void Forward(at::TensorList x, const RowMask& mask, double, const Tensors& y) {
    const at::Tensor q = UnitStride(x[kQ]), s = UnitStride(x[kS]), v = UnitStride(x[kV]);
    y[1].copy_(x[kMemory]), y[2].copy_(x[kZ]);
    DispatchType(v, [&]<class T>(T) {
      LatteForward<T>(ShapeOf(s, v), InputRows<T>(q), InputRows<T>(s), InputRows<T>(v), mask,
                      y[1].mutable_data_ptr<double>(), y[2].mutable_data_ptr<double>(),
                      OutputRows<T>(y[0]));
    });
  }

  static Tensors Backward(const Tensors& g, at::TensorList x, at::TensorList y, const RowMask& mask,
                          double) {
    const at::Tensor q = UnitStride(x[kQ]), s = UnitStride(x[kS]), v = UnitStride(x[kV]),
                     d_out = UnitStride(OrZeros(Given(g[0]), y[0])),
                     memory = x[kMemory].contiguous(), z = x[kZ].contiguous();
    const auto type = v.scalar_type();
    const at::Tensor G = GradientOf(g[1], memory, type);
    at::Tensor h = at::zeros(z.sizes(), z.options());
    AddDot(g[1], y[1], h);
    if (g[2].defined()) h = h - g[2];
    h = h.to(type);
    const at::Tensor dq = EmptyHeads(q.sym_sizes(), q.options()),
                     ds = EmptyHeads(s.sym_sizes(), s.options()),
                     dv = EmptyHeads(v.sym_sizes(), v.options());
    DispatchType(v, [&]<class T>(T) {
      LatteBackward<T>(ShapeOf(s, v), InputRows<T>(q), InputRows<T>(s), InputRows<T>(v),
                       InputRows<T>(d_out), mask, memory.const_data_ptr<double>(),
                       z.const_data_ptr<double>(), G.mutable_data_ptr<T>(), h.mutable_data_ptr<T>(),
                       OutputRows<T>(dq), OutputRows<T>(ds), OutputRows<T>(dv));
    });
    const at::Tensor d_memory = G.to(at::kDouble);
    return {dq, ds, dv, d_memory, (d_memory * memory).sum(-1) - h};
  }
};

struct Abc {
  static constexpr const char* kName = "abc";
  static constexpr size_t kOutputs = 4;
  enum { kQ, kK, kV, kS, kKeys, kValues, kZ };  // x; outputs: out, keys, values, z; saved: scores
  static const at::Tensor& Tokens(at::TensorList x) { return x[kV]; }

  static void Check(at::TensorList x) {
    TORCH_CHECK(x.size() == 7, "[abc] expected q, k, v, s, keys, values and z, got ", x.size(),
                " tensors");
    CheckState("[abc]", x[kS], x[kV], x[kValues], x[kZ]);
    CheckState("[abc]", x[kS], x[kV], x[kKeys], x[kZ]);
    for (const size_t i : {kQ, kK}) {
      TORCH_CHECK(x[i].sym_sizes() == x[kV].sym_sizes(), "[abc] expected q and k of shape ",
                  x[kV].sym_sizes(), ", got ", x[i].sym_sizes());
    }
    for (const size_t i : {kQ, kK, kS}) {
      TORCH_CHECK(x[i].scalar_type() == x[kV].scalar_type(), "[abc] expected one dtype, got ",
                  x[i].scalar_type(), " beside v ", x[kV].scalar_type());
    }
  }

  static Tensors Compose(const Tensors& x, const Mask& mask, double scale) {
    const SlotResult matched = SlotMatch(x[kQ], x[kS], x[kK], {x[kKeys], x[kZ]}, mask);
    const SlotResult r =
        SlotRead(at::softmax(matched.out * scale, -1), x[kS], x[kV], {x[kValues], x[kZ]}, mask);
    return {r.out, matched.state.memory, r.state.memory, r.state.z};
  }

  static Tensors Empty(at::TensorList x, bool save) {
    Tensors y = {EmptyHeads(x[kV].sym_sizes(), x[kV].options()),
                 at::empty_symint(x[kKeys].sym_sizes(), x[kKeys].options()),
                 at::empty_symint(x[kValues].sym_sizes(), x[kValues].options()),
                 at::empty_symint(x[kZ].sym_sizes(), x[kZ].options())};
    if (save) y.push_back(EmptyHeads(x[kS].sym_sizes(), x[kS].options()));
    return y;
  }

  static void Forward(at::TensorList x, const RowMask& mask, double scale, const Tensors& y) {
    const at::Tensor q = UnitStride(x[kQ]), k = UnitStride(x[kK]), v = UnitStride(x[kV]),
                     s = UnitStride(x[kS]);
    y[1].copy_(x[kKeys]), y[2].copy_(x[kValues]), y[3].copy_(x[kZ]);
    DispatchType(v, [&]<class T>(T) {
      AbcForward<T>(ShapeOf(s, v), scale, InputRows<T>(q), InputRows<T>(k), InputRows<T>(v),
                    InputRows<T>(s), mask, y[1].mutable_data_ptr<double>(),
                    y[2].mutable_data_ptr<double>(), y[3].mutable_data_ptr<double>(),
                    OutputRows<T>(y[0]), y.size() > 4 ? OutputRows<T>(y[4]) : Rows<T>{});
    });
  }

  static Tensors Backward(const Tensors& g, at::TensorList x, at::TensorList y, const RowMask& mask,
                          double scale) {
    const at::Tensor q = UnitStride(x[kQ]), k = UnitStride(x[kK]), v = UnitStride(x[kV]),
                     s = UnitStride(x[kS]), d_out = UnitStride(OrZeros(Given(g[0]), y[0])),
                     keys = x[kKeys].contiguous(), values = x[kValues].contiguous(),
                     z = x[kZ].contiguous();
    const auto type = v.scalar_type();
    const at::Tensor G_keys = GradientOf(g[1], keys, type),
                     G_values = GradientOf(g[2], values, type);
    at::Tensor h = at::zeros(z.sizes(), z.options());
    AddDot(g[1], y[1], h), AddDot(g[2], y[2], h);
    if (g[3].defined()) h = h - g[3];
    h = h.to(type);
    const auto like = [](const at::Tensor& t) { return EmptyHeads(t.sym_sizes(), t.options()); };
    const at::Tensor dq = like(q), dk = like(k), dv = like(v), ds = like(s), dx = like(s);
    DispatchType(v, [&]<class T>(T) {
      AbcBackward<T>(ShapeOf(s, v), scale, InputRows<T>(q), InputRows<T>(k), InputRows<T>(v),
                     InputRows<T>(s), InputRows<T>(y[4]), InputRows<T>(d_out), mask,
                     keys.const_data_ptr<double>(), values.const_data_ptr<double>(),
                     z.const_data_ptr<double>(), G_keys.mutable_data_ptr<T>(),
                     G_values.mutable_data_ptr<T>(), h.mutable_data_ptr<T>(), OutputRows<T>(dq),
                     OutputRows<T>(dk), OutputRows<T>(dv), OutputRows<T>(ds), OutputRows<T>(dx));
    });
    const at::Tensor d_keys = G_keys.to(at::kDouble), d_values = G_values.to(at::kDouble);
    return {dq,
            dk,
            dv,
            ds,
            d_keys,
            d_values,
            (d_keys * keys).sum(-1) + (d_values * values).sum(-1) - h};
  }
};

}  // namespace slot_attention

CISTERN_PRIMITIVE(slot_attention::Latte)
CISTERN_PRIMITIVE(slot_attention::Abc)

AttentionResult LatteAttention(const at::Tensor& q, const at::Tensor& s, const at::Tensor& v,
                               const SlotState& state, const Mask& mask) {
  const Tensors y = OpPair<slot_attention::Latte>::Call({q, s, v, state.memory, state.z}, mask);
  return {y[0], {y[1], y[2]}};
}

AbcResult AbcAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& s, const AbcState& state, double scale, const Mask& mask) {
  const Tensors y = OpPair<slot_attention::Abc>::Call(
      {q, k, v, s, state.keys, state.values, state.z}, mask, scale);
  return {y[0], {y[1], y[2], y[3]}};
}

}  // namespace cistern::ops
