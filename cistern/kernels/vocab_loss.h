#pragma once
// Cross-entropy over a vocabulary, and its gradient in the place of the logits: with p = softmax(l)
// of a row and target y
//   nats = log sum_v e^(l_v) - (1 - s) l_y - s / V sum_v l_v       (s: label smoothing)
//   dl_v = share (p_v - s / V - (1 - s) [v = y])
// One row at a time in three passes over memory that the first brings into the cache.
#include <cstdint>

#include "cistern/kernels/bfloat16.h"

namespace cistern {

struct VocabLossShape {
  int64_t rows, vocabulary;
  double smoothing = 0;  // this share of each target goes to the whole vocabulary alike
  double share = 1;      // what the gradient is multiplied by
  bool gradient = true;  // else the logits stay as they are
};

// logits [rows,V], contiguous. targets [rows]: 0 .. V-1, or below 0: the row has no loss, and its
// gradient is 0. nats [rows]: written. The exponentials and their sum are in T, the rest of the
// loss is in double. Rows do not depend on each other nor on the number of threads.
// T: float, double, or BFloat16, which is computed in float and rounded once.
template <class T>
void VocabLoss(const VocabLossShape& shape, T* logits, const int64_t* targets, double* nats);

}  // namespace cistern
