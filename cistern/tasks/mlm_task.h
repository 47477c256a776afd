#pragma once
// Masked language modelling on any text (TextTask; RoBERTa, Liu et al. 2019; spec 3.6): of each
// row some tokens are chosen, most of them hidden by the mask, some replaced by a random token,
// some left as they are; the model says what they were. Training draws another choice each time, a
// measurement always the same one for a text.
#include <memory>
#include <string>
#include <vector>

#include "cistern/models/masked_lm.h"
#include "cistern/tasks/text_task.h"

namespace cistern {

class MlmTask : public TextTask {
 public:
  struct Options : TextTask::Options {
    double mask_share = 0.15;   // of the tokens of a row that are chosen
    double hidden_share = 0.8;  // of those: hidden by the mask
    double random_share = 0.1;  // of those: replaced by a random token; the rest stays
  };
  static Fields Describe(Options& options);
  MlmTask(const Options& options, const std::string& cache);  // UsageError

  void Prepare() override;
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;
  at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const override;
  double Terms(const Batch& batch) const override;  // chosen tokens
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override;
  // Labelled: a text to be measured on. Else lines with <mask> in them, to be filled in.
  std::unique_ptr<BatchReader> ReadFile(const std::string& path, bool labelled,
                                        const ReadOptions& options) const override;
  Score Measure(Model& model, const Batch& batch) const override;
  // Of the chosen tokens: perplexity, nats_per_token, accuracy, tokens; after Prepare also
  // unigram_perplexity and majority (accuracy of always the most frequent token), of answers by the
  // training text's frequencies.
  Json Metrics(const Score& score) const override;
  const Metric& metric() const override;
  // {"line", "text" with the best tokens filled in, "masks": [[{"token", "probability"}]]}.
  std::vector<Json> Predict(Model& model, const Batch& batch) const override;

 private:
  class Lines;
  // Masked by where rows begin.
  std::unique_ptr<BatchReader> RowsOf(const TokenText& text, const ReadOptions& o,
                                      std::shared_ptr<void> keep = nullptr) const;
  // ids and targets [rows,T] of tokens [rows,T]: row r by the draws of (seed, streams[r]).
  Batch Masked(const at::Tensor& tokens, uint64_t seed, const std::vector<uint64_t>& streams) const;

  Options options_;
  std::vector<double> unigram_nats_;  // of each token by its frequency, one added to each count
  int64_t most_frequent_ = -1;
};

}  // namespace cistern
