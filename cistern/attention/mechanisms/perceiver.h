#pragma once
// Perceiver (Jaegle et al. 2021; P004 eq. 29; spec 2.9): learned latents attend to the tokens by
// exact softmax attention, and the blocks after it run on the latents. Its core is that of softmax
// attention, given queries of another stream; what is its own is the parameter `latents` [1,L,D]
// and that a block of it (nn/block.h) turns the stream of tokens into one of latents. Where it
// comes again, the latents attend to the tokens again.
#include "cistern/attention/mechanisms/softmax.h"

namespace cistern {

class PerceiverMechanism : public SoftmaxMechanism {
 public:
  struct Options {
    int64_t latents = 64;
    std::string init = "normal";  // normal: N(0,1), lucidrains/perceiver-pytorch; truncated: N(0,
                                  // 0.02^2) cut at two deviations, the paper
  };
  static Fields Describe(Options& options);
  PerceiverMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  std::vector<Projection> Projections() const override;
  at::Tensor InitialMemory() const override { return latents_; }

 private:
  at::Tensor latents_;  // undefined but in the first layer: later ones go on with its latents
};

}  // namespace cistern
