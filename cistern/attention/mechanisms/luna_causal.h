#pragma once
// Luna's causal attention (Ma et al. 2021 sec. 3.3; P004 eq. 24-26; spec 2.10): slots weigh each
// token by a_s = omega(P c'_s / sqrt(d)) >= 0, hold the sums G_t = 1/t sum_s a_s (x) k_s and R_t =
// 1/t sum_s a_s (x) v_s, and a token reads y_t = softmax(q_t G_t^T / sqrt(d)) R_t. The memory P is
// learned and the same for all tokens and layers. Sums are the raw mode of ops/sum_memory; t counts
// the tokens of a document.
//
// In Luna's decoder P is not learned but the memory that cross attention hands from layer to layer
// (its static_context; AttentionDims::memory_given): it comes with each row and is part of the
// state.
#include "cistern/attention/memory_mechanism.h"

namespace cistern {

class LunaCausalMechanism : public MemoryMechanism {
 public:
  // omega: softplus of base 2, log2(1 + 2^u), as Luna's code; elu(u) + 1, the paper's other choice
  enum class Weight { kSoftplus, kElu };
  struct Options : MemoryOptions {
    Weight weight = Weight::kSoftplus;
    bool tie_kv = true;
  };
  static Fields Describe(Options& options);
  LunaCausalMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  bool TakesBFloat16(Form form) const override;
  at::Tensor DoPack(const std::vector<at::Tensor>& x,
                    const ops::Mask& mask) override;  // Error, as Unpack: luna packs
  at::Tensor DoUnpack(const std::vector<at::Tensor>& x, const std::vector<at::Tensor>& packed,
                      const ops::Mask& mask) override;
  // key_memory, value_memory [B,H,M,d] in double, the sums; count [B] int64: tokens of the document
  // each row is in. With a given memory also memory [B,H,M,d], P after its map, and readable [B]
  // int64: slots that tokens may read, 0 before there is a memory, where a token reads zeros.
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  State Merge(const State& first, const State& second) const override;  // plain sums
  void GiveMemory(const std::vector<at::Tensor>& memory, const at::Tensor& readable,
                  State& state) const override;
  void CheckState(const State& state) const override;

 private:
  at::Tensor Omega(const at::Tensor& u) const;
  // Both [B,H,T,M].
  at::Tensor WriteWeights(const std::vector<at::Tensor>& x, const State& state) const;
  at::Tensor ReadWeights(const at::Tensor& matched, const at::Tensor& tokens,
                         const State& state) const;

  Options options_;
  ProjectionId q_, fit_k_, k_, v_, memory_q_;  // fit_k_: c' of a_s; tie_kv: v_ is k_
  StateId key_memory_, value_memory_, count_;
  StateId memory_, readable_;  // declared with a given memory
};

}  // namespace cistern
