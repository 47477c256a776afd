#pragma once
// Clusters of keys by the sides of hyperplanes on which they lie (ABC with clustered writes: P003
// App. A, after Vyas et al. 2020; spec 2.14).
#include "cistern/kernels/rows.h"
#include "cistern/kernels/slot_memory.h"

namespace cistern {

inline constexpr int64_t kMostPlanes = 32;

// Bit p of a key's code: whether plane[h][p] . (k, 1) > 0, in double, summed in this order for
// every key. shape.slots: the planes that are used, the first of each head; the other bits are 0.
// NaN is on no positive side. O(T d).
//   k       [B,H,T,d]
//   planes  [H,32,d+1]: normals, then the bias
//   codes   [B,H,T], contiguous
template <class S>
void SignCodes(const SlotShape& shape, Rows<const S> k, const float* planes, uint32_t* codes);

// Lloyd's algorithm on codes: centres begin at the keys l T / n; a key belongs to the centre that
// differs from it in the fewest bits, the first of several; a bit of a centre becomes that of most
// of its keys, and stays where they tie or there is none. shape.slots: n, 65,536 at most. O(T n)
// for each iteration, which end when no centre moves.
//   codes     [B,H,T], contiguous
//   lengths   [B], or null: keys beyond are padding, which belongs to cluster 0 and moves nothing
//   clusters  [B,H,T], contiguous
void SignClusters(const SlotShape& shape, const uint32_t* codes, const int64_t* lengths,
                  int64_t iterations, int64_t* clusters);

}  // namespace cistern
