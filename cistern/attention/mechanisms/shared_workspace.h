#pragma once
// Shared workspace (Goyal et al. 2022; the relation to bounded memory is P003 eq. 10; spec 2.14):
// slots compete for tokens by a softmax without 1/sqrt(d), of which each slot keeps its top_k
// weights, not renormalised; the memory then changes through norms, a two-layer map and LSTM-like
// gates, and the tokens attend to the changed memory:
//
//   A = LN(M + packed), A' = LN(A + W2 relu(W1 A)), (i, f) = Wg mean(x) + Wm tanh(M), M' =
//   sigmoid(i) tanh(A') + sigmoid(f + 1) M
//
// M' goes on to the next block as it is. Bidirectional only.
#include "cistern/attention/memory_mechanism.h"

namespace cistern {

class SharedWorkspaceMechanism : public MemoryMechanism {
 public:
  // What the tokens' part of the gates is a map of: the mean of the tokens, or all of them behind
  // each other (zeros for those that a row lacks), W [2D, N D] with N = max_length.
  enum class GateInput { kMean, kFlattened };
  struct Options : MemoryOptions {
    int64_t top_k = 3;  // 0: all
    GateInput gate_input = GateInput::kMean;
  };
  static Fields Describe(Options& options);
  SharedWorkspaceMechanism(const MechanismInfo& info, const Options& options,
                           const AttentionDims& dims);

  at::Tensor DoPack(const std::vector<at::Tensor>& x, const ops::Mask& mask) override;
  at::Tensor Update(const std::vector<at::Tensor>& x, const at::Tensor& packed,
                    const ops::Mask& mask) const override;
  at::Tensor DoUnpack(const std::vector<at::Tensor>& x, const std::vector<at::Tensor>& packed,
                      const ops::Mask& mask) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;

 private:
  struct Affine {
    at::Tensor weight, bias;
  };

  // The tokens' part of the gates, [B,1,2D].
  at::Tensor OfTokens(const at::Tensor& inputs, const ops::Mask& mask) const;

  int64_t top_k_;
  ProjectionId q_, k_, v_, gate_inputs_, memory_q_, memory_itself_, packed_k_, packed_v_;
  Affine packed_norm_, up_, down_, mlp_norm_, gate_;
  Affine flattened_;  // flattened_gate_proj; undefined: the mean
};

}  // namespace cistern
