#pragma once
// Efficient attention (Shen et al. 2018; P002 sec. 2.1 describes it as linear attention; spec 2.2):
// softmax over the channels of a query, softmax over the positions of a key channel, and the d x d
// products of keys and values between them. Both factors are stochastic, so that nothing is divided
// afterwards. It is Latte with L = D latents, whose code it shares. With normaliser = scaling the
// softmaxes go and Q (K^T V) is divided by d (P002) or by the number of tokens seen (Shen): plain
// sums of k (x) v, in double.
#include "cistern/attention/mechanisms/latte.h"

namespace cistern {

class EfficientMechanism : public LatteMechanism {
 public:
  enum class Normaliser { kSoftmax, kScaling };
  enum class Divisor { kWidth, kLength };  // of scaling: P002's, Shen's
  struct Options {
    Normaliser normaliser = Normaliser::kSoftmax;
    Divisor divisor = Divisor::kWidth;
  };
  static Fields Describe(Options& options);
  EfficientMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  // softmax: memory [B,H,d,d], z [B,H,d]. scaling: memory [B,H,d,d] in double, and count [B] int64
  // where it divides by the length.
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  State Merge(const State& first, const State& second) const override;
  bool TakesBFloat16(Form form) const override {
    return !scaling_ && LatteMechanism::TakesBFloat16(form);
  }

 private:
  bool scaling_, by_length_;
  StateId count_;
};

}  // namespace cistern
