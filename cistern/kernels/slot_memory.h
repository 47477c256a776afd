#pragma once
// The slot memory in exp mode (spec: M is a running softmax-weighted mean of what was written, z
// its running log-sum-exp).
//
//   z_t = logaddexp(z_{t-1}, s_t),   M_t = M_{t-1} + e^{s_t - z_t} (v_t - M_{t-1})
//
// for each batch row, head and slot.
//
// Each token is written, then reads (causal). s = -inf: that slot is not written. A slot never
// written has z = -inf and M = 0, and reads 0. All functions work in chunks of rows with small
// matrix products: time O(T n d), memory O(n d) beyond inputs and outputs. Causality is bitwise:
// outputs up to t depend on no bit of later tokens; results do not depend on the number of threads.
// T is float or double; tokens are stored as S: as T, or in bfloat16 with T float (ComputeType).
// What belongs to slots is in T. The state is always double: a float z stops moving after about
// 10^7 tokens, and a float mean drops, one token at a time, what is below its last bit (0.2% of it
// after 10^7 tokens, 0.1% after 10^6 where log-weights spread over 3). Products inside a chunk of
// rows are in T, or of bfloat16 where tokens are and that gains.
#include <cstdint>

#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/rows.h"

namespace cistern {

struct SlotShape {
  int64_t batch, heads, length, slots, width;  // B, H, T, n, d; any may be 0 except slots and width
};

// out[t] = sum_l r[t,l] M_t[l].
//   r, s      [B,H,T,n]
//   v, out    [B,H,T,d]
//   memory, z [B,H,n,d] and [B,H,n], contiguous: the state before; replaced by the state after
//   z_out     [B,H,T,n], the z of every position, or data = nullptr
template <class S>
void SlotRead(const SlotShape& shape, Rows<const ComputeType<S>> r, Rows<const ComputeType<S>> s,
              Rows<const S> v, const RowMask& mask, double* memory, double* z, Rows<S> out,
              Rows<ComputeType<S>> z_out);

// out[t,l] = q[t] . M_t[l], with keys in place of values.
//   q, k      [B,H,T,d]
//   s, out    [B,H,T,n]
template <class S>
void SlotMatch(const SlotShape& shape, Rows<const S> q, Rows<const ComputeType<S>> s,
               Rows<const S> k, const RowMask& mask, double* memory, double* z,
               Rows<ComputeType<S>> out, Rows<ComputeType<S>> z_out);

// The reverse pass that both backwards share:
//
//   read backward:   b = dr = SlotMatch(q := g, s, k := v, initial state)
//                    SlotAdjoint(a := r, g, s, u := v, b := dr)
//   match backward:  dq = SlotRead(r := dx, s, v := k, initial state)
//                    SlotAdjoint(a := dx, g := q, s, u := k, b := x)
//
// with g = d(out) of the read and dx = d(out) of the match. For each slot, in reverse:
//
//   G_t = e^{z_t - z_{t+1}} G_{t+1} + a_t (x) g_t
//   h_t = e^{z_t - z_{t+1}} h_{t+1} + a_t b_t - dz_t
//   du_t    = sum_l e^{s_t - z_t} G_t[l]
//   ds_t[l] = e^{s_t - z_t} (G_t[l] . u_t - h_t[l])
//
//   a, b, s, ds [B,H,T,n]
//   g, u, du    [B,H,T,d]
//   z0          [B,H,n], the z before the sequence
//   dz          [B,H,T,n], gradient of z_out, or data = nullptr
//   G           [B,H,n,d], in: gradient of the final memory; out: of the initial memory
//   h           [B,H,n], in: dM_T[l] . M_T[l] - dz_T[l]; out: h_0, and dz_0[l] = G_0[l] . M_0[l] -
//               h_0[l]
template <class S>
void SlotAdjoint(const SlotShape& shape, Rows<const ComputeType<S>> a, Rows<const S> g,
                 Rows<const ComputeType<S>> s, Rows<const S> u, Rows<const ComputeType<S>> b,
                 Rows<const ComputeType<S>> dz, const RowMask& mask, const double* z0,
                 ComputeType<S>* G, ComputeType<S>* h, Rows<S> du, Rows<ComputeType<S>> ds);

}  // namespace cistern
