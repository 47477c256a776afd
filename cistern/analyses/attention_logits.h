#pragma once
// What a softmax takes the exponential of, by its own formula and in double: packing's logits of a
// memory stream (slots attend to tokens), and those of exact softmax attention (tokens attend to
// tokens). P000 compares their variances.
#include <optional>

#include "cistern/analyses/captured_layers.h"

namespace cistern {

struct AttentionLogits {
  at::Tensor values;   // [G,Q,K] double, after the divisor; -inf: a key that is not seen
  double divisor = 1;  // of the products q . k
};

// Whether packing's keys and values are the largest of each channel over some tokens (conv_luna's
// filter=maxpool), which no weights of the tokens make.
bool FiltersByMaximum(const CapturedLayer& layer);

// Of one row: slots over its real tokens, or over what conv_luna's filter makes of them. Checked:
// Error where their softmax does not pack what the layer packed. nullopt: of shared_workspace,
// whose packing is of another kind. O(G M T d).
std::optional<AttentionLogits> PackingLogits(const CapturedLayer& layer, int64_t row);

// Of the real queries of one row of a layer of exact softmax, [H,T,T]. nullopt: of other layers, of
// cross attention, of relative positions and of rows of several documents. O(H T^2 d).
std::optional<AttentionLogits> SoftmaxLogits(const CapturedLayer& layer, int64_t row);

// Means over the queries of [G,Q,K]; queries that see fewer than two keys do not count, and NaN is
// where none does.
struct LogitFigures {
  double entropy = 0;   // of their softmax / ln(keys that the query sees); 1: uniform
  double variance = 0;  // of a query's logits over the keys that it sees
};
LogitFigures FiguresOf(const at::Tensor& logits);

}  // namespace cistern
