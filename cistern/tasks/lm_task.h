#pragma once
// Language modelling on any text (TextTask). Figures are of consecutive rows of the training
// length, each from the empty state; with `context` each begins with that many tokens of the one
// before, which are not measured again.
#include <memory>
#include <string>

#include "cistern/tasks/lm_blocks.h"
#include "cistern/tasks/text_task.h"

namespace cistern {

class LmTask : public TextTask {
 public:
  struct Options : TextTask::Options {
    int64_t context = 0;  // fairseq's --context-window (P003 Table 3; spec 3.6)
  };
  static Fields Describe(Options& options);
  LmTask(const Options& options, const std::string& cache);

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

 private:
  std::unique_ptr<BatchReader> Blocks(const TokenText& text, const ReadOptions& options,
                                      std::shared_ptr<void> keep = nullptr) const;
  int64_t context_;
};

}  // namespace cistern
