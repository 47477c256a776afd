#pragma once
// Perceiver (Jaegle et al. 2021; P004 eq. 29; spec 2.9): learned latents attend to the tokens by
// exact softmax attention, and the blocks after it run on the latents. Its core is that of softmax
// attention, given queries of another stream; what is its own is the parameter `latents` [1,L,D]
// and that a block of it (nn/block.h) turns the stream of tokens into one of latents. Where it
// comes again, the latents attend to the tokens again.
#include "cistern/attention/fourier.h"
#include "cistern/attention/mechanisms/softmax.h"

namespace cistern {

class PerceiverMechanism : public SoftmaxMechanism {
 public:
  enum class Init {
    kNormal,     // N(0,1), lucidrains/perceiver-pytorch
    kTruncated,  // N(0, 0.02^2) cut at two deviations, the paper
  };
  // Made of the latents by a map, or the latents themselves (P004 eq. 29).
  enum class Queries { kMapped, kLatents };
  struct Options {
    int64_t latents = 64;
    Init init = Init::kNormal;
    int64_t heads = 0;     // of this layer alone; 0: the model's
    int64_t head_dim = 0;  // width of each of them; 0: the layer's width, shared out
    Queries queries = Queries::kMapped;
    FourierOptions fourier;  // beside the tokens
  };
  static Fields Describe(Options& options);
  PerceiverMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  at::Tensor InitialMemory() const override { return latents_; }
  std::string FormRefusal(Form form) const override;

 private:
  bool fourier_;
  at::Tensor latents_;  // undefined but in the first layer: later ones go on with its latents
};

}  // namespace cistern
