#pragma once
// Short causal convolution over time, one filter per channel:
//
//   y[b,t,c] = sum_j w[c,j] x[b, t-(K-1)+j+ahead, c],   j = 0..K-1
//
// Causal with ahead = 0: w[c,K-1] meets the token itself.
// Tokens before the sequence come from the state [B, K-1, C] (zeros when empty), those after it are
// zeros, taps never cross a document start, padding rows (t >= length) count as zeros, give 0 and
// do not enter the new state. Time O(T K C).
//
// T: float, double, or BFloat16 for tokens that are stored so; filters, states and their gradients
// are then in float, as is the arithmetic.
#include <cstdint>

#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/rows.h"

namespace cistern {

struct ConvShape {
  int64_t batch, length, channels, taps;  // B, T, C, K >= 1
  int64_t ahead = 0;  // tokens after its own that a filter sees, 0 .. K-1; above 0 without document
                      // starts alone
};

// x, y: [B,T,C] contiguous in the last dimension with the strides given; w: [C,K]; state_in (may be
// null) and state_out: [B,K-1,C]. state_out holds the last K-1 real inputs, with zeros where they
// lie before the last document start.
template <class T>
void ShortConv(const ConvShape& shape, Rows<const T> x, const ComputeType<T>* w,
               const ComputeType<T>* state_in, const RowMask& mask, Rows<T> y,
               ComputeType<T>* state_out);

// dstate_out may be null. dw: [C,K], written. dstate_in: [B,K-1,C] or null. Rows use batch and time
// strides; head is unused.
template <class T>
void ShortConvBackward(const ConvShape& shape, Rows<const T> dy, const ComputeType<T>* dstate_out,
                       Rows<const T> x, const ComputeType<T>* w, const ComputeType<T>* state_in,
                       const RowMask& mask, Rows<T> dx, ComputeType<T>* dw,
                       ComputeType<T>* dstate_in);

}  // namespace cistern
