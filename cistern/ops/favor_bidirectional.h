#pragma once
// FAVOR+ of all tokens at once (kernels/favor_attention.h): bidirectional and cross attention from
// queries and keys. The logarithms of their features are formed where tokens are read.
#include "cistern/ops/slot_memory.h"

namespace cistern::ops {

// SlotWrite (slot_memory.h) with the log-weights matrix k'^T - |k'|^2 / 2, k' = scale k: k
// [B,H,T,d_k], v [B,H,T,d], matrix [n,d_k], with whose gradient it is composed; mask.starts is
// refused.
SlotState FavorWrite(const at::Tensor& k, const at::Tensor& v, const at::Tensor& matrix,
                     double scale, const SlotState& state, const Mask& mask = {});

// softmax(matrix q'^T + z) over the slots times the memory -> [B,H,T,d]. Slots with z = -inf take
// no part; an empty memory reads 0.
at::Tensor FavorRead(const at::Tensor& q, const at::Tensor& matrix, double scale,
                     const SlotState& state);

}  // namespace cistern::ops
