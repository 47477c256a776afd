#pragma once
// Linear attention of float tokens, one after another, with writes put off as slot_decoding.h does:
//
//   S_t = S_0 + sum_j phi(k_j) (x) v_j,   z_t = z_0 + sum_j phi(k_j),
//   out_t = phi(q_t) S_t / divisor(phi(q_t) . z_t)
//
// over the tokens j since S_0 was last changed. S_0 is the sum of two floats, of which reads take
// the first, so a token reads half of a memory in double and writes almost nothing of it; z is
// double. A sum above what a float holds becomes infinite or NaN, as one over a span of
// linear_attention.h does.
#include <cstddef>

#include "cistern/kernels/linear_attention.h"
#include "cistern/kernels/slot_decoding.h"

namespace cistern {

//   memory    [B,H,n,d+1], contiguous: as in linear_attention.h, with a divisor
//   decoding  [B,H,DecodingBytes(n, d, false)], aligned to 64 bytes; the same on every instruction
//             set
// The second does not change `decoding`.
void BeginLinearDecoding(const SlotShape& shape, const double* memory, std::byte* decoding);
void EndLinearDecoding(const SlotShape& shape, const std::byte* decoding, double* memory);

// As LinearForward, for shape.length 1 and a rule that divides. O(n d) a head, exactly as much for
// any number of earlier tokens, but for every kDeferredTokens-th. T: float or BFloat16.
template <class T>
void LinearDecode(const SlotShape& shape, const LinearRule& rule, Rows<const T> q, Rows<const T> k,
                  Rows<const T> v, const RowMask& mask, std::byte* decoding, Rows<T> out,
                  const FourierMap<float>* fourier = nullptr);

}  // namespace cistern
