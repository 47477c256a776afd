#pragma once
// Relative positions of T5 (Raffel et al. 2020; spec 1.1): a learned bias of each head's scores by
// the bucket of the distance from query to key. Near distances have a bucket each, farther ones
// share buckets whose bounds grow as a power, and everything from kRelativeDistance tokens on is in
// the last one. In the causal form all buckets are of keys before the query; in the bidirectional
// form one half is of these, the other of the keys after it.
#include <ATen/core/Tensor.h>

namespace cistern {

inline constexpr int64_t kRelativeBuckets = 32, kRelativeDistance = 128;

// Of each distance (key - query, int64, any shape): 0 .. kRelativeBuckets - 1, the same shape. Keys
// after the query are in the bucket of distance 0 in the causal form, which does not see them.
at::Tensor RelativeBuckets(const at::Tensor& distance, bool causal);

// table [kRelativeBuckets,h], positions of queries [1 or B,T] and keys [1 or B,S], int64 ->
// [1 or B,h,T,S]. Differentiable in the table. O(T S h).
at::Tensor RelativeBias(const at::Tensor& table, const at::Tensor& queries, const at::Tensor& keys,
                        bool causal);

}  // namespace cistern
