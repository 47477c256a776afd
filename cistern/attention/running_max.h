#pragma once
// Weights e^s over a sequence without overflow: a memory that holds sums of e^(s_i - m_t), where
// m_t is the largest s so far, decays by e^(m_(t-1) - m_t) at each step. Everything is [B,H,T,1] in
// double and differentiable.
#include "cistern/ops/mask.h"

namespace cistern {

// [B,H], -inf: nothing was written yet.
at::Tensor EmptyMax(int64_t batch, int64_t heads, const at::TensorOptions& options);

// For a causal pass. `last` is the maximum after the piece, of each row's last document.
struct RunningMaxResult {
  at::Tensor weight;    // e^(s_t - m_t)
  at::Tensor log_gate;  // m_(t-1) - m_t <= 0; -inf where nothing was written before, 0 where a
                        // document begins and at padding
  at::Tensor last;
};
RunningMaxResult RunningMax(const at::Tensor& s, const at::Tensor& before, const ops::Mask& mask);

// For writing a piece at once: weight e^(s_t - m) with m the maximum of the piece and what was
// before, whose memory is multiplied by `decay`.
struct PieceMaxResult {
  at::Tensor weight, decay, last;  // decay [B,H,1,1]
};
PieceMaxResult PieceMax(const at::Tensor& s, const at::Tensor& before,
                        const ops::Mask& mask);  // mask: no starts

// For merging two memories: what each is multiplied by, [B,H,1,1].
struct PairMaxResult {
  at::Tensor first, second, last;
};
PairMaxResult PairMax(const at::Tensor& first, const at::Tensor& second);

}  // namespace cistern
