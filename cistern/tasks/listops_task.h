#pragma once
// ListOps as a sequence classification task (spec 3.1): the published TSV files, or generated from
// a seed and cached as such.
#include <memory>
#include <optional>

#include "cistern/data/listops.h"
#include "cistern/tasks/row_batch.h"
#include "cistern/tasks/task.h"

namespace cistern {

class ListOpsTask : public Task {
 public:
  struct Options {
    std::string data;       // folder with the published TSV files; empty: generated
    int64_t length = 2000;  // longest row
    PadTo pad_to = PadTo::kLongest;
    bool group_by_length = false;
    int64_t data_seed = 1, train_examples = 96000, valid_examples = 2000, test_examples = 2000;
  };
  static Fields Describe(Options& options);
  ListOpsTask(const Options& options, const std::string& cache);

  void SaveAssets(const std::string&) const override {}
  void LoadAssets(const std::string&) override {}
  void Prepare() override;
  Json DataSummary() const override;
  void Complete(ModelConfig& config) const override;
  int64_t tokens_per_row() const override { return options_.length; }
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;
  int64_t train_rows() const override { return data_.train.size(); }
  at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const override;
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override;
  // A TSV file in the published form; unlabelled also with the column Source alone.
  std::unique_ptr<BatchReader> ReadFile(const std::string& path, bool labelled,
                                        const ReadOptions& options) const override;
  Score Measure(Model& model, const Batch& batch) const override;
  // accuracy in percent, loss in nats, and what it must beat on the same rows: majority and
  // root_operator (the first token alone), in percent, and root_operator_loss, in nats.
  Json Metrics(const Score& score) const override;
  const Metric& metric() const override;
  std::vector<Json> Predict(Model& model, const Batch& batch) const override;

 private:
  const ListOpsSet& Set(Split split) const;
  RowPadding padding() const { return {options_.pad_to, options_.length}; }

  Options options_;
  std::string cache_;
  ListOpsSplits data_;
  std::optional<ListOpsGuesses> guesses_;  // of the training split, once prepared
  std::unique_ptr<ShuffledOrder> order_;
  std::vector<std::string> notes_;
};

}  // namespace cistern
