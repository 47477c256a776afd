#include "cistern/ops/slot_memory_composite.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "cistern/ops/composite_chunks.h"
#include "cistern/ops/finite.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern::ops {
namespace {

// e^{s_i - m_t} is formed for every pair of tokens of a chunk: every exponent is <= 0.
constexpr int64_t kChunk = 16;
constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

// Weights of terms e^{log}, of one more with `before`, normalised by their sum: e^z.
struct Normalised {
  at::Tensor terms, before, z;
};
// log [...,i,n], the sum over i; before [...,n]. A sum of nothing has z = -inf and weights 0.
Normalised Normalise(const at::Tensor& log, const at::Tensor& before) {
  // A finite reference, the largest term. The result does not depend on it, so it carries no
  // gradient.
  at::Tensor m = log.detach().amax(-2);
  if (before.defined()) m = at::maximum(m, before.detach());
  m = m.masked_fill(m == kNegativeInfinity, 0.0);
  const at::Tensor terms = (log - m.unsqueeze(-2)).exp();
  at::Tensor sum = terms.sum(-2), of_before;
  if (before.defined()) {
    of_before = (before - m).exp();
    sum = of_before + sum;
  }
  const at::Tensor safe = sum.masked_fill(sum == 0, 1.0);
  return {terms / safe.unsqueeze(-2), before.defined() ? of_before / safe : at::Tensor(),
          at::where(sum > 0, m + safe.log(), at::full({}, kNegativeInfinity, sum.options()))};
}

}  // namespace

std::vector<at::Tensor> SlotMemoryComposite(bool match, const SlotArguments& x) {
  const int64_t length = x.u.size(2);
  const auto dtype = ComputeTypeOf(x.u);
  at::Tensor a = x.a.to(dtype), s = x.s.to(at::kDouble), u = x.u.to(dtype);
  const at::Tensor pad = x.mask.HeadsPadding(length), documents = x.mask.Documents(length);
  if (pad.defined()) {
    s = s.masked_fill(pad, kNegativeInfinity);
    a = a.masked_fill(pad, 0.0),
    u = u.masked_fill(pad, 0.0);  // whatever padding holds, NaN too, is not multiplied
  }

  // A chunk's products take 0 times every later token, and at the start of a document the memory
  // before it, which is NaN where that is not finite: then tokens are taken one by one.
  const bool finite = AllFinite(a) && AllFinite(u) && AllBelowInfinity(s) && AllFinite(x.memory);
  const int64_t chunk = finite ? kChunk : 1,
                pairs = s.size(0) * s.size(1) * s.size(3) * chunk * chunk,
                step = finite ? chunk * ChunksAtATime(pairs) : 1;
  at::Tensor m_prev = x.memory, z_prev = x.z;
  std::vector<at::Tensor> outs, zs;
  for (int64_t t0 = 0; t0 < length; t0 += step) {
    const int64_t count = std::min(step, length - t0);
    const at::Tensor sc = InChunks(s.narrow(2, t0, count), chunk, kNegativeInfinity),
                     uc = InChunks(u.narrow(2, t0, count), chunk, 0),
                     ac = InChunks(a.narrow(2, t0, count), chunk, 0);
    const int64_t chunks = sc.size(2);
    const auto causal = [&](int64_t n) {
      return at::ones({n, n}, s.options().dtype(at::kBool)).tril();  // [t,i]
    };
    at::Tensor seen = causal(chunk), chunks_seen = causal(chunks);
    at::Tensor hidden, chunks_hidden;  // where what was before the chunk, or the step, is not seen
    if (documents.defined()) {
      const at::Tensor given = documents.narrow(1, t0, count),
                       first = t0 > 0 ? documents.narrow(1, t0 - 1, 1)
                                      : at::zeros_like(given.narrow(1, 0, 1));  // [B,1]
      const at::Tensor doc =
          at::cat({given, given.narrow(1, count - 1, 1).expand({-1, chunks * chunk - count})}, 1)
              .unflatten(1, {chunks, chunk});            // [B,C,c]
      const at::Tensor last = doc.select(2, chunk - 1),  // [B,C]
          before = at::cat({first, last.narrow(1, 0, chunks - 1)}, 1);
      const auto heads = [](const at::Tensor& t) { return t.unsqueeze(1).unsqueeze(-1); };
      seen = heads(seen.logical_and(doc.unsqueeze(3) == doc.unsqueeze(2))).squeeze(-1);
      chunks_seen = chunks_seen.logical_and(last.unsqueeze(2) == last.unsqueeze(1)).unsqueeze(1);
      hidden = heads(doc != before.unsqueeze(2));  // [B,1,C,c,1]
      chunks_hidden = heads(last != first);        // [B,1,C,1]
      if (chunk == 1) m_prev = m_prev.masked_fill(chunks_hidden, 0.0);
    }
    // The state after each chunk, from what its last token sees of it and of the chunks before.
    const at::Tensor log_pairs = sc.unsqueeze(3).masked_fill(seen.logical_not().unsqueeze(-1),
                                                             kNegativeInfinity);  // [B,H,C,t,i,n]
    const Normalised own = Normalise(log_pairs.select(3, chunk - 1), {});
    const at::Tensor written = at::matmul(own.terms.transpose(3, 4).to(dtype), uc);  // [B,H,C,n,d]
    at::Tensor z_step = z_prev.unsqueeze(2).expand({-1, -1, chunks, -1});
    if (chunks_hidden.defined()) z_step = z_step.masked_fill(chunks_hidden, kNegativeInfinity);
    const Normalised after = Normalise(
        own.z.unsqueeze(2).masked_fill(chunks_seen.logical_not().unsqueeze(-1), kNegativeInfinity),
        z_step);  // of the chunks i before each chunk j, [B,H,j,i,n]
    const at::Tensor memory =
        after.before.unsqueeze(-1) * m_prev.unsqueeze(2) +
        at::einsum("bhjin,bhind->bhjnd", {after.terms, written.to(m_prev.scalar_type())});
    // Its tokens, from the state before it.
    at::Tensor z_before =
        BeforeChunks(after.z, z_prev).unsqueeze(3).expand({-1, -1, -1, chunk, -1});
    if (hidden.defined()) z_before = z_before.masked_fill(hidden, kNegativeInfinity);
    const Normalised all = Normalise(log_pairs, z_before);
    const at::Tensor decay = all.before.to(dtype), weights = all.terms.to(dtype),
                     m_seen = BeforeChunks(memory, m_prev).to(dtype);
    at::Tensor out;
    if (match) {
      const at::Tensor scores = at::matmul(ac, uc.transpose(3, 4));  // q_t . k_i
      out = decay * at::matmul(ac, m_seen.transpose(3, 4)) +
            at::einsum("bhcti,bhctil->bhctl", {scores, weights});
    } else {
      const at::Tensor scores = at::einsum("bhctl,bhctil->bhcti", {ac, weights});
      out = at::matmul(ac * decay, m_seen) + at::matmul(scores, uc);
    }
    outs.push_back(out.flatten(2, 3).narrow(2, 0, count));
    if (x.want_z) zs.push_back(all.z.flatten(2, 3).narrow(2, 0, count).to(x.s.scalar_type()));
    m_prev = memory.select(2, chunks - 1);
    z_prev = after.z.select(2, chunks - 1);
  }
  at::Tensor out =
      length > 0 ? at::cat(outs, 2) : (match ? at::zeros_like(x.s) : at::zeros_like(u));
  at::Tensor z_out = x.want_z ? (length > 0 ? at::cat(zs, 2) : at::zeros_like(x.s))
                              : at::empty({0}, x.s.options());
  if (pad.defined()) {
    out = out.masked_fill(pad, 0.0);
    if (x.want_z) z_out = z_out.masked_fill(pad, 0.0);
  }
  if (length == 0) {
    m_prev =
        m_prev.masked_fill((x.z == kNegativeInfinity).unsqueeze(-1), 0.0);  // as every step does
    z_prev = z_prev.clone();
  }
  return {out.to((match ? x.s : x.u).scalar_type()), m_prev, z_prev, z_out};
}

}  // namespace cistern::ops
