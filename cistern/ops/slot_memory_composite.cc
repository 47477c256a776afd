#include "cistern/ops/slot_memory_composite.h"

#include <ATen/ATen.h>

#include <limits>

#include "cistern/ops/finite.h"

namespace cistern::ops {
namespace {

constexpr int64_t kChunk =
    16;  // e^{s_i - m_t} is formed for every pair inside a chunk: every exponent is <= 0
constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

}  // namespace

std::vector<at::Tensor> SlotMemoryComposite(bool match, const SlotArguments& x) {
  const int64_t length = x.u.size(2);
  const auto dtype = x.u.scalar_type();
  at::Tensor a = x.a, s = x.s.to(at::kDouble), u = x.u;
  const at::Tensor pad = x.mask.HeadsPadding(length), documents = x.mask.Documents(length);
  if (pad.defined()) {
    s = s.masked_fill(pad, kNegativeInfinity);
    a = a.masked_fill(pad, 0.0),
    u = u.masked_fill(pad, 0.0);  // whatever padding holds, NaN too, is not multiplied
  }

  // A chunk's products take 0 times every later token, which is NaN where that is not finite: then
  // tokens are taken one by one.
  const int64_t chunk = AllFinite(a) && AllFinite(u) && AllBelowInfinity(s) ? kChunk : 1;
  at::Tensor m_prev = x.memory, z_prev = x.z;
  std::vector<at::Tensor> outs, zs;
  for (int64_t t0 = 0; t0 < length; t0 += chunk) {
    const int64_t c = std::min(chunk, length - t0);
    const at::Tensor sc = s.narrow(2, t0, c), uc = u.narrow(2, t0, c), ac = a.narrow(2, t0, c);
    at::Tensor seen = at::ones({c, c}, s.options().dtype(at::kBool)).tril();  // [t,i]
    at::Tensor z_before =
        z_prev.unsqueeze(2).expand({-1, -1, c, -1});  // what token t still sees of it  [B,H,c,n]
    if (documents.defined()) {
      const at::Tensor doc = documents.narrow(1, t0, c);
      seen = seen.logical_and(doc.unsqueeze(2) == doc.unsqueeze(1)).unsqueeze(1);  // [B,1,t,i]
      const at::Tensor before =
          t0 > 0 ? documents.narrow(1, t0 - 1, 1) : at::zeros_like(doc.narrow(1, 0, 1));
      const at::Tensor gone = (doc != before).unsqueeze(1).unsqueeze(-1);  // [B,1,c,1]
      z_before = z_before.masked_fill(gone, kNegativeInfinity);
      if (chunk == 1) m_prev = m_prev.masked_fill(gone, 0.0);
    }
    const at::Tensor log_pairs = sc.unsqueeze(2).masked_fill(seen.logical_not().unsqueeze(-1),
                                                             kNegativeInfinity);  // [B,H,t,i,n]
    // m_t: a finite reference, the largest log-weight that t sees. The result does not depend on
    // it, so it carries no gradient.
    at::Tensor m = at::maximum(log_pairs.detach().amax(3), z_before.detach());
    m = m.masked_fill(m == kNegativeInfinity, 0.0);
    const at::Tensor from_before = (z_before - m).exp();
    const at::Tensor pairs = (log_pairs - m.unsqueeze(3)).exp();
    const at::Tensor alpha = from_before + pairs.sum(3);
    const at::Tensor safe = alpha.masked_fill(alpha == 0, 1.0);
    const at::Tensor kept = from_before / safe, decay = kept.to(dtype), m_seen = m_prev.to(dtype);
    const at::Tensor weights = (pairs / safe.unsqueeze(3)).to(dtype);  // e^{s_i - z_t}
    if (match) {
      const at::Tensor scores = at::matmul(ac, uc.transpose(2, 3));  // q_t . k_i
      outs.push_back(decay * at::matmul(ac, m_seen.transpose(2, 3)) +
                     at::einsum("bhti,bhtil->bhtl", {scores, weights}));
    } else {
      const at::Tensor scores = at::einsum("bhtl,bhtil->bhti", {ac, weights});
      outs.push_back(at::matmul(ac * decay, m_seen) + at::matmul(scores, uc));
    }
    const at::Tensor z =
        at::where(alpha > 0, m + safe.log(), at::full({}, kNegativeInfinity, alpha.options()));
    if (x.want_z) zs.push_back(z.to(x.s.scalar_type()));
    m_prev = kept.select(2, c - 1).unsqueeze(-1) * m_prev +
             at::matmul(weights.select(2, c - 1).transpose(2, 3), uc);
    z_prev = z.select(2, c - 1);
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
  return {out, m_prev, z_prev, z_out};
}

}  // namespace cistern::ops
