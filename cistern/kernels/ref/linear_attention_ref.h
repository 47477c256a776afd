#pragma once
// Linear attention by its definition: plain loops over contiguous double arrays, the oracle of the
// fast kernels and CISTERN_IMPL=reference. Shapes: q, k [B,H,T,n]; v, out [B,H,T,d]; memory
// [B,H,n,d+1], or [B,H,n,d] without a divisor; gradients have the same shapes. The backward keeps
// the memory of every position of one head.
#include "cistern/kernels/linear_attention.h"

namespace cistern::ref {

// memory: before, replaced by that after.
void LinearForward(const SlotShape& shape, const LinearRule& rule, const double* q, const double* k,
                   const double* v, const RowMask& mask, double* memory, double* out);

// memory0: before the sequence. dmemory_T, the gradient of the memory after it, may be null.
void LinearBackward(const SlotShape& shape, const LinearRule& rule, const double* q,
                    const double* k, const double* v, const RowMask& mask, const double* memory0,
                    const double* dout, const double* dmemory_T, double* dq, double* dk, double* dv,
                    double* dmemory0);

}  // namespace cistern::ref
