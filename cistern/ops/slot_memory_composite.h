#pragma once
// The slot memory in plain ATen operations, for any device and dtype, differentiated by autograd
// (ops/slot_memory.h documents the shapes).
#include <tuple>

#include "cistern/ops/tensor_rows.h"

namespace cistern::ops {

using Tensor4 =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;  // out, memory, z, z_out

// match = false: a = r [B,H,T,n], u = v [B,H,T,d]; match = true: a = q [B,H,T,d], u = k [B,H,T,d].
Tensor4 SlotMemoryComposite(bool match, const at::Tensor& a, const at::Tensor& s,
                            const at::Tensor& u, const at::Tensor& memory, const at::Tensor& z,
                            const OptionalTensor& starts, const OptionalTensor& lengths,
                            bool want_z);

}  // namespace cistern::ops
