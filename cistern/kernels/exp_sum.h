#pragma once
// Sums of exponentials in double, as drawing from logits needs them.
#include <cstdint>

namespace cistern {

// The largest of x [n]: NaN if one of them is NaN, -infinity if there is none.
double Largest(int64_t n, const double* x);

// e[i] = exp((x[i] - largest) / divisor), to 2 ulp, 0 where the exponent is below -708; returns
// their sum. largest: no x[i] is above it; divisor > 0. e [n] may be x, or null.
double ExpSum(int64_t n, const double* x, double largest, double divisor, double* e);

}  // namespace cistern
