#pragma once
// Torch's fused attention (scaled_dot_product_attention), with the second derivatives that its
// flash kernel for the CPU lacks. For .cc files of this layer.
#include <ATen/core/Tensor.h>

namespace cistern::ops {

// softmax(q k^T scale + bias) v: q [B,H,T,d], k [B,H,S,d], v [B,H,S,e] -> [B,H,T,e].
//   bias, if defined, broadcasts to [B,H,T,S] and is 0 where a query sees a key and -inf where it
//   does not; every query has to see one. causal: query t sees the keys 0 .. t; not with a bias.
// The gradients are torch's own, bit for bit; where they shall be differentiated again
// (create_graph), those of the probabilities formed explicitly: O(T S) memory.
at::Tensor FlashAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& bias, bool causal, double scale);

}  // namespace cistern::ops
