#pragma once
// FAVOR+ (Choromanski et al. 2021; P004 eq. 30-32; spec 2.6) from queries and keys: FavorForward
// (slot_attention.h) whose log-weights are the logarithms of positive random features,
//
//   x_t = matrix q'_t,   s_t = matrix k'_t - |k'_t|^2 / 2,   q' = scale q, k' = scale k,
//
// formed for the tokens at hand wherever a walk reads them: no [B,H,T,n] of them lies in memory.
// What is the same for all features of a token cancels. The same bits for any number of threads;
// the backward takes O(T n) for each thread. Time O(T n (d_k + d)).
#include "cistern/kernels/slot_attention.h"
#include "cistern/kernels/slot_bidirectional.h"

namespace cistern {

template <class T>
struct FavorMap {
  const T* matrix;  // [n,d_k], of all heads
  int64_t width;    // d_k
  double scale;
};

// q, k [B,H,T,d_k]; v, out [B,H,T,d]; memory, z: as for LatteForward. T: float, double or BFloat16.
template <class T>
void FavorQueriesForward(const SlotShape& shape, const FavorMap<ComputeType<T>>& map,
                         Rows<const T> q, Rows<const T> k, Rows<const T> v, const RowMask& mask,
                         double* memory, double* z, Rows<T> out);

// As LatteBackward.
template <class T>
void FavorQueriesBackward(const SlotShape& shape, const FavorMap<ComputeType<T>>& map,
                          Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<const T> d_out,
                          const RowMask& mask, const double* memory, const double* z,
                          ComputeType<T>* G, ComputeType<T>* h, Rows<T> dq, Rows<T> dk, Rows<T> dv);

// All tokens at once (slot_bidirectional.h). A write: SlotWrite of v [B,H,T,d] with the log-weights
// of k [B,H,T,d_k], and its gradients.
template <class T>
void FavorWrite(const SlotShape& shape, const FavorMap<ComputeType<T>>& map, Rows<const T> k,
                Rows<const T> v, const int64_t* lengths, double* memory, double* z);
template <class T>
void FavorWriteBackward(const SlotShape& shape, const FavorMap<ComputeType<T>>& map,
                        Rows<const T> k, const SlotWrittenGradients<T>& v, const int64_t* lengths,
                        const double* z_after, const ComputeType<T>* h, Rows<T> dk);

// A read: out_t = sum_l softmax(x_t + z)_l M[l] for q [B,H,T,d_k]; slots with z = -inf take no
// part, and a memory without others reads as if all z were 0. d_memory [B,H,n,d] and d_z [B,H,n]
// are replaced.
template <class T>
void FavorRead(const SlotShape& shape, const FavorMap<ComputeType<T>>& map, Rows<const T> q,
               const double* memory, const double* z, Rows<T> out);
template <class T>
void FavorReadBackward(const SlotShape& shape, const FavorMap<ComputeType<T>>& map, Rows<const T> q,
                       const double* memory, const double* z, Rows<const T> d_out, Rows<T> dq,
                       double* d_memory, double* d_z);

}  // namespace cistern
