#include "cistern/ops/sum_memory.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include "cistern/ops/op_pair.h"
#include "cistern/ops/sum_memory_composite.h"

// The two ops share everything here: `match` says which. a is r or q, u is v or k.
namespace cistern::ops {
namespace sum_memory {

void CheckSums(bool match, const at::Tensor& a, const at::Tensor& w, const at::Tensor& u, const at::Tensor& memory,
               const OptionalTensor& log_gate, const OptionalTensor& starts, const OptionalTensor& lengths) {
  const char* op = match ? "[sum_match]" : "[sum_read]";
  const char* a_name = match ? "q" : "r";
  const char* u_name = match ? "k" : "v";
  TORCH_CHECK(w.dim() == 4, op, " expected w of shape [B,H,T,n], got ", w.sym_sizes());
  TORCH_CHECK(u.dim() == 4 && u.sym_size(0) == w.sym_size(0) && u.sym_size(1) == w.sym_size(1) && u.sym_size(2) == w.sym_size(2), op,
              " expected ", u_name, " of shape [B,H,T,d] with the B, H, T of w ", w.sym_sizes(), ", got ", u.sym_sizes());
  TORCH_CHECK(a.sym_sizes() == (match ? u.sym_sizes() : w.sym_sizes()), op, " expected ", a_name, " of shape ",
              match ? u.sym_sizes() : w.sym_sizes(), ", got ", a.sym_sizes());
  TORCH_CHECK(memory.dim() == 4 && memory.sym_size(0) == w.sym_size(0) && memory.sym_size(1) == w.sym_size(1) &&
                  memory.sym_size(2) == w.sym_size(3) && memory.sym_size(3) == u.sym_size(3),
              op, " expected memory of shape [B,H,n,d] for w ", w.sym_sizes(), " and ", u_name, " ", u.sym_sizes(), ", got ",
              memory.sym_sizes());
  TORCH_CHECK(memory.scalar_type() == at::kDouble, op, " expected memory in double, got ", memory.scalar_type());
  TORCH_CHECK(a.scalar_type() == w.scalar_type() && w.scalar_type() == u.scalar_type(), op, " expected one dtype, got ", a_name, " ",
              a.scalar_type(), ", w ", w.scalar_type(), ", ", u_name, " ", u.scalar_type());
  if (log_gate) {
    TORCH_CHECK(log_gate->sym_sizes() == w.sym_sizes() && log_gate->scalar_type() == w.scalar_type(), op, " expected log_gate of shape ",
                w.sym_sizes(), " (or with one gate per token) and dtype ", w.scalar_type(), ", got ", log_gate->sym_sizes(), " ",
                log_gate->scalar_type());
  }
  CheckMask(op, w, starts, lengths);
}

// One gate per token serves every slot.
OptionalTensor GatePerSlot(const at::Tensor& log_gate, const at::Tensor& w) {
  if (!log_gate.defined()) return std::nullopt;
  if (log_gate.dim() == 4 && w.dim() == 4 && log_gate.size(3) == 1 && log_gate.sizes().slice(0, 3) == w.sizes().slice(0, 3)) {
    return log_gate.expand(w.sizes());
  }
  return log_gate;
}

SumResult Run(bool match, const at::Tensor& a, const at::Tensor& w, const at::Tensor& u, const at::Tensor& memory, const Mask& mask,
              const at::Tensor& log_gate) {
  const OptionalTensor gate = GatePerSlot(log_gate, w);
  CheckSums(match, a, w, u, memory, gate, mask.starts, mask.lengths);
  auto [out, after] = SumMemoryComposite(match, a, w, u, memory, gate, mask.starts, mask.lengths);
  return {out, after};
}

}  // namespace sum_memory

at::Tensor EmptySums(int64_t batch, int64_t heads, int64_t slots, int64_t width, const at::TensorOptions& options) {
  return at::zeros({batch, heads, slots, width}, options.dtype(at::kDouble));
}

SumResult SumRead(const at::Tensor& r, const at::Tensor& w, const at::Tensor& v, const at::Tensor& memory, const Mask& mask,
                  const at::Tensor& log_gate) {
  return sum_memory::Run(false, r, w, v, memory, mask, log_gate);
}
SumResult SumMatch(const at::Tensor& q, const at::Tensor& w, const at::Tensor& k, const at::Tensor& memory, const Mask& mask,
                   const at::Tensor& log_gate) {
  return sum_memory::Run(true, q, w, k, memory, mask, log_gate);
}

at::Tensor SumWrite(const at::Tensor& w_in, const at::Tensor& v_in, const at::Tensor& memory, const Mask& mask,
                    const at::Tensor& log_gate) {
  const OptionalTensor gate_in = sum_memory::GatePerSlot(log_gate, w_in);
  TORCH_CHECK(w_in.dim() == 4 && v_in.dim() == 4 && w_in.sizes().slice(0, 3) == v_in.sizes().slice(0, 3) && memory.dim() == 4 &&
                  memory.sizes().slice(0, 2) == w_in.sizes().slice(0, 2) && memory.size(2) == w_in.size(3) &&
                  memory.size(3) == v_in.size(3) && (!gate_in || gate_in->sizes() == w_in.sizes()),
              "[sum_write] expected w [B,H,T,n], v [B,H,T,d], memory [B,H,n,d] and log_gate [B,H,T,n], [B,H,T,1] or none, got ",
              w_in.sizes(), ", ", v_in.sizes(), ", ", memory.sizes(), " and ", gate_in ? gate_in->sizes() : at::IntArrayRef());
  TORCH_CHECK(w_in.scalar_type() == v_in.scalar_type() && memory.scalar_type() == at::kDouble,
              "[sum_write] expected w and v of one dtype and memory in double, got ", w_in.scalar_type(), ", ", v_in.scalar_type(), " and ",
              memory.scalar_type());
  TORCH_CHECK(!mask.starts, "[sum_write] a memory holds one document: packed rows have to be split before they are written");
  CheckMask("[sum_write]", w_in, mask.starts, mask.lengths);
  const auto dtype = at::toOpMathType(w_in.scalar_type());
  const int64_t length = w_in.size(2);
  at::Tensor w = w_in.to(dtype), v = v_in.to(dtype), pad, after = memory;
  if (mask.lengths) {
    pad = (at::arange(length, mask.lengths->options()).unsqueeze(0) >= mask.lengths->unsqueeze(1)).unsqueeze(1).unsqueeze(-1);
    w = w.masked_fill(pad, 0.0), v = v.masked_fill(pad, 0.0);
  }
  if (gate_in && length > 0) {
    // What is left at the end of the write of token i: e^{sum of the log-gates after i}, or 0 where one of those gates is 0.
    at::Tensor gate = gate_in->to(at::kDouble);
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
