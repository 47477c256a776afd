#pragma once
// Attention by gated slots, causal (kernels/gated_slots.h has the algebra): the same as a
// composition of SumMatch, softmax and SumRead with the gates' logarithms, in one walk over the
// tokens. Differentiable in every tensor, the memories in and out included.
#include "cistern/ops/sum_memory.h"

namespace cistern::ops {

struct Gate {
  at::Tensor log_gate, write;  // as the logits: log g and 1 - g, exact where g is near 1
};
// g = sigmoid(logits)^(1 / temperature).
Gate MakeGate(const at::Tensor& logits, double temperature);

struct GatedSlotsResult {
  at::Tensor out;
  at::Tensor keys, values;  // [B,H,n,d] double, after the last token
};

// SumRead(softmax(scale SumMatch(q, 1 - g, k, g)), 1 - g, v, g).
//   q, k, v [B,H,T,d], logits [B,H,T,n], keys and values [B,H,n,d] double -> out [B,H,T,d]
GatedSlotsResult GatedSlotsAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const at::Tensor& logits, const at::Tensor& keys,
                                     const at::Tensor& values, double scale, double temperature,
                                     const Mask& mask = {});

// The same for memories that go on: they become those after. Where the caller's handles are the
// only ones and no gradient is recorded, they are written in place (in_place.h): no copy.
at::Tensor GatedSlotsExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& logits, at::Tensor& keys, at::Tensor& values,
                            double scale, double temperature, const Mask& mask = {});

}  // namespace cistern::ops
