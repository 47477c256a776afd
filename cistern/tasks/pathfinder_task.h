#pragma once
// Pathfinder and Path-X (spec 3.5): whether two discs lie on the ends of one dashed contour. Images
// are generated and packed in the cache, or read from a packed file or the published folders.
#include <memory>
#include <string>
#include <vector>

#include "cistern/data/pathfinder.h"
#include "cistern/tasks/class_measure.h"
#include "cistern/tasks/order.h"
#include "cistern/tasks/pixel_input.h"

namespace cistern {

class PathfinderTask : public ClassTask {
 public:
  struct Options {
    std::string data;                          // empty: generated
    PathfinderOptions generate = {.size = 0};  // size 0: 32, or as data has it
    int64_t data_seed = 1, examples = 20'000;
    PixelInput pixels;
    double valid_share = 0.1, test_share = 0.1;
    int64_t split_seed = 1;
  };
  static Fields Describe(Options& options);
  PathfinderTask(const Options& options, const std::string& cache);

  void SaveAssets(const std::string& folder) const override;  // pathfinder.json
  void LoadAssets(const std::string& folder) override;
  void Prepare() override;
  Json DataSummary() const override;
  void Complete(ModelConfig& config) const override;
  bool CompletesFirst() const override { return options_.data.empty(); }
  int64_t tokens_per_row() const override { return options_.pixels.Tokens(shape_); }
  int64_t train_rows() const override { return int64_t(split_[0].size()); }
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override;
  // A packed file or a folder in the published layout, of images of the size that was learned.
  std::unique_ptr<BatchReader> ReadFile(const std::string& path, bool labelled,
                                        const ReadOptions& options) const override;
  const Metric& metric() const override;

 private:
  std::unique_ptr<PathfinderSet> Generated();
  // `why`: what says the size.
  void CheckSide(const PathfinderSet& set, const std::string& path, const std::string& why) const;
  Batch MakeBatch(const PathfinderSet& set, const std::vector<int64_t>& rows) const;

  Options options_;
  std::string cache_;
  PixelShape shape_;  // saved with the model
  std::unique_ptr<PathfinderSet> set_;
  std::vector<int64_t> split_[3];  // images of each, by Split
  std::unique_ptr<ShuffledOrder> order_;
  std::vector<std::string> notes_;
};

}  // namespace cistern
