#pragma once
// The summing slot memory in plain ATen operations, for any device and dtype, differentiated by
// autograd (ops/sum_memory.h documents the shapes).
#include <vector>

#include "cistern/ops/sum_memory.h"

namespace cistern::ops {

// Log-gates below this are gates of exactly 0: e^x of a double is 0 there.
inline constexpr double kZeroGate = -746;

// What sum_read and sum_match take: a = r [B,H,T,n], u = v [B,H,T,d]; or a = q [B,H,T,d], u = k
// [B,H,T,d]. w [B,H,T,n], log_gate [B,H,T,n], [B,H,T,1] or none.
struct SumArguments {
  at::Tensor a, w, u, memory;
  std::optional<at::Tensor> log_gate;
  Mask mask;
};

// -> out, memory
std::vector<at::Tensor> SumMemoryComposite(bool match, const SumArguments& x);

}  // namespace cistern::ops
