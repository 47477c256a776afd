#pragma once
// ABC with an MLP control (P003, eq. 7 and App. B.1; spec 2.13): token i writes key and value into n slots with weights
// exp(W_phi x_i) / sum_j exp(W_phi x_j); a query attends to the n slots by softmax. Slot memory: match over keys, softmax, read over
// values.
#include "cistern/attention/mechanism.h"

namespace cistern {

class AbcMlpMechanism : public Mechanism {
 public:
  struct Options {
    int64_t slots = 32;  // n, per head
  };
  static Fields Describe(Options& options);
  AbcMlpMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  std::vector<Projection> Projections() const override;
  // key_memory, value_memory [B,H,n,d], z [B,H,n]
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;
  at::Tensor Extend(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  void Write(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries, const std::vector<at::Tensor>& x) const override;
  State Merge(const State& first, const State& second) const override;

 private:
  at::Tensor Attend(const at::Tensor& logits, const at::Tensor& occupied) const;
  int64_t slots_;
};

}  // namespace cistern
