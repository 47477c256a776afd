#pragma once
// The block of a mechanism with latents (attention/mechanisms/perceiver.h): it puts these in the
// place of the tokens, which become the stream's source. Where it comes again, the latents attend
// to the tokens again.
#include "cistern/nn/block.h"

namespace cistern {

class LatentBlock : public Block {
 public:
  explicit LatentBlock(const BlockOptions& options);
  Stream Bidirectional(Stream stream) override;

 private:
  std::shared_ptr<LayerNorm> source_norm_;  // null where the norms come after
};

}  // namespace cistern
