#pragma once
// Self-pretraining (Amos et al. 2023, arXiv 2310.02980): the inputs of another task as a task of
// their own, without its labels. Masked: tokens that are hidden; causal: the next token. A batch is
// that of the task under it, so a pure function of (seed, step) like that one.
#include <memory>
#include <string>
#include <vector>

#include "cistern/tasks/masking.h"
#include "cistern/tasks/task.h"

namespace cistern {

enum class SelfObjective { kNone, kMasked, kCausal };
const EnumNames<SelfObjective>& SelfObjectives();  // none, masked, causal

class SelfTask : public Task {
 public:
  // Of a prepared task, which outlives this; `vocab`: token ids of its rows. UsageError where its
  // rows are not ids that stand one after the other: real values, pairs, left-out padding.
  SelfTask(const Task& task, SelfObjective objective, double mask_share, int64_t vocab);

  void SaveAssets(const std::string&) const override {}
  void LoadAssets(const std::string&) override {}
  void Prepare() override {}
  Json DataSummary() const override { return task_.DataSummary(); }
  void Complete(ModelConfig&) const override {}
  int64_t tokens_per_row() const override { return task_.tokens_per_row(); }
  int64_t train_rows() const override { return task_.train_rows(); }
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;
  at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const override;
  double Terms(const Batch& batch) const override;  // tokens that are predicted
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override;
  Score Measure(Model& model, const Batch& batch) const override;
  // Of the predicted tokens: perplexity, nats_per_token, accuracy, tokens.
  Json Metrics(const Score& score) const override;
  const Metric& metric() const override;

 private:
  class Reader;
  // ids, targets [B,T] and lengths of the rows of a batch of the task; row r draws from (seed,
  // stream + r).
  Batch Asked(const Batch& batch, uint64_t seed, uint64_t stream) const;

  const Task& task_;
  SelfObjective objective_;
  MaskShares shares_;
  int64_t vocab_;
  std::vector<int32_t> token_bytes_;  // one each: MeasureTokens counts bytes as well
};

}  // namespace cistern
