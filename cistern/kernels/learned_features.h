#pragma once
// Learned features (T2R: Kasai et al. 2021; spec 2.4): the positive part of an affine map for each
// head, in one pass over the tokens each way.
#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/rows.h"
#include "cistern/kernels/slot_memory.h"

namespace cistern {

// max(0, scale W x + b), for tokens x [d] of a head -> [n].
template <class T>
struct LearnedMap {
  const T* weights;  // W [H,n,d]
  const T* bias;     // b [H,n]
  double scale;
};

// shape.slots: the features n. NaN stays NaN. O(T n d), sums over d in T.
//   x    [B,H,T,d]
//   out  [B,H,T,n]
template <class S>
void LearnedFeatures(const SlotShape& shape, const LearnedMap<ComputeType<S>>& map, Rows<const S> x,
                     Rows<S> out);

// The gradients of x, W and b, from the output and its gradient: the positive ones of `out` have
// one. The same bits for any number of threads. Sums over tokens are double beyond 128 of them, and
// take n d doubles for 2,048 tokens of a head.
//   d_weights [H,n,d], d_bias [H,n]
template <class S>
void LearnedFeaturesBackward(const SlotShape& shape, const LearnedMap<ComputeType<S>>& map,
                             Rows<const S> x, Rows<const S> out, Rows<const S> d_out, Rows<S> dx,
                             ComputeType<S>* d_weights, ComputeType<S>* d_bias);

}  // namespace cistern
