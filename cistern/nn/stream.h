#pragma once
// What flows from block to block: never a bare tensor.
#include <ATen/core/Tensor.h>

#include "cistern/attention/handles.h"
#include "cistern/ops/slot_memory.h"

namespace cistern {

struct Stream {
  at::Tensor x;          // [B,T,D]
  ops::Mask mask;        // lengths [B]: padding on the right; starts [B,T]: packed documents
  at::Tensor positions;  // [1 or B,T] int64, counted from the start of each document
  // Scores that the block before leaves to its self attention and its cross attention.
  Handles handles = {}, cross_handles = {};
};

}  // namespace cistern
