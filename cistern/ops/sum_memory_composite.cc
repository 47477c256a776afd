#include "cistern/ops/sum_memory_composite.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <limits>

#include "cistern/ops/composite_chunks.h"
#include "cistern/ops/finite.h"

namespace cistern::ops {
namespace {

constexpr int64_t kSumChunk = 64;
constexpr int64_t kSlotGatesChunk =
    16;  // e^{c_t - c_i} is formed for every pair inside a chunk and every slot

// What a row of tokens, or of chunks, keeps of earlier writes.
struct Decay {
  at::Tensor before;  // [...,c,n] of the memory before the row
  at::Tensor pairs;   // [...,t,i,n] of the write of token i
  // Of the whole row, [...,n]: what its gates add up to, and whether it lets nothing through.
  at::Tensor log_gate, cut;
};

// log_gate [...,c,n] (or n = 1, for all slots) in double; cut: where the memory is emptied first.
// Exponents are differences c_t - c_i of running sums over the row, for i <= t only. What is cut
// does not enter the sums: it separates segments that do not see each other.
Decay GateDecay(const at::Tensor& log_gate, const at::Tensor& cut) {
  constexpr double kMinusInf = -std::numeric_limits<double>::infinity();
  const int64_t last = log_gate.size(-2) - 1;
  const at::Tensor sum = log_gate.masked_fill(cut, 0.0).cumsum(-2),
                   segment = cut.to(at::kLong).cumsum(-2);
  const at::Tensor causal = at::ones({last + 1, last + 1}, cut.options()).tril().unsqueeze(-1);
  const at::Tensor seen = (segment.unsqueeze(-2) == segment.unsqueeze(-3)).logical_and(causal);
  return {sum.masked_fill(segment > 0, kMinusInf).exp(),
          (sum.unsqueeze(-2) - sum.unsqueeze(-3)).masked_fill(seen.logical_not(), kMinusInf).exp(),
          sum.select(-2, last), segment.select(-2, last) > 0};
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

  // A chunk's products take 0 times every later token, and at the start of a document the memory
  // before it, which is NaN where that is not finite: then tokens are taken one by one.
  const bool finite = AllFinite(a) && AllFinite(w) && AllFinite(u) && AllFinite(x.memory) &&
                      (!gate.defined() || AllBelowInfinity(gate));
  const int64_t chunk = !finite      ? 1
                        : slot_gates ? kSlotGatesChunk
                                     : kSumChunk,
                pairs = w.size(0) * w.size(1) * chunk * chunk * (slot_gates ? w.size(3) : 1),
                step = finite ? chunk * ChunksAtATime(pairs) : 1;
  at::Tensor memory = x.memory;
  std::vector<at::Tensor> outs;
  for (int64_t t0 = 0; t0 < length; t0 += step) {
    const int64_t count = std::min(step, length - t0);
    const auto chunks_of = [&](const at::Tensor& t) {  // [B,H,T,w] -> [B,H,C,c,w]
      return InChunks(t.narrow(2, t0, count), chunk, 0);
    };
    const at::Tensor ac = chunks_of(a), wc = chunks_of(w), uc = chunks_of(u);
    at::Tensor begins;  // [B,1,C,c,1]
    if (starts.defined()) {
      begins = chunks_of(starts.unsqueeze(1).unsqueeze(-1).to(at::kByte)).to(at::kBool);
      if (chunk == 1) memory = memory.masked_fill(begins.squeeze(2), 0.0);
    }
    const bool decays = gate.defined() || begins.defined();
    Decay decay, of_chunks;
    if (decays) {
      const at::Tensor log_gate =
          gate.defined() ? chunks_of(gate) : at::zeros({1, 1, 1, chunk, 1}, memory.options());
      at::Tensor cut = log_gate < kZeroGate;
      if (begins.defined()) cut = cut.logical_or(begins);
      decay = GateDecay(log_gate, cut);
      of_chunks = GateDecay(decay.log_gate, decay.cut);
    }
    at::Tensor writes, ends = wc;  // of each token for each, [B,H,C,t,i,n]; for the chunk's last
    if (slot_gates) {
      writes = decay.pairs.to(dtype) * wc.unsqueeze(3);
      ends = writes.select(3, chunk - 1);
    } else if (decays) {
      ends = wc * decay.pairs.select(3, chunk - 1).to(dtype);
    }
    // The memory after each chunk, [B,H,C,n,d], then the one before each.
    const at::Tensor written = at::matmul(ends.transpose(3, 4), uc).to(memory.scalar_type());
    at::Tensor after;
    if (slot_gates) {
      after = at::einsum("bhjin,bhind->bhjnd", {of_chunks.pairs, written});
    } else if (decays) {
      after = at::matmul(of_chunks.pairs.squeeze(-1), written.flatten(3)).view_as(written);
    } else {
      after = written.cumsum(2);
    }
    const at::Tensor before = memory.unsqueeze(2);
    after = after + (decays ? of_chunks.before.unsqueeze(-1) * before : before);
    const at::Tensor past = BeforeChunks(after, memory).to(dtype);
    memory = after.select(2, after.size(2) - 1);
    at::Tensor out;
    if (slot_gates && match) {
      const at::Tensor scores = at::matmul(ac, uc.transpose(3, 4));
      out = decay.before.to(dtype) * at::matmul(ac, past.transpose(3, 4)) +
            at::einsum("bhcti,bhctil->bhctl", {scores, writes});
    } else if (slot_gates) {
      const at::Tensor scores = at::einsum("bhctl,bhctil->bhcti", {ac, writes});
      out = at::matmul(ac * decay.before.to(dtype), past) + at::matmul(scores, uc);
    } else {
      // One gate for all slots, or none: out = a M + tril(a b^T) values, where (b, values) is
      // (w, v) for a read and (k, w) for a match.
      const at::Tensor scores = at::matmul(ac, (match ? uc : wc).transpose(3, 4));
      out = at::matmul(decays ? scores * decay.pairs.squeeze(-1).to(dtype) : scores.tril(),
                       match ? wc : uc) +
            at::matmul(decays ? ac * decay.before.to(dtype) : ac,
                       match ? past.transpose(3, 4) : past);
    }
    outs.push_back(out.flatten(2, 3).narrow(2, 0, count));
  }
  at::Tensor out = length > 0 ? at::cat(outs, 2) : match ? at::zeros_like(w) : at::zeros_like(u);
  if (pad.defined()) out = out.masked_fill(pad, 0.0);
  return {out.to((match ? x.w : x.u).scalar_type()), length > 0 ? memory : memory.clone()};
}

}  // namespace cistern::ops
