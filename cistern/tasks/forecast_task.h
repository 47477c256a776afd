#pragma once
// Forecasting one step ahead: from each step of a series and those before it the next step's values
// (io/series_source.h; labels are not read). A row is a window of a series. Every series is parted
// by time: its first steps are for training, the next ones for validation, the last for the test.
#include <memory>
#include <string>
#include <vector>

#include "cistern/tasks/series_input.h"

namespace cistern {

class ForecastTask : public Task {
 public:
  struct Options {
    SeriesInputOptions input;
    int64_t length = 128, context = -1;
    double valid_share = 0.1, test_share = 0.2;
  };
  static Fields Describe(Options& options);
  ForecastTask(const Options& options, const std::string& cache);

  void SaveAssets(const std::string& folder) const override;  // forecast.json
  void LoadAssets(const std::string& folder) override;
  void Prepare() override;
  Json DataSummary() const override;
  std::string SplitSummary() const override;
  void Complete(ModelConfig& config) const override;
  int64_t tokens_per_row() const override { return options_.length; }
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;
  at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const override;
  double Terms(const Batch& batch) const override;  // values that are predicted
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override;
  // labelled: all steps of the file's series, to be measured; else one row for each series: its
  // end.
  std::unique_ptr<BatchReader> ReadFile(const std::string& path, bool labelled,
                                        const ReadOptions& options) const override;
  Score Measure(Model& model, const Batch& batch) const override;
  // nrmse, nmae: over all values, each in deviations of its channel in the training part; the same
  // of always giving the last value (last_*) and the training mean (mean_*); channels: rmse, mae
  // and those of the baselines in the channel's own unit.
  Json Metrics(const Score& score) const override;
  const Metric& metric() const override;
  // line, steps, forecast: by channel what follows the series' last step, in the channel's unit.
  std::vector<Json> Predict(Model& model, const Batch& batch) const override;

 private:
  // Steps of a series that are to be predicted.
  struct Range {
    int64_t begin, end;
  };
  struct Window {
    int64_t series, begin, end;  // the steps that are predicted
  };
  // The windows of parts of a store's series, by number: O(log series) each.
  struct Windows;

  Range PartOf(const SeriesStore& store, int64_t series, Split split) const;
  Windows WindowsOf(const SeriesStore& store, Split split, bool whole, int64_t context) const;
  // `context`: steps before a window that are read as well, at most.
  Batch MakeBatch(const SeriesStore& store, const std::vector<Window>& windows, int64_t context,
                  bool with_last) const;
  void LastKnown(const SeriesStore& store, int64_t series, int64_t begin,
                 const std::vector<float>& raw, int64_t steps, float* known) const;
  std::unique_ptr<BatchReader> ReadWindows(std::shared_ptr<const SeriesStore> store, Split split,
                                           bool whole, const ReadOptions& options) const;
  int64_t ContextOf(const ReadOptions& options) const;

  Options options_;
  SeriesInput input_;
  std::shared_ptr<const SeriesStore> all_, test_;
  std::vector<int64_t> starts_;  // training windows before each series, and in all
  std::vector<std::string> notes_;
};

}  // namespace cistern
