#include "cistern/tasks/image_task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/io/line_reader.h"
#include "cistern/tasks/row_batch.h"

namespace cistern {
namespace {

constexpr char kImageAssets[] = "/image.json";
constexpr double kImageValidShare = 0.1;

// The names of a file with one in each line, if there are as many; else the numbers themselves.
std::vector<std::string> ImageClassNames(const std::string& path, size_t count) {
  std::vector<std::string> names;
  if (!path.empty()) {
    LineReader lines(path);
    for (std::string line; lines.Next(&line);) {
      if (!line.empty()) names.push_back(line);
    }
  }
  if (names.size() == count) return names;
  names.clear();
  for (size_t c = 0; c < count; ++c) names.push_back(std::to_string(c));
  return names;
}

}  // namespace

Fields ImageTask::Describe(Options& o) {
  Fields f;
  f.Add("data", &o.data,
        "a folder with CIFAR-10's data_batch_*.bin and test_batch.bin, or with the IDX files "
        "train-images-idx3-ubyte, train-labels-idx1-ubyte and t10k-* (MNIST, Fashion-MNIST); or "
        "one such file of training images; each also .gz or .xz");
  f.Add("test", &o.test, "test images: a file or a folder; empty: those of the folder");
  f.Add("colour", &o.colour,
        "grey as TensorFlow rounds it (Long Range Arena), grey_truncated (Latte), or rgb, whose "
        "bytes follow each other as ids and are a vector as values",
        ImageColours());
  o.pixels.Describe(&f);
  f.Add("valid", &o.valid,
        "validation on the last tenth of the training images (Long Range Arena), on a random "
        "share of them (Latte), or on the test images themselves, with which the best model is "
        "then chosen, as in P002 (UCU): no honest test",
        {{Valid::kLast, "last"}, {Valid::kRandom, "random"}, {Valid::kTest, "test"}});
  f.Add("valid_share", &o.valid_share, "of the training images, for validation", {0.001, 0.9});
  f.Add("split_seed", &o.split_seed, "of valid=random", {0, int64_t{1} << 62});
  return f;
}

const TaskInfo& image_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "image";
    t.summary = "images as sequences of pixels: CIFAR-10 (Long Range Arena's Image), MNIST's kind";
    t.models = {"encoder_classifier"};
    t.metrics = AccuracyMetric();
    t.data = "data";
    t.claims = LooksLikeImages;
    t.defaults = {"model.dim=64",          "model.layers=2",     "model.heads=4",
                  "model.ffn_dim=128",     "model.norm=pre",     "model.positions=learned",
                  "model.embedding_std=1", "model.init_std=0.1", "model.position_std=0.02",
                  "train.batch=32",        "train.lr=2e-3",      "train.seconds=300"};
    t.mechanisms = {"softmax", "latte", "luna", "conv_luna"};
    BindTask<ImageTask>(t);
    return t;
  }();
  return info;
}

ImageTask::ImageTask(const Options& options, const std::string&) : options_(options) {
  options_.pixels.Check();
  shape_.channels = options_.colour == ImageColour::kRgb ? 3 : 1;
  if (options_.valid == Valid::kTest && options_.valid_share != kImageValidShare)
    FailUsage("task.image: valid=test takes no share of the training images; omit valid_share");
}

const Metric& ImageTask::metric() const { return image_task().metrics[0]; }

void ImageTask::Prepare() {
  namespace fs = std::filesystem;
  if (options_.data.empty())
    FailUsage("task.image.data is empty: name a folder with CIFAR-10's batches or IDX files");
  std::error_code ignored;
  const bool folder = fs::is_directory(options_.data, ignored);
  if (!folder && options_.test.empty())
    FailUsage("task.image.test is empty, and ", options_.data,
              " is a single file: name the test images, or a folder that has them");
  images_ = ReadImages(options_.data, false, options_.colour);
  const std::string test = options_.test.empty() ? options_.data : options_.test;
  test_ = ReadImages(test, true, options_.colour);
  std::vector<int64_t> all(size_t(images_.size()));
  std::iota(all.begin(), all.end(), 0);
  if (options_.valid == Valid::kRandom) {
    const ShuffledOrder order(images_.size());
    for (size_t i = 0; i < all.size(); ++i)
      all[i] = order.At(uint64_t(options_.split_seed), int64_t(i), 1);
  }
  const auto kept = options_.valid == Valid::kTest
                        ? std::ptrdiff_t(all.size())
                        : std::ptrdiff_t(double(all.size()) * (1 - options_.valid_share) + 1e-9);
  CISTERN_CHECK(kept > 0 && (options_.valid == Valid::kTest || kept < std::ptrdiff_t(all.size())),
                options_.data, ": ", all.size(),
                " images are too few to take valid_share of them for validation");
  train_.assign(all.begin(), all.begin() + kept);
  valid_.assign(all.begin() + kept, all.end());
  order_ = std::make_unique<ShuffledOrder>(int64_t(train_.size()));
  if (classes_.empty()) {  // not LoadAssets
    std::vector<double> counts(
        size_t(*std::max_element(images_.labels.begin(), images_.labels.end())) + 1);
    for (const int64_t i : train_) ++counts[images_.labels[size_t(i)]];
    const std::string names = folder ? FindImages(options_.data).names : "";
    SetClasses(ImageClassNames(names, counts.size()), counts, options_.data);
    shape_ = {images_.height, images_.width, images_.channels};
    options_.pixels.CheckShape(shape_);
  }
  CheckFits(images_, options_.data, true);
  CheckFits(test_, test, true);
  notes_ = {StrCat(shape_.height, " x ", shape_.width, " pixels, ",
                   NameOf(options_.colour, ImageColours()), ", ", tokens_per_row(),
                   " tokens an image")};
  if (options_.valid == Valid::kTest)
    notes_.push_back("valid=test: the test images choose the best model; its test is not honest");
}

void ImageTask::CheckFits(const ImageSet& set, const std::string& path, bool labelled) const {
  CISTERN_CHECK(
      set.height == shape_.height && set.width == shape_.width && set.channels == shape_.channels,
      path, ": images of ", set.height, " x ", set.width, " x ", set.channels, "; expected ",
      shape_.height, " x ", shape_.width, " x ", shape_.channels);
  for (int64_t i = 0; labelled && i < set.size(); ++i) {
    CISTERN_CHECK(set.labels[size_t(i)] < classes_.size(), path, ": image ", i + 1,
                  " has the label ", int{set.labels[size_t(i)]}, "; the training images have ",
                  classes_.size(), " classes, 0 to ", classes_.size() - 1);
  }
}

Json ImageTask::DataSummary() const {
  const int64_t tests = test_.size();
  return {{"data", options_.data},
          {"xxh64", HexText(HashImages(images_) ^ (HashImages(test_) * 31))},
          {"train", train_.size()},
          {"valid", options_.valid == Valid::kTest ? tests : int64_t(valid_.size())},
          {"test", tests},
          {"classes", CountsByClass()},
          {"ids", options_.pixels.Ids()},
          {"notes", notes_}};
}

void ImageTask::SaveAssets(const std::string& folder) const {
  SaveClasses(folder + kImageAssets,
              {{"height", shape_.height}, {"width", shape_.width}, {"channels", shape_.channels}});
}

void ImageTask::LoadAssets(const std::string& folder) {
  const std::string path = folder + kImageAssets;
  const Json json = LoadClasses(path);
  try {
    shape_ = {json.at("height").get<int64_t>(), json.at("width").get<int64_t>(),
              json.at("channels").get<int64_t>()};
  } catch (const nlohmann::json::exception& e) {
    Fail(path, " is broken: ", e.what());
  }
  constexpr int64_t kMost = 1 << 14;
  CISTERN_CHECK(
      shape_.height >= 1 && shape_.height <= kMost && shape_.width >= 1 && shape_.width <= kMost &&
          shape_.channels == (options_.colour == ImageColour::kRgb ? 3 : 1),
      path, " is broken: images of ", shape_.height, " x ", shape_.width, " x ", shape_.channels);
  options_.pixels.CheckShape(shape_);
}

void ImageTask::Complete(ModelConfig& config) const {
  config.classes = int64_t(classes_.size());
  options_.pixels.Complete(shape_, &config);
}

Batch ImageTask::MakeBatch(const ImageSet& set, const std::vector<int64_t>& rows) const {
  std::vector<std::span<const uint8_t>> images;
  std::vector<int64_t> targets, lines;
  for (const int64_t i : rows) {
    images.push_back(set.Image(i));
    targets.push_back(set.labels[size_t(i)]);
    lines.push_back(i + 1);
  }
  Batch batch;
  options_.pixels.AddImages(images, shape_, &batch);
  AddNumbers("targets", targets, &batch);
  AddNumbers("lines", lines, &batch);
  return batch;
}

Batch ImageTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  std::vector<int64_t> picked = PickRows(*order_, seed, step, rows);
  for (int64_t& i : picked) i = train_[size_t(i)];
  return MakeBatch(images_, picked);
}

namespace {

constexpr int64_t kImageRows = 32;

}  // namespace

std::unique_ptr<BatchReader> ImageTask::Read(Split split, const ReadOptions& options) const {
  if (split == Split::kTest || (split == Split::kValid && options_.valid == Valid::kTest)) {
    return ReadInOrder(test_.size(), options, kImageRows,
                       [this](const std::vector<int64_t>& rows) { return MakeBatch(test_, rows); });
  }
  const std::vector<int64_t>& part = split == Split::kTrain ? train_ : valid_;
  return ReadInOrder(int64_t(part.size()), options, kImageRows,
                     [this, &part](std::vector<int64_t> rows) {
                       for (int64_t& i : rows) i = part[size_t(i)];
                       return MakeBatch(images_, rows);
                     });
}

std::unique_ptr<BatchReader> ImageTask::ReadFile(const std::string& path, bool labelled,
                                                 const ReadOptions& options) const {
  auto set = std::make_shared<ImageSet>(ReadImages(path, true, options_.colour, labelled));
  CheckFits(*set, path, labelled);
  if (!labelled) std::fill(set->labels.begin(), set->labels.end(), uint8_t{0});
  return ReadInOrder(
      set->size(), options, kImageRows,
      [this, set](const std::vector<int64_t>& rows) { return MakeBatch(*set, rows); });
}

}  // namespace cistern
