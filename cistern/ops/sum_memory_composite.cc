#include "cistern/ops/sum_memory_composite.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <limits>

#include "cistern/ops/finite.h"

namespace cistern::ops {
namespace {

constexpr int64_t kSumChunk = 64;
constexpr int64_t kSlotGatesChunk =
    16;  // e^{c_t - c_i} is formed for every pair inside a chunk and every slot

// What the tokens of one chunk keep of earlier writes.
struct Decay {
  at::Tensor before;  // [B,H,c,n] of the memory before the chunk
  at::Tensor pairs;   // [B,H,t,i,n] of the write of token i
};

// log_gate [B,H,c,n] (or n = 1, for all slots) in double; starts [B,c] or undefined. Exponents are
// differences c_t - c_i of running sums over the chunk, for i <= t only. A gate of 0 and the start
// of a document do not enter the sums: they separate segments that do not see each other.
Decay GateDecay(const at::Tensor& log_gate, const at::Tensor& starts) {
  constexpr double kMinusInf = -std::numeric_limits<double>::infinity();
  const int64_t c = log_gate.size(2);
  at::Tensor cut = log_gate < kZeroGate;
  if (starts.defined()) cut = cut.logical_or(starts.unsqueeze(1).unsqueeze(-1));
  const at::Tensor sum = log_gate.masked_fill(cut, 0.0).cumsum(2),
                   segment = cut.to(at::kLong).cumsum(2);
  const at::Tensor causal = at::ones({c, c}, cut.options()).tril().unsqueeze(-1);
  const at::Tensor seen = (segment.unsqueeze(3) == segment.unsqueeze(2)).logical_and(causal);
  return {sum.masked_fill(segment > 0, kMinusInf).exp(),
          (sum.unsqueeze(3) - sum.unsqueeze(2)).masked_fill(seen.logical_not(), kMinusInf).exp()};
}

}  // namespace

std::vector<at::Tensor> SumMemoryComposite(bool match, const SumArguments& x) {
  const bool slot_gates = x.log_gate && x.log_gate->size(3) > 1;
  const int64_t length = x.w.size(2);
  const auto dtype = at::toOpMathType(x.w.scalar_type());
  at::Tensor a = x.a.to(dtype), w = x.w.to(dtype), u = x.u.to(dtype), gate;
  if (x.log_gate) gate = x.log_gate->to(at::kDouble);
  const at::Tensor pad = x.mask.HeadsPadding(length), starts = x.mask.RealStarts(length);
  if (pad.defined()) {
    for (at::Tensor* t : {&a, &w, &u}) *t = t->masked_fill(pad, 0.0);
    if (gate.defined()) gate = gate.masked_fill(pad, 0.0);
  }

  // A chunk's products take 0 times every later token, which is NaN where that is not finite: then
  // tokens are taken one by one.
  const bool finite =
      AllFinite(a) && AllFinite(w) && AllFinite(u) && (!gate.defined() || AllBelowInfinity(gate));
  const int64_t chunk = !finite ? 1 : slot_gates ? kSlotGatesChunk : kSumChunk;
  at::Tensor memory = x.memory;
  std::vector<at::Tensor> outs;
  for (int64_t t0 = 0; t0 < length; t0 += chunk) {
    const int64_t c = std::min(chunk, length - t0);
    const at::Tensor begins = starts.defined() ? starts.narrow(1, t0, c) : at::Tensor();
    if (chunk == 1 && begins.defined())
      memory = memory.masked_fill(begins.unsqueeze(-1).unsqueeze(-1), 0.0);
    const at::Tensor ac = a.narrow(2, t0, c), wc = w.narrow(2, t0, c), uc = u.narrow(2, t0, c),
                     past = memory.to(dtype);
    if (slot_gates) {
      const Decay decay = GateDecay(gate.narrow(2, t0, c), begins);
      const at::Tensor before = decay.before.to(dtype),
                       writes = decay.pairs.to(dtype) * wc.unsqueeze(2);  // [B,H,t,i,n]
      if (match) {
        const at::Tensor scores = at::matmul(ac, uc.transpose(2, 3));
        outs.push_back(before * at::matmul(ac, past.transpose(2, 3)) +
                       at::einsum("bhti,bhtil->bhtl", {scores, writes}));
      } else {
        const at::Tensor scores = at::einsum("bhtl,bhtil->bhti", {ac, writes});
        outs.push_back(at::matmul(ac * before, past) + at::matmul(scores, uc));
      }
      memory = decay.before.select(2, c - 1).unsqueeze(-1) * memory +
               at::matmul(writes.select(2, c - 1).transpose(2, 3), uc);
      continue;
    }
    // One gate for all slots, or none: out = a M + tril(a b^T) values, where (b, values) is (w, v)
    // for a read and (k, w) for a match.
    const at::Tensor b = match ? uc : wc, values = match ? wc : uc;
    at::Tensor scores = at::matmul(ac, b.transpose(2, 3)), of_past = ac, ends = wc;
    if (gate.defined() || begins.defined()) {
      const Decay decay = GateDecay(
          gate.defined() ? gate.narrow(2, t0, c) : at::zeros({1, 1, c, 1}, memory.options()),
          begins);
      scores = scores * decay.pairs.squeeze(-1).to(dtype);
      of_past = ac * decay.before.to(dtype);
      ends = wc * decay.pairs.select(2, c - 1).to(dtype);
      memory = decay.before.select(2, c - 1).unsqueeze(-1) * memory;
    } else {
      scores = scores.tril();
    }
    outs.push_back(at::matmul(of_past, match ? past.transpose(2, 3) : past) +
                   at::matmul(scores, values));
    memory = memory + at::matmul(ends.transpose(2, 3), uc);
  }
  at::Tensor out = length > 0 ? at::cat(outs, 2) : match ? at::zeros_like(w) : at::zeros_like(u);
  if (pad.defined()) out = out.masked_fill(pad, 0.0);
  return {out.to(x.w.scalar_type()), length > 0 ? memory : memory.clone()};
}

}  // namespace cistern::ops
