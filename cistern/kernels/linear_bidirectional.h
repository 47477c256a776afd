#pragma once
// Linear attention where every token is written before any reads: bidirectional and cross attention
// (linear_attention.h has the algebra and the rules), feature map, sums and division inside.
//
// T is float, double, or BFloat16, which is converted where rows are packed; the memory is double.
// Sums are formed in T, or float, over 128 rows, then in double.
// Time O(T n d), memory O(n d) for every 2,048 tokens of a head beyond inputs and outputs. Threads
// share segments of 2,048 tokens, so results do not depend on their number.
#include "cistern/kernels/linear_attention.h"

namespace cistern {

// memory += sum_t phi(k_t) (x) [v_t, 1], without the last column where nothing is divided.
//   k        [B,H,T,n]
//   v        [B,H,T,d]
//   lengths  [B] or null: tokens from there on are not read, whatever they hold
//   memory   [B,H,n,d+1], or [B,H,n,d] with kNone, contiguous, in place
//   fourier  as of LinearForward
template <class T>
void LinearWrite(const SlotShape& shape, const LinearRule& rule, Rows<const T> k, Rows<const T> v,
                 const int64_t* lengths, double* memory,
                 const FourierMap<ComputeType<T>>* fourier = nullptr);

// Its gradients; G: that of the memory, as memory. dk and dv are 0 at padding. d_scale: as of
// LinearBackward.
template <class T>
void LinearWriteBackward(const SlotShape& shape, const LinearRule& rule, Rows<const T> k,
                         Rows<const T> v, const int64_t* lengths, const double* G, Rows<T> dk,
                         Rows<T> dv, const FourierMap<ComputeType<T>>* fourier = nullptr,
                         ComputeType<T>* d_scale = nullptr);

// out_t = phi(q_t) S / divisor(phi(q_t) . z), S and z being the columns of the memory.
//   q    [B,H,T,n]
//   out  [B,H,T,d]
template <class T>
void LinearRead(const SlotShape& shape, const LinearRule& rule, Rows<const T> q,
                const double* memory, Rows<T> out,
                const FourierMap<ComputeType<T>>* fourier = nullptr);

// Its gradients; out is the forward's, d_memory is replaced.
template <class T>
void LinearReadBackward(const SlotShape& shape, const LinearRule& rule, Rows<const T> q,
                        const double* memory, Rows<const T> out, Rows<const T> d_out, Rows<T> dq,
                        double* d_memory, const FourierMap<ComputeType<T>>* fourier = nullptr,
                        ComputeType<T>* d_scale = nullptr);

}  // namespace cistern
