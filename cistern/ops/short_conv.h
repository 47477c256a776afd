#pragma once
// Short convolution over time, one filter per channel, as a differentiable op
// (kernels/short_conv.h).
#include <ATen/core/Tensor.h>

#include <tuple>

#include "cistern/ops/mask.h"

namespace cistern::ops {

// x [B,T,C], weight [C,K], state [B,K-1,C] (the last inputs before x; zeros when empty) -> (y
// [B,T,C], the state after). y[b,t,c] = sum_j weight[c,j] x[b,t-(K-1)+j+ahead,c]: causal with ahead
// = 0, at most K-1, an error above 0 where mask has document starts. Taps never cross a document
// start; padding and tokens after the last count as zeros; padding gives 0 and leaves the state
// alone.
std::tuple<at::Tensor, at::Tensor> ShortConv(const at::Tensor& x, const at::Tensor& weight,
                                             const at::Tensor& state, const Mask& mask = {},
                                             int64_t ahead = 0);

}  // namespace cistern::ops
