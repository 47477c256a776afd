#pragma once
// What softmax_attention.cc and blockwise_attention.cc have in common.
#include <ATen/core/Tensor.h>

#include "cistern/kernels/dropout.h"

namespace cistern::ops::softmax_attention {

// The definition: softmax(q k^T scale + bias) over the visible keys, formed explicitly; rows
// without one are zero. visible [B or 1,1,T or 1,S] bool and bias may be undefined.
at::Tensor Probabilities(const at::Tensor& q, const at::Tensor& k, const at::Tensor& visible,
                         double scale, const at::Tensor& bias);

// p [B,H,rows,S] of the queries from `first` on, with what is dropped zero and the rest divided by
// 1 - rate: as the kernel of exact attention drops, on the CPU; by torch elsewhere.
at::Tensor Dropped(const at::Tensor& p, const DropoutDraw& dropout, int64_t first = 0);

}  // namespace cistern::ops::softmax_attention
