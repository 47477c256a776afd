#pragma once
// What the primitives of the slot memory check alike. For .cc files of this layer.
#include <ATen/core/Tensor.h>

namespace cistern::ops {

// weights [B,H,T,n], rows [B,H,T,d], memory [B,H,n,d] and z [B,H,n] (null: none) in double; op as
// in "[slot_read]", the names as the op's arguments.
inline void CheckSlots(const char* op, const char* weights_name, const at::Tensor& weights,
                       const char* rows_name, const at::Tensor& rows, const at::Tensor& memory,
                       const at::Tensor* z) {
  TORCH_CHECK(weights.dim() == 4, op, " expected ", weights_name, " of shape [B,H,T,n], got ",
              weights.sym_sizes());
  TORCH_CHECK(rows.dim() == 4 && rows.sym_sizes().slice(0, 3) == weights.sym_sizes().slice(0, 3),
              op, " expected ", rows_name, " of shape [B,H,T,d] with the B, H, T of ", weights_name,
              " ", weights.sym_sizes(), ", got ", rows.sym_sizes());
  TORCH_CHECK(
      memory.dim() == 4 && memory.sym_sizes().slice(0, 2) == weights.sym_sizes().slice(0, 2) &&
          memory.sym_size(2) == weights.sym_size(3) && memory.sym_size(3) == rows.sym_size(3),
      op, " expected memory of shape [B,H,n,d] for ", weights_name, " ", weights.sym_sizes(),
      " and ", rows_name, " ", rows.sym_sizes(), ", got ", memory.sym_sizes());
  if (!z) {
    TORCH_CHECK(memory.scalar_type() == at::kDouble, op, " expected memory in double, got ",
                memory.scalar_type());
    return;
  }
  TORCH_CHECK(z->dim() == 3 && z->sym_sizes() == memory.sym_sizes().slice(0, 3), op,
              " expected z of shape [B,H,n], got ", z->sym_sizes());
  TORCH_CHECK(memory.scalar_type() == at::kDouble && z->scalar_type() == at::kDouble, op,
              " expected memory and z in double, got ", memory.scalar_type(), " and ",
              z->scalar_type());
}

}  // namespace cistern::ops
