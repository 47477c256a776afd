#include "cistern/ops/sum_memory.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "cistern/kernels/ref/sum_memory_ref.h"
#include "cistern/kernels/sum_memory.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/op_pair.h"
#include "cistern/ops/sum_memory_composite.h"

// The two ops share everything here: `match` says which. a is r or q, u is v or k.
namespace cistern::ops {
namespace sum_memory {

using torch::autograd::variable_list;
using Tensor5 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

void CheckSums(bool match, const at::Tensor& a, const at::Tensor& w, const at::Tensor& u,
               const at::Tensor& memory, const OptionalTensor& log_gate,
               const OptionalTensor& starts, const OptionalTensor& lengths) {
  const char* op = match ? "[sum_match]" : "[sum_read]";
  const char* a_name = match ? "q" : "r";
  const char* u_name = match ? "k" : "v";
  TORCH_CHECK(w.dim() == 4, op, " expected w of shape [B,H,T,n], got ", w.sym_sizes());
  TORCH_CHECK(u.dim() == 4 && u.sym_size(0) == w.sym_size(0) && u.sym_size(1) == w.sym_size(1) &&
                  u.sym_size(2) == w.sym_size(2),
              op, " expected ", u_name, " of shape [B,H,T,d] with the B, H, T of w ", w.sym_sizes(),
              ", got ", u.sym_sizes());
  TORCH_CHECK(a.sym_sizes() == (match ? u.sym_sizes() : w.sym_sizes()), op, " expected ", a_name,
              " of shape ", match ? u.sym_sizes() : w.sym_sizes(), ", got ", a.sym_sizes());
  TORCH_CHECK(memory.dim() == 4 && memory.sym_size(0) == w.sym_size(0) &&
                  memory.sym_size(1) == w.sym_size(1) && memory.sym_size(2) == w.sym_size(3) &&
                  memory.sym_size(3) == u.sym_size(3),
              op, " expected memory of shape [B,H,n,d] for w ", w.sym_sizes(), " and ", u_name, " ",
              u.sym_sizes(), ", got ", memory.sym_sizes());
  TORCH_CHECK(memory.scalar_type() == at::kDouble, op, " expected memory in double, got ",
              memory.scalar_type());
  TORCH_CHECK(a.scalar_type() == w.scalar_type() && w.scalar_type() == u.scalar_type(), op,
              " expected one dtype, got ", a_name, " ", a.scalar_type(), ", w ", w.scalar_type(),
              ", ", u_name, " ", u.scalar_type());
  if (log_gate) {
    TORCH_CHECK(
        log_gate->dim() == 4 && log_gate->sym_sizes().slice(0, 3) == w.sym_sizes().slice(0, 3) &&
            (log_gate->sym_size(3) == w.sym_size(3) || log_gate->sym_size(3) == 1) &&
            log_gate->scalar_type() == w.scalar_type(),
        op, " expected log_gate of shape [B,H,T,n] or [B,H,T,1] and dtype ", w.scalar_type(),
        " for w ", w.sym_sizes(), ", got ", log_gate->sym_sizes(), " ", log_gate->scalar_type());
  }
  CheckMask(op, w, starts, lengths);
}

SlotShape ShapeOf(const at::Tensor& w, const at::Tensor& u) {
  return {w.size(0), w.size(1), w.size(2), w.size(3), u.size(3)};
}

// One gate per token serves every slot.
OptionalTensor PerSlot(const OptionalTensor& log_gate, const at::Tensor& w) {
  return log_gate ? Given(log_gate->expand_as(w)) : std::nullopt;
}

OptionalTensor GateUnitStride(const OptionalTensor& log_gate) {
  return log_gate ? Given(UnitStride(*log_gate)) : std::nullopt;
}

template <class T>
LogGates<T> InputGates(const OptionalTensor& x) {
  return x ? LogGates<T>{InputRows<T>(*x), x->size(3)} : LogGates<T>{};
}

// Forward into `out`; memory is a fresh copy that becomes the memory after. Inputs have unit
// stride.
void ForwardKernel(bool match, const at::Tensor& a, const at::Tensor& w, const at::Tensor& u,
                   const OptionalTensor& log_gate, const RowMask& mask, const at::Tensor& memory,
                   const at::Tensor& out) {
  auto run = [&]<class T>(T) {
    (match ? &cistern::SumMatch<T>
           : &cistern::SumRead<T>)(ShapeOf(w, u), InputRows<T>(a), InputRows<T>(w), InputRows<T>(u),
                                   InputGates<T>(log_gate), mask, memory.mutable_data_ptr<double>(),
                                   OutputRows<T>(out));
  };
  u.scalar_type() == at::kFloat ? run(float{}) : run(double{});
}

Tensor2 ForwardCpu(bool match, const at::Tensor& a, const at::Tensor& w, const at::Tensor& u,
                   const at::Tensor& memory_in, const OptionalTensor& log_gate,
                   const OptionalTensor& starts, const OptionalTensor& lengths) {
  CheckSums(match, a, w, u, memory_in, log_gate, starts, lengths);
  if (!UsesKernel(u))
    return SumMemoryComposite(match, a, w, u, memory_in, log_gate, starts, lengths);
  const MaskView view(starts, lengths, w.size(2));
  const at::Tensor memory = memory_in.clone(at::MemoryFormat::Contiguous);
  if (ActiveImpl() == Impl::kReference) {
    const at::Tensor ad = AsDouble(a), wd = AsDouble(w), ud = AsDouble(u),
                     gate = AsDouble(PerSlot(log_gate, w));
    const at::Tensor out = at::empty(match ? w.sizes() : u.sizes(), ad.options());
    (match ? &ref::SumMatch : &ref::SumRead)(
        ShapeOf(w, u), ad.const_data_ptr<double>(), wd.const_data_ptr<double>(),
        ud.const_data_ptr<double>(), DataOrNull(gate), view.mask, memory.mutable_data_ptr<double>(),
        out.mutable_data_ptr<double>());
    return {out.to(u.scalar_type()), memory};
  }
  const at::Tensor out = EmptyHeads(match ? w.sym_sizes() : u.sym_sizes(), u.options());
  ForwardKernel(match, UnitStride(a), UnitStride(w), UnitStride(u), GateUnitStride(log_gate),
                view.mask, memory, out);
  return {out, memory};
}

// Gradients of (a, w, u, memory, log_gate); the last one is empty in raw mode. With gates, a match
// needs its out and both need the memory after the last token.
Tensor5 BackwardCpu(bool match, const OptionalTensor& d_out, const OptionalTensor& d_memory,
                    const at::Tensor& a_in, const at::Tensor& w_in, const at::Tensor& u_in,
                    const at::Tensor& memory_in, const OptionalTensor& log_gate,
                    const OptionalTensor& out, const OptionalTensor& memory_end,
                    const OptionalTensor& starts, const OptionalTensor& lengths) {
  TORCH_CHECK(!log_gate || (memory_end && (out || !match)), match ? "[sum_match" : "[sum_read",
              "_backward] expected out and memory_end of the forward where there is a log_gate");
  const MaskView view(starts, lengths, w_in.size(2));
  const SlotShape shape = ShapeOf(w_in, u_in);
  const at::Tensor g_out = UnitStride(OrZeros(d_out, match ? w_in : u_in));
  const at::Tensor none = at::empty({0}, w_in.options());
  if (ActiveImpl() == Impl::kReference) {
    const at::Tensor ad = AsDouble(a_in), wd = AsDouble(w_in), ud = AsDouble(u_in),
                     m0 = AsDouble(memory_in), gate = AsDouble(PerSlot(log_gate, w_in)),
                     gd = AsDouble(g_out), gm = AsDouble(d_memory);
    const at::Tensor da = at::zeros_like(ad), dw = at::zeros_like(wd), du = at::zeros_like(ud),
                     dm = at::zeros_like(m0), dg = log_gate ? at::zeros_like(gate) : at::Tensor();
    (match ? &ref::SumMatchBackward : &ref::SumReadBackward)(
        shape, DataOrNull(ad), DataOrNull(wd), DataOrNull(ud), DataOrNull(gate), view.mask,
        DataOrNull(m0), DataOrNull(gd), DataOrNull(gm), da.mutable_data_ptr<double>(),
        dw.mutable_data_ptr<double>(), du.mutable_data_ptr<double>(),
        log_gate ? dg.mutable_data_ptr<double>() : nullptr, dm.mutable_data_ptr<double>());
    const auto dtype = u_in.scalar_type();
    return {da.to(dtype), dw.to(dtype), du.to(dtype), dm,
            log_gate ? dg.sum_to_size(log_gate->sizes()).to(dtype) : none};
  }
  const at::Tensor a = UnitStride(a_in), w = UnitStride(w_in), u = UnitStride(u_in);
  const OptionalTensor gate = GateUnitStride(log_gate);
  // read: da = dr = match(d_out, w, v); match: da = dq = read(d_out, w, k).
  const at::Tensor da = EmptyHeads(a.sym_sizes(), a.options());
  ForwardKernel(!match, g_out, w, u, gate, view.mask, memory_in.clone(at::MemoryFormat::Contiguous),
                da);
  // The reverse pass: weights r and values d_out for read; weights d_out and values q for match.
  const at::Tensor weights = match ? g_out : a, values = match ? a : g_out;
  const at::Tensor term = !gate ? none : match ? UnitStride(*out) : da;
  const at::Tensor G = d_memory ? d_memory->clone(at::MemoryFormat::Contiguous)
                                : at::zeros_like(memory_in, at::MemoryFormat::Contiguous);
  const at::Tensor h = gate ? (G * *memory_end).sum(-1).contiguous() : at::Tensor();
  const at::Tensor du = EmptyHeads(u.sym_sizes(), u.options()),
                   dw = EmptyHeads(w.sym_sizes(), w.options()),
                   d_gate = gate ? EmptyHeads(gate->sym_sizes(), w.options()) : none;
  auto run = [&]<class T>(T) {
    SumAdjoint<T>(shape, InputRows<T>(weights), InputRows<T>(values), InputRows<T>(w),
                  InputRows<T>(u), gate ? InputRows<T>(term) : Rows<const T>{}, InputGates<T>(gate),
                  view.mask, G.mutable_data_ptr<double>(),
                  gate ? h.mutable_data_ptr<double>() : nullptr, OutputRows<T>(du),
                  OutputRows<T>(dw), gate ? OutputRows<T>(d_gate) : Rows<T>{});
  };
  u.scalar_type() == at::kFloat ? run(float{}) : run(double{});
  return {da, dw, du, G, d_gate};
}

Tensor2 ForwardMeta(bool match, const at::Tensor& a, const at::Tensor& w, const at::Tensor& u,
                    const at::Tensor& memory, const OptionalTensor& log_gate,
                    const OptionalTensor& starts, const OptionalTensor& lengths) {
  CheckSums(match, a, w, u, memory, log_gate, starts, lengths);
  return {EmptyHeads(match ? w.sym_sizes() : u.sym_sizes(), u.options()),
          at::empty_symint(memory.sym_sizes(), memory.options())};
}

Tensor5 BackwardMeta(bool, const OptionalTensor&, const OptionalTensor&, const at::Tensor& a,
                     const at::Tensor& w, const at::Tensor& u, const at::Tensor& memory,
                     const OptionalTensor& log_gate, const OptionalTensor&, const OptionalTensor&,
                     const OptionalTensor&, const OptionalTensor&) {
  return {EmptyHeads(a.sym_sizes(), a.options()), EmptyHeads(w.sym_sizes(), w.options()),
          EmptyHeads(u.sym_sizes(), u.options()),
          at::empty_symint(memory.sym_sizes(), memory.options()),
          log_gate ? EmptyHeads(log_gate->sym_sizes(), w.options()) : at::empty({0}, w.options())};
}

// Typed handles of the registered ops.
using ForwardSchema = Tensor2(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                              const OptionalTensor&);
using BackwardSchema = Tensor5(const OptionalTensor&, const OptionalTensor&, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, const OptionalTensor&);
const c10::TypedOperatorHandle<ForwardSchema>& ForwardOp(bool match) {
  static const auto read = OpHandle<ForwardSchema>("cistern::sum_read"),
                    matched = OpHandle<ForwardSchema>("cistern::sum_match");
  return match ? matched : read;
}
const c10::TypedOperatorHandle<BackwardSchema>& BackwardOp(bool match) {
  static const auto read = OpHandle<BackwardSchema>("cistern::sum_read_backward"),
                    matched = OpHandle<BackwardSchema>("cistern::sum_match_backward");
  return match ? matched : read;
}

struct SumMemoryFunction : torch::autograd::Function<SumMemoryFunction> {
  static variable_list forward(torch::autograd::AutogradContext* ctx, bool match,
                               const at::Tensor& a, const at::Tensor& w, const at::Tensor& u,
                               const at::Tensor& memory, const OptionalTensor& log_gate,
                               const OptionalTensor& starts, const OptionalTensor& lengths) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, memory_end] = ForwardOp(match).call(a, w, u, memory, log_gate, starts, lengths);
    const at::Tensor none;
    ctx->save_for_backward({a, w, u, memory, log_gate.value_or(none),
                            log_gate && match ? out : none, log_gate ? memory_end : none,
                            starts.value_or(none), lengths.value_or(none)});
    ctx->saved_data["match"] = match;
    ctx->set_materialize_grads(false);
    return {out, memory_end};
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list grads) {
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(8);
    const auto saved = ctx->get_saved_variables();
    auto [da, dw, du, dm, d_gate] = BackwardOp(ctx->saved_data["match"].toBool())
                                        .call(Given(grads[0]), Given(grads[1]), saved[0], saved[1],
                                              saved[2], saved[3], Given(saved[4]), Given(saved[5]),
                                              Given(saved[6]), Given(saved[7]), Given(saved[8]));
    return {at::Tensor(), da,          dw, du, dm, saved[4].defined() ? d_gate : at::Tensor(),
            at::Tensor(), at::Tensor()};
  }
};

Tensor2 ForwardAutograd(bool match, const at::Tensor& a, const at::Tensor& w, const at::Tensor& u,
                        const at::Tensor& memory, const OptionalTensor& log_gate,
                        const OptionalTensor& starts, const OptionalTensor& lengths) {
  if (!u.is_meta() && !UsesKernel(u)) {
    CheckSums(match, a, w, u, memory, log_gate, starts, lengths);
    return SumMemoryComposite(match, a, w, u, memory, log_gate, starts, lengths);
  }
  RefuseTangents(match ? "[sum_match]" : "[sum_read]", a, w, u, memory,
                 log_gate.value_or(at::Tensor()));
  if (!torch::autograd::compute_requires_grad(a, w, u, memory, log_gate.value_or(at::Tensor()))) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return ForwardOp(match).call(a, w, u, memory, log_gate, starts, lengths);
  }
  const auto r = SumMemoryFunction::apply(match, a, w, u, memory, log_gate, starts, lengths);
  return {r[0], r[1]};
}

// Second derivatives: autograd through the composite.
Tensor5 BackwardAutograd(bool match, const OptionalTensor& d_out, const OptionalTensor& d_memory,
                         const at::Tensor& a, const at::Tensor& w, const at::Tensor& u,
                         const at::Tensor& memory, const OptionalTensor& log_gate,
                         const OptionalTensor& out, const OptionalTensor& memory_end,
                         const OptionalTensor& starts, const OptionalTensor& lengths) {
  const at::Tensor none;
  if (!torch::autograd::compute_requires_grad(d_out.value_or(none), d_memory.value_or(none), a, w,
                                              u, memory, log_gate.value_or(none))) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return BackwardOp(match).call(d_out, d_memory, a, w, u, memory, log_gate, out, memory_end,
                                  starts, lengths);
  }
  at::AutoGradMode enable(true);
  variable_list inputs = {a, w, u, memory};
  if (log_gate) inputs.push_back(*log_gate);
  inputs = Apart(inputs);
  auto [o, m] = SumMemoryComposite(match, inputs[0], inputs[1], inputs[2], inputs[3],
                                   log_gate ? Given(inputs[4]) : std::nullopt, starts, lengths);
  variable_list outputs, grads;
  if (d_out) outputs.push_back(o), grads.push_back(*d_out);
  if (d_memory) outputs.push_back(m), grads.push_back(*d_memory);
  auto g = torch::autograd::grad(outputs, inputs, grads, true, true, true);
  for (size_t i = 0; i < g.size(); ++i) {
    if (!g[i].defined()) g[i] = at::zeros_like(inputs[i]);
  }
  return {g[0], g[1], g[2], g[3], log_gate ? g[4] : at::empty({0}, w.options())};
}

TORCH_LIBRARY_FRAGMENT(cistern, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "sum_read(Tensor r, Tensor w, Tensor v, Tensor memory, Tensor? log_gate=None, Tensor? "
      "starts=None, Tensor? lengths=None)"
      " -> (Tensor, Tensor)",
      tags);
  m.def(
      "sum_match(Tensor q, Tensor w, Tensor k, Tensor memory, Tensor? log_gate=None, Tensor? "
      "starts=None, Tensor? lengths=None)"
      " -> (Tensor, Tensor)",
      tags);
  for (const char* name : {"sum_read_backward", "sum_match_backward"}) {
    m.def((std::string(name) + "(Tensor? d_out, Tensor? d_memory, Tensor a, Tensor w, Tensor u, "
                               "Tensor memory, Tensor? log_gate, Tensor? out, "
                               "Tensor? memory_end, Tensor? starts=None, Tensor? lengths=None) -> "
                               "(Tensor, Tensor, Tensor, Tensor, Tensor)")
              .c_str(),
          tags);
  }
}
#define CISTERN_SUM_IMPL(key, forward, backward)                 \
  TORCH_LIBRARY_IMPL(cistern, key, m) {                          \
    m.impl("sum_read", &Bound<false, &forward>::Call);           \
    m.impl("sum_match", &Bound<true, &forward>::Call);           \
    m.impl("sum_read_backward", &Bound<false, &backward>::Call); \
    m.impl("sum_match_backward", &Bound<true, &backward>::Call); \
  }
CISTERN_SUM_IMPL(CPU, ForwardCpu, BackwardCpu)
CISTERN_SUM_IMPL(Meta, ForwardMeta, BackwardMeta)
CISTERN_SUM_IMPL(Autograd, ForwardAutograd, BackwardAutograd)
#undef CISTERN_SUM_IMPL

SumResult Run(bool match, const at::Tensor& a, const at::Tensor& w, const at::Tensor& u,
              const at::Tensor& memory, const Mask& mask, const at::Tensor& log_gate) {
  auto [out, after] =
      ForwardOp(match).call(a, w, u, memory, Given(log_gate), mask.starts, mask.lengths);
  return {out, after};
}

}  // namespace sum_memory

at::Tensor EmptySums(int64_t batch, int64_t heads, int64_t slots, int64_t width,
                     const at::TensorOptions& options) {
  return at::zeros({batch, heads, slots, width}, options.dtype(at::kDouble));
}

SumResult SumRead(const at::Tensor& r, const at::Tensor& w, const at::Tensor& v,
                  const at::Tensor& memory, const Mask& mask, const at::Tensor& log_gate) {
  return sum_memory::Run(false, r, w, v, memory, mask, log_gate);
}
SumResult SumMatch(const at::Tensor& q, const at::Tensor& w, const at::Tensor& k,
                   const at::Tensor& memory, const Mask& mask, const at::Tensor& log_gate) {
  return sum_memory::Run(true, q, w, k, memory, mask, log_gate);
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
  CheckMask("[sum_write]", w_in, mask.starts, mask.lengths);
  const auto dtype = at::toOpMathType(w_in.scalar_type());
  const int64_t length = w_in.size(2);
  at::Tensor w = w_in.to(dtype), v = v_in.to(dtype), pad, after = memory;
  if (mask.lengths) {
    pad = (at::arange(length, mask.lengths->options()).unsqueeze(0) >= mask.lengths->unsqueeze(1))
              .unsqueeze(1)
              .unsqueeze(-1);
    w = w.masked_fill(pad, 0.0), v = v.masked_fill(pad, 0.0);
  }
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
