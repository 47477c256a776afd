#pragma once
// The random projections of RFA. A bank of matrices costs no memory: each is a function of (seed,
// index) alone and is made when needed.
#include <ATen/core/Tensor.h>

namespace cistern {

// Matrix `index` of the bank that `seed` names, [features, width] in float on the CPU, the same on
// every machine up to rounding.
//   iid: entries N(0,1).
//   orthogonal (Yu et al. 2016): blocks of `width` rows, each a Haar-distributed orthogonal matrix
//   (QR of a Gaussian one with the signs of R's diagonal multiplied in; without them the features
//   are biased) whose rows get the lengths of independent Gaussian vectors; the last block is cut.
//   Every row is then N(0,I), and the rows of a block are orthogonal, which lowers the variance of
//   the kernel.
// O(features width), orthogonal O(features width^2).
at::Tensor RandomMatrix(uint64_t seed, uint64_t index, int64_t features, int64_t width,
                        bool orthogonal);

}  // namespace cistern
