#pragma once
// Memory degradation (P000 Fig 1, sec. 2, App. C; spec 5): do the slots of a memory differ, and do
// they attend to different tokens?
//
//   memory streams (luna, conv_luna and its ablations, set_transformer, shared_workspace): the
//   learned memory, each block's input memory and what it packs; the weights of packing: entropy
//   divided by ln(keys) (1 = uniform, P000's "near-uniform"), likeness of slots 1 - TV; likeness
//   (cosine) of the outputs over tokens and over slots; entropy of reading / ln(slots); variance of
//   packing's products q . k and of its logits over the keys; variance of the outputs over tokens
//   slots in a state (abc_*, gated_slots, luna_causal, linformer): key and value memory of each
//   head after the row
//
//   exact softmax, to be compared with: the same of its own attention (entropy / ln(keys seen))
//
// Means over rows (and heads), next to the same of a model of this config with random weights.
#include <map>

#include "cistern/analyses/analysis.h"
#include "cistern/analyses/mean.h"
#include "cistern/analyses/memory_claims.h"
#include "cistern/analyses/slot_stats.h"

namespace cistern {

class MemoryAnalysis : public Analysis {
 public:
  struct Options {
    bool reference = true;
    int64_t row = 0, rows = 100, reference_rows = 100;
  };
  static Fields Describe(Options& options);
  MemoryAnalysis(const Options& options, const AnalysisContext& context);

  void Add(const Batch& batch, const std::vector<CapturedLayer>& layers) override;
  void Merge(const Analysis& other) override;
  Figures Report() const override;
  MemorySummary Summary(const std::string& label) const;

 private:
  // Of one memory of a layer: the fields of SlotStats.
  struct MemorySums {
    int64_t slots = 0;
    Mean empty, cosine, rank, rank_share, participation, centred_rank, centred_participation,
        unique;
    void Add(const at::Tensor& memory);  // [M,D]
    void Merge(const MemorySums& other);
  };
  struct LayerSums {
    std::string name, mechanism;
    std::map<std::string, MemorySums> memories;  // "input", "packed", "key_memory", ...
    Mean entropy, likeness, tokens, slots, reading, products, logits, divisor, output, packed;
    Json options = Json::object();  // of the mechanism
    void Merge(const LayerSums& other);
  };
  using Sums = std::vector<LayerSums>;

  void AddTo(Sums* sums, const std::vector<CapturedLayer>& whole, bool draws);
  void AddStream(const CapturedLayer& layer, int64_t row, LayerSums* sums, bool drawn);
  // state: after all tokens of the batch's rows.
  void AddState(const CapturedLayer& layer, const State& state, int64_t row, LayerSums* sums,
                bool drawn);
  static void AddSoftmax(const CapturedLayer& layer, int64_t row, LayerSums* sums);
  void Draw(const std::string& title, const at::Tensor& memory);

  Options options_;
  AnalysisContext context_;
  std::shared_ptr<Model> random_;  // null: none asked for
  Sums trained_, untrained_;
  std::vector<HeatMap> pictures_;
  int64_t rows_ = 0, measured_ = 0;
};

}  // namespace cistern
