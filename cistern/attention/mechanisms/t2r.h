#pragma once
// T2R, "transformer to RNN" (Kasai et al. 2021, eq. 5-7; spec 2.4): attention by features phi(x) =
// relu(W_h x + b_h) that are learned, one map a head, the same for queries and keys; queries are
// multiplied by d^-1/2 first. Meant to take a trained softmax model over: its projections stay, the
// map is new, and finetuning does the rest. In evaluation a layer folds the map into the
// projections of queries and keys (W_h W_q and W_h W_k are made once), so that decoding makes no
// product for the features.
#include "cistern/attention/feature_attention.h"
#include "cistern/attention/folding.h"
#include "cistern/attention/operations.h"

namespace cistern {

class T2rMechanism : public FoldingMechanism, public CountsOperations {
 public:
  struct Options {
    int64_t features = 32;  // m, per head
    bool norm = false;      // x / (||x|| + 1e-3) before the map ("mlp-norm" in the authors' code)
    double minimum =
        1e-2;  // of the denominator, which is never negative, so that |z| and z are the same
  };
  static Fields Describe(Options& options);
  // UsageError: attention dropout. mapped: what comes after the map, whose outputs are given in
  // place of queries and keys (AfterMaps).
  T2rMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims,
               bool mapped = false);

  State EmptyState(int64_t batch, const at::TensorOptions& options)
      const override;  // memory [B,H,m,d+1] in double; `decoding` in its place while it
                       // decodes (ops/slot_decoding.h)
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  State Merge(const State& first, const State& second) const override;

  // Not with `norm`, which stands between, and not where the folded map would take more products
  // than the two it replaces.
  std::string FoldRefusal() const override;
  HeadMap FirstMap(size_t projection) const override;
  std::shared_ptr<Mechanism> AfterMaps() const override;
  LeastOperations Operations(Form form, int64_t tokens, int64_t before) const override;
  // Not with `norm`, whose lengths bfloat16 would round.
  bool TakesBFloat16(Form form) const override;

 private:
  at::Tensor Features(const at::Tensor& x,
                      double scale) const;  // [B,H,T,d], or [B,H,T,m] if mapped -> [B,H,T,m]

  Options options_;
  Denominator denominator_;
  double scale_;  // d^-1/2
  ProjectionId q_, k_, v_;
  StateId memory_;
  at::Tensor weight_, bias_;  // map.weight [H,m,d], map.bias [H,m]: U(+-1/sqrt(d)), as torch
                              // initialises a linear map; undefined if mapped
};

}  // namespace cistern
