#pragma once
// Span corruption on any text (TextTask; T5, Raffel et al. 2020; P001 A.2, spec 4.11): an encoder
// reads a row of which spans are hidden, a decoder writes them (spans.h). Training draws other
// spans each time, a measurement always the same ones for a text. Ids behind the tokenizer's:
// `end`, which also begins targets, then the sentinels.
#include <memory>
#include <string>
#include <vector>

#include "cistern/tasks/spans.h"
#include "cistern/tasks/text_task.h"

namespace cistern {

class SpanCorruptionTask : public TextTask {
 public:
  struct Options : TextTask::Options {
    double hidden_share = 0.15;
    double span_length = 3;
    int64_t sentinels = 100;
  };
  static Fields Describe(Options& options);
  SpanCorruptionTask(const Options& options, const std::string& cache);  // UsageError

  void Complete(ModelConfig& config) const override;
  int64_t tokens_per_row() const override;
  int64_t tokens_per_sequence() const override;
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;
  at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const override;
  double Terms(const Batch& batch) const override;  // tokens of the targets
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override;
  // Labelled: a text to be measured on. Else lines with <mask> in them, gaps of any length.
  std::unique_ptr<BatchReader> ReadFile(const std::string& path, bool labelled,
                                        const ReadOptions& options) const override;
  Score Measure(Model& model, const Batch& batch) const override;
  // Of the targets' tokens, sentinels and ends included: perplexity, nats_per_token, accuracy,
  // tokens.
  Json Metrics(const Score& score) const override;
  const Metric& metric() const override;
  // {"line", "text" with the gaps filled, "gaps": what fills each}.
  std::vector<Json> Predict(Model& model, const Batch& batch) const override;

 private:
  class Lines;
  SpanShares shares() const { return {options_.hidden_share, options_.span_length}; }
  int32_t end() const { return int32_t(tokenizer().vocab_size()); }
  int32_t Sentinel(int64_t i) const { return end() + 1 + int32_t(i); }
  // Rows [rows,T] with row r's spans by the draws of (seed, streams[r]).
  Batch Corrupted(const at::Tensor& tokens, uint64_t seed,
                  const std::vector<uint64_t>& streams) const;
  std::unique_ptr<BatchReader> RowsOf(const TokenText& text, const ReadOptions& o,
                                      std::shared_ptr<void> keep = nullptr) const;

  Options options_;
};

}  // namespace cistern
