#pragma once
// Linear attention in one walk over the tokens: feature map, sums and division together
// (Katharopoulos et al. 2020, eq. 4-12).
//
//   S_t = S_{t-1} + phi(k_t) (x) v_t,   z_t = z_{t-1} + phi(k_t),
//   out_t = phi(q_t) S_t / divisor(phi(q_t) . z_t)
//
// for each batch row and head. Each token is written, then reads (causal). S and z are double at
// the beginning of each span of tokens, beside float sums of the span (sum_memory.h says why they
// are double). Time O(T n d), memory O(n d + T) a head beyond inputs and outputs. Causality is
// bitwise: outputs up to t depend on no bit of later tokens. Where there are fewer heads than
// threads, these share a head: the sums of its segments (1,024 tokens) are formed at once, then its
// parts are walked from what came before each. Sums of a segment are apart from those before it in
// any case, so results do not depend on the number of threads.
#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/fourier_features.h"
#include "cistern/kernels/slot_memory.h"

namespace cistern {

enum class FeatureMap {
  kNone,        // q and k are features
  kEluPlusOne,  // x + 1 for x > 0, else e^x
  kFourier      // fourier_features.h
};

// What the sum of the values is divided by, z = phi(q_t) . z_t.
enum class DivisorRule {
  kPlus,       // z + value
  kAtLeast,    // max(z, value)
  kMagnitude,  // max(|z|, value)
  kSignSafe,   // z where |z| >= value, else value with the sign of z
  kNone        // no z is kept; the sum is multiplied by value
};

struct LinearRule {
  FeatureMap map = FeatureMap::kNone;
  double map_eps = 0;  // added to what kEluPlusOne gives; else 0
  DivisorRule divisor = DivisorRule::kPlus;
  double value = 1e-6;

  // Columns of the memory for values of width d: with that of z, the last one.
  int64_t Columns(int64_t width) const { return divisor == DivisorRule::kNone ? width : width + 1; }
};

//   q, k      [B,H,T,n]
//   v, out    [B,H,T,d]
//   memory    [B,H,n,d+1], or [B,H,n,d] with kNone, contiguous: before the sequence; replaced by
//             that after it
//   z         [B,H,T,1]: phi(q_t) . z_t, wanted by the backward, or data = nullptr
//   fourier   with kFourier, else null: then q and k are [B,H,T,fourier->width], n = 2
//             fourier->features, and the features are formed for the tokens at hand wherever they
//             are read. No [B,H,T,n] lies in memory
//
// T: float, double, or BFloat16, as in slot_attention.h.
template <class T>
void LinearForward(const SlotShape& shape, const LinearRule& rule, Rows<const T> q, Rows<const T> k,
                   Rows<const T> v, const RowMask& mask, double* memory, Rows<T> out,
                   Rows<ComputeType<T>> z, const FourierMap<ComputeType<T>>* fourier = nullptr);

// Its gradients; out and z are the forward's.
//   memory    before the sequence
//   G         as memory, in: gradient of the final memory; out: of the initial memory
//   d_scale   [H,fourier->width], of fourier->scale, or null
template <class T>
void LinearBackward(const SlotShape& shape, const LinearRule& rule, Rows<const T> q,
                    Rows<const T> k, Rows<const T> v, Rows<const T> out,
                    Rows<const ComputeType<T>> z, Rows<const T> d_out, const RowMask& mask,
                    const double* memory, double* G, Rows<T> dq, Rows<T> dk, Rows<T> dv,
                    const FourierMap<ComputeType<T>>* fourier = nullptr,
                    ComputeType<T>* d_scale = nullptr);

}  // namespace cistern
