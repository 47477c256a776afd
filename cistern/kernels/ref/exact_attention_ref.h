#pragma once
// Exact attention by its definition: plain loops over contiguous double arrays, the oracle of the
// fast kernels and CISTERN_IMPL=reference. Shapes as in exact_attention.h.
#include "cistern/kernels/exact_attention.h"

namespace cistern::ref {

void AttentionForward(const AttentionShape& shape, double scale, const double* q, const double* k,
                      const double* v, const AttentionMask& mask, double* out);

void AttentionBackward(const AttentionShape& shape, double scale, const double* q, const double* k,
                       const double* v, const double* d_out, const AttentionMask& mask, double* dq,
                       double* dk, double* dv);

}  // namespace cistern::ref
