#pragma once
// The feed-forward with GELU as one operation, which walks over blocks of rows that stay in the
// cache from map to map.
#include <ATen/core/Tensor.h>

namespace cistern::ops {

// The maps of a feed-forward: up [H,D] and down [D,H], with biases [H] and [D] or undefined ones.
struct FeedForwardMaps {
  at::Tensor up, up_bias, down, down_bias;
};

// y = residual + W_down gelu(W_up x + b_up) + b_down; x and residual [...,D]. Differentiable any
// number of times. O(rows D H) time.
//
// In float on the CPU nothing is kept for the backward pass but x and W_up x + b_up, without a
// gradient not even that: what the activation gives is formed again, block by block, with its
// gradient. Elsewhere it is LinearProduct, Gelu and AddResidual, one after another.
at::Tensor GeluFeedForward(const at::Tensor& x, const FeedForwardMaps& maps,
                           const at::Tensor& residual);

}  // namespace cistern::ops
