#pragma once
// How kernels see the tensors of a batch: strided rows of tokens, and which tokens take part.
#include <cstdint>

namespace cistern {

// Rows of a [B, H, T, w] array: element (b, h, t, j) is data[b*batch + h*head + t*time + j].
// Strides count elements; the last one is 1. Any permutation of [B, T, H, w] memory fits, so
// projections need no copy before a kernel.
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t batch = 0, head = 0, time = 0;
  T* At(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * time; }
};

// Which tokens of a padded or packed batch take part. Null pointers: all of them, one document per
// row.
struct RowMask {
  const uint8_t* starts = nullptr;   // [B, T]: 1 where a document begins; the state is emptied
                                     // before that token is written
  const int64_t* lengths = nullptr;  // [B]: tokens t >= lengths[b] are padding: never written,
                                     // their outputs and gradients are 0
};

}  // namespace cistern
