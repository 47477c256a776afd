#pragma once
// Random feature attention (Peng et al. 2021; P002 sec. 2.4; spec 2.5): phi(x) = c [sin(W x), cos(W
// x)] with random rows w ~ N(0, I/tau^2), so that phi(q) . phi(k) estimates exp(-|q-k|^2 / (2
// tau^2)): the softmax weight exp(q.k / tau^2) up to a factor of q, which cancels, and a factor of
// k, which is constant where q and k are normalised to length one and is kept as a weight of the
// key where they are not. The papers write N(0, tau^2 I); their formula and their code need
// 1/tau^2.
#include "cistern/attention/feature_attention.h"
#include "cistern/attention/operations.h"

namespace cistern {

struct RfaOptions {
  enum class Variant {
    // q, k / (|.| + 1e-3); c = 1/sqrt(m); the denominator keeps |z| >= 1e-3 and its sign
    kPaper,
    // as kPaper with c = 0.1 and z >= 1 (the authors' code): the first tokens are scaled, not
    // normalised. In cross attention |z|
    kRepository,
    kFork,         // as kRepository with c = 0.01 and z >= 0.01 (T2R's copy of that code)
    kUcuNotebook,  // as kPaper with z >= 1, W fixed and its scale not learned (P002, Fig. 3)
    // q, k as they are, no factor of the key, nothing is divided, c = 1/sqrt(m), W fixed (P002's
    // training code)
    kUcuCode,
    // q, k as they are with the factor of the key, exp(|k|^2 / (2 tau^2)); c and z as kPaper, z
    // relative to the largest factor
    kPlain,
    // kPlain with tau d^(1/4): estimates softmax(q.k / sqrt(d)), which P002's equation means
    kExactScale,
  };
  // kArccos: phi(x) = c relu(W x) instead (order-1 arc-cosine kernel)
  enum class Kernel { kGaussian, kArccos };
  enum class Matrices { kIid, kOrthogonal };
  enum class Draws { kLayer, kModel };

  int64_t features = 0;  // m rows of W per head, which give 2m features (arccos: m); 0: d
  Variant variant = Variant::kPaper;
  Kernel kernel = Kernel::kGaussian;
  Matrices matrices = Matrices::kIid;
  double tau = 1;
  // In training a sequence begun empty draws one matrix for each head, none twice, from a bank of
  // this many; in evaluation head h of every layer has matrix h. Layers draw apart, or (kModel)
  // none gets a matrix that another has: the layer that comes first draws an order of the bank, and
  // layer l takes its places l H to (l+1) H - 1. 0 or a fixed variant: never drawn anew.
  int64_t bank = 500;
  Draws draws = Draws::kLayer;
  int64_t seed = 31415;
  // phi(k) is multiplied by sigmoid(w . x + b), one number a head, b at first 3 (T2R's copy of the
  // authors' code; not the gate of the paper, rfa_gate).
  bool input_gate = false;
  bool gate_bias = true;  // of rfa_gate: b_g, whatever the model's biases; false: as these

  void DescribeFeatures(Fields& fields);  // kernel and matrices
  void DescribeBank(Fields& fields);      // bank, draws, seed
};

class RfaMechanism : public Mechanism, public CountsOperations {
 public:
  using Options = RfaOptions;
  using Variant = Options::Variant;
  using Kernel = Options::Kernel;
  static Fields Describe(Options& options);
  // UsageError: attention dropout, fewer matrices than heads (or than the heads of all layers up to
  // this one), a kernel that the variant does not have.
  RfaMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  // memory [B,H,f,d+1] in double, `decoding` in its place while it decodes (ops/slot_decoding.h)
  // where it does not decay; draw [B,H] int64, on the CPU: each head's matrix, one draw for
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
  LeastOperations Operations(Form form, int64_t tokens, int64_t before) const override;
  // Where sums are of the features of queries and keys as they are: no gate, no factor of the key,
  // sines and cosines. They are made where tokens are read.
  bool FormsFeatures(Form form) const override;
  bool TakesBFloat16(Form form) const override;

 protected:
  // With a gate: x has a fourth tensor, the logits [B,H,T,1] of a decay of the memory; only the
  // causal form.
  RfaMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims,
               bool gated);
  at::Tensor BidirectionalRows(const std::vector<at::Tensor>& x, const ops::Mask& mask) override;

 private:
  struct VariantOf;
  static const VariantOf& FindVariant(Variant variant);
  // Sums of each head: sines and cosines, or arc-cosine features.
  int64_t Sums() const { return options_.kernel == Kernel::kArccos ? features_ : 2 * features_; }
  at::Tensor Drawn() const;  // [H]: each head's matrix, of a sequence that begins
  at::Tensor InputGate(const at::Tensor& weights, const std::vector<at::Tensor>& x) const;
  at::Tensor Matrix(int64_t index) const;
  // [H,m,d], in the type that features of x are computed in.
  at::Tensor Matrices(const State& state, const at::Tensor& x) const;
  at::Tensor Scale(at::ScalarType type) const;  // sigma / tau [H,1,d]; undefined without sigma
  ops::FourierFeatureMap FeatureMapOf(const at::Tensor& x, const at::Tensor& matrices) const;
  at::Tensor Scaled(const at::Tensor& x) const;  // what W is applied to
  // [B,H,T,d] -> [B,H,T,f]; of Scaled(x), and of x.
  at::Tensor FeaturesOfScaled(const at::Tensor& scaled, const at::Tensor& matrices) const;
  at::Tensor Features(const at::Tensor& x, const at::Tensor& matrices) const;
  at::Tensor ReadBy(const Denominator& denominator, const std::vector<at::Tensor>& x,
                    const State& state) const;
  at::Tensor DefinitionWeights(const std::vector<at::Tensor>& query,
                               const std::vector<at::Tensor>& seen) const;  // [B,H,1,S]

  Options options_;
  const VariantOf& variant_;
  bool gated_;
  int64_t features_;     // m
  double tau_, factor_;  // factor_: c
  Denominator denominator_, cross_;
  ProjectionId q_, k_, v_, gate_, input_gate_;
  StateId memory_, draw_, scale_;
  at::Tensor
      sigma_;  // [H,1,d], learned: W's columns are multiplied by it; undefined in fixed variants
  at::Tensor input_bias_;     // "input_gate.bias" [H,1,1], learned; undefined without
  mutable at::Tensor order_;  // of the first layer, draws=model: the bank's, drawn last
  at::Tensor evaluation_;  // "matrices" [H,m,d], a buffer: those of evaluation, 0..H-1 of the bank
  mutable std::vector<int64_t> drawn_indices_;  // what drawn_ holds: the last draw that was used
  mutable at::Tensor drawn_;
};

}  // namespace cistern
