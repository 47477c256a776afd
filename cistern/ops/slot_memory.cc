#include "cistern/ops/slot_memory.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <limits>

#include "cistern/kernels/ref/slot_memory_ref.h"
#include "cistern/kernels/slot_memory.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/op_pair.h"
#include "cistern/ops/slot_memory_composite.h"

// Two ops, slot_read and slot_match, share everything here: `match` says which. a is r or q, u is v
// or k.
namespace cistern::ops {
namespace {

using torch::autograd::variable_list;
using Tensor5 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

void CheckShapes(bool match, const at::Tensor& a, const at::Tensor& s, const at::Tensor& u,
                 const at::Tensor& memory, const at::Tensor& z, const OptionalTensor& starts,
                 const OptionalTensor& lengths) {
  const char* op = match ? "[slot_match]" : "[slot_read]";
  const char* a_name = match ? "q" : "r";
  const char* u_name = match ? "k" : "v";
  TORCH_CHECK(s.dim() == 4, op, " expected s of shape [B,H,T,n], got ", s.sym_sizes());
  TORCH_CHECK(u.dim() == 4 && u.sym_size(0) == s.sym_size(0) && u.sym_size(1) == s.sym_size(1) &&
                  u.sym_size(2) == s.sym_size(2),
              op, " expected ", u_name, " of shape [B,H,T,d] with the B, H, T of s ", s.sym_sizes(),
              ", got ", u.sym_sizes());
  TORCH_CHECK(a.sym_sizes() == (match ? u.sym_sizes() : s.sym_sizes()), op, " expected ", a_name,
              " of shape ", match ? u.sym_sizes() : s.sym_sizes(), ", got ", a.sym_sizes());
  TORCH_CHECK(memory.dim() == 4 && memory.sym_size(0) == s.sym_size(0) &&
                  memory.sym_size(1) == s.sym_size(1) && memory.sym_size(2) == s.sym_size(3) &&
                  memory.sym_size(3) == u.sym_size(3),
              op, " expected memory of shape [B,H,n,d] for s ", s.sym_sizes(), " and ", u_name, " ",
              u.sym_sizes(), ", got ", memory.sym_sizes());
  TORCH_CHECK(z.dim() == 3 && z.sym_size(0) == s.sym_size(0) && z.sym_size(1) == s.sym_size(1) &&
                  z.sym_size(2) == s.sym_size(3),
              op, " expected z of shape [B,H,n], got ", z.sym_sizes());
  TORCH_CHECK(memory.scalar_type() == at::kDouble && z.scalar_type() == at::kDouble, op,
              " expected memory and z in double, got ", memory.scalar_type(), " and ",
              z.scalar_type());
  TORCH_CHECK(a.scalar_type() == s.scalar_type() && s.scalar_type() == u.scalar_type(), op,
              " expected one dtype, got ", a_name, " ", a.scalar_type(), ", s ", s.scalar_type(),
              ", ", u_name, " ", u.scalar_type());
  CheckMask(op, s, starts, lengths);
}

SlotShape ShapeOf(const at::Tensor& s, const at::Tensor& u) {
  return {s.size(0), s.size(1), s.size(2), s.size(3), u.size(3)};
}

template <class T>
void RunForward(bool match, const SlotShape& shape, const at::Tensor& a, const at::Tensor& s,
                const at::Tensor& u, const RowMask& mask, const at::Tensor& memory,
                const at::Tensor& z, const at::Tensor& out, const at::Tensor& z_out) {
  const Rows<T> z_rows = z_out.defined() ? OutputRows<T>(z_out) : Rows<T>{};
  (match ? &cistern::SlotMatch<T>
         : &cistern::SlotRead<T>)(shape, InputRows<T>(a), InputRows<T>(s), InputRows<T>(u), mask,
                                  memory.mutable_data_ptr<double>(), z.mutable_data_ptr<double>(),
                                  OutputRows<T>(out), z_rows);
}

// Forward into fresh outputs; memory and z are fresh copies that become the state after.
void ForwardKernel(bool match, const at::Tensor& a, const at::Tensor& s, const at::Tensor& u,
                   const RowMask& mask, const at::Tensor& memory, const at::Tensor& z,
                   const at::Tensor& out, const at::Tensor& z_out) {
  const at::Tensor ac = UnitStride(a), sc = UnitStride(s), uc = UnitStride(u);
  if (u.scalar_type() == at::kFloat) {
    RunForward<float>(match, ShapeOf(s, u), ac, sc, uc, mask, memory, z, out, z_out);
  } else {
    RunForward<double>(match, ShapeOf(s, u), ac, sc, uc, mask, memory, z, out, z_out);
  }
}

Tensor4 ForwardReference(bool match, const at::Tensor& a, const at::Tensor& s, const at::Tensor& u,
                         const RowMask& mask, const at::Tensor& memory_in, const at::Tensor& z_in,
                         bool want_z) {
  const at::Tensor ad = AsDouble(a), sd = AsDouble(s), ud = AsDouble(u);
  const at::Tensor memory = memory_in.clone(at::MemoryFormat::Contiguous),
                   z = z_in.clone(at::MemoryFormat::Contiguous);
  const at::Tensor out = at::empty(match ? s.sizes() : u.sizes(), ad.options());
  const at::Tensor z_out =
      want_z ? at::empty(s.sizes(), ad.options()) : at::empty({0}, ad.options());
  (match ? &ref::SlotMatch : &ref::SlotRead)(
      ShapeOf(s, u), ad.const_data_ptr<double>(), sd.const_data_ptr<double>(),
      ud.const_data_ptr<double>(), mask, memory.mutable_data_ptr<double>(),
      z.mutable_data_ptr<double>(), out.mutable_data_ptr<double>(),
      want_z ? z_out.mutable_data_ptr<double>() : nullptr);
  return {out.to(u.scalar_type()), memory, z, z_out.to(u.scalar_type())};
}

Tensor4 ForwardCpu(bool match, const at::Tensor& a, const at::Tensor& s, const at::Tensor& u,
                   const at::Tensor& memory_in, const at::Tensor& z_in,
                   const OptionalTensor& starts, const OptionalTensor& lengths, bool want_z) {
  CheckShapes(match, a, s, u, memory_in, z_in, starts, lengths);
  if (!UsesKernel(u))
    return SlotMemoryComposite(match, a, s, u, memory_in, z_in, starts, lengths, want_z);
  const MaskView view(starts, lengths, s.size(2));
  if (ActiveImpl() == Impl::kReference)
    return ForwardReference(match, a, s, u, view.mask, memory_in, z_in, want_z);
  const at::Tensor memory = memory_in.clone(at::MemoryFormat::Contiguous),
                   z = z_in.clone(at::MemoryFormat::Contiguous);
  const at::Tensor out = EmptyHeads(match ? s.sym_sizes() : u.sym_sizes(), u.options());
  const at::Tensor z_out = want_z ? EmptyHeads(s.sym_sizes(), s.options()) : at::Tensor();
  ForwardKernel(match, a, s, u, view.mask, memory, z, out, z_out);
  return {out, memory, z, want_z ? z_out : at::empty({0}, s.options())};
}

// Gradients of (a, s, u, memory, z). out is the forward's out (needed by match), memory_end its
// final memory.
Tensor5 BackwardCpu(bool match, const OptionalTensor& d_out, const OptionalTensor& d_memory,
                    const OptionalTensor& d_z, const OptionalTensor& d_z_out, const at::Tensor& a,
                    const at::Tensor& s, const at::Tensor& u, const at::Tensor& memory_in,
                    const at::Tensor& z_in, const at::Tensor& out, const at::Tensor& memory_end,
                    const OptionalTensor& starts, const OptionalTensor& lengths) {
  const MaskView view(starts, lengths, s.size(2));
  const at::Tensor g_out = UnitStride(OrZeros(d_out, out));
  if (ActiveImpl() == Impl::kReference) {
    const at::Tensor ad = AsDouble(a), sd = AsDouble(s), ud = AsDouble(u), m0 = AsDouble(memory_in),
                     z0 = AsDouble(z_in), gd = AsDouble(g_out);
    const at::Tensor gz = AsDouble(d_z_out), gm = AsDouble(d_memory), gzt = AsDouble(d_z);
    const at::Tensor da = at::zeros_like(ad), ds = at::zeros_like(sd), du = at::zeros_like(ud),
                     dm = at::zeros_like(m0), dz = at::zeros_like(z0);
    (match ? &ref::SlotMatchBackward : &ref::SlotReadBackward)(
        ShapeOf(s, u), DataOrNull(ad), DataOrNull(sd), DataOrNull(ud), view.mask, DataOrNull(m0),
        DataOrNull(z0), DataOrNull(gd), DataOrNull(gz), DataOrNull(gm), DataOrNull(gzt),
        da.mutable_data_ptr<double>(), ds.mutable_data_ptr<double>(), du.mutable_data_ptr<double>(),
        dm.mutable_data_ptr<double>(), dz.mutable_data_ptr<double>());
    const auto dtype = u.scalar_type();
    return {da.to(dtype), ds.to(dtype), du.to(dtype), dm, dz};
  }
  const at::Tensor ac = UnitStride(a), sc = UnitStride(s), uc = UnitStride(u);
  // read: da = dr = match(d_out, s, v); match: da = dq = read(d_out, s, k).
  const at::Tensor da = EmptyHeads(a.sym_sizes(), a.options());
  ForwardKernel(!match, g_out, sc, uc, view.mask, memory_in.clone(at::MemoryFormat::Contiguous),
                z_in.clone(at::MemoryFormat::Contiguous), da, {});
  // The reverse pass: weights r and values d_out for read; weights d_out and values q for match.
  const at::Tensor weights = match ? g_out : ac, values = match ? ac : g_out,
                   term = match ? UnitStride(out) : da;
  const at::Tensor g_memory = OrZeros(d_memory, memory_in),
                   G = g_memory.to(u.scalar_type(), false, true, at::MemoryFormat::Contiguous);
  at::Tensor h = (g_memory * memory_end).sum(-1);
  if (d_z) h = h - *d_z;
  h = h.to(u.scalar_type()).contiguous();
  const at::Tensor du = EmptyHeads(u.sym_sizes(), u.options()),
                   ds = EmptyHeads(s.sym_sizes(), s.options());
  const at::Tensor dz_rows = d_z_out ? UnitStride(*d_z_out) : at::Tensor(), z0 = z_in.contiguous();
  auto run = [&]<class T>(T) {
    SlotAdjoint<T>(ShapeOf(s, u), InputRows<T>(weights), InputRows<T>(values), InputRows<T>(sc),
                   InputRows<T>(uc), InputRows<T>(term),
                   dz_rows.defined() ? InputRows<T>(dz_rows) : Rows<const T>{}, view.mask,
                   z0.const_data_ptr<double>(), G.mutable_data_ptr<T>(), h.mutable_data_ptr<T>(),
                   OutputRows<T>(du), OutputRows<T>(ds), false);
  };
  u.scalar_type() == at::kFloat ? run(float{}) : run(double{});
  const at::Tensor d_memory_in = G.to(at::kDouble);
  return {da, ds, du, d_memory_in, (d_memory_in * memory_in).sum(-1) - h};
}

Tensor4 ForwardMeta(bool match, const at::Tensor& a, const at::Tensor& s, const at::Tensor& u,
                    const at::Tensor& memory, const at::Tensor& z, const OptionalTensor& starts,
                    const OptionalTensor& lengths, bool want_z) {
  CheckShapes(match, a, s, u, memory, z, starts, lengths);
  return {EmptyHeads(match ? s.sym_sizes() : u.sym_sizes(), u.options()),
          at::empty_symint(memory.sym_sizes(), memory.options()),
          at::empty_symint(z.sym_sizes(), z.options()),
          want_z ? EmptyHeads(s.sym_sizes(), s.options()) : at::empty({0}, s.options())};
}

Tensor5 BackwardMeta(bool, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                     const OptionalTensor&, const at::Tensor& a, const at::Tensor& s,
                     const at::Tensor& u, const at::Tensor& memory, const at::Tensor& z,
                     const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                     const OptionalTensor&) {
  return {EmptyHeads(a.sym_sizes(), a.options()), EmptyHeads(s.sym_sizes(), s.options()),
          EmptyHeads(u.sym_sizes(), u.options()),
          at::empty_symint(memory.sym_sizes(), memory.options()),
          at::empty_symint(z.sym_sizes(), z.options())};
}

// Typed handles of the registered ops.
using ForwardSchema = Tensor4(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                              const OptionalTensor&, bool);
using BackwardSchema = Tensor5(const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                               const OptionalTensor&);
const c10::TypedOperatorHandle<ForwardSchema>& ForwardOp(bool match) {
  static const auto read = OpHandle<ForwardSchema>("cistern::slot_read"),
                    matched = OpHandle<ForwardSchema>("cistern::slot_match");
  return match ? matched : read;
}
const c10::TypedOperatorHandle<BackwardSchema>& BackwardOp(bool match) {
  static const auto read = OpHandle<BackwardSchema>("cistern::slot_read_backward"),
                    matched = OpHandle<BackwardSchema>("cistern::slot_match_backward");
  return match ? matched : read;
}

struct SlotMemoryFunction : torch::autograd::Function<SlotMemoryFunction> {
  static variable_list forward(torch::autograd::AutogradContext* ctx, bool match,
                               const at::Tensor& a, const at::Tensor& s, const at::Tensor& u,
                               const at::Tensor& memory, const at::Tensor& z,
                               const OptionalTensor& starts, const OptionalTensor& lengths,
                               bool want_z) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, memory_end, z_end, z_out] =
        ForwardOp(match).call(a, s, u, memory, z, starts, lengths, want_z);
    ctx->save_for_backward({a, s, u, memory, z, out, memory_end, starts.value_or(at::Tensor()),
                            lengths.value_or(at::Tensor())});
    ctx->saved_data["match"] = match;
    ctx->set_materialize_grads(false);
    if (!want_z) ctx->mark_non_differentiable({z_out});
    return {out, memory_end, z_end, z_out};
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list grads) {
    if (!grads[0].defined() && !grads[1].defined() && !grads[2].defined() && !grads[3].defined())
      return variable_list(9);
    const auto saved = ctx->get_saved_variables();
    const bool match = ctx->saved_data["match"].toBool();
    auto [da, ds, du, dm, dz] = BackwardOp(match).call(
        Given(grads[0]), Given(grads[1]), Given(grads[2]), Given(grads[3]), saved[0], saved[1],
        saved[2], saved[3], saved[4], saved[5], saved[6], Given(saved[7]), Given(saved[8]));
    return {at::Tensor(), da, ds, du, dm, dz, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

Tensor4 ForwardAutograd(bool match, const at::Tensor& a, const at::Tensor& s, const at::Tensor& u,
                        const at::Tensor& memory, const at::Tensor& z, const OptionalTensor& starts,
                        const OptionalTensor& lengths, bool want_z) {
  if (!u.is_meta() && !UsesKernel(u)) {
    CheckShapes(match, a, s, u, memory, z, starts, lengths);
    return SlotMemoryComposite(match, a, s, u, memory, z, starts, lengths, want_z);
  }
  RefuseTangents(match ? "[slot_match]" : "[slot_read]", a, s, u, memory, z);
  if (!torch::autograd::compute_requires_grad(a, s, u, memory, z)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return ForwardOp(match).call(a, s, u, memory, z, starts, lengths, want_z);
  }
  const auto r = SlotMemoryFunction::apply(match, a, s, u, memory, z, starts, lengths, want_z);
  return {r[0], r[1], r[2], r[3]};
}

// Second derivatives: autograd through the composite.
Tensor5 BackwardAutograd(bool match, const OptionalTensor& d_out, const OptionalTensor& d_memory,
                         const OptionalTensor& d_z, const OptionalTensor& d_z_out,
                         const at::Tensor& a, const at::Tensor& s, const at::Tensor& u,
                         const at::Tensor& memory, const at::Tensor& z, const at::Tensor& out,
                         const at::Tensor& memory_end, const OptionalTensor& starts,
                         const OptionalTensor& lengths) {
  const at::Tensor none;
  if (!torch::autograd::compute_requires_grad(d_out.value_or(none), d_memory.value_or(none),
                                              d_z.value_or(none), d_z_out.value_or(none), a, s, u,
                                              memory, z)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return BackwardOp(match).call(d_out, d_memory, d_z, d_z_out, a, s, u, memory, z, out,
                                  memory_end, starts, lengths);
  }
  at::AutoGradMode enable(true);
  variable_list inputs = Apart({a, s, u, memory, z});
  auto [o, m, ze, zo] = SlotMemoryComposite(match, inputs[0], inputs[1], inputs[2], inputs[3],
                                            inputs[4], starts, lengths, d_z_out.has_value());
  variable_list outputs, grads;
  const std::pair<at::Tensor, OptionalTensor> pairs[] = {
      {o, d_out}, {m, d_memory}, {ze, d_z}, {zo, d_z_out}};
  for (const auto& [value, grad] : pairs) {
    if (!grad) continue;
    outputs.push_back(value);
    grads.push_back(*grad);
  }
  auto g = torch::autograd::grad(outputs, inputs, grads, true, true, true);
  for (size_t i = 0; i < g.size(); ++i) {
    if (!g[i].defined()) g[i] = at::zeros_like(inputs[i]);
  }
  return {g[0], g[1], g[2], g[3], g[4]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cistern, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "slot_read(Tensor r, Tensor s, Tensor v, Tensor memory, Tensor z, Tensor? starts=None, "
      "Tensor? lengths=None, bool want_z=False)"
      " -> (Tensor, Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "slot_match(Tensor q, Tensor s, Tensor k, Tensor memory, Tensor z, Tensor? starts=None, "
      "Tensor? lengths=None, bool want_z=False)"
      " -> (Tensor, Tensor, Tensor, Tensor)",
      tags);
  for (const char* name : {"slot_read_backward", "slot_match_backward"}) {
    m.def((std::string(name) + "(Tensor? d_out, Tensor? d_memory, Tensor? d_z, Tensor? d_z_out, "
                               "Tensor a, Tensor s, Tensor u, Tensor memory, Tensor z, "
                               "Tensor out, Tensor memory_end, Tensor? starts=None, Tensor? "
                               "lengths=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
              .c_str(),
          tags);
  }
}
#define CISTERN_SLOT_IMPL(key, forward, backward)                 \
  TORCH_LIBRARY_IMPL(cistern, key, m) {                           \
    m.impl("slot_read", &Bound<false, &forward>::Call);           \
    m.impl("slot_match", &Bound<true, &forward>::Call);           \
    m.impl("slot_read_backward", &Bound<false, &backward>::Call); \
    m.impl("slot_match_backward", &Bound<true, &backward>::Call); \
  }
CISTERN_SLOT_IMPL(CPU, ForwardCpu, BackwardCpu)
CISTERN_SLOT_IMPL(Meta, ForwardMeta, BackwardMeta)
CISTERN_SLOT_IMPL(Autograd, ForwardAutograd, BackwardAutograd)
#undef CISTERN_SLOT_IMPL

SlotState EmptySlots(int64_t batch, int64_t heads, int64_t slots, int64_t width,
                     const at::TensorOptions& options) {
  return {at::zeros({batch, heads, slots, width}, options.dtype(at::kDouble)),
          at::full({batch, heads, slots}, -std::numeric_limits<double>::infinity(),
                   options.dtype(at::kDouble))};
}

namespace {

constexpr double kMinusInf = -std::numeric_limits<double>::infinity();

// m + log(sum), -inf where the sum is 0; safe is sum with 1 in those places.
at::Tensor LogOrMinusInf(const at::Tensor& sum, const at::Tensor& safe, const at::Tensor& m) {
  return at::where(sum > 0, m + safe.log(), at::full({}, kMinusInf, sum.options()));
}

SlotResult Run(bool match, const at::Tensor& a, const at::Tensor& s, const at::Tensor& u,
               const SlotState& state, const Mask& mask, bool want_z) {
  auto [out, memory, z, z_out] =
      ForwardOp(match).call(a, s, u, state.memory, state.z, mask.starts, mask.lengths, want_z);
  return {out, {memory, z}, want_z ? z_out : at::Tensor()};
}

}  // namespace

SlotResult SlotRead(const at::Tensor& r, const at::Tensor& s, const at::Tensor& v,
                    const SlotState& state, const Mask& mask, bool want_z) {
  return Run(false, r, s, v, state, mask, want_z);
}
SlotResult SlotMatch(const at::Tensor& q, const at::Tensor& s, const at::Tensor& k,
                     const SlotState& state, const Mask& mask, bool want_z) {
  return Run(true, q, s, k, state, mask, want_z);
}

SlotState SlotWrite(const at::Tensor& s_in, const at::Tensor& v, const SlotState& state,
                    const Mask& mask) {
  TORCH_CHECK(
      s_in.dim() == 4 && v.dim() == 4 && s_in.sizes().slice(0, 3) == v.sizes().slice(0, 3) &&
          state.memory.dim() == 4 && state.memory.size(2) == s_in.size(3) &&
          state.memory.size(3) == v.size(3) && state.z.sizes() == state.memory.sizes().slice(0, 3),
      "[slot_write] expected s [B,H,T,n], v [B,H,T,d], memory [B,H,n,d] and z [B,H,n], got ",
      s_in.sizes(), ", ", v.sizes(), ", ", state.memory.sizes(), " and ", state.z.sizes());
  TORCH_CHECK(!mask.starts,
              "[slot_write] a state holds one document: packed rows have to be split before they "
              "are written");
  at::Tensor s = s_in;
  if (mask.lengths) {
    const at::Tensor pad =
        at::arange(s.size(2), mask.lengths->options()).unsqueeze(0) >= mask.lengths->unsqueeze(1);
    s = s.masked_fill(pad.unsqueeze(1).unsqueeze(-1), kMinusInf);
  }
  // m: a reference no smaller than z and every s; the result does not depend on it, so it carries
  // no gradient.
  at::Tensor m = state.z.detach();
  if (s.size(2) > 0) m = at::maximum(m, std::get<0>(s.detach().max(2)).to(at::kDouble));
  m = m.masked_fill(m == kMinusInf, 0.0);
  const at::Tensor old = (state.z - m).exp(), e = (s - m.unsqueeze(2).to(s.scalar_type())).exp();
  const at::Tensor sum = old + e.sum({2}, false, at::kDouble),
                   safe = sum.masked_fill(sum == 0, 1.0);
  const at::Tensor scale = safe.reciprocal().unsqueeze(-1);
  const at::Tensor fresh = at::matmul(e.to(v.scalar_type()).transpose(2, 3), v);
  return {(old.unsqueeze(-1) * scale) * state.memory + scale * fresh, LogOrMinusInf(sum, safe, m)};
}

SlotState MergeSlots(const SlotState& first, const SlotState& second) {
  TORCH_CHECK(first.memory.sizes() == second.memory.sizes(),
              "[merge_slots] expected two states of one shape, got ", first.memory.sizes(), " and ",
              second.memory.sizes());
  at::Tensor m = at::maximum(first.z, second.z).detach();
  m = m.masked_fill(m == kMinusInf, 0.0);
  const at::Tensor a = (first.z - m).exp(), b = (second.z - m).exp(), sum = a + b,
                   safe = sum.masked_fill(sum == 0, 1.0);
  return {(a / safe).unsqueeze(-1) * first.memory + (b / safe).unsqueeze(-1) * second.memory,
          LogOrMinusInf(sum, safe, m)};
}

}  // namespace cistern::ops
