#pragma once
// A matrix in the other order of memory, at the speed of the cache.
#include <cstdint>

namespace cistern {

// Both numbers of a matrix that Transpose takes are multiples of this.
constexpr int64_t kTransposeBlock = 16;

// to [columns, rows], contiguous and on a boundary of 64 bytes = from [rows, columns]^T, whose rows
// lie `stride` numbers apart.
void Transpose(int64_t rows, int64_t columns, const float* from, int64_t stride, float* to);

}  // namespace cistern
