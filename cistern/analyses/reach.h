#pragma once
// How far a model reaches: from how far back an input still changes its output.
//
//   gradient      |d y_t / d e_s|, the norm of the Jacobian of an output (the hidden state before
//                 the output layer; a classifier's logits) in the embedding of a token
//                 (input_gradient.h); its share is divided by the sum over the tokens s
//   length        the least distance within which a share of a query's gradient lies (50, 90, 99 %)
//   perturbation  another token at s: the total variation between the predictions at t with and
//                 without it
//
// Means over queries and rows, by distance |t - s|. A classifier has one output and no distances:
// its picture are the words that its decision depends on. Unlike implied attention maps this goes
// through all layers, with what norms and feed-forwards do.
#include "cistern/analyses/analysis.h"
#include "cistern/analyses/mean.h"

namespace cistern {

class ReachAnalysis : public Analysis {
 public:
  struct Options {
    int64_t row = 0, rows = 16, queries = 8, probes = 2, changes = 16;
    double threshold = 0.01;
  };
  static Fields Describe(Options& options);
  ReachAnalysis(const Options& options, const AnalysisContext& context);

  void Add(const Batch& batch, const std::vector<CapturedLayer>& layers) override;
  void Merge(const Analysis& other) override;
  Figures Report() const override;

 private:
  void AddRow(const at::Tensor& ids, bool drawn);
  void AddGradients(const at::Tensor& gradients, const std::vector<int64_t>& queries);

  Options options_;
  AnalysisContext context_;
  std::vector<Mean> gradient_, change_;  // by distance
  Mean half_, most_, all_, tokens_;
  at::Tensor drawn_;              // [Q,T] shares, of the row that is drawn
  std::vector<int64_t> queries_;  // its lines
  std::vector<std::string> words_;
  int64_t rows_ = 0, measured_ = 0, longest_ = 0;
};

}  // namespace cistern
