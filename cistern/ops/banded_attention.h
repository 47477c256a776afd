#pragma once
// Exact softmax attention inside a band: a query sees the keys near it. Time and memory are
// O(T (before + after + 64) d) and no [T,T] mask exists: the kernel (ops/exact_attention.h) visits
// the tiles of the band alone; in the composite blocks of queries meet the keys of their own and
// the next block. With dropout the composite forms the [T,S] probabilities.
#include <ATen/core/Tensor.h>

namespace cistern::ops {

struct Band {
  int64_t before = 0, after = 0;  // a query at key row s sees the key rows s - before .. s + after
  int64_t lead = 0;               // query t stands at key row lead + t
  // A query that sees fewer keys than this, itself and those before it, sees zeros in the places of
  // the others: keys of logit 0 and value 0. At most before + 1; 0: it sees nothing else.
  int64_t slots = 0;
  // A query sees the rows of these at distances that are multiples of this, as a band of every
  // dilation-th row: before, after and slots count such rows. It divides `lead`.
  int64_t dilation = 1;
};

// q [B,H,T,d], k, v [B,H,lead+T,d] -> [B,H,T,d]. documents [B or 1, lead+T] int64: a query sees the
// keys of its own document alone, whose rows stand together, none where it is negative (padding);
// undefined: all rows are one document. A query that sees no key gives zeros, with zero gradient.
// Implementations as SoftmaxAttention (ops/softmax_attention.h).
at::Tensor BandedAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const Band& band, const at::Tensor& documents, double scale,
                           double dropout);

}  // namespace cistern::ops
