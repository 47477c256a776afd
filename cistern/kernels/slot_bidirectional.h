#pragma once
// The slot memory where every token is written before any reads: bidirectional and cross attention
// (slot_memory.h has the algebra). A write sums over all tokens at once, from one reference for
// each slot; a read is a softmax over the slots and a product.
//
// T is float or double; states are double. Sums are formed in T over kSpan rows, then in double.
// Time O(T n d), memory O(n d) for every 2,048 tokens of a head beyond inputs and outputs. Threads
// share segments of 2,048 tokens, which follow from the shape alone, so results do not depend on
// their number.
#include <cstdint>

#include "cistern/kernels/rows.h"
#include "cistern/kernels/slot_memory.h"

namespace cistern {

// z' = logaddexp(z, logsumexp_t s_t),   M' = e^{z - z'} M + sum_t e^{s_t - z'} (x) v_t.
//   s         [B,H,T,n]
//   v         [B,H,T,d]
//   lengths   [B] or null: tokens from there on are not read, whatever they hold
//   memory, z [B,H,n,d] and [B,H,n], contiguous: the state before; replaced by the state after. A
//             slot with z' = -inf has M' = 0.
template <class T>
void SlotWrite(const SlotShape& shape, Rows<const T> s, Rows<const T> v, const int64_t* lengths,
               double* memory, double* z);

// Its gradients: with w_t = e^{s_t - z'},
//   dv_t = sum_l w_t[l] G[l],   ds_t[l] = w_t[l] (G[l] . v_t - h[l])
//   z_after  [B,H,n], z'
//   G        [B,H,n,d], the gradient of M'
//   h        [B,H,n], G . M' - dz'
//   ds, dv   0 at padding
template <class T>
void SlotWriteBackward(const SlotShape& shape, Rows<const T> s, Rows<const T> v,
                       const int64_t* lengths, const double* z_after, const T* G, const T* h,
                       Rows<T> ds, Rows<T> dv);

// out_t = sum_l softmax(x_t)_l M[l].
//   x       [B,H,T,n]
//   memory  [B,H,n,d], contiguous
//   out     [B,H,T,d]
template <class T>
void SlotSoftmaxRead(const SlotShape& shape, Rows<const T> x, const double* memory, Rows<T> out);

// Its gradients; d_memory is replaced.
template <class T>
void SlotSoftmaxReadBackward(const SlotShape& shape, Rows<const T> x, const double* memory,
                             Rows<const T> d_out, Rows<T> dx, double* d_memory);

}  // namespace cistern
