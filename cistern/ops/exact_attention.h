#pragma once
// Exact softmax attention by our own kernels (kernels/exact_attention.h has what they promise), for
// masks that are ranges of keys: causal, windows, dilated windows, documents, lengths.
#include <ATen/core/Tensor.h>

#include "cistern/kernels/dropout.h"

namespace cistern::ops {

struct SeenKeys {
  // [B or 1,T,3] int64: the keys begin .. end - 1 that a query sees, and how many keys of score 0
  // and value 0 beside them. Undefined: all keys.
  at::Tensor ranges = {};
  at::Tensor valid = {};  // [B,S] bool: false where no query sees a key; undefined: all are seen
  int64_t dilation = 1;   // query t sees keys t modulo this; it divides S - T
};

// out_t = sum_j softmax_j(scale q_t . k_j) v_j: q [B,H,T,d], k [B,H,S,d], v [B,H,S,e] -> [B,H,T,e].
// `dropout` is of the probabilities: what its seed drops, it drops in every implementation.
// A query that sees no key gives zeros, with zero gradient. What a query does not see has no part
// in any bit of its output, be it NaN; what it sees and is NaN makes it NaN. Gradients of q, k, v;
// second derivatives form the probabilities explicitly: O(T S) memory. Of tokens in bfloat16
// products are in bfloat16 where the processor has them (MultipliesBFloat16), else in float; sums
// and the softmax are float, the output and gradients are rounded once.
at::Tensor ExactAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          double scale, const SeenKeys& seen = {}, const DropoutDraw& dropout = {});

// Whether ExactAttention has a kernel for q, k and v and CISTERN_IMPL=kernel; not where
// forward-mode derivatives are wanted.
bool HasExactKernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

// Whether tokens in bfloat16 cost attention no more than float's: with CISTERN_IMPL=kernel, whose
// kernels take them as they are stored.
bool AttendsToBFloat16();
// Whether they cost it less, in products of bfloat16.
bool MultipliesBFloat16();
// In which type torch's products take such tokens: on the CPU, bfloat16 only where it multiplies
// it, else float.
at::ScalarType ProductTypeOf(const at::Tensor& tokens);

}  // namespace cistern::ops
