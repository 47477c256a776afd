#pragma once
// Latte (P004; spec 2.15): latents stand between queries and keys. Read weights P = softmax over
// the latents of a head of x Wq; each latent holds the softmax(x Wk)-weighted mean of the values.
// The slot memory's read alone; no key memory.
#include "cistern/attention/mechanism.h"

namespace cistern {

class LatteMechanism : public Mechanism {
 public:
  struct Options {
    int64_t latents = 0;  // L, over all heads; 0: D
  };
  static Fields Describe(Options& options);
  LatteMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  std::vector<Projection> Projections() const override;
  State EmptyState(int64_t batch, const at::TensorOptions& options)
      const override;  // memory [B,H,L/H,d], z [B,H,L/H]
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  State Merge(const State& first, const State& second) const override;

 private:
  at::Tensor ReadWeights(const at::Tensor& x) const;  // [B,H,T,n], after dropout

  int64_t latents_;
};

}  // namespace cistern
