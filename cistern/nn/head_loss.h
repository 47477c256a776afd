#pragma once
// The loss of a language model's output layer without its logits: with a large vocabulary or a long
// text the logits [N,V] are the largest tensor of a training step, so rows are processed a few at a
// time, and their gradients are formed at once.
#include <ATen/core/Tensor.h>

namespace cistern {

// Mean cross-entropy in nats of hidden W^T + bias against the targets, over targets != -100 (none:
// 0).
//   hidden [N,D], weight [V,D], bias [V] or undefined, targets [N] int64.   label_smoothing: this
//   share of each target goes to all V alike.
// Differentiable once in hidden, weight and bias. Under bfloat16 autocast the products are in
// bfloat16, the rest in float. O(N V D) time; memory for the logits of some rows (about 2 MB),
// for any N.
at::Tensor HeadLoss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias,
                    const at::Tensor& targets, double label_smoothing = 0);

}  // namespace cistern
