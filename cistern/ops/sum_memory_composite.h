#pragma once
// The summing slot memory in plain ATen operations, for any device and dtype, differentiated by
// autograd (ops/sum_memory.h documents the shapes).
#include <tuple>

#include "cistern/ops/tensor_rows.h"

namespace cistern::ops {

using Tensor2 = std::tuple<at::Tensor, at::Tensor>;  // out, memory

// Log-gates below this are gates of exactly 0: e^x of a double is 0 there.
inline constexpr double kZeroGate = -746;

// match = false: a = r [B,H,T,n], u = v [B,H,T,d]; match = true: a = q [B,H,T,d], u = k [B,H,T,d].
// w [B,H,T,n], log_gate [B,H,T,n], [B,H,T,1] or none.
Tensor2 SumMemoryComposite(bool match, const at::Tensor& a, const at::Tensor& w,
                           const at::Tensor& u, const at::Tensor& memory,
                           const OptionalTensor& log_gate, const OptionalTensor& starts,
                           const OptionalTensor& lengths);

}  // namespace cistern::ops
