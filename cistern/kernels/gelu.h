#pragma once
// GELU (Hendrycks & Gimpel 2016), in the exact form: y = x Phi(x), with Phi the distribution
// function of the standard normal distribution. One pass over memory each way.
#include <cstdint>

namespace cistern {

// y[i] = x[i] Phi(x[i]), to about 2e-7 of |x|. y may be x. NaN for NaN and for -infinity.
void Gelu(int64_t n, const float* x, float* y);

// dx[i] = dy[i] (Phi(x[i]) + x[i] phi(x[i])). dx may be dy.
void GeluBackward(int64_t n, const float* dy, const float* x, float* dx);

}  // namespace cistern
