#pragma once
// Positions of tokens: learned, sinusoidal (added to the embedding) or rotary (turns queries and
// keys).
#include <torch/nn/module.h>

#include "cistern/attention/position_kind.h"

namespace cistern {

// Adds positions to embeddings. Sinusoids interleave sin and cos (10000^(-2i/D)) and are computed
// on demand: no longest length. Sinusoids in halves are fairseq's (Luna): all sines, then all
// cosines, with the rates 10000^(-i/(D/2 - 1)); both count from 0.
class PositionEmbedding : public torch::nn::Module {
 public:
  PositionEmbedding(PositionKind kind, int64_t width, int64_t max_length, double std);
  // x [B,T,D], positions [1 or B,T] int64. A learned table longer than max_length is an Error.
  at::Tensor Forward(const at::Tensor& x, const at::Tensor& positions) const;

 private:
  PositionKind kind_;
  int64_t max_length_;
  at::Tensor weight_;
};

// The cosines of rotary angles, then their sines, of `type`: [1 or B,T,width] for positions
// [1 or B,T], what ops::Rotary takes. On the halves convention: channel j pairs with channel
// j + width/2. In double until then: exact to far beyond a million tokens.
at::Tensor RotaryTable(const at::Tensor& positions, int64_t width, at::ScalarType type);

}  // namespace cistern
