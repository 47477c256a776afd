#pragma once
// Implied attention maps: the effective T x T weights of every layer and head (implied_weights.h),
// and what can be said of them in numbers, over any rows:
//
//   entropy     of a query's weights |w| / sum |w|, in nats, and divided by ln of the tokens of the
//               row, up to it where attention is causal: 1 = uniform, 0 = one token
//   distance    mean |t - s| under the same weights: locality; not of cross attention
//   rank        effective rank e^H(sigma / sum sigma) of a row's W over its real tokens, sigma its
//               singular values (Roy and Vetterli 2007); for the first `rank_rows` rows, of at most
//               1,024 tokens, because it costs O(T^3)
//   row sum     of a query's weights: 1 where attention is a mean; and the share of |w| below zero
//
// Means over all real queries of all rows (rank: over rows); a query without any weight has a row
// sum alone. W is walked by columns, so memory is O(H T) times a block of columns.
#include <map>

#include "cistern/analyses/analysis.h"
#include "cistern/analyses/mean.h"

namespace cistern {

class MapsAnalysis : public Analysis {
 public:
  struct Options {
    std::vector<int64_t> layers, heads;  // from 1; none: all layers, the mean over heads
    int64_t row = 0, query = 0, rank_rows = 4;
    bool words = true;
  };
  static Fields Describe(Options& options);
  MapsAnalysis(const Options& options, const AnalysisContext& context);

  void Add(const Batch& batch, const std::vector<CapturedLayer>& layers) override;
  void Merge(const Analysis& other) override;
  Figures Report() const override;

 private:
  struct HeadSums {
    Mean entropy, share, distance, sum, negative, rank;
    int64_t without = 0;  // queries that have no weight at all
    void Merge(const HeadSums& other);
  };
  struct LayerSums {
    std::string name, mechanism;
    Form form = Form::kCausal;
    int64_t number = 0;  // CapturedLayer::number
    std::vector<HeadSums> heads;
  };
  // What is drawn of the one row.
  struct Drawn {
    std::string name;
    std::vector<std::pair<std::string, at::Tensor>> maps;   // title, [T',S'] double
    std::vector<std::pair<std::string, at::Tensor>> query;  // of the words: [S] double
    int64_t queries = 0, sources = 0, seen_query = 0;
    std::optional<int64_t> before;  // CapturedLayer::TokensBeforeText
    bool causal = false;
  };

  // One row of a layer: `rank` asks for its effective rank, `drawn` (may be null) for its pictures.
  void AddRow(const CapturedLayer& layer, int64_t row, bool rank, std::vector<HeadSums>* sums,
              Drawn* drawn) const;

  Options options_;
  AnalysisContext context_;
  std::vector<LayerSums> layers_;
  std::vector<Drawn> drawn_;
  std::vector<std::string> words_;  // of the row that is drawn
  int64_t rows_ = 0;
};

}  // namespace cistern
