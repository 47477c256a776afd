#pragma once
// A mechanism of one's own: slots that forget nothing and weigh every token alike, but each through
// its own gate. Token i writes its value into slot l with weight exp(gate_i[l]); a token reads the
// slots with softmax(q). With `gated=false` all weights are equal and every slot holds the plain
// running mean of the values: bag of words, the simplest bounded memory there is.
#include "cistern/attention/mechanism.h"

namespace cistern {

class MeanMechanism : public Mechanism {
 public:
  struct Options {
    int64_t slots = 4;  // n, per head
    bool gated = true;
  };
  static Fields Describe(Options& options);

  MeanMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);
  State EmptyState(int64_t batch,
                   const at::TensorOptions& options) const override;  // memory [B,H,n,d], z [B,H,n]
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;

 private:
  at::Tensor LogWeights(const std::vector<at::Tensor>& x) const;

  Options options_;
  ProjectionId q_, gate_, v_;
  StateId memory_, z_;
};

MechanismInfo mean_mechanism();

}  // namespace cistern
