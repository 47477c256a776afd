#pragma once
// Language modelling on any text file or folder, in bytes or byte-level BPE. 90/5/5 % of the bytes
// by position; test figures are on the last 5 %, in consecutive blocks of the training length
// without carried context. Tokens are cached on disk and mapped.
#include <memory>

#include "cistern/data/token_cache.h"
#include "cistern/tasks/lm_eval.h"
#include "cistern/tasks/order.h"
#include "cistern/tasks/task.h"

namespace cistern {

class LmTask : public Task {
 public:
  explicit LmTask(const TaskOptions& options) : options_(options) {}
  void Prepare() override;
  void Complete(ModelConfig& config) const override;
  // Shuffled blocks of `length` tokens; each epoch cuts the text at another offset.
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;
  at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const override;
  // bits_per_byte, nats_per_token, perplexity, accuracy (of the next token, in percent), tokens,
  // bytes.
  Json Evaluate(Model& model, Split split, const EvalOptions& options) const override;
  std::string metric() const override { return "bits_per_byte"; }
  bool lower_is_better() const override { return true; }
  int64_t tokens_per_row() const override { return options_.length; }
  Json DataSummary() const override;
  void SaveAssets(const std::string& folder) const override;  // tokenizer.json

  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const TokenFile& tokens(Split split) const;
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  TaskOptions options_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<TokenSplits> data_;
  std::vector<int32_t> token_bytes_;
  std::unique_ptr<ShuffledOrder> order_;
  std::vector<std::string> notes_;
  uint64_t text_hash_ = 0;
};

}  // namespace cistern
