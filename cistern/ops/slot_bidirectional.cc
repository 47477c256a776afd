#include "cistern/kernels/slot_bidirectional.h"

#include <limits>

#include "cistern/kernels/ref/slot_memory_ref.h"
#include "cistern/ops/primitive.h"
#include "cistern/ops/slot_checks.h"
#include "cistern/ops/slot_memory.h"
#include "cistern/ops/written_terms.h"

namespace cistern::ops {
namespace slot_bidirectional {

constexpr double kMinusInf = -std::numeric_limits<double>::infinity();

// m + log(sum), -inf where the sum is 0; safe is sum with 1 in those places.
at::Tensor LogOrMinusInf(const at::Tensor& sum, const at::Tensor& safe, const at::Tensor& m) {
  return at::where(sum == 0, at::full({}, kMinusInf, sum.options()), m + safe.log());
}

struct WriteArguments {
  at::Tensor s, v, memory, z;
  Mask mask;
};

struct Write {
  static constexpr const char* kSchema =
      "slot_write(Tensor s, Tensor v, Tensor memory, Tensor z, Tensor? starts=None, Tensor? "
      "lengths=None) -> (Tensor, Tensor)";
  using Arguments = WriteArguments;
  static constexpr auto kFields = [](auto& x) {
    return std::tie(x.s, x.v, x.memory, x.z, x.mask.starts, x.mask.lengths);
  };
  static constexpr size_t kOutputs = 2, kDifferentiable = 2;
  enum { kMemory, kZ };
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& x) { return x.v; }

  static SlotShape ShapeOf(const Arguments& x) {
    return {x.s.size(0), x.s.size(1), x.s.size(2), x.s.size(3), x.v.size(3)};
  }

  static void Check(const Arguments& x) {
    CheckSlots("[slot_write]", "s", x.s, "v", x.v, x.memory, &x.z);
    TORCH_CHECK(x.s.scalar_type() == x.v.scalar_type(), "[slot_write] expected one dtype, got s ",
                x.s.scalar_type(), ", v ", x.v.scalar_type());
    TORCH_CHECK(!x.mask.starts,
                "[slot_write] a state holds one document: packed rows have to be split before they "
                "are written");
  }

  static Tensors Compose(const Arguments& x) {
    const auto type = ComputeTypeOf(x.v);
    const at::Tensor pad = x.mask.HeadsPadding(x.s.size(2)), all_s = x.s.to(type),
                     all_v = x.v.to(type),
                     s = pad.defined() ? all_s.masked_fill(pad, kMinusInf) : all_s,
                     v = pad.defined() ? all_v.masked_fill(pad, 0.0) : all_v;
    // m: a reference no smaller than z and every s; the result does not depend on it, so it
    // carries no gradient.
    at::Tensor m = x.z.detach();
    if (s.size(2) > 0) m = at::maximum(m, std::get<0>(s.detach().max(2)).to(at::kDouble));
    m = m.masked_fill(m == kMinusInf, 0.0);
    const at::Tensor old = (x.z - m).exp(), e = (s - m.unsqueeze(2).to(s.scalar_type())).exp();
    const at::Tensor sum = old + e.sum({2}, false, at::kDouble),
                     safe = sum.masked_fill(sum == 0, 1.0);
    const at::Tensor scale = safe.reciprocal().unsqueeze(-1);
    const at::Tensor fresh = at::matmul(e.to(v.scalar_type()).transpose(2, 3), v);
    return {(old.unsqueeze(-1) * scale) * x.memory + scale * fresh, LogOrMinusInf(sum, safe, m)};
  }

  static Tensors Empty(const Arguments& x) { return {LikePlain(x.memory), LikePlain(x.z)}; }
  static Tensors EmptyGradients(const Arguments& x) {
    return {GradientLike(x.s), GradientLike(x.v), LikePlain(x.memory), LikePlain(x.z)};
  }

  static void Forward(const Arguments& x, const RowMask& mask, const Tensors& y) {
    const at::Tensor s = UnitStride(x.s), v = UnitStride(x.v);
    BeginState(x.memory, y[kMemory]), BeginState(x.z, y[kZ]);
    DispatchStored(v, [&]<class T>(T) {
      const SlotWritten<T> written[] = {{InputRows<T>(v), y[kMemory].mutable_data_ptr<double>()}};
      cistern::SlotWrite<T>(ShapeOf(x), InputRows<T>(s), written, mask.lengths,
                            y[kZ].mutable_data_ptr<double>());
    });
  }

  static Tensors Keep(const Arguments&, const Tensors& y) { return y; }

  static Tensors Backward(const Arguments& x, const RowMask& mask, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor s = UnitStride(x.s), v = UnitStride(x.v), ds = GradientLike(x.s),
                     dv = GradientLike(x.v), &after = kept[kMemory], &z = kept[kZ];
    const WrittenTerms terms(g[kMemory], g[kZ], x.memory, x.z, after, z, ComputeTypeOf(v));
    DispatchStored(v, [&]<class T>(T) {
      using C = ComputeType<T>;
      const SlotWrittenGradients<T> written[] = {
          {InputRows<T>(v), terms.G.const_data_ptr<C>(), OutputRows<T>(dv)}};
      SlotWriteBackward<T>(ShapeOf(x), InputRows<T>(s), written, mask.lengths,
                           terms.z_after.const_data_ptr<double>(), terms.h.const_data_ptr<C>(),
                           OutputRows<T>(ds));
    });
    return {ds, dv, terms.DMemory(), terms.DZ()};
  }

  // A read with weights of 0 writes, too.
  static Tensors ForwardReference(const Arguments& x, const RowMask& mask) {
    const at::Tensor s = AsDouble(x.s), v = AsDouble(x.v), r = at::zeros_like(s),
                     memory = x.memory.clone(at::MemoryFormat::Contiguous),
                     z = x.z.clone(at::MemoryFormat::Contiguous), out = at::empty_like(v);
    ref::SlotRead(ShapeOf(x), DataOrNull(r), DataOrNull(s), DataOrNull(v), mask,
                  memory.mutable_data_ptr<double>(), z.mutable_data_ptr<double>(),
                  out.mutable_data_ptr<double>(), nullptr);
    return {memory, z};
  }

  static Tensors BackwardReference(const Arguments& x, const RowMask& mask, const Tensors& g,
                                   const Tensors&) {
    const at::Tensor s = AsDouble(x.s), v = AsDouble(x.v), r = at::zeros_like(s),
                     memory = AsDouble(x.memory), z = AsDouble(x.z), d_out = at::zeros_like(v),
                     d_memory = AsDouble(g[kMemory]), d_z = AsDouble(g[kZ]);
    const at::Tensor dr = at::zeros_like(r), ds = at::zeros_like(s), dv = at::zeros_like(v),
                     dm = at::zeros_like(memory), dz = at::zeros_like(z);
    ref::SlotReadBackward(ShapeOf(x), DataOrNull(r), DataOrNull(s), DataOrNull(v), mask,
                          DataOrNull(memory), DataOrNull(z), DataOrNull(d_out), nullptr,
                          DataOrNull(d_memory), DataOrNull(d_z), dr.mutable_data_ptr<double>(),
                          ds.mutable_data_ptr<double>(), dv.mutable_data_ptr<double>(),
                          dm.mutable_data_ptr<double>(), dz.mutable_data_ptr<double>());
    const auto dtype = x.v.scalar_type();
    return {ds.to(dtype), dv.to(dtype), dm, dz};
  }
};

struct ReadArguments {
  at::Tensor x, memory;
  Mask mask;  // never given: every row is for itself
};

struct Read {
  static constexpr const char* kSchema = "slot_softmax_read(Tensor x, Tensor memory) -> Tensor";
  using Arguments = ReadArguments;
  static constexpr auto kFields = [](auto& a) { return std::tie(a.x, a.memory); };
  static constexpr size_t kOutputs = 1, kDifferentiable = 1;
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& a) { return a.x; }

  static SlotShape ShapeOf(const Arguments& a) {
    return {a.x.size(0), a.x.size(1), a.x.size(2), a.x.size(3), a.memory.size(3)};
  }

  static void Check(const Arguments& a) {
    TORCH_CHECK(a.x.dim() == 4 && a.memory.dim() == 4 &&
                    a.memory.sym_sizes().slice(0, 2) == a.x.sym_sizes().slice(0, 2) &&
                    a.memory.sym_size(2) == a.x.sym_size(3),
                "[slot_softmax_read] expected x of shape [B,H,T,n] and memory [B,H,n,d], got ",
                a.x.sym_sizes(), " and ", a.memory.sym_sizes());
    TORCH_CHECK(a.memory.scalar_type() == at::kDouble,
                "[slot_softmax_read] expected memory in double, got ", a.memory.scalar_type());
  }

  static Tensors Compose(const Arguments& a) {
    // Over the last dimension of a [B,H,T,n] view of [B,T,H,n] memory, keeping that layout.
    const auto type = ComputeTypeOf(a.x);
    const at::Tensor p = at::softmax(a.x.to(type).transpose(1, 2), -1).transpose(1, 2);
    return {at::matmul(p, a.memory.to(type)).to(a.x.scalar_type())};
  }

  static at::Tensor Out(const Arguments& a) {
    const c10::SymInt sizes[] = {a.x.sym_size(0), a.x.sym_size(1), a.x.sym_size(2),
                                 a.memory.sym_size(3)};
    return EmptyHeads(sizes, a.x.options());
  }
  static Tensors Empty(const Arguments& a) { return {Out(a)}; }
  static Tensors EmptyGradients(const Arguments& a) {
    return {GradientLike(a.x), LikePlain(a.memory)};
  }

  static void Forward(const Arguments& a, const RowMask&, const Tensors& y) {
    const at::Tensor x = UnitStride(a.x), memory = a.memory.contiguous();
    DispatchStored(x, [&]<class T>(T) {
      cistern::SlotSoftmaxRead<T>(ShapeOf(a), InputRows<T>(x), memory.const_data_ptr<double>(),
                                  OutputRows<T>(y[0]));
    });
  }

  static Tensors Keep(const Arguments&, const Tensors&) { return {}; }

  static Tensors Backward(const Arguments& a, const RowMask&, const Tensors& g, const Tensors&) {
    const at::Tensor x = UnitStride(a.x), memory = a.memory.contiguous(), d_out = UnitStride(g[0]),
                     dx = GradientLike(a.x), d_memory = LikePlain(memory);
    DispatchStored(x, [&]<class T>(T) {
      SlotSoftmaxReadBackward<T>(ShapeOf(a), InputRows<T>(x), memory.const_data_ptr<double>(),
                                 InputRows<T>(d_out), OutputRows<T>(dx),
                                 d_memory.mutable_data_ptr<double>());
    });
    return {dx, d_memory};
  }
};

}  // namespace slot_bidirectional

CISTERN_PRIMITIVE(slot_bidirectional::Write)
CISTERN_PRIMITIVE(slot_bidirectional::Read)

SlotState SlotWrite(const at::Tensor& s, const at::Tensor& v, const SlotState& state,
                    const Mask& mask) {
  auto [memory, z] = OpPair<slot_bidirectional::Write>::Call({s, v, state.memory, state.z, mask});
  return {memory, z};
}

at::Tensor SlotSoftmaxRead(const at::Tensor& x, const at::Tensor& memory) {
  return std::get<0>(OpPair<slot_bidirectional::Read>::Call({x, memory, {}}));
}

SlotState MergeSlots(const SlotState& first, const SlotState& second) {
  TORCH_CHECK(first.memory.sizes() == second.memory.sizes(),
              "[merge_slots] expected two states of one shape, got ", first.memory.sizes(), " and ",
              second.memory.sizes());
  at::Tensor m = at::maximum(first.z, second.z).detach();
  m = m.masked_fill(m == slot_bidirectional::kMinusInf, 0.0);
  const at::Tensor a = (first.z - m).exp(), b = (second.z - m).exp(), sum = a + b,
                   safe = sum.masked_fill(sum == 0, 1.0);
  return {(a / safe).unsqueeze(-1) * first.memory + (b / safe).unsqueeze(-1) * second.memory,
          slot_bidirectional::LogOrMinusInf(sum, safe, m)};
}

}  // namespace cistern::ops
