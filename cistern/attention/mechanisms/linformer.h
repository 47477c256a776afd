#pragma once
// Linformer (Wang et al. 2020; P002 sec. 2.2, P003 sec. 3.1; spec 2.7): learned matrices E and F of
// one column of weights for each position mix all keys and values into k slots, K~ = E K, V~ = F V,
// and a query attends to those: softmax(q K~^T / sqrt(d)) V~. As P003 shows, that is an ABC whose
// write weights depend on the position alone, so that it runs causally as well: K~_t = K~_(t-1) +
// E[:,t] (x) k_t. A position beyond max_length has no weights and is an Error.
#include "cistern/attention/mechanism.h"

namespace cistern {

class LinformerMechanism : public Mechanism {
 public:
  struct Options {
    int64_t slots = 64;  // k
    // Which share one matrix. none: nothing, headwise: the heads, E and F apart; key_value: the
    // heads, and E = F; layerwise: that matrix also serves all layers of the model with this
    // mechanism, and belongs to the first.
    std::string sharing = "key_value";
    // Entries of [k, N], N = max_length.
    //   xavier_uniform  U(+-sqrt(6/(N+k))): Long Range Arena         xavier_normal  N(0, 2/(N+k)):
    //   P003, by its authors' related code normal          N(0, 0.02^2): Nystromformer's repository
    //   uniform        U(+-1/sqrt(k)): lucidrains/linformer kaiming         N(0, 2/N): P002's code
    //   johnson_lindenstrauss  N(0, 1/k): the theorem of Wang et al.
    std::string init = "xavier_uniform";
  };
  static Fields Describe(Options& options);
  LinformerMechanism(const MechanismInfo& info, const Options& options,
                     const AttentionDims& dims);  // UsageError: no max_length

  std::vector<Projection> Projections() const override;
  // key_memory, value_memory [B,H,k,d] in double; count [B] int64: tokens of the document each row
  // is in
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;

 private:
  // Positions of the piece [B,T]; Error where a token's is beyond max_length. Those of padding are
  // made harmless.
  at::Tensor Positions(const State& state, int64_t length, const ops::Mask& mask) const;
  at::Tensor Weights(const at::Tensor& matrix, const at::Tensor& positions,
                     at::ScalarType type) const;  // [B,H,T,k]
  at::Tensor Attend(const at::Tensor& logits) const;

  Options options_;
  at::Tensor key_, value_;  // key.weight, value.weight [N, 1 or H, k], the transpose of the papers'
                            // E and F; no value_ where E = F
};

}  // namespace cistern
