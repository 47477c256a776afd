#pragma once
// Language modelling on any text (TextTask). Test figures are on 5 % of it, in consecutive rows of
// the training length without carried context.
#include <memory>
#include <string>

#include "cistern/tasks/lm_blocks.h"
#include "cistern/tasks/text_task.h"

namespace cistern {

class LmTask : public TextTask {
 public:
  LmTask(const Options& options, const std::string& cache) : TextTask("lm", options, cache) {}

  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;
  at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const override;
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override;
  std::unique_ptr<BatchReader> ReadFile(const std::string& path, bool labelled,
                                        const ReadOptions& options) const override;
  Score Measure(Model& model, const Batch& batch) const override;
  Json Metrics(const Score& score) const override { return TokenMetrics(score); }
  const Metric& metric() const override { return BitsPerByte(); }
  std::optional<TokenText> Text(Split split) const override;
  std::optional<TokenText> Text(const std::string& path) const override;
};

}  // namespace cistern
