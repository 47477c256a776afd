#pragma once
// The product of a linear map with few rows, as decoding has them: each weight is read once and
// meets every row, so the weights' way from memory is what it takes.
#include <cstdint>

#include "cistern/kernels/bfloat16.h"

namespace cistern {

struct FewRowsShape {
  int64_t rows, in, out;
};

// y[r,o] = sum_i x[r,i] w[o,i] + b[o], T: float or double; W: T, or BFloat16 beside float, whose
// weights count as the floats that they are and come from memory in half the time.
//   x [rows,in], w [out,in], b [out] or null, y [rows,out]: contiguous; y is none of the others
// Each sum has an order of its own, given by `in` and the length of a vector: its bits depend
// neither on the other rows nor on the number of threads. Threads divide the outputs.
template <class T, class W = T>
void FewRowsProduct(const FewRowsShape& shape, const T* x, const W* w, const T* b, T* y);

}  // namespace cistern
