#pragma once
// Attention by the slot memory, fused. Causal (kernels/slot_attention.h has the algebra): the same
// as a composition of softmax, SlotMatch and SlotRead, in one walk over the tokens. All tokens at
// once (kernels/slot_bidirectional.h): AbcWrite, then AbcRead. Differentiable in every tensor, the
// state in and out included.
#include "cistern/ops/slot_memory.h"

namespace cistern::ops {

struct AttentionResult {
  at::Tensor out;
  SlotState state;  // after the last token
};

// SlotRead(softmax(q), s, v).   q, s [B,H,T,n], v [B,H,T,d] -> out [B,H,T,d]
AttentionResult LatteAttention(const at::Tensor& q, const at::Tensor& s, const at::Tensor& v,
                               const SlotState& state, const Mask& mask = {});

// The same for a state that goes on: memory and z become those after. Where the caller's handles
// are the only ones and no gradient is recorded, they are written in place (in_place.h): no copy.
at::Tensor LatteExtend(const at::Tensor& q, const at::Tensor& s, const at::Tensor& v,
                       at::Tensor& memory, at::Tensor& z, const Mask& mask = {});

// SlotRead(r, s, v) with r_t = softmax(x_t + z_t) over the slots that hold something, z_t being
// that after token t; 0 where none of them has x > -inf. FAVOR+ where x and s are the logarithms
// of features.   x, s [B,H,T,n], v [B,H,T,d] -> out [B,H,T,d]
AttentionResult FavorAttention(const at::Tensor& x, const at::Tensor& s, const at::Tensor& v,
                               const SlotState& state, const Mask& mask = {});
// As LatteExtend.
at::Tensor FavorExtend(const at::Tensor& x, const at::Tensor& s, const at::Tensor& v,
                       at::Tensor& memory, at::Tensor& z, const Mask& mask = {});

// FavorAttention with x = matrix (scale q) and s = matrix (scale k) - |scale k|^2 / 2, the
// logarithms of FAVOR+'s features but for a constant, which no tensor holds on the way
// (kernels/favor_attention.h): q, k [B,H,T,d_k], matrix [n,d_k], v [B,H,T,d]. With a gradient of
// the matrix, which is drawn and not learned, composed of FavorAttention.
AttentionResult FavorQueriesAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& matrix, double scale,
                                      const SlotState& state, const Mask& mask = {});
// As LatteExtend.
at::Tensor FavorQueriesExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& matrix, double scale, at::Tensor& memory,
                              at::Tensor& z, const Mask& mask = {});

struct AbcState {
  at::Tensor keys, values;  // [B,H,n,d], double
  at::Tensor z;             // [B,H,n], double
};
struct AbcResult {
  at::Tensor out;
  AbcState state;
};

// SlotRead(softmax(scale SlotMatch(q, s, k)), s, v).   q, k, v [B,H,T,d], s [B,H,T,n] -> [B,H,T,d]
// A slot that holds nothing takes part in the softmax with the logit 0 and the value 0; or,
// `masked`, no part, unless all slots are empty.
AbcResult AbcAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& s, const AbcState& state, double scale,
                       const Mask& mask = {}, bool masked = false);
// As LatteExtend.
at::Tensor AbcExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& s, at::Tensor& keys, at::Tensor& values, at::Tensor& z,
                     double scale, const Mask& mask = {}, bool masked = false);

// The state after a whole piece: SlotWrite of keys and values with one set of log-weights.
// O(T n d).   k, v [B,H,T,d], s [B,H,T,n]
AbcState AbcWrite(const at::Tensor& s, const at::Tensor& k, const at::Tensor& v,
                  const AbcState& state, const Mask& mask = {});
// softmax(scale q . keys) values.   q [B,H,T,d] -> [B,H,T,d]
// z [B,H,n], without a gradient: where it is -inf a slot takes no part, unless no slot of its row
// and head does otherwise; undefined: all take part.
at::Tensor AbcRead(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                   const at::Tensor& z, double scale);

}  // namespace cistern::ops
