#pragma once
// Clusters of keys by the sides of random hyperplanes (kernels/sign_clusters.h). Nothing here has a
// gradient.
#include "cistern/ops/mask.h"

namespace cistern::ops {

// The first `count` sides of keys [B,H,T,d] as bits of a number [B,H,T] int32. planes [H,32,d+1]
// float: normals, then the bias. Sums are in double. O(T d).
at::Tensor SignCodes(const at::Tensor& keys, const at::Tensor& planes, int64_t count);

// Lloyd's algorithm on codes of all 32 sides: the cluster, 0 .. n-1, of each key, [B,H,T] int64.
// Padding belongs to cluster 0 and moves nothing. O(T n) for each iteration.
at::Tensor SignClusters(const at::Tensor& codes, int64_t n, int64_t iterations, const Mask& mask);

}  // namespace cistern::ops
