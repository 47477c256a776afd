#pragma once
// Classes of time series of one or more channels (UCR and UEA archives, .ts): every time step is a
// token, a vector of the channels' real values. The series are held in memory.
//
// A missing value is the last one of its channel before it; before the first one, and where a
// channel has none, it is that channel's mean in the training series. Values are scaled by the
// training series' mean and deviation of each channel.
#include <memory>
#include <string>
#include <vector>

#include "cistern/io/series_file.h"
#include "cistern/tasks/class_measure.h"
#include "cistern/tasks/order.h"

namespace cistern {

class SeriesTask : public ClassTask {
 public:
  struct Options {
    std::string data, test;  // a folder, or a file; test empty: that of the folder
    bool scale = true, skip_bad_rows = false;
    double valid_share = 0.2;
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
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override;
  std::unique_ptr<BatchReader> ReadFile(const std::string& path, bool labelled,
                                        const ReadOptions& options) const override;
  const Metric& metric() const override;

 private:
  // With classes and channels as learned; missing values filled, values scaled.
  SeriesFile Open(const std::string& path) const;
  void Learn(SeriesFile* train);
  void Fill(SeriesFile* file) const;
  int64_t ClassOf(const SeriesFile& file, int64_t i) const;
  Batch MakeBatch(const SeriesFile& file, const std::vector<int64_t>& rows) const;

  Options options_;
  std::vector<double> means_, deviations_;  // of each channel; saved with the model
  int64_t longest_ = 1;                     // steps; saved, too
  SeriesFile all_, test_;                   // all_: of training and validation
  std::vector<int64_t> train_, valid_;      // of all_
  std::unique_ptr<ShuffledOrder> order_;
  std::vector<std::string> notes_;
};

}  // namespace cistern
