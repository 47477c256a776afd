#pragma once
// The slot memory in plain ATen operations, for any device and dtype, differentiated by autograd
// (ops/slot_memory.h documents the shapes).
#include <vector>

#include "cistern/ops/slot_memory.h"

namespace cistern::ops {

// What slot_read and slot_match take: a = r [B,H,T,n], u = v [B,H,T,d]; or a = q [B,H,T,d], u = k
// [B,H,T,d].
struct SlotArguments {
  at::Tensor a, s, u, memory, z;
  Mask mask;
  bool want_z = false;
};

// -> out, memory, z, z_out; the last one empty unless asked for.
std::vector<at::Tensor> SlotMemoryComposite(bool match, const SlotArguments& x);

}  // namespace cistern::ops
