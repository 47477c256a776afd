#include "cistern/ops/slot_memory.h"

#include <limits>

#include "cistern/kernels/ref/slot_memory_ref.h"
#include "cistern/kernels/slot_memory.h"
#include "cistern/ops/primitive.h"
#include "cistern/ops/slot_checks.h"
#include "cistern/ops/slot_memory_composite.h"

namespace cistern::ops {
namespace slot_memory {

SlotShape ShapeOf(const SlotArguments& x) {
  return {x.s.size(0), x.s.size(1), x.s.size(2), x.s.size(3), x.u.size(3)};
}

// memory and z are what they were before, and become what they are after.
void RunKernel(bool match, const SlotShape& shape, const at::Tensor& a, const at::Tensor& s,
               const at::Tensor& u, const RowMask& mask, const at::Tensor& memory,
               const at::Tensor& z, const at::Tensor& out, const at::Tensor& z_out) {
  DispatchStored(u, [&]<class S>(S) {
    using T = ComputeType<S>;
    double *const m = memory.mutable_data_ptr<double>(), *const zs = z.mutable_data_ptr<double>();
    const Rows<T> rows_of_z = z_out.defined() ? OutputRows<T>(z_out) : Rows<T>{};
    if (match) {
      cistern::SlotMatch<S>(shape, InputRows<S>(a), InputRows<T>(s), InputRows<S>(u), mask, m, zs,
                            OutputRows<T>(out), rows_of_z);
    } else {
      cistern::SlotRead<S>(shape, InputRows<T>(a), InputRows<T>(s), InputRows<S>(u), mask, m, zs,
                           OutputRows<S>(out), rows_of_z);
    }
  });
}

// slot_read and slot_match (slot_memory_composite.h says what a and u are).
template <bool kMatch>
struct Memory {
  static constexpr const char* kSchema =
      kMatch ? "slot_match(Tensor q, Tensor s, Tensor k, Tensor memory, Tensor z, Tensor? "
               "starts=None, Tensor? lengths=None, bool want_z=False) -> (Tensor, Tensor, Tensor, "
               "Tensor)"
             : "slot_read(Tensor r, Tensor s, Tensor v, Tensor memory, Tensor z, Tensor? "
               "starts=None, Tensor? lengths=None, bool want_z=False) -> (Tensor, Tensor, Tensor, "
               "Tensor)";
  using Arguments = SlotArguments;
  static constexpr auto kFields = [](auto& x) {
    return std::tie(x.a, x.s, x.u, x.memory, x.z, x.mask.starts, x.mask.lengths, x.want_z);
  };
  static constexpr size_t kOutputs = 4, kDifferentiable = 4;
  enum { kOut, kMemory, kZ, kZOut };
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& x) { return x.u; }

  static void Check(const Arguments& x) {
    const char* op = kMatch ? "[slot_match]" : "[slot_read]";
    const char* a = kMatch ? "q" : "r";
    const char* u = kMatch ? "k" : "v";
    CheckSlots(op, "s", x.s, u, x.u, x.memory, &x.z);
    TORCH_CHECK(x.a.sym_sizes() == (kMatch ? x.u : x.s).sym_sizes(), op, " expected ", a,
                " of shape ", (kMatch ? x.u : x.s).sym_sizes(), ", got ", x.a.sym_sizes());
    TORCH_CHECK(x.a.scalar_type() == (kMatch ? x.u : x.s).scalar_type() &&
                    x.s.scalar_type() == ComputeTypeOf(x.u),
                op, " expected one dtype (or float beside tokens in bfloat16), got ", a, " ",
                x.a.scalar_type(), ", s ", x.s.scalar_type(), ", ", u, " ", x.u.scalar_type());
  }

  static Tensors Compose(const Arguments& x) { return SlotMemoryComposite(kMatch, x); }

  static Tensors Empty(const Arguments& x) {
    const at::Tensor& like = kMatch ? x.s : x.u;
    return {EmptyHeads(like.sym_sizes(), like.options()), LikePlain(x.memory), LikePlain(x.z),
            x.want_z ? LikeHeads(x.s) : at::empty({0}, x.s.options())};
  }
  static Tensors EmptyGradients(const Arguments& x) {
    return {GradientLike(x.a), GradientLike(x.s), GradientLike(x.u), LikePlain(x.memory),
            LikePlain(x.z)};
  }

  static Tensors InPlace(const Arguments& x) {
    return {LikeHeads(kMatch ? x.s : x.u), x.memory, x.z, x.want_z ? LikeHeads(x.s) : at::Tensor()};
  }

  static void Forward(const Arguments& x, const RowMask& mask, const Tensors& y) {
    BeginState(x.memory, y[kMemory]), BeginState(x.z, y[kZ]);
    RunKernel(kMatch, ShapeOf(x), UnitStride(x.a), UnitStride(x.s), UnitStride(x.u), mask,
              y[kMemory], y[kZ], y[kOut], x.want_z ? y[kZOut] : at::Tensor());
  }

  // A match needs its out, both the memory after the last token.
  static Tensors Keep(const Arguments&, const Tensors& y) {
    return {kMatch ? y[kOut] : at::Tensor(), y[kMemory]};
  }

  static Tensors Backward(const Arguments& x, const RowMask& mask, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor a = UnitStride(x.a), s = UnitStride(x.s), u = UnitStride(x.u),
                     g_out = UnitStride(OrZeros(g[kOut], kMatch ? s : u));
    // read: da = dr = match(d_out, s, v); match: da = dq = read(d_out, s, k).
    const at::Tensor da = GradientLike(x.a);
    RunKernel(!kMatch, ShapeOf(x), g_out, s, u, mask, x.memory.clone(at::MemoryFormat::Contiguous),
              x.z.clone(at::MemoryFormat::Contiguous), da, {});
    // The reverse pass: weights r and values d_out for read; weights d_out and values q for match.
    const at::Tensor weights = kMatch ? g_out : a, values = kMatch ? a : g_out,
                     term = kMatch ? UnitStride(kept[0]) : da;
    const at::Tensor g_memory = OrZeros(g[kMemory], x.memory),
                     G = g_memory.to(s.scalar_type(), false, true, at::MemoryFormat::Contiguous);
    at::Tensor h = (g_memory * kept[1]).sum(-1);
    if (g[kZ].defined()) h = h - g[kZ];
    h = h.to(s.scalar_type()).contiguous();
    const at::Tensor du = GradientLike(x.u), ds = GradientLike(x.s), z0 = x.z.contiguous(),
                     dz_rows = x.want_z && g[kZOut].defined() ? UnitStride(g[kZOut]) : at::Tensor();
    DispatchStored(u, [&]<class S>(S) {
      using T = ComputeType<S>;
      SlotAdjoint<S>(ShapeOf(x), InputRows<T>(weights), InputRows<S>(values), InputRows<T>(s),
                     InputRows<S>(u), InputRows<T>(term),
                     dz_rows.defined() ? InputRows<T>(dz_rows) : Rows<const T>{}, mask,
                     z0.const_data_ptr<double>(), G.mutable_data_ptr<T>(), h.mutable_data_ptr<T>(),
                     OutputRows<S>(du), OutputRows<T>(ds));
    });
    const at::Tensor d_memory = G.to(at::kDouble);
    return {da, ds, du, d_memory, (d_memory * x.memory).sum(-1) - h};
  }

  static Tensors ForwardReference(const Arguments& x, const RowMask& mask) {
    const at::Tensor a = AsDouble(x.a), s = AsDouble(x.s), u = AsDouble(x.u),
                     memory = x.memory.clone(at::MemoryFormat::Contiguous),
                     z = x.z.clone(at::MemoryFormat::Contiguous),
                     out = at::empty((kMatch ? x.s : x.u).sizes(), a.options()),
                     z_out = x.want_z ? at::empty(x.s.sizes(), a.options())
                                      : at::empty({0}, a.options());
    (kMatch ? &ref::SlotMatch : &ref::SlotRead)(
        ShapeOf(x), DataOrNull(a), DataOrNull(s), DataOrNull(u), mask,
        memory.mutable_data_ptr<double>(), z.mutable_data_ptr<double>(),
        out.mutable_data_ptr<double>(), x.want_z ? z_out.mutable_data_ptr<double>() : nullptr);
    return {out.to((kMatch ? x.s : x.u).scalar_type()), memory, z, z_out.to(x.s.scalar_type())};
  }

  static Tensors BackwardReference(const Arguments& x, const RowMask& mask, const Tensors& g,
                                   const Tensors&) {
    const at::Tensor a = AsDouble(x.a), s = AsDouble(x.s), u = AsDouble(x.u),
                     memory = AsDouble(x.memory), z = AsDouble(x.z),
                     g_out = AsDouble(OrZeros(g[kOut], kMatch ? x.s : x.u)),
                     g_z_out = x.want_z ? AsDouble(g[kZOut]) : at::Tensor(),
                     g_memory = AsDouble(g[kMemory]), g_z = AsDouble(g[kZ]);
    const at::Tensor da = at::zeros_like(a), ds = at::zeros_like(s), du = at::zeros_like(u),
                     dm = at::zeros_like(memory), dz = at::zeros_like(z);
    (kMatch ? &ref::SlotMatchBackward : &ref::SlotReadBackward)(
        ShapeOf(x), DataOrNull(a), DataOrNull(s), DataOrNull(u), mask, DataOrNull(memory),
        DataOrNull(z), DataOrNull(g_out), DataOrNull(g_z_out), DataOrNull(g_memory),
        DataOrNull(g_z), da.mutable_data_ptr<double>(), ds.mutable_data_ptr<double>(),
        du.mutable_data_ptr<double>(), dm.mutable_data_ptr<double>(),
        dz.mutable_data_ptr<double>());
    return {da.to(x.a.scalar_type()), ds.to(x.s.scalar_type()), du.to(x.u.scalar_type()), dm, dz};
  }
};

using Read = Memory<false>;
using Match = Memory<true>;

// What belongs to slots is in float beside tokens in bfloat16; what a match gives, and z, are in
// the type of the log-weights.
template <class Op>
SlotArguments Widened(SlotArguments x) {
  x.s = OfSlots(x.s, x.u);
  if (std::is_same_v<Op, Read>) x.a = OfSlots(x.a, x.u);
  return x;
}
template <class Op>
SlotRows InTypeOf(const SlotArguments& x, const at::Tensor& out, const at::Tensor& z_out) {
  const auto type = x.s.scalar_type();
  return {std::is_same_v<Op, Match> ? out.to(type) : out, x.want_z ? z_out.to(type) : at::Tensor()};
}

template <class Op>
SlotResult Run(const SlotArguments& x) {
  auto [out, memory, z, z_out] = OpPair<Op>::Call(Widened<Op>(x));
  const SlotRows rows = InTypeOf<Op>(x, out, z_out);
  return {rows.out, {memory, z}, rows.z};
}

template <class Op>
SlotRows Extend(const SlotArguments& given, bool alone, at::Tensor& memory, at::Tensor& z) {
  SlotArguments x = Widened<Op>(given);
  at::Tensor out, z_out;
  std::tie(out, memory, z, z_out) = alone ? OpPair<Op>::CallInPlace(x) : OpPair<Op>::Call(x);
  return InTypeOf<Op>(given, out, z_out);
}

}  // namespace slot_memory

CISTERN_PRIMITIVE(slot_memory::Read)
CISTERN_PRIMITIVE(slot_memory::Match)

SlotState EmptySlots(int64_t batch, int64_t heads, int64_t slots, int64_t width,
                     const at::TensorOptions& options) {
  return {at::zeros({batch, heads, slots, width}, options.dtype(at::kDouble)),
          at::full({batch, heads, slots}, -std::numeric_limits<double>::infinity(),
                   options.dtype(at::kDouble))};
}

SlotResult SlotRead(const at::Tensor& r, const at::Tensor& s, const at::Tensor& v,
                    const SlotState& state, const Mask& mask, bool want_z) {
  return slot_memory::Run<slot_memory::Read>({r, s, v, state.memory, state.z, mask, want_z});
}
SlotResult SlotMatch(const at::Tensor& q, const at::Tensor& s, const at::Tensor& k,
                     const SlotState& state, const Mask& mask, bool want_z) {
  return slot_memory::Run<slot_memory::Match>({q, s, k, state.memory, state.z, mask, want_z});
}

at::Tensor SlotReadExtend(const at::Tensor& r, const at::Tensor& s, const at::Tensor& v,
                          at::Tensor& memory, at::Tensor& z, const Mask& mask) {
  const bool alone = OwnedAlone(memory) && OwnedAlone(z);
  return slot_memory::Extend<slot_memory::Read>({r, s, v, memory, z, mask}, alone, memory, z).out;
}
SlotRows SlotMatchExtend(const at::Tensor& q, const at::Tensor& s, const at::Tensor& k,
                         at::Tensor& memory, at::Tensor& z, const Mask& mask, bool want_z) {
  const bool alone = OwnedAlone(memory) && OwnedAlone(z);
  return slot_memory::Extend<slot_memory::Match>({q, s, k, memory, z, mask, want_z}, alone, memory,
                                                 z);
}

}  // namespace cistern::ops
