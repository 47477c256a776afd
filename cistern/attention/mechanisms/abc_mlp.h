#pragma once
// ABC with an MLP control (P003, eq. 7 and App. B.1; spec 2.13): token i writes key and value into
// n slots with weights alpha_i / sum_j alpha_j, alpha = exp, relu or sigmoid of W_phi x; a query
// attends to the n slots by softmax. In the exp mode of the slot memory the log-weights are
// log(alpha); log 0 = -inf is not written.
#include "cistern/attention/abc_memory.h"
#include "cistern/attention/operations.h"

namespace cistern {

class AbcMlpMechanism : public AbcMechanism, public CountsOperations {
 public:
  enum class Activation { kExp, kRelu, kSigmoid };
  enum class ControlBias { kNone, kModel };
  struct Options {
    MemoryOptions memory;
    Activation activation = Activation::kExp;
    bool shared_heads = false;                      // one control for all heads
    bool tied = false;                              // one control for all layers
    ControlBias control_bias = ControlBias::kNone;  // eq. 7 has none
    DecayOptions decay;                             // attention/decay.h
  };
  static Fields Describe(Options& options);
  AbcMlpMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);
  LeastOperations Operations(Form form, int64_t tokens, int64_t before) const override;
  bool TakesBFloat16(Form form) const override;

 protected:
  at::Tensor LogWeights(const std::vector<at::Tensor>& x, const Piece& piece) const override;
  at::Tensor DefinedWeights(Form form, const std::vector<at::Tensor>& seen) const override;

 private:
  Activation activation_;
  bool shared_heads_;
  ProjectionId control_;
};

}  // namespace cistern
