#pragma once
// GELU (Hendrycks & Gimpel 2016), in the exact form: y = x Phi(x), with Phi the distribution
// function of the standard normal distribution. One pass over memory each way.
#include <cstdint>

#include "cistern/kernels/bfloat16.h"

namespace cistern {

// T: float or BFloat16, whose arithmetic is in float.

// y[i] = x[i] Phi(x[i]), to about 2e-7 of |x|; BFloat16 to 4e-4 of y before it is rounded to 2e-3.
// y may be x. NaN for NaN and for -infinity.
template <class T>
void Gelu(int64_t n, const T* x, T* y);

// dx[i] = dy[i] (Phi(x[i]) + x[i] phi(x[i])). dx may be dy.
template <class T>
void GeluBackward(int64_t n, const T* dy, const T* x, T* dx);

// y of Gelu and dx of GeluBackward in one pass, with the same bits.
void GeluWithBackward(int64_t n, const float* dy, const float* x, float* y, float* dx);

}  // namespace cistern
