#pragma once
// Latte (P004; spec 2.15): latents stand between queries and keys. Read weights P = softmax over
// the latents of a head of x Wq; each latent holds the softmax(x Wk)-weighted mean of the values.
// The slot memory's read alone; no key memory.
#include "cistern/attention/decay.h"
#include "cistern/attention/operations.h"

namespace cistern {

class LatteMechanism : public Mechanism, public CountsOperations {
 public:
  // What attention dropout drops: the read weights of every form; or as P004's code, those of the
  // causal form, and what its layer gives.
  enum class Dropped { kWeights, kPublished };
  struct Options {
    int64_t latents = 0;  // L, over all heads; 0: D
    Dropped dropout = Dropped::kWeights;
    DecayOptions decay;
  };
  static Fields Describe(Options& options);
  LatteMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  State EmptyState(int64_t batch, const at::TensorOptions& options)
      const override;  // memory [B,H,L/H,d], z [B,H,L/H]; with a gate decay [B,H,L/H or 1], the sum
                       // of the gates' logarithms over the document so far. `decoding` in place of
                       // the first two while it decodes (ops/slot_decoding.h)
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  State Merge(const State& first, const State& second) const override;
  double OutputDropout(Form form) const override;
  bool TakesBFloat16(Form form) const override;
  std::string FormRefusal(Form form) const override;
  LeastOperations Operations(Form form, int64_t tokens, int64_t before) const override;

 protected:
  bool PutsOffWrites() const override;
  // The projections alone: the states are those of the class derived from it, or, where it calls
  // DeclareStates, Latte's.
  LatteMechanism(const MechanismInfo& info, int64_t latents, const AttentionDims& dims);

  void DeclareStates();

  ProjectionId q_, k_, v_;
  StateId memory_, z_;

 private:
  at::Tensor ReadWeights(const at::Tensor& x, double dropout) const;  // [B,H,T,n]
  double WeightDropout(Form form) const;
  at::Tensor ExtendWith(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask);
  // x in double with the log-weights k - G of a gated piece; the gate's tensor is left out.
  std::vector<at::Tensor> Faded(const std::vector<at::Tensor>& x, const Decay& decay) const;
  void FadeState(const Decay& decay, State& state) const;
  int64_t Slots() const { return latents_ / dims().heads; }
  int64_t Width() const { return dims().dim / dims().heads; }

  int64_t latents_;
  Dropped dropped_ = Dropped::kWeights;
  DecayOptions decay_options_;
  ProjectionId gate_;
  StateId decay_;
};

}  // namespace cistern
