#pragma once
// Attention by the slot memory in one walk over the tokens (slot_memory.h has the algebra and what
// it promises, all of which holds here): the softmax of the read weights is inside, and the
// exponentials of the log-weights are made once. Time O(T n d), memory O(n d) beyond inputs and
// outputs. Threads share a head where there are fewer heads than threads (head_parts.h); then the
// backward takes O(T n) more, as it does of BFloat16.
//
// T: float, double, or BFloat16 for tokens that are stored so. Those are computed in float, or,
// where GainsByBFloat16() (isa.h), in products of bfloat16 (chunk_pairs-inl.h); states and their
// gradients are as for float.
#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/slot_memory.h"

namespace cistern {

// Latte (P004 eq. 8-14): out[t] = sum_l softmax_l(q_t)_l M_t[l].
//   q, s      [B,H,T,n]
//   v, out    [B,H,T,d]
//   memory, z [B,H,n,d] and [B,H,n], contiguous: the state before; replaced by the state after
template <class T>
void LatteForward(const SlotShape& shape, Rows<const T> q, Rows<const T> s, Rows<const T> v,
                  const RowMask& mask, double* memory, double* z, Rows<T> out);

// Its gradients. memory, z: the state before the sequence. G, h: as in SlotAdjoint.
template <class T>
void LatteBackward(const SlotShape& shape, Rows<const T> q, Rows<const T> s, Rows<const T> v,
                   Rows<const T> d_out, const RowMask& mask, const double* memory, const double* z,
                   ComputeType<T>* G, ComputeType<T>* h, Rows<T> dq, Rows<T> ds, Rows<T> dv);

// FAVOR+ (Choromanski et al. 2021; spec 2.6): out[t] = sum_l softmax_l(x_t + z_t)_l M_t[l] over the
// slots that hold something, the token's own write included. With x and s the logarithms of
// features of queries and keys, that is sum_s (phi(q_t) . phi(k_s)) v_s over the same sum of 1.
// Where no slot that holds something has x > -inf, the token reads 0. All else is as for Latte.
template <class T>
void FavorForward(const SlotShape& shape, Rows<const T> x, Rows<const T> s, Rows<const T> v,
                  const RowMask& mask, double* memory, double* z, Rows<T> out);

template <class T>
void FavorBackward(const SlotShape& shape, Rows<const T> x, Rows<const T> s, Rows<const T> v,
                   Rows<const T> d_out, const RowMask& mask, const double* memory, const double* z,
                   ComputeType<T>* G, ComputeType<T>* h, Rows<T> dx, Rows<T> ds, Rows<T> dv);

// ABC (P003 sec. 2-3):
//
//   x_t[l] = scale q_t . K_t[l],   out[t] = sum_l softmax_l(x_t)_l V_t[l]
//
// where K and V are the memories of keys and values, written with the same s. A slot that holds
// nothing has x = 0 and value 0; or, `masked`, the lowest number for x, so that it has no part in
// the softmax unless every slot is empty.
//   q, k, v, out    [B,H,T,d]
//   s               [B,H,T,n]
//   x               [B,H,T,n], wanted by the backward, or data = nullptr
//   keys, values, z [B,H,n,d] twice and [B,H,n], as memory and z above
template <class T>
void AbcForward(const SlotShape& shape, double scale, bool masked, Rows<const T> q, Rows<const T> k,
                Rows<const T> v, Rows<const T> s, const RowMask& mask, double* keys, double* values,
                double* z, Rows<T> out, Rows<ComputeType<T>> x);

// Its gradients. G_keys, G_values: as G of SlotAdjoint; h: the sum of both memories' h. dx: scratch
// of the shape of x.
template <class T>
void AbcBackward(const SlotShape& shape, double scale, Rows<const T> q, Rows<const T> k,
                 Rows<const T> v, Rows<const T> s, Rows<const ComputeType<T>> x,
                 Rows<const T> d_out, const RowMask& mask, const double* keys, const double* values,
                 const double* z, ComputeType<T>* G_keys, ComputeType<T>* G_values,
                 ComputeType<T>* h, Rows<T> dq, Rows<T> dk, Rows<T> dv, Rows<T> ds,
                 Rows<ComputeType<T>> dx);

}  // namespace cistern
