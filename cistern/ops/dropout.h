#pragma once
// Dropout in training, by counter (kernels/dropout.h): one pass over memory each way, of which
// nothing is kept for the backward pass.
#include <ATen/core/Tensor.h>

#include "cistern/kernels/dropout.h"

namespace cistern::ops {

// x [B,...], any real dtype, with each value zero with probability `rate` and else divided by
// 1 - rate; x itself without training or for rate 0. What is dropped of a row depends on the draw
// (draws.h) and on the row's number in the whole batch. Derivatives of every order. On devices
// other than the CPU by torch's generator there.
at::Tensor Dropout(const at::Tensor& x, double rate, bool training);
// The same of a draw that was made before; x itself where it drops nothing.
at::Tensor Dropout(const at::Tensor& x, const DropoutDraw& draw);

// The same of some tokens of a batch: x [N,D] of the tokens numbered tokens [N] int64 among the
// batch's B T, of T a row. What is dropped of token t of a row does not depend on T.
at::Tensor DropoutOfTokens(const at::Tensor& x, const at::Tensor& tokens, int64_t tokens_per_row,
                           double rate, bool training);

}  // namespace cistern::ops
