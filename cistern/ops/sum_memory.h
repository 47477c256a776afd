#pragma once
// The slot memory in raw and gated mode as differentiable ops: slots that hold weighted sums
// (spec 2.19; kernels/sum_memory.h has the algebra). The exp mode, whose slots hold means, is in
// slot_memory.h.
//
//   M_t = e^{lg_t} M_{t-1} + w_t (x) u_t
//
// for each batch row, head and slot. lg is the log-gate; absent, it is 0 (raw mode, plain sums).
// The write weights w may have any sign; lg <= 0, and lg = -inf empties the slot before the write.
// Normalisation is the caller's: a column of ones appended to v makes the running sum of the
// weights the last column of the memory.
//
// The memory is double whatever the dtype of the inputs, because a float sum of ones stops growing
// at 2^24 tokens. Inputs share one dtype; products inside a chunk are in that dtype (float for half
// precision). Beside tokens (v, q, k) in bfloat16, weights and gates may be in float; what is
// matched is in the weights' type. mask.lengths: padding is skipped: no gate, no write, output 0
// and zero gradient. mask.starts: the memory is emptied before that token, so the token's own gate
// has zero gradient. Time O(T n d); autograd keeps the inputs and two memories.
#include "cistern/ops/slot_memory.h"

namespace cistern::ops {

struct SumResult {
  at::Tensor out;
  at::Tensor memory;  // [B,H,n,d] double, after the last token
};

// Double zeros [B,H,n,d] on the device of `options`, whose dtype is ignored.
at::Tensor EmptySums(int64_t batch, int64_t heads, int64_t slots, int64_t width,
                     const at::TensorOptions& options);

// Causal: each token is written, then reads. Differentiable in every tensor, the memory in and out
// included. log_gate: [B,H,T,n], [B,H,T,1] for one gate per token, or undefined. out[t] = sum_l
// r[t,l] M_t[l].    r, w [B,H,T,n], v [B,H,T,d], memory [B,H,n,d] -> out [B,H,T,d]
SumResult SumRead(const at::Tensor& r, const at::Tensor& w, const at::Tensor& v,
                  const at::Tensor& memory, const Mask& mask = {}, const at::Tensor& log_gate = {});
// out[t,l] = q[t] . M_t[l].        q, k [B,H,T,d], w [B,H,T,n], memory [B,H,n,d] -> out [B,H,T,n]
SumResult SumMatch(const at::Tensor& q, const at::Tensor& w, const at::Tensor& k,
                   const at::Tensor& memory, const Mask& mask = {},
                   const at::Tensor& log_gate = {});

// The same for a memory that goes on: it becomes the one after. Where the caller's handle is the
// only one and no gradient is recorded, it is written in place (in_place.h): no copy.
at::Tensor SumReadExtend(const at::Tensor& r, const at::Tensor& w, const at::Tensor& v,
                         at::Tensor& memory, const Mask& mask = {},
                         const at::Tensor& log_gate = {});
at::Tensor SumMatchExtend(const at::Tensor& q, const at::Tensor& w, const at::Tensor& k,
                          at::Tensor& memory, const Mask& mask = {},
                          const at::Tensor& log_gate = {});

// Writes a whole piece and returns the memory after it. O(T n d), plain ATen. A memory holds one
// document: mask.starts is an error.
at::Tensor SumWrite(const at::Tensor& w, const at::Tensor& v, const at::Tensor& memory,
                    const Mask& mask = {}, const at::Tensor& log_gate = {});

}  // namespace cistern::ops
