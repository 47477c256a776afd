#pragma once
// Linformer (Wang et al. 2020; P002 sec. 2.2, P003 sec. 3.1; spec 2.7): learned matrices E and F of
// one column of weights for each position mix all keys and values into k slots, K~ = E K, V~ = F V,
// and a query attends to those: softmax(q K~^T / sqrt(d)) V~. As P003 shows, that is an ABC whose
// write weights depend on the position alone, so that it runs causally as well: K~_t = K~_(t-1) +
// E[:,t] (x) k_t. A position beyond N, which is `length` or max_length, has no weights and is an
// Error.
#include <cmath>

#include "cistern/attention/mechanism.h"
#include "cistern/attention/operations.h"

namespace cistern {

class LinformerMechanism : public Mechanism, public CountsOperations {
 public:
  // Which share one matrix. none: nothing, headwise: the heads, E and F apart; key_value: the
  // heads, and E = F; layerwise: that matrix also serves all layers of the model with this
  // mechanism, and belongs to the first; layerwise_per_head: so does one for each head, E = F.
  enum class Sharing { kNone, kHeadwise, kKeyValue, kLayerwise, kLayerwisePerHead };
  // Entries of [k, N].
  enum class Init {
    kXavierUniform,         // U(+-sqrt(6/(N+k))): Long Range Arena
    kXavierNormal,          // N(0, 2/(N+k)): P003, by its authors' related code
    kNormal,                // N(0, 0.02^2): Nystromformer's repository
    kUniform,               // U(+-1/sqrt(k)): lucidrains/linformer
    kKaiming,               // N(0, 2/N): P002's code
    kJohnsonLindenstrauss,  // N(0, 1/k): the theorem of Wang et al.
    // Normal, cut at two deviations, of variance 1/(N h), h the heads that have matrices of their
    // own: P004's code, whose matrix [N,H,k] has N H inputs for JAX
    kLecun,
  };
  // None: padding is mixed into the slots like any token (Long Range Arena)
  enum class Masking { kTokens, kNone };
  struct Options {
    int64_t slots = 64;  // k
    Sharing sharing = Sharing::kKeyValue;
    Init init = Init::kXavierUniform;
    int64_t length = 0;  // N; 0: max_length
    Masking mask = Masking::kTokens;
    bool normalise = false;  // tokens to length one before the maps of q, k and v: P004's code
  };
  static Fields Describe(Options& options);
  LinformerMechanism(const MechanismInfo& info, const Options& options,
                     const AttentionDims& dims);  // UsageError: no max_length

  // key_memory, value_memory [B,H,k,d] in double; count [B] int64: tokens of the document each row
  // is in
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  std::string FormRefusal(Form form) const override;  // mask=none
  bool TakesBFloat16(Form form) const override;
  bool SeesPadding() const override { return options_.mask == Masking::kNone; }
  LeastOperations Operations(Form form, int64_t tokens, int64_t before) const override;

 protected:
  at::Tensor BidirectionalRows(const std::vector<at::Tensor>& x, const ops::Mask& mask) override;

 private:
  // Positions of the piece [B,T]; Error where a token's is beyond N. Those of padding are
  // made harmless.
  at::Tensor Positions(const State& state, int64_t length, const ops::Mask& mask) const;
  at::Tensor Weights(const at::Tensor& matrix, const at::Tensor& positions,
                     at::ScalarType type) const;  // [B,H,T,k]
  at::Tensor Attend(const at::Tensor& logits) const;
  at::Tensor ReadFrom(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values) const;
  at::Tensor Mixed(const at::Tensor& matrix, const at::Tensor& x) const;  // [B,H,k,d]
  double Scale() const { return 1 / std::sqrt(double(dims().dim / dims().heads)); }
  bool Drops() const { return is_training() && dims().dropout > 0; }

  Options options_;
  int64_t length_;          // N
  at::Tensor key_, value_;  // key.weight, value.weight [N, 1 or H, k], the transpose of the papers'
                            // E and F; no value_ where E = F
  ProjectionId q_, k_, v_;
  StateId key_memory_, value_memory_, count_;
};

}  // namespace cistern
