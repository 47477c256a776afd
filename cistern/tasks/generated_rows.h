#pragma once
// What tasks share that measure how much a memory can hold: rows of tokens that are generated, of
// some of which a causal model has to say what follows, in several sizes (the number of things to
// be remembered). Accuracy by size is the capacity curve of a mechanism.
#include <memory>
#include <string>
#include <vector>

#include "cistern/base/random.h"
#include "cistern/tasks/task.h"

namespace cistern {

// One row: targets are -100 where nothing is asked.
struct GeneratedRow {
  std::vector<int64_t> ids, targets;  // of one length
};

class GeneratedRowsTask : public Task {
 public:
  struct Options {
    std::vector<int64_t> sizes = {4, 8, 16, 32};
    int64_t distance = 0;
    int64_t data_seed = 1, valid_examples = 256, test_examples = 1024;
  };

  // Of TaskInfo: the metric, settings that suit some minutes, mechanisms to compare.
  static Metric AccuracyMetric();
  static std::vector<std::string> MemoryDefaults(), MemoryMechanisms();

  void SaveAssets(const std::string&) const override {}
  void LoadAssets(const std::string&) override {}
  void Prepare() override {}
  Json DataSummary() const override;
  void Complete(ModelConfig& config) const override;
  int64_t tokens_per_row() const override { return Length(largest_); }
  // All rows of a step have one size, which is drawn.
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;
  at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const override;
  double Terms(const Batch& batch) const override;  // targets
  // The same number of rows of each size, those of one size after the other.
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override;
  // accuracy of the targets in percent, the mean over sizes; loss in nats; rows (share without a
  // mistake, in percent); chance; held: the most things that any size shows to be remembered,
  // n (accuracy - chance) / (1 - chance); capacity: {"x", "points": [[size, accuracy]]}.
  Score Measure(Model& model, const Batch& batch) const override;
  Json Metrics(const Score& score) const override;
  const Metric& metric() const override;

 protected:
  // `what` the sizes count: "pairs". UsageError where sizes are empty or below 1.
  GeneratedRowsTask(const std::string& what, const Options& options);
  static void DescribeRows(Fields& fields, Options& options, const std::string& sizes_help);
  virtual GeneratedRow MakeRow(Random& random, int64_t size) const = 0;
  virtual int64_t Length(int64_t size) const = 0;  // of a row
  virtual int64_t Vocabulary() const = 0;
  virtual int64_t Answers() const = 0;  // that a target may be: chance is 1 / Answers
  int64_t distance() const { return options_.distance; }

 private:
  Batch MakeBatch(uint64_t seed, const std::vector<std::pair<uint64_t, int64_t>>& rows) const;

  std::string what_;
  Options options_;
  int64_t largest_ = 0;
};

}  // namespace cistern
