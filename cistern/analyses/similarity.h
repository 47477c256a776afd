#pragma once
// How alike the attention of a model's layers and heads is (P001 sec. 3, eq. 2-3, Figs 2, 3, 6;
// spec 5). Of two heads on one example, over its n real queries:
//
//   S(A, A') = 1 - (1/n) sum_p 1/2 |A_p - A'_p|_1          in [0,1]: 1 - total variation
//   S(l,h -> l') = max_h' mean_examples S(A_lh, A_l'h')    the mean before the maximum: asymmetric
//
// A are the implied weights of any mechanism (implied_weights.h), which have to be probabilities:
// others are refused, or made so (`normalise`), over the queries of which both heads have any. With
// `data` random or both, the model also runs on rows of the same lengths whose ids are drawn
// uniformly from the vocabulary (Fig 4). W is walked by blocks of columns, so memory is
// O(layers x heads x T) times a block; time O((layers x heads)^2 T^2 / 2) an example.
#include "cistern/analyses/analysis.h"
#include "cistern/analyses/similarity_cells.h"

namespace cistern {

class SimilarityAnalysis : public Analysis {
 public:
  enum class Data { kRows, kRandom, kBoth };  // those that were read, uniform ids in their place
  struct Options {
    bool normalise = false;
    Data data = Data::kRows;
    double threshold = 0.8;
  };
  static Fields Describe(Options& options);
  SimilarityAnalysis(const Options& options, const AnalysisContext& context);

  void Add(const Batch& batch, const std::vector<CapturedLayer>& layers) override;
  void Merge(const Analysis& other) override;
  Figures Report() const override;

  // S of heads averaged over examples, [N,N] by layer and head: layer 1's heads first. NaN of heads
  // that never look at once.
  std::vector<double> Heads(bool random = false) const {
    const Sums& s = random ? random_ : data_;
    return MeanOf(s.heads, s.counts);
  }
  // On the rows and on random ids, as far as there are any.
  std::vector<SimilarityCell> Cells(const std::string& model) const;
  // S(l,h -> l'), by [l][h][l'], of such a matrix.
  std::vector<std::vector<std::vector<double>>> BestMatches(const std::vector<double>& heads) const;

 private:
  // The sums after the first examples, to see how many are enough (Fig 6).
  struct Snapshot {
    int64_t rows;
    std::vector<double> sums, counts;
  };
  struct Sums {
    std::vector<double> heads, counts;  // [N,N]; counts: rows with a query of both heads
    std::vector<Snapshot> snapshots;
    int64_t rows = 0, skipped = 0, without = 0;  // without: queries, of each head, without a weight
    double tokens = 0;
    void Merge(const Sums& other);
  };
  void AddLayers(const Batch& batch, const std::vector<CapturedLayer>& layers, Sums* sums);
  // One row alone, into empty sums.
  void AddRow(const std::vector<const CapturedLayer*>& layers, int64_t row, Sums* sums) const;
  static std::vector<double> MeanOf(const std::vector<double>& sums,
                                    const std::vector<double>& counts);
  // The steps of Report. What the numbers mean, and what is left out of them.
  void AddDefinition(bool random, Figures* f) const;
  // After how many examples the heat map is what it is in the end (Fig 6).
  void AddExamples(const Sums& sums, const std::vector<std::vector<double>>& of_layers,
                   Figures* f) const;
  // The Reuse model that is recommended; length: tokens of a row, the mean.
  void AddReuse(const std::vector<std::vector<std::vector<double>>>& best, double length,
                Figures* f) const;

  Options options_;
  AnalysisContext context_;
  std::vector<std::string> names_, mechanisms_;  // of the layers
  std::vector<int64_t> numbers_;  // the model's, from 1: some layers attend to nothing
  std::vector<int64_t> first_;    // of each layer: its first head among all; then their number
  Sums data_, random_;
  int64_t other_layers_ = 0, drawn_ = 0;  // drawn_: rows of random ids
};

// The batch with each id drawn uniformly from `vocab` by (seed, first_row + row, place), lengths
// and padding as they are. UsageError where its rows are no ids.
Batch WithRandomIds(const Batch& batch, int64_t vocab, uint64_t seed, int64_t first_row);

// sum_i |a_i - b_i| of every two of `count` rows of n floats each, added to sums [count,count]
// (both halves; the diagonal stays). Parallel; sums in double over blocks of 2,048.
void AddDifferences(const float* rows, int64_t count, int64_t n, double* sums);

}  // namespace cistern
