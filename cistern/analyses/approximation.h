#pragma once
// How well each mechanism approximates exact softmax attention on the queries, keys and values of a
// trained softmax model (P002 Fig 2; spec 5), by its size: slots, landmarks, features or window.
//
//   rows      |W' - W| / |W|, Frobenius, of the attention weights of a head (T x T)
//   tv        mean over queries of the total variation between their weights, 1/2 sum |w' - w|
//   outputs   |W' v - W v| / |W v|
//
// W' is exact (identity_values.h). A mechanism takes part where it is a function of q, k and v
// alone: one with learned maps of its own is no approximation before it is trained. Linformer's
// random projection is its theorem's. Beside them stands what no matrix of rank k can beat: the
// truncated singular value decomposition (Eckart and Young).
//
// Spectra: singular values of W of each layer. Linformer (Wang et al. 2020, theorem 2) says that a
// random projection to k = min(9 d ln d, 5 ln T) / eps^2 keeps the outputs within eps; the bound
// drawn is eps(k), with the constants hidden in its Theta taken as they stand. Above 1 it says
// nothing.
#include <map>

#include "cistern/analyses/analysis.h"
#include "cistern/analyses/mean.h"

namespace cistern {

class ApproximationAnalysis : public Analysis {
 public:
  struct Options {
    std::vector<std::string> mechanisms;  // none: all that fit
    std::vector<int64_t> sizes = {8, 16, 32, 64, 128};
    std::vector<int64_t> layers;  // from 1; none: all
    int64_t rows = 4, length = 256, row = 0, layer = 1, head = 1, drawn_size = 32;
    bool bidirectional = false;
  };
  static Fields Describe(Options& options);
  ApproximationAnalysis(const Options& options, const AnalysisContext& context);

  void Add(const Batch& batch, const std::vector<CapturedLayer>& layers) override;
  void Merge(const Analysis& other) override;
  Figures Report() const override;

 private:
  struct Errors {
    Mean rows, tv, outputs;
    void Merge(const Errors& o) { rows.Merge(o.rows), tv.Merge(o.tv), outputs.Merge(o.outputs); }
  };
  struct LayerSums {
    std::string name;
    int64_t heads = 0, reach = 0;  // reach: the largest size that is at most the tokens of the rows
    std::map<std::string, std::map<int64_t, std::vector<Errors>>> errors;  // name, size, head
    std::vector<Mean> spectrum;  // singular values divided by the largest, by their number
    Mean rank, ninety, width, tokens;
    void Merge(const LayerSums& other);
  };
  using ByReach = std::map<int64_t, LayerSums>;
  // The rows that reach the largest size that half of them reach: a shorter one would be part of
  // the smaller sizes alone, and the curve one of other rows at each size.
  static LayerSums OfMost(const ByReach& rows);
  struct Picture {
    std::string title;
    at::Tensor map;  // [T,T] double
  };

  void AddRow(const CapturedLayer& layer, int64_t row, bool drawn, LayerSums* sums);

  Options options_;
  AnalysisContext context_;
  std::vector<ByReach> layers_;
  std::vector<Picture> pictures_;
  int64_t rows_ = 0, measured_ = 0;
};

}  // namespace cistern
