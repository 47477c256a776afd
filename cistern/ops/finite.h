#pragma once
// Whether a tensor holds NaN or infinities, in one pass. Where it does, products with 0 or with a
// mask are no longer zero, and slower ways are taken.
#include <ATen/core/Tensor.h>

namespace cistern::ops {

// No NaN, no infinity. Finite numbers whose sum overflows count as not finite. True of tensors that
// have no numbers to look at: of shapes alone, traced or mapped.
bool AllFinite(const at::Tensor& x);
// No NaN, no +inf: of log-weights, which may be -inf.
bool AllBelowInfinity(const at::Tensor& s);
// Whether all numbers of x [B,H,T,d] at tokens from lengths [B] on are smaller than `limit`, NaN is
// not, whatever their sign. Looks at nothing else; false where it cannot look: not on the CPU, of
// shapes alone, traced or mapped.
bool PaddingIsBelow(const at::Tensor& x, const at::Tensor& lengths, double limit);

}  // namespace cistern::ops
