#pragma once
// Random feature attention (Peng et al. 2021; P002 sec. 2.4; spec 2.5): phi(x) = c [sin(W x), cos(W
// x)] with random rows w ~ N(0, I/tau^2), so that phi(q) . phi(k) estimates exp(-|q-k|^2 / (2
// tau^2)): the softmax weight exp(q.k / tau^2) up to a factor of q, which cancels, and a factor of
// k, which is constant where q and k are normalised to length one and is kept as a weight of the
// key where they are not. The papers write N(0, tau^2 I); their formula and their code need
// 1/tau^2.
#include "cistern/attention/feature_attention.h"

namespace cistern {

struct RfaOptions {
  int64_t features = 0;  // m rows of W per head, which give 2m features (arccos: m); 0: d
  // paper         q, k / (|.| + 1e-3); c = 1/sqrt(m); the denominator keeps |z| >= 1e-3 and its
  // sign repository    as paper with c = 0.1 and z >= 1 (the authors' code): the first tokens are
  // scaled, not normalised. In cross attention |z| fork          as repository with c = 0.01 and z
  // >= 0.01 (T2R's copy of that code) ucu_notebook  as paper with z >= 1, W fixed and its scale not
  // learned (P002, Fig. 3) ucu_code      q, k as they are, no factor of the key, nothing is
  // divided, c = 1/sqrt(m), W fixed (P002's training code) plain         q, k as they are with the
  // factor of the key, exp(|k|^2 / (2 tau^2)); c and z as paper, z relative to the largest factor
  // exact_scale   plain with tau d^(1/4): estimates softmax(q.k / sqrt(d)), which P002's equation
  // means
  std::string variant = "paper";
  std::string kernel =
      "gaussian";                // arccos: phi(x) = c relu(W x) instead (order-1 arc-cosine kernel)
  std::string matrices = "iid";  // or orthogonal
  double tau = 1;
  // In training a sequence begun empty draws one matrix for each head, none twice, from a bank of
  // this many; in evaluation head h has matrix h. Layers draw apart. 0 or a fixed variant: never
  // drawn anew.
  int64_t bank = 500;
  int64_t seed = 31415;
};

class RfaMechanism : public Mechanism {
 public:
  using Options = RfaOptions;
  static Fields Describe(Options& options);
  // UsageError: attention dropout, fewer matrices than heads, a kernel that the variant does not
  // have.
  RfaMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  std::vector<Projection> Projections() const override;
  // memory [B,H,f,d+1] in double; draw [B,H] int64, on the CPU: each head's matrix, one draw for
  // all rows; for variants with the factor of the key, scale [B,H] in double: the logarithm of the
  // largest factor so far, which the memory is divided by.
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  State Merge(const State& first,
              const State& second) const override;  // Error where the two drew different matrices

 protected:
  // With a gate: x has a fourth tensor, the logits [B,H,T,1] of a decay of the memory; only the
  // causal form.
  RfaMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims,
               bool gated);
  at::Tensor BidirectionalRows(const std::vector<at::Tensor>& x, const ops::Mask& mask) override;

 private:
  struct Variant;
  static const Variant& FindVariant(const std::string& name);
  at::Tensor Matrix(int64_t index) const;
  at::Tensor Matrices(const State& state, at::ScalarType type) const;  // [H,m,d]
  at::Tensor Scaled(const at::Tensor& x) const;                        // what W is applied to
  at::Tensor Features(const at::Tensor& scaled,
                      const at::Tensor& matrices) const;  // [B,H,T,d] -> [B,H,T,f]
  at::Tensor DefinitionWeights(const std::vector<at::Tensor>& query,
                               const std::vector<at::Tensor>& seen) const;  // [B,H,1,S]

  Options options_;
  const Variant& variant_;
  bool gated_;
  int64_t features_;     // m
  double tau_, factor_;  // factor_: c
  Denominator denominator_, cross_;
  at::Tensor
      sigma_;  // [H,1,d], learned: W's columns are multiplied by it; undefined in fixed variants
  at::Tensor evaluation_;  // "matrices" [H,m,d], a buffer: those of evaluation, 0..H-1 of the bank
  mutable std::vector<int64_t> drawn_indices_;  // what drawn_ holds: the last draw that was used
  mutable at::Tensor drawn_;
};

}  // namespace cistern
