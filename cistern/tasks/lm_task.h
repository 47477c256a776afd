#pragma once
// Language modelling on any text file or folder, in bytes or byte-level BPE. 90/5/5 % of the bytes
// by position; test figures are on the last 5 %, in consecutive blocks of the training length
// without carried context. Tokens are cached on disk and mapped.
#include <memory>

#include "cistern/data/token_cache.h"
#include "cistern/tasks/lm_blocks.h"
#include "cistern/tasks/order.h"
#include "cistern/tasks/task.h"

namespace cistern {

class LmTask : public Task {
 public:
  struct Options {
    std::string text;               // a file or folder
    std::string tokenizer = "bpe";  // bpe | bytes
    int64_t vocab_size = 2048;      // with bpe
    int64_t length = 256;           // tokens of a training row
  };
  static Fields Describe(Options& options);
  LmTask(const Options& options, const std::string& cache);  // UsageError without a text

  void SaveAssets(const std::string& folder) const override;  // tokenizer.json
  void LoadAssets(const std::string& folder) override;
  void Prepare() override;
  Json DataSummary() const override;
  void Complete(ModelConfig& config) const override;
  int64_t tokens_per_row() const override { return options_.length; }
  // Shuffled blocks of `length` tokens; each epoch cuts the text at another offset.
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
  const TokenFile& tokens(Split split) const;
  TokenText Of(const TokenFile& file) const;
  std::shared_ptr<Tokenizer> LearnTokenizer(const TextSource& source, ByteRange train,
                                            const std::string& cache);
  // All of a text, in tokens.
  std::shared_ptr<TokenFile> Tokenize(const std::string& path) const;

  Options options_;
  std::string cache_;
  std::shared_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<TokenSplits> data_;
  std::vector<int32_t> token_bytes_;
  std::unique_ptr<ShuffledOrder> order_;
  std::vector<std::string> notes_;
  uint64_t text_hash_ = 0;
};

}  // namespace cistern
