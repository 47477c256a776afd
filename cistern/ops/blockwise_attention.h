#pragma once
// Softmax attention with dropout, or with a bias that is learned, without its probabilities in
// memory: torch's fused kernel for the CPU has neither. For .cc files of this layer.
#include <ATen/core/Tensor.h>

#include "cistern/kernels/dropout.h"

namespace cistern::ops {

// dropout(softmax(q k^T scale + bias)) v over the keys that are visible: shapes, `visible` and
// `bias` as in MaskedAttention (softmax_attention.h). Queries are taken some rows at a time; the
// backward pass forms each block's probabilities again, with the same ones dropped. Gradients of q,
// k, v and bias, with a graph of their own (create_graph) as well, which keeps all blocks. O(T S (d
// + e)) time, once more in the backward pass; memory of a block, about 16 MB, and of one mask of T
// S bools where `visible` is one.
at::Tensor BlockwiseAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& visible, const at::Tensor& bias, double scale,
                              const DropoutDraw& dropout);

// Whether the probabilities of q and k are more than a block, on a device that draws as the CPU.
bool WorthBlocks(const at::Tensor& q, const at::Tensor& k);

}  // namespace cistern::ops
