#pragma once
// The feed-forward with GELU as one operation, which walks over blocks of rows that stay in the
// cache from map to map.
#include <ATen/core/Tensor.h>

namespace cistern::ops {

// The maps of a feed-forward: up [H,D] and down [D,H], with biases [H] and [D] or undefined ones.
struct FeedForwardMaps {
  at::Tensor up, up_bias, down, down_bias;
};

// Dropout (dropout.h) of what the activation gives and of what is added to the residual; 0 outside
// of training.
struct FeedForwardDropout {
  double hidden = 0, out = 0;
};

// y = residual + drop(W_down drop(gelu(W_up x + b_up)) + b_down); x and residual [...,D], with
// dropout [B,...,D]. Differentiable any number of times. O(rows D H) time.
//
// In float on the CPU nothing is kept for the backward pass but x and W_up x + b_up, without a
// gradient not even that: what the activation gives is formed again, block by block, with its
// gradient, and what was dropped of both is drawn again. Elsewhere it is LinearProduct, Gelu,
// Dropout and AddResidual, one after another, which drop the same.
at::Tensor GeluFeedForward(const at::Tensor& x, const FeedForwardMaps& maps,
                           const at::Tensor& residual, const FeedForwardDropout& dropout = {});

}  // namespace cistern::ops
