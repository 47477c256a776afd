#pragma once
// Attention by gated slots in one walk over the tokens (Zhang et al. 2024, Gated Slot Attention;
// spec 2.14):
//
//   g_t = sigmoid(x_t)^(1 / temperature),   K_t = g_t K_{t-1} + (1 - g_t) (x) k_t,   V_t likewise
//   y_t[l] = scale q_t . K_t[l],            out[t] = sum_l softmax_l(y_t)_l V_t[l]
//
// for each batch row and head, l being a slot. It is SumMatch, a softmax and SumRead of
// sum_memory.h, whose promises hold here, too: states are double, causality is bitwise, results do
// not depend on the number of threads, and before the first token of a document the memories are
// emptied. Time O(T n d), memory O(n d) beyond inputs and outputs.
//
// T: float, double, or BFloat16 for tokens that are stored so and computed in float.
#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/slot_memory.h"

namespace cistern {

struct GatedSlotsOptions {
  double scale = 1, temperature = 1;
};

// What both directions read.   q, k, v [B,H,T,d];   x [B,H,T,n], the gates' logits
template <class T>
struct GatedSlotsInputs {
  Rows<const T> q, k, v, x;
};

//   out          [B,H,T,d]
//   y            [B,H,T,n], wanted by the backward, or data = nullptr
//   keys, values [B,H,n,d], contiguous: before the sequence; replaced by those after it
template <class T>
void GatedSlotsForward(const SlotShape& shape, const GatedSlotsOptions& options,
                       const GatedSlotsInputs<T>& in, const RowMask& mask, double* keys,
                       double* values, Rows<T> out, Rows<ComputeType<T>> y);

// Its gradients.
//   keys, values         before the sequence
//   G_keys, G_values     [B,H,n,d], in: gradients of the memories after it; out: of those before it
//   h                    [B,H,n], in: G . M_T of each slot, both memories' sum; scratch
//   dy, terms            [B,H,T,n], scratch
template <class T>
void GatedSlotsBackward(const SlotShape& shape, const GatedSlotsOptions& options,
                        const GatedSlotsInputs<T>& in, Rows<const ComputeType<T>> y,
                        Rows<const T> d_out, const RowMask& mask, const double* keys,
                        const double* values, double* G_keys, double* G_values, double* h,
                        Rows<T> dq, Rows<T> dk, Rows<T> dv, Rows<T> dx, Rows<ComputeType<T>> dy,
                        Rows<ComputeType<T>> terms);

}  // namespace cistern
