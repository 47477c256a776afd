#pragma once
// The slot memory in exp mode as differentiable ops (kernels/slot_memory.h has the algebra;
// spec 2.19). Beside tokens (v, q, k) in bfloat16, weights and log-weights of SlotRead and
// SlotMatch may be in float; what is matched, and z, are in the log-weights' type.
#include <ATen/core/Tensor.h>

#include "cistern/ops/mask.h"

namespace cistern::ops {

struct SlotState {
  at::Tensor memory;  // [B,H,n,d], double whatever the values are (kernels/slot_memory.h says why)
  at::Tensor z;       // [B,H,n], double, -inf where nothing was written
};
SlotState EmptySlots(int64_t batch, int64_t heads, int64_t slots, int64_t width,
                     const at::TensorOptions& options);

struct SlotResult {
  at::Tensor out;
  SlotState state;   // after the last token
  at::Tensor z_out;  // [B,H,T,n] the z at every position, dtype of s; undefined unless asked for
};

// Causal: each token is written, then reads. Differentiable in every tensor, state in and out
// included. out[t] = sum_l r[t,l] M_t[l].    r, s [B,H,T,n], v [B,H,T,d] -> out [B,H,T,d]
SlotResult SlotRead(const at::Tensor& r, const at::Tensor& s, const at::Tensor& v,
                    const SlotState& state, const Mask& mask = {}, bool want_z = false);
// out[t,l] = q[t] . M_t[l].        q, k [B,H,T,d], s [B,H,T,n] -> out [B,H,T,n]
SlotResult SlotMatch(const at::Tensor& q, const at::Tensor& s, const at::Tensor& k,
                     const SlotState& state, const Mask& mask = {}, bool want_z = false);

// The same for a state that goes on: memory and z become those after. Where the caller's handles
// are the only ones and no gradient is recorded, they are written in place (in_place.h): no copy.
at::Tensor SlotReadExtend(const at::Tensor& r, const at::Tensor& s, const at::Tensor& v,
                          at::Tensor& memory, at::Tensor& z, const Mask& mask = {});
struct SlotRows {
  at::Tensor out;
  at::Tensor z;  // [B,H,T,n], undefined unless asked for
};
SlotRows SlotMatchExtend(const at::Tensor& q, const at::Tensor& s, const at::Tensor& k,
                         at::Tensor& memory, at::Tensor& z, const Mask& mask = {},
                         bool want_z = false);

// All tokens at once (kernels/slot_bidirectional.h).
// Writes a whole piece and returns the state only: M = softmax-weighted mean over the piece and
// what was there before. O(T n d).
SlotState SlotWrite(const at::Tensor& s, const at::Tensor& v, const SlotState& state,
                    const Mask& mask = {});
// The slots' attention to all tokens: SlotWrite with s[t,l] = scale k[t] . queries[l], which the
// kernel forms for the rows at hand.    queries double [B,H,n,d_k], k [B,H,T,d_k], v [B,H,T,d]
SlotState SlotPack(const at::Tensor& queries, const at::Tensor& k, const at::Tensor& v,
                   double scale, const SlotState& state, const Mask& mask = {});
// out[t] = sum_l softmax(x[t])_l M[l].    x [B,H,T,n], memory double [B,H,n,d] -> out [B,H,T,d]
at::Tensor SlotSoftmaxRead(const at::Tensor& x, const at::Tensor& memory);

// States of two adjacent pieces of one sequence, each begun empty: the state of the whole.
SlotState MergeSlots(const SlotState& first, const SlotState& second);

}  // namespace cistern::ops
