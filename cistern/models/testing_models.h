#pragma once
// For tests: a language model run piece by piece.
#include "cistern/models/decoder_lm.h"
#include "cistern/ops/testing.h"

namespace cistern::testing {

// Logits [B,T,V] of ids [B,T], extended piece by piece from the empty state; cuts begin with 0 and end with the length.
inline at::Tensor ExtendModel(DecoderLm& m, const at::Tensor& ids, const std::vector<int64_t>& cuts, const ops::Mask& mask = {},
                              ModelState* state_out = nullptr) {
  ModelState state = m.EmptyState(ids.size(0));
  std::vector<at::Tensor> outs;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t begin = cuts[i], count = cuts[i + 1] - begin;
    ops::Mask piece;
    if (mask.lengths) piece.lengths = (*mask.lengths - begin).clamp(0, count);
    if (mask.starts) piece.starts = mask.starts->narrow(1, begin, count);
    outs.push_back(m.Extend(ids.narrow(1, begin, count), state, piece));
  }
  if (state_out) *state_out = state;
  return at::cat(outs, 1);
}

}  // namespace cistern::testing
