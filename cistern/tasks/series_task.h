#pragma once
// A class, or a number, for each series of real values (io/series_source.h): every time step is a
// token, a vector of the channels' values. Values stay on disk where they are many.
#include <memory>
#include <string>
#include <vector>

#include "cistern/tasks/class_measure.h"
#include "cistern/tasks/number_measure.h"
#include "cistern/tasks/order.h"
#include "cistern/tasks/series_input.h"

namespace cistern {

class SeriesTask : public ClassTask {
 public:
  struct Options {
    SeriesInputOptions input;
    bool regression = false, group_by_length = true;
    double valid_share = 0.2, test_share = 0.2;
    int64_t split_seed = 1;
  };
  static Fields Describe(Options& options);
  SeriesTask(const Options& options, const std::string& cache);

  void SaveAssets(const std::string& folder) const override;  // series.json
  void LoadAssets(const std::string& folder) override;
  void Prepare() override;
  Json DataSummary() const override;
  void Complete(ModelConfig& config) const override;
  int64_t tokens_per_row() const override { return longest_; }
  int64_t train_rows() const override { return int64_t(train_.size()); }
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;
  at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const override;
  std::string WhyNoSmoothing(const Model& model) const override;
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override;
  std::unique_ptr<BatchReader> ReadFile(const std::string& path, bool labelled,
                                        const ReadOptions& options) const override;
  Score Measure(Model& model, const Batch& batch) const override;
  Json Metrics(const Score& score) const override;
  const Metric& metric() const override;
  std::vector<Json> Predict(Model& model, const Batch& batch) const override;

 private:
  void Learn(const SeriesStore& store);  // of the training series
  // The number of a series' class; that of classes: it is not known.
  int64_t ClassOf(const SeriesStore& store, int64_t i) const;
  // The series whose classes are known. Error at another one, unless it is to be skipped, and where
  // there is none.
  std::vector<int64_t> KnownRows(const SeriesStore& store, bool skip) const;
  // Whether padding would take part in what the model says of the batch.
  static bool PaddingSeen(const Model& model, const Batch& batch);
  // labelled: with targets.
  Batch MakeBatch(const SeriesStore& store, const std::vector<int64_t>& rows, bool labelled) const;

  Options options_;
  SeriesInput input_;
  NumberScale scale_;                              // regression: of the training labels
  int64_t longest_ = 1;                            // steps
  std::shared_ptr<const SeriesStore> all_, test_;  // test_: a file of its own, or all_
  std::vector<int64_t> train_, valid_, test_rows_;
  std::unique_ptr<ShuffledOrder> order_;
  std::vector<std::string> notes_;
};

// The file of the training series of a folder, or the path itself; the test file beside it, or "".
// UsageError where a folder has none.
struct SeriesFiles {
  std::string train, test;
};
SeriesFiles SeriesFilesOf(const SeriesInputOptions& options, const std::string& task, bool learn);
// Whether a path looks like series: archives' names, .npy.
bool LooksLikeSeries(const std::string& path);

}  // namespace cistern
