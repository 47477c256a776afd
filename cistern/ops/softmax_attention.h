#pragma once
// Exact softmax attention with masks for caches, padding and packed rows: by our kernels
// (ops/exact_attention.h); with a bias by torch's fused attention, and with both in blocks.
// Differentiable as often as wanted: gradients with a graph of their own (create_graph) form the
// probabilities explicitly.
#include <ATen/core/Tensor.h>

#include "cistern/ops/mask.h"

namespace cistern::ops {

struct SoftmaxOptions {
  bool causal = false;
  int64_t query_offset =
      0;  // causal: query row t sees keys 0 .. query_offset + t (query_offset = cached keys)
  double dropout = 0;    // on the probabilities, training only; one draw from torch's generator
  double scale = 0;      // 0: 1/sqrt(d)
  at::Tensor bias = {};  // [1 or B,1 or H,T,S], added to the scaled scores of what is seen; where
                         // it needs a gradient the probabilities are formed explicitly
};

// The lowest number of a floating type that scores have, at most that of a float: a score that is
// left out, so that a row of them has finite gradients.
double LowestOf(at::ScalarType type);

// q [B,H,T,d], k, v [B,H,S,d] -> [B,H,T,d].
//   mask: with T == S, or without starts, its lengths and valid tokens are of the keys; with a
//   cache the padding follows from key_valid. mask.starts [B,T]: documents begin there; the S - T
//   keys before the piece belong to the document before its first start. key_valid [B,S] bool:
//   false where a key must not be seen; undefined: all are.
// A row that sees no key gives zeros, with zero gradient. CISTERN_IMPL=composite forms the
// probabilities explicitly; reference does so in double.
at::Tensor SoftmaxAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const SoftmaxOptions& options, const Mask& mask = {},
                            const at::Tensor& key_valid = {});

// softmax(q k^T scale) over the keys that each query sees: [B,H,T,S], formed explicitly, whatever
// the implementation. Rows that see no key are zero. options.dropout is left to ApplyProbabilities.
at::Tensor AttentionProbabilities(const at::Tensor& q, const at::Tensor& k,
                                  const SoftmaxOptions& options, const Mask& mask = {},
                                  const at::Tensor& key_valid = {});

// dropout(p) v: p [B,H,T,S], v [B,H,S,e] -> [B,H,T,e].
at::Tensor ApplyProbabilities(const at::Tensor& p, const at::Tensor& v, double dropout);

// SoftmaxAttention with the mask given: visible [B or 1, 1, T, S] bool, true where a query sees a
// key; undefined: all do. bias: as in SoftmaxOptions.
at::Tensor MaskedAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& visible, double scale, double dropout,
                           const at::Tensor& bias = {});

}  // namespace cistern::ops
