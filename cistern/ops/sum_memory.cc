#include "cistern/ops/sum_memory.h"

#include <ATen/OpMathType.h>

#include "cistern/kernels/ref/sum_memory_ref.h"
#include "cistern/kernels/sum_memory.h"
#include "cistern/ops/primitive.h"
#include "cistern/ops/slot_checks.h"
#include "cistern/ops/sum_memory_composite.h"

namespace cistern::ops {
namespace sum_memory {

SlotShape ShapeOf(const SumArguments& x) {
  return {x.w.size(0), x.w.size(1), x.w.size(2), x.w.size(3), x.u.size(3)};
}

template <class T>
LogGates<T> InputGates(const at::Tensor& x) {
  return x.defined() ? LogGates<T>{InputRows<T>(x), x.size(3)} : LogGates<T>{};
}
at::Tensor GateUnitStride(const OptionalTensor& log_gate) {
  return log_gate ? UnitStride(*log_gate) : at::Tensor();
}
// One gate per token serves every slot.
at::Tensor GatePerSlot(const SumArguments& x) {
  return x.log_gate ? AsDouble(x.log_gate->expand_as(x.w)) : at::Tensor();
}

// memory is what it was before, and becomes what it is after. Inputs have unit stride.
void RunKernel(bool match, const SlotShape& shape, const at::Tensor& a, const at::Tensor& w,
               const at::Tensor& u, const at::Tensor& gate, const RowMask& mask,
               const at::Tensor& memory, const at::Tensor& out) {
  DispatchStored(u, [&]<class S>(S) {
    using T = ComputeType<S>;
    double* const m = memory.mutable_data_ptr<double>();
    if (match) {
      cistern::SumMatch<S>(shape, InputRows<S>(a), InputRows<T>(w), InputRows<S>(u),
                           InputGates<T>(gate), mask, m, OutputRows<T>(out));
    } else {
      cistern::SumRead<S>(shape, InputRows<T>(a), InputRows<T>(w), InputRows<S>(u),
                          InputGates<T>(gate), mask, m, OutputRows<S>(out));
    }
  });
}

// sum_read and sum_match (sum_memory_composite.h says what a and u are).
template <bool kMatch>
struct Memory {
  static constexpr const char* kSchema =
      kMatch ? "sum_match(Tensor q, Tensor w, Tensor k, Tensor memory, Tensor? log_gate=None, "
               "Tensor? starts=None, Tensor? lengths=None) -> (Tensor, Tensor)"
             : "sum_read(Tensor r, Tensor w, Tensor v, Tensor memory, Tensor? log_gate=None, "
               "Tensor? starts=None, Tensor? lengths=None) -> (Tensor, Tensor)";
  using Arguments = SumArguments;
  static constexpr auto kFields = [](auto& x) {
    return std::tie(x.a, x.w, x.u, x.memory, x.log_gate, x.mask.starts, x.mask.lengths);
  };
  static constexpr size_t kOutputs = 2, kDifferentiable = 2;
  enum { kOut, kMemory };
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& x) { return x.u; }

  static void Check(const Arguments& x) {
    const char* op = kMatch ? "[sum_match]" : "[sum_read]";
    const char* a = kMatch ? "q" : "r";
    const char* u = kMatch ? "k" : "v";
    CheckSlots(op, "w", x.w, u, x.u, x.memory, nullptr);
    TORCH_CHECK(x.a.sym_sizes() == (kMatch ? x.u : x.w).sym_sizes(), op, " expected ", a,
                " of shape ", (kMatch ? x.u : x.w).sym_sizes(), ", got ", x.a.sym_sizes());
    TORCH_CHECK(x.a.scalar_type() == (kMatch ? x.u : x.w).scalar_type() &&
                    x.w.scalar_type() == ComputeTypeOf(x.u),
                op, " expected one dtype (or float beside tokens in bfloat16), got ", a, " ",
                x.a.scalar_type(), ", w ", x.w.scalar_type(), ", ", u, " ", x.u.scalar_type());
    if (!x.log_gate) return;
    const at::Tensor& gate = *x.log_gate;
    TORCH_CHECK(gate.dim() == 4 && gate.sym_sizes().slice(0, 3) == x.w.sym_sizes().slice(0, 3) &&
                    (gate.sym_size(3) == x.w.sym_size(3) || gate.sym_size(3) == 1) &&
                    gate.scalar_type() == x.w.scalar_type(),
                op, " expected log_gate of shape [B,H,T,n] or [B,H,T,1] and dtype ",
                x.w.scalar_type(), " for w ", x.w.sym_sizes(), ", got ", gate.sym_sizes(), " ",
                gate.scalar_type());
  }

  static Tensors Compose(const Arguments& x) { return SumMemoryComposite(kMatch, x); }

  static Tensors Empty(const Arguments& x) {
    const at::Tensor& like = kMatch ? x.w : x.u;
    return {EmptyHeads(like.sym_sizes(), like.options()), LikePlain(x.memory)};
  }
  static Tensors EmptyGradients(const Arguments& x) {
    Tensors g = {GradientLike(x.a), GradientLike(x.w), GradientLike(x.u), LikePlain(x.memory)};
    if (x.log_gate) g.push_back(GradientLike(*x.log_gate));
    return g;
  }

  static Tensors InPlace(const Arguments& x) { return {LikeHeads(kMatch ? x.w : x.u), x.memory}; }

  static void Forward(const Arguments& x, const RowMask& mask, const Tensors& y) {
    BeginState(x.memory, y[kMemory]);
    RunKernel(kMatch, ShapeOf(x), UnitStride(x.a), UnitStride(x.w), UnitStride(x.u),
              GateUnitStride(x.log_gate), mask, y[kMemory], y[kOut]);
  }

  // With gates, a match needs its out and both need the memory after the last token.
  static Tensors Keep(const Arguments& x, const Tensors& y) {
    return {x.log_gate && kMatch ? y[kOut] : at::Tensor(), x.log_gate ? y[kMemory] : at::Tensor()};
  }

  static Tensors Backward(const Arguments& x, const RowMask& mask, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor a = UnitStride(x.a), w = UnitStride(x.w), u = UnitStride(x.u),
                     gate = GateUnitStride(x.log_gate),
                     g_out = UnitStride(OrZeros(g[kOut], kMatch ? w : u));
    const bool gated = gate.defined();
    // read: da = dr = match(d_out, w, v); match: da = dq = read(d_out, w, k).
    const at::Tensor da = GradientLike(x.a);
    RunKernel(!kMatch, ShapeOf(x), g_out, w, u, gate, mask,
              x.memory.clone(at::MemoryFormat::Contiguous), da);
    // The reverse pass: weights r and values d_out for read; weights d_out and values q for match.
    const at::Tensor weights = kMatch ? g_out : a, values = kMatch ? a : g_out,
                     term = !gated   ? at::Tensor()
                            : kMatch ? UnitStride(kept[0])
                                     : da,
                     G = g[kMemory].defined()
                             ? g[kMemory].clone(at::MemoryFormat::Contiguous)
                             : at::zeros_like(x.memory, at::MemoryFormat::Contiguous),
                     h = gated ? (G * kept[1]).sum(-1).contiguous() : at::Tensor();
    Tensors dx = {da, GradientLike(x.w), GradientLike(x.u), G};
    if (gated) dx.push_back(GradientLike(*x.log_gate));
    DispatchStored(u, [&]<class S>(S) {
      using T = ComputeType<S>;
      SumAdjoint<S>(ShapeOf(x), InputRows<T>(weights), InputRows<S>(values), InputRows<T>(w),
                    InputRows<S>(u), gated ? InputRows<T>(term) : Rows<const T>{},
                    InputGates<T>(gate), mask, G.mutable_data_ptr<double>(),
                    gated ? h.mutable_data_ptr<double>() : nullptr, OutputRows<S>(dx[2]),
                    OutputRows<T>(dx[1]), gated ? OutputRows<T>(dx[4]) : Rows<T>{});
    });
    return dx;
  }

  static Tensors ForwardReference(const Arguments& x, const RowMask& mask) {
    const at::Tensor a = AsDouble(x.a), w = AsDouble(x.w), u = AsDouble(x.u), gate = GatePerSlot(x),
                     memory = x.memory.clone(at::MemoryFormat::Contiguous),
                     out = at::empty((kMatch ? x.w : x.u).sizes(), a.options());
    (kMatch ? &ref::SumMatch : &ref::SumRead)(
        ShapeOf(x), DataOrNull(a), DataOrNull(w), DataOrNull(u), DataOrNull(gate), mask,
        memory.mutable_data_ptr<double>(), out.mutable_data_ptr<double>());
    return {out.to((kMatch ? x.w : x.u).scalar_type()), memory};
  }

  static Tensors BackwardReference(const Arguments& x, const RowMask& mask, const Tensors& g,
                                   const Tensors&) {
    const at::Tensor a = AsDouble(x.a), w = AsDouble(x.w), u = AsDouble(x.u),
                     memory = AsDouble(x.memory), gate = GatePerSlot(x),
                     g_out = AsDouble(OrZeros(g[kOut], kMatch ? x.w : x.u)),
                     g_memory = AsDouble(g[kMemory]);
    const at::Tensor da = at::zeros_like(a), dw = at::zeros_like(w), du = at::zeros_like(u),
                     dm = at::zeros_like(memory),
                     dg = gate.defined() ? at::zeros_like(gate) : at::Tensor();
    (kMatch ? &ref::SumMatchBackward : &ref::SumReadBackward)(
        ShapeOf(x), DataOrNull(a), DataOrNull(w), DataOrNull(u), DataOrNull(gate), mask,
        DataOrNull(memory), DataOrNull(g_out), DataOrNull(g_memory), da.mutable_data_ptr<double>(),
        dw.mutable_data_ptr<double>(), du.mutable_data_ptr<double>(),
        dg.defined() ? dg.mutable_data_ptr<double>() : nullptr, dm.mutable_data_ptr<double>());
    const auto type = x.w.scalar_type();
    Tensors dx = {da.to(x.a.scalar_type()), dw.to(type), du.to(x.u.scalar_type()), dm};
    if (x.log_gate) dx.push_back(dg.sum_to_size(x.log_gate->sizes()).to(type));
    return dx;
  }
};

using Read = Memory<false>;
using Match = Memory<true>;

// What belongs to slots is in float beside tokens in bfloat16; what a match gives is in the type of
// the weights.
template <class Op>
SumArguments Widened(SumArguments x) {
  x.w = OfSlots(x.w, x.u);
  if (std::is_same_v<Op, Read>) x.a = OfSlots(x.a, x.u);
  if (x.log_gate) x.log_gate = OfSlots(*x.log_gate, x.u);
  return x;
}
template <class Op>
at::Tensor InTypeOf(const at::Tensor& w, const at::Tensor& out) {
  return std::is_same_v<Op, Match> ? out.to(w.scalar_type()) : out;
}

template <class Op>
SumResult Run(const SumArguments& x) {
  auto [out, memory] = OpPair<Op>::Call(Widened<Op>(x));
  return {InTypeOf<Op>(x.w, out), memory};
}

template <class Op>
at::Tensor Extend(const SumArguments& given, bool alone, at::Tensor& memory) {
  SumArguments x = Widened<Op>(given);
  at::Tensor out;
  std::tie(out, memory) = alone ? OpPair<Op>::CallInPlace(x) : OpPair<Op>::Call(x);
  return InTypeOf<Op>(given.w, out);
}

}  // namespace sum_memory

CISTERN_PRIMITIVE(sum_memory::Read)
CISTERN_PRIMITIVE(sum_memory::Match)

at::Tensor EmptySums(int64_t batch, int64_t heads, int64_t slots, int64_t width,
                     const at::TensorOptions& options) {
  return at::zeros({batch, heads, slots, width}, options.dtype(at::kDouble));
}

SumResult SumRead(const at::Tensor& r, const at::Tensor& w, const at::Tensor& v,
                  const at::Tensor& memory, const Mask& mask, const at::Tensor& log_gate) {
  return sum_memory::Run<sum_memory::Read>({r, w, v, memory, Given(log_gate), mask});
}
SumResult SumMatch(const at::Tensor& q, const at::Tensor& w, const at::Tensor& k,
                   const at::Tensor& memory, const Mask& mask, const at::Tensor& log_gate) {
  return sum_memory::Run<sum_memory::Match>({q, w, k, memory, Given(log_gate), mask});
}

at::Tensor SumReadExtend(const at::Tensor& r, const at::Tensor& w, const at::Tensor& v,
                         at::Tensor& memory, const Mask& mask, const at::Tensor& log_gate) {
  const bool alone = OwnedAlone(memory);
  return sum_memory::Extend<sum_memory::Read>({r, w, v, memory, Given(log_gate), mask}, alone,
                                              memory);
}
at::Tensor SumMatchExtend(const at::Tensor& q, const at::Tensor& w, const at::Tensor& k,
                          at::Tensor& memory, const Mask& mask, const at::Tensor& log_gate) {
  const bool alone = OwnedAlone(memory);
  return sum_memory::Extend<sum_memory::Match>({q, w, k, memory, Given(log_gate), mask}, alone,
                                               memory);
}

at::Tensor SumWrite(const at::Tensor& w_in, const at::Tensor& v_in, const at::Tensor& memory,
                    const Mask& mask, const at::Tensor& log_gate) {
  TORCH_CHECK(
      w_in.dim() == 4 && v_in.dim() == 4 && w_in.sizes().slice(0, 3) == v_in.sizes().slice(0, 3) &&
          memory.dim() == 4 && memory.sizes().slice(0, 2) == w_in.sizes().slice(0, 2) &&
          memory.size(2) == w_in.size(3) && memory.size(3) == v_in.size(3) &&
          (!log_gate.defined() ||
           (log_gate.dim() == 4 && log_gate.sizes().slice(0, 3) == w_in.sizes().slice(0, 3) &&
            (log_gate.size(3) == w_in.size(3) || log_gate.size(3) == 1))),
      "[sum_write] expected w [B,H,T,n], v [B,H,T,d], memory [B,H,n,d] and log_gate [B,H,T,n], "
      "[B,H,T,1] or none, got ",
      w_in.sizes(), ", ", v_in.sizes(), ", ", memory.sizes(), " and ",
      log_gate.defined() ? log_gate.sizes() : at::IntArrayRef());
  TORCH_CHECK(w_in.scalar_type() == v_in.scalar_type() && memory.scalar_type() == at::kDouble,
              "[sum_write] expected w and v of one dtype and memory in double, got ",
              w_in.scalar_type(), ", ", v_in.scalar_type(), " and ", memory.scalar_type());
  TORCH_CHECK(!mask.starts,
              "[sum_write] a memory holds one document: packed rows have to be split before they "
              "are written");
  mask.Check("[sum_write]", w_in.size(0), w_in.size(2));
  const auto dtype = at::toOpMathType(w_in.scalar_type());
  const int64_t length = w_in.size(2);
  at::Tensor w = w_in.to(dtype), v = v_in.to(dtype), after = memory;
  const at::Tensor pad = mask.HeadsPadding(length);
  if (pad.defined()) w = w.masked_fill(pad, 0.0), v = v.masked_fill(pad, 0.0);
  if (log_gate.defined() && length > 0) {
    // What is left at the end of the write of token i: e^{sum of the log-gates after i}, or 0 where
    // one of those gates is 0.
    at::Tensor gate = log_gate.to(at::kDouble);
    if (pad.defined()) gate = gate.masked_fill(pad, 0.0);
    const at::Tensor zero = gate < kZeroGate;
    const at::Tensor sums = gate.masked_fill(zero, 0.0).flip({2}).cumsum(2).flip({2}),
                     zeros = zero.to(at::kLong).flip({2}).cumsum(2).flip({2});
    auto left = [&](int64_t first, int64_t count) {
      return sums.narrow(2, first, count).exp().masked_fill(zeros.narrow(2, first, count) > 0, 0.0);
    };
    after = after * left(0, 1).transpose(2, 3);
    w = w * at::cat({left(1, length - 1), at::ones_like(left(0, 1))}, 2).to(dtype);
  }
  constexpr int64_t kPiece = 1024;  // summed in the inputs' precision; sums of pieces in double
  for (int64_t t = 0; t < length; t += kPiece) {
    const int64_t count = std::min(kPiece, length - t);
    after = after + at::matmul(w.narrow(2, t, count).transpose(2, 3), v.narrow(2, t, count));
  }
  return length > 0 ? after : after.clone();
}

}  // namespace cistern::ops
