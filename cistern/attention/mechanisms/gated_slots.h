#pragma once
// ABC with gated slots (P003 sec. 4 remarks that a gate fits every ABC; Zhang et al. 2024, Gated
// Slot Attention; spec 2.14): each slot decays by a learned gate and takes in what the gate lets
// go,
//
//   K_t = g_t K_(t-1) + (1 - g_t) (x) k_t,   V_t likewise,   o_t = V_t^T softmax(K_t q_t / sqrt(d))
//
// with g_t = sigmoid(W_g x_t)^(1/temperature) in (0,1)^n per head. Slots are running means that
// favour recent tokens, so nothing has to be divided, and every token that reads has been written
// to every slot.
#include "cistern/attention/mechanism.h"
#include "cistern/attention/operations.h"

namespace cistern {

class GatedSlotsMechanism : public Mechanism, public CountsOperations {
 public:
  struct Options {
    int64_t slots = 32;      // n, per head
    double temperature = 8;  // of the gate's logarithm: larger remembers longer from the start (8
                             // in Zhang et al.); 1: the plain sigmoid
  };
  static Fields Describe(Options& options);
  GatedSlotsMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  State EmptyState(int64_t batch, const at::TensorOptions& options)
      const override;  // key_memory, value_memory [B,H,n,d] in double; `decoding` in their place
                       // while it decodes (ops/slot_decoding.h)
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  bool TakesBFloat16(Form form) const override;
  LeastOperations Operations(Form form, int64_t tokens, int64_t before) const override;

 protected:
  bool PutsOffWrites() const override { return !DropsWeights(); }

 private:
  double Scale() const;
  bool DropsWeights() const;
  at::Tensor Attend(const at::Tensor& logits) const;

  Options options_;
  ProjectionId q_, k_, v_, gate_;
  StateId key_memory_, value_memory_;
};

}  // namespace cistern
