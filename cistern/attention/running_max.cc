#include "cistern/attention/running_max.h"

#include <ATen/ATen.h>

#include <limits>

namespace cistern {
namespace {

constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

at::Tensor Heads(const at::Tensor& rows) {
  return rows.unsqueeze(1).unsqueeze(-1);
}  // [B,T] -> [B,1,T,1]

// e^(a - b), and 1 where both are -inf.
at::Tensor Ratio(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor none = b == kNegativeInfinity;
  return at::where(none, at::zeros_like(a), a - b.masked_fill(none, 0.0)).exp();
}

// Running maximum of m [B,H,T,1] inside runs of equal `document` [B,T]: log2(T) steps, each
// doubling what a row has seen.
at::Tensor MaxInDocuments(at::Tensor m, const at::Tensor& document) {
  const int64_t length = m.size(2);
  for (int64_t shift = 1; shift < length; shift *= 2) {
    const at::Tensor same =
        Heads(document.narrow(1, shift, length - shift) == document.narrow(1, 0, length - shift));
    const at::Tensor earlier =
        m.narrow(2, 0, length - shift).masked_fill(same.logical_not(), kNegativeInfinity);
    m = at::cat({m.narrow(2, 0, shift), at::maximum(m.narrow(2, shift, length - shift), earlier)},
                2);
  }
  return m;
}

}  // namespace

at::Tensor EmptyMax(int64_t batch, int64_t heads, const at::TensorOptions& options) {
  return at::full({batch, heads}, kNegativeInfinity, options.dtype(at::kDouble));
}

RunningMaxResult RunningMax(const at::Tensor& s, const at::Tensor& before, const ops::Mask& mask) {
  const int64_t length = s.size(2);
  const at::Tensor pad = mask.HeadsPadding(length), first = before.unsqueeze(-1).unsqueeze(-1);
  const at::Tensor real = pad.defined() ? s.masked_fill(pad, kNegativeInfinity) : s;
  at::Tensor m = at::cat({first, real}, 2), restart;  // m: row 0 is what came before
  if (mask.starts) {
    restart = mask.RealStarts(length);
    m = MaxInDocuments(m, at::cat({at::zeros({s.size(0), 1}, restart.options().dtype(at::kLong)),
                                   restart.to(at::kLong).cumsum(1)},
                                  1));
  } else {
    m = std::get<0>(at::cummax(m, 2));
  }
  const at::Tensor now = m.narrow(2, 1, length);
  at::Tensor ignored =
      restart.defined() ? Heads(restart) : at::Tensor();  // where the gate has no say
  at::Tensor exponent = s - now, log_gate = m.narrow(2, 0, length) - now;
  if (pad.defined()) {
    exponent = at::where(pad, at::zeros_like(exponent), exponent);
    ignored = ignored.defined() ? ignored.logical_or(pad) : pad;
  }
  if (ignored.defined()) log_gate = at::where(ignored, at::zeros_like(log_gate), log_gate);
  return {exponent.exp(), log_gate, m.select(2, length).squeeze(-1)};
}

PieceMaxResult PieceMax(const at::Tensor& s, const at::Tensor& before, const ops::Mask& mask) {
  const at::Tensor pad = mask.HeadsPadding(s.size(2)), first = before.unsqueeze(-1).unsqueeze(-1);
  const at::Tensor real = pad.defined() ? s.masked_fill(pad, kNegativeInfinity) : s;
  const at::Tensor last = at::cat({first, real}, 2).amax(2, true);
  at::Tensor exponent = s - last;
  if (pad.defined()) exponent = at::where(pad, at::zeros_like(exponent), exponent);
  return {exponent.exp(), Ratio(first, last), last.squeeze(-1).squeeze(-1)};
}

PairMaxResult PairMax(const at::Tensor& first, const at::Tensor& second) {
  const at::Tensor last = at::maximum(first, second);
  auto ratio = [&](const at::Tensor& m) { return Ratio(m, last).unsqueeze(-1).unsqueeze(-1); };
  return {ratio(first), ratio(second), last};
}

}  // namespace cistern
