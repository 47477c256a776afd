#pragma once
// What the backward of a write of all tokens takes (kernels/slot_bidirectional.h), and what it
// gives to the state before it. For .cc files of this layer.
#include "cistern/ops/primitive.h"

namespace cistern::ops {

struct WrittenTerms {
  // Gradients of the memory and z after the write, undefined: zeros; the state before and after.
  WrittenTerms(const at::Tensor& given_memory, const at::Tensor& given_z, const at::Tensor& memory,
               const at::Tensor& z, const at::Tensor& memory_after, const at::Tensor& z_afterwards,
               at::ScalarType type)
      : memory_(memory),
        d_memory_(OrZeros(given_memory, memory)),
        h_((d_memory_ * memory_after).sum(-1)),
        // The share of what was there before; of an empty slot none.
        before_((z - z_afterwards).exp().masked_fill(at::isneginf(z), 0.0)) {
    if (given_z.defined()) h_ = h_ - given_z;
    G = d_memory_.to(type, false, true, at::MemoryFormat::Contiguous);
    h = h_.to(type).contiguous();
    z_after = z_afterwards.contiguous();
  }
  at::Tensor DMemory() const { return before_.unsqueeze(-1) * d_memory_; }
  at::Tensor DZ() const { return before_ * ((d_memory_ * memory_).sum(-1) - h_); }

  at::Tensor G, h, z_after;  // G, h in the type of the tokens' arithmetic

 private:
  at::Tensor memory_, d_memory_, h_, before_;
};

}  // namespace cistern::ops
