#pragma once
// How alike the attention of a model's layers and heads is (P001 sec. 3, eq. 2-3, Figs 2, 3, 6;
// spec 5). Of two heads on one example, over its n real queries:
//
//   S(A, A') = 1 - (1/n) sum_p 1/2 |A_p - A'_p|_1          in [0,1]: 1 - total variation
//   S(l,h -> l') = max_h' mean_examples S(A_lh, A_l'h')    the mean before the maximum: asymmetric
//
// A are the implied weights of any mechanism (implied_weights.h), which have to be probabilities:
// others are refused, or made so (`normalise`). W is walked by blocks of columns, so memory is
// O(layers x heads x T) times a block; time O((layers x heads)^2 T^2 / 2) an example.
#include "cistern/analyses/analysis.h"

namespace cistern {

class SimilarityAnalysis : public Analysis {
 public:
  struct Options {
    bool normalise = false;
    double threshold = 0.8;
  };
  static Fields Describe(Options& options);
  SimilarityAnalysis(const Options& options, const AnalysisContext& context);

  void Add(const Batch& batch, const std::vector<CapturedLayer>& layers) override;
  void Merge(const Analysis& other) override;
  Figures Report() const override;

  // S of heads averaged over examples, [N,N] by layer and head: layer 1's heads first.
  std::vector<double> Heads() const { return MeanOf(sums_, rows_); }
  // S(l,h -> l'), by [l][h][l'], of such a matrix.
  std::vector<std::vector<std::vector<double>>> BestMatches(const std::vector<double>& heads) const;

 private:
  // The sums after the first examples, to see how many are enough (Fig 6).
  struct Snapshot {
    int64_t rows;
    std::vector<double> sums;
  };
  void AddRow(const std::vector<const CapturedLayer*>& layers, int64_t row);
  static std::vector<double> MeanOf(const std::vector<double>& sums, int64_t rows);

  Options options_;
  AnalysisContext context_;
  std::vector<std::string> names_, mechanisms_;  // of the layers
  std::vector<int64_t> first_;  // of each layer: its first head among all; then their number
  std::vector<double> sums_;    // [N,N]
  std::vector<Snapshot> snapshots_;
  int64_t rows_ = 0, skipped_ = 0, other_layers_ = 0;
  double tokens_ = 0;
};

// sum_i |a_i - b_i| of every two of `count` rows of n floats each, added to sums [count,count]
// (both halves; the diagonal stays). Parallel; sums in double over blocks of 2,048.
void AddDifferences(const float* rows, int64_t count, int64_t n, double* sums);

}  // namespace cistern
