#pragma once
// Classes of images as sequences of pixels (spec 3.4): CIFAR-10, MNIST, Fashion-MNIST and others in
// their forms (data/images.h). The images are held in memory, a byte a pixel and colour.
#include <memory>
#include <string>
#include <vector>

#include "cistern/data/images.h"
#include "cistern/tasks/class_measure.h"
#include "cistern/tasks/order.h"
#include "cistern/tasks/pixel_input.h"

namespace cistern {

class ImageTask : public ClassTask {
 public:
  enum class Valid { kLast, kRandom, kTest };
  struct Options {
    std::string data, test;  // a folder, or a file; test empty: that of the folder
    ImageColour colour = ImageColour::kGrey;
    PixelInput pixels;
    Valid valid = Valid::kLast;
    double valid_share = 0.1;
    int64_t split_seed = 1;
  };
  static Fields Describe(Options& options);
  ImageTask(const Options& options, const std::string& cache);

  void SaveAssets(const std::string& folder) const override;  // image.json
  void LoadAssets(const std::string& folder) override;
  void Prepare() override;
  Json DataSummary() const override;
  void Complete(ModelConfig& config) const override;
  int64_t tokens_per_row() const override { return options_.pixels.Tokens(shape_); }
  int64_t train_rows() const override { return int64_t(train_.size()); }
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override;
  // A file of images of the size that was learned, or a folder, of which the test images.
  std::unique_ptr<BatchReader> ReadFile(const std::string& path, bool labelled,
                                        const ReadOptions& options) const override;
  const Metric& metric() const override;

 private:
  // `lines` are the numbers of the images in their file or files, from 1.
  Batch MakeBatch(const ImageSet& set, const std::vector<int64_t>& rows) const;
  void CheckFits(const ImageSet& set, const std::string& path, bool labelled) const;

  Options options_;
  PixelShape shape_;                    // saved with the model, like the classes
  ImageSet images_, test_;              // images_: of training and validation
  std::vector<int64_t> train_, valid_;  // of images_; valid_ empty: the test images
  std::unique_ptr<ShuffledOrder> order_;
  std::vector<std::string> notes_;
};

}  // namespace cistern
