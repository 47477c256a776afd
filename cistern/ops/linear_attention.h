#pragma once
// Causal linear attention, fused (kernels/linear_attention.h has the algebra): the same as a
// composition of feature map, SumRead over values with a column of ones, and division, in one walk
// over the tokens. Differentiable in every tensor, the memory in and out included.
#include "cistern/kernels/linear_attention.h"
#include "cistern/ops/sum_memory.h"

namespace cistern::ops {

// q, k [B,H,T,n], v [B,H,T,d], memory double [B,H,n,d+1], or [B,H,n,d] with DivisorRule::kNone ->
// out [B,H,T,d]. The last column of the memory is z. mask.lengths: padding is skipped, its output
// and gradients are 0. mask.starts: the memory is emptied before that token.
SumResult LinearAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& memory, const LinearRule& rule, const Mask& mask = {});

// The same for a memory that goes on: it becomes the one after. Where the caller's handle is the
// only one and no gradient is recorded, it is written in place (in_place.h): no copy.
at::Tensor LinearExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        at::Tensor& memory, const LinearRule& rule, const Mask& mask = {});

// All tokens at once (kernels/linear_bidirectional.h), differentiable: memory + sum_t phi(k_t) (x)
// [v_t, 1], shapes as above (mask.starts is refused); and phi(q) S over the divisor of phi(q) . z.
at::Tensor LinearWrite(const at::Tensor& k, const at::Tensor& v, const at::Tensor& memory,
                       const LinearRule& rule, const Mask& mask = {});
at::Tensor LinearRead(const at::Tensor& q, const at::Tensor& memory, const LinearRule& rule);

// The parts of the composition, differentiable.
// elu(x) + 1: x + 1 for x > 0, else e^x.
at::Tensor EluPlusOne(const at::Tensor& x);
// The values with the column of ones that becomes z.
at::Tensor WithOnes(const at::Tensor& v, DivisorRule rule);
// sums [..,d+1], or [..,d] with kNone, -> [..,d]: all but the last column over the divisor of that.
at::Tensor DivideSums(const at::Tensor& sums, DivisorRule rule, double value);

}  // namespace cistern::ops
