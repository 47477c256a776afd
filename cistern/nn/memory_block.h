#pragma once
// The block of a mechanism with a memory stream that passes from block to block. It has a
// residual and a norm as the tokens have around attention, and no feed-forward: mem' = LN(mem +
// packed) (post), as in Luna and P000. A mechanism that makes the next memory itself
// (MemoryUse::kReplaced) has neither.
#include "cistern/nn/block.h"

namespace cistern {

class MemoryBlock : public Block {
 public:
  explicit MemoryBlock(const BlockOptions& options);
  Stream Bidirectional(Stream stream) override;

 private:
  bool replaced_;
  std::shared_ptr<LayerNorm> norm_;  // null where not needed
};

}  // namespace cistern
