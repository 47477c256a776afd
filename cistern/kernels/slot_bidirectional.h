#pragma once
// The slot memory where every token is written before any reads: bidirectional and cross attention
// (slot_memory.h has the algebra). A write sums over all tokens at once, from a reference for each
// slot that moves seldom; a read is a softmax over the slots and a product, of logits that are
// given (Latte) or come from keys of the slots (ABC).
//
// T is float, double, or BFloat16, which is converted where rows are packed; states are double.
// Sums are formed in T, or float, over kSpan rows, then in double. Time O(T n d), memory O(n d) for
// every 2,048 tokens of a head beyond inputs and outputs. Threads share segments of 2,048 tokens,
// which follow from the shape alone, so results do not depend on their number.
#include <cstdint>
#include <span>

#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/rows.h"
#include "cistern/kernels/slot_memory.h"

namespace cistern {

// Rows that are written with the same weights: the values of a slot memory, or ABC's keys and
// values.
constexpr size_t kMostWritten = 2;
template <class T>
struct SlotWritten {
  Rows<const T> v;  // [B,H,T,d]
  double* memory;   // [B,H,n,d], contiguous: the state before; replaced by the state after
};
template <class T>
struct SlotWrittenGradients {
  Rows<const T> v;
  const ComputeType<T>* G;  // [B,H,n,d], the gradient of M'
  Rows<T> dv;
};

// z' = logaddexp(z, logsumexp_t s_t),   M' = e^{z - z'} M + sum_t e^{s_t - z'} (x) v_t.
//   s        [B,H,T,n]
//   written  one or two
//   lengths  [B] or null: tokens from there on are not read, whatever they hold
//   z        [B,H,n], contiguous: the state before; replaced by the state after. A slot with z' =
//            -inf has M' = 0.
template <class T>
void SlotWrite(const SlotShape& shape, Rows<const T> s, std::span<const SlotWritten<T>> written,
               const int64_t* lengths, double* z);

// Its gradients; with w_t = e^{s_t - z'}, and sums over what is written,
//   dv_t = sum_l w_t[l] G[l],   ds_t[l] = w_t[l] (sum G[l] . v_t - h[l])
//   z_after  [B,H,n], z'
//   h        [B,H,n], sum G . M' - dz'
//   ds, dv   0 at padding
template <class T>
void SlotWriteBackward(const SlotShape& shape, Rows<const T> s,
                       std::span<const SlotWrittenGradients<T>> written, const int64_t* lengths,
                       const double* z_after, const ComputeType<T>* h, Rows<T> ds);

// One vector of each slot, for products with tokens.
struct SlotVectors {
  double scale;
  const double* data;  // [B,H,n,width], contiguous
  int64_t width;
};

// SlotWrite of v with log-weights s_t[l] = scale k_t . Q[l], Q the queries, formed for the rows at
// hand: the slots' attention to all tokens (Luna's packing).   k [B,H,T,width], v [B,H,T,d]
template <class T>
void SlotPack(const SlotShape& shape, const SlotVectors& queries, Rows<const T> k, Rows<const T> v,
              const int64_t* lengths, double* memory, double* z);

// Its gradients, as SlotWriteBackward's; d_queries is replaced.
template <class T>
void SlotPackBackward(const SlotShape& shape, const SlotVectors& queries, Rows<const T> k,
                      const SlotWrittenGradients<T>& v, const int64_t* lengths,
                      const double* z_after, const ComputeType<T>* h, Rows<T> dk,
                      double* d_queries);

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

// The keys of slots that are read by content.
struct SlotKeys {
  double scale;
  const double* keys;  // [B,H,n,d], contiguous
  const double* z;     // [B,H,n] or null: slots with z = -inf take no part where others do
};

// out_t = sum_l softmax_l(scale q_t . K[l]) M[l].   q, out [B,H,T,d], memory as above
template <class T>
void SlotAttend(const SlotShape& shape, Rows<const T> q, const SlotKeys& keys, const double* memory,
                Rows<T> out);

// Its gradients; d_keys and d_memory are replaced.
template <class T>
void SlotAttendBackward(const SlotShape& shape, Rows<const T> q, const SlotKeys& keys,
                        const double* memory, Rows<const T> d_out, Rows<T> dq, double* d_keys,
                        double* d_memory);

}  // namespace cistern
