#pragma once
// Slots at work (slot_weights.h): which tokens each slot or latent holds on to, and who reads it.
//
//   held      tokens a slot holds: e^H of its write weights |w| / sum |w|; a slot that holds one
//             token has 1, one that holds the mean of T tokens T
//   age       how far back these stand, in tokens before the last, the mean under the same weights
//   empty     share of slots that hold nothing
//   rank      effective rank of the write weights [n,T], each slot's divided by its length: how
//             many slots' worth of different mixtures there are
//   read      slots that a query reads: e^H of |r| / sum |r|; 0 where it reads nothing
//   used      the same of the mean over queries: slots that are read at all
//
// Means over slots (held, age) or queries (read), heads and rows, after the last token of a row.
#include "cistern/analyses/analysis.h"
#include "cistern/analyses/mean.h"
#include "cistern/analyses/slot_weights.h"

namespace cistern {

class SlotsAnalysis : public Analysis {
 public:
  struct Options {
    std::vector<int64_t> layers;  // from 1; none: all
    int64_t row = 0, head = 1, times = 32, words = 4, rank_rows = 8, rows = 100;
  };
  static Fields Describe(Options& options);
  SlotsAnalysis(const Options& options, const AnalysisContext& context);

  void Add(const Batch& batch, const std::vector<CapturedLayer>& layers) override;
  void Merge(const Analysis& other) override;
  Figures Report() const override;

 private:
  struct LayerSums {
    std::string name, mechanism;
    int64_t number = 0;  // of its layer, from 1; groups of heads have that of theirs
    int64_t slots = 0, first_head = 0;
    Mean held, age, empty, rank, read, used;
    std::vector<Mean> slot_held, slot_age, slot_read;  // of each slot of each head, [G n]
    void Merge(const LayerSums& other);
  };
  // What is drawn of the one row: moments of one head, double.
  struct Drawn {
    std::string name;
    int64_t head = 0;  // of the layer, from 1
    std::vector<int64_t> times;
    std::vector<at::Tensor> write, read;  // [n,tokens], [Q,n]
    std::optional<int64_t> before;        // CapturedLayer::TokensBeforeText
    bool causal = false;
  };

  void Begin(const std::vector<CapturedLayer>& layers);
  void AddRow(const CapturedLayer& layer, int64_t row, bool rank, LayerSums* sums,
              Drawn* drawn) const;
  void DrawLayer(const Drawn& drawn, int* number, Figures* figures) const;

  Options options_;
  AnalysisContext context_;
  std::vector<LayerSums> layers_;
  std::vector<Drawn> drawn_;
  std::vector<std::string> words_;  // of the row that is drawn
  int64_t rows_ = 0, measured_ = 0;
};

}  // namespace cistern
