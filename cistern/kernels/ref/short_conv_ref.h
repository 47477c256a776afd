#pragma once
// The short convolution by its definition: plain double loops, the oracle of the fast kernel and
// CISTERN_IMPL=reference.
#include "cistern/kernels/short_conv.h"

namespace cistern::ref {

// x, y: [B,T,C]   w: [C,K]   state_in, state_out: [B,K-1,C], both may be null (zeros; not wanted).
void ShortConv(const ConvShape& shape, const double* x, const double* w, const double* state_in,
               const RowMask& mask, double* y, double* state_out);

// dstate_out, state_in and dstate_in may be null.
void ShortConvBackward(const ConvShape& shape, const double* dy, const double* dstate_out,
                       const double* x, const double* w, const double* state_in,
                       const RowMask& mask, double* dx, double* dw, double* dstate_in);

}  // namespace cistern::ref
