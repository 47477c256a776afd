#pragma once
// The gradient by the weights of a linear map, of tokens in bfloat16: a product whose depth is the
// tokens, so that both of its operands lie in the wrong order.
#include <cstdint>

#include "cistern/kernels/bfloat16.h"

namespace cistern {

struct TransposedShape {
  int64_t rows, left, right;
};

// A matrix [rows, columns] whose rows lie `step` values apart.
struct BFloat16Matrix {
  const BFloat16* data;
  int64_t step;
};

// Whether TransposedProduct is there: by Intel's tiles (AMX), or by pairs (AVX512-BF16) on AMD's
// processors (GainsByBFloat16 in isa.h).
bool CanMultiplyTransposed();

// c = a^T b, or c += a^T b where `add`: c[i,j] = sum_r a[r,i] b[r,j], summed in float.
//   a [rows,left], b [rows,right], c [left,right]: rows of c lie `step` floats apart
// O(rows left right). The terms of a sum come in the order of the rows, so its bits depend neither
// on the number of threads, which divide c, nor on the other columns. Subnormal values count as 0.
void TransposedProduct(const TransposedShape& shape, BFloat16Matrix a, BFloat16Matrix b, bool add,
                       float* c, int64_t step);

}  // namespace cistern
