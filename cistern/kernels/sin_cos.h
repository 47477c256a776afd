#pragma once
// Random Fourier features (Rahimi & Recht 2007, as in RFA): factor [sin x, cos x], in one pass over
// memory each way.
#include <cstdint>

namespace cistern {

// y [rows, 2 width]: factor sin x in the first half of a row, factor cos x in the second, of x
// [rows, width]; to 5e-7 of factor. NaN for what is not finite.
void SinCos(int64_t rows, int64_t width, float factor, const float* x, float* y);

// dx = dy_sin y_cos - dy_cos y_sin, from y itself.
void SinCosBackward(int64_t rows, int64_t width, const float* dy, const float* y, float* dx);

}  // namespace cistern
