#pragma once
// The data that passes from block to block.
#include <ATen/core/Tensor.h>

#include <memory>

#include "cistern/attention/handles.h"
#include "cistern/ops/mask.h"

namespace cistern {

struct Stream {
  at::Tensor x;            // [B,T,D]
  ops::Mask mask;          // padding, masked tokens, packed documents
  at::Tensor positions;    // [1 or B,T] int64, counted from the start of each document
  at::Tensor memory = {};  // [1 or B,M,D]: the second stream of mechanisms that have one; undefined
                           // before the first of them
  std::shared_ptr<const Stream> source =
      {};  // where x holds latents: the tokens they attend to (attention/mechanisms/perceiver.h)
  // Padding reads what the real tokens wrote, and is not read (Long Range Arena); else it reads
  // zeros.
  bool padding_reads = false;
  // Scores that the previous block passes to this block's self attention and cross attention.
  Handles handles = {}, cross_handles = {};
  // The table of rotary positions (nn/positions.h): made by the first layer that turns by these
  // positions, taken by the others of the same width and type.
  struct Rotary {
    at::Tensor positions, table;
  };
  std::shared_ptr<Rotary> rotary = std::make_shared<Rotary>();
};

}  // namespace cistern
