#pragma once
// The block of a mechanism with latents (attention/mechanisms/perceiver.h): the latents replace the
// tokens, which become the stream's source. If it occurs again, the latents attend to the tokens
// again.
#include "cistern/attention/fourier.h"
#include "cistern/nn/block.h"

namespace cistern {

class LatentBlock : public Block {
 public:
  explicit LatentBlock(const BlockOptions& options);
  Stream Bidirectional(Stream stream) override;

 private:
  // The source with the Fourier features of its positions, where the options ask for them.
  at::Tensor Source(const Stream& source) const;

  FourierOptions fourier_;
  std::shared_ptr<LayerNorm> source_norm_;  // null where the norms come after
};

}  // namespace cistern
