#pragma once
// Rotary positions (Su et al. 2021) on the halves convention: channel j pairs with channel j + d/2,
// and each pair is turned by an angle that grows with the position.
#include <cstdint>

#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/rows.h"

namespace cistern {

struct RotaryShape {
  int64_t batch, heads, time, half;  // half: pairs of a head, d/2
  bool one_table;                    // all rows of the batch are turned by one table
};

// y_j = x_j cos - x_{j+half} sin,  y_{j+half} = x_{j+half} cos + x_j sin
//   x, y    [B,H,T,d]; y may be x
//   table   [B or 1,T,d]: the cosines of a token, then its sines
// back: by the opposite angles, which is the gradient. T: float, double, or BFloat16, which is
// turned in float and rounded once. One pass over memory.
template <class T>
void Rotary(const RotaryShape& shape, Rows<const T> x, const ComputeType<T>* table, bool back,
            Rows<T> y);

}  // namespace cistern
