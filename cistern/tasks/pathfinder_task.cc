#include "cistern/tasks/pathfinder_task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/progress.h"
#include "cistern/io/file_lock.h"
#include "cistern/tasks/cache.h"
#include "cistern/tasks/row_batch.h"

namespace cistern {
namespace {

constexpr char kPathfinderAssets[] = "/pathfinder.json";
constexpr int64_t kPathfinderRows = 32;
constexpr char kAsTrained[] = "the model was trained on";

}  // namespace

Fields PathfinderTask::Describe(Options& o) {
  Fields f;
  f.Add("data", &o.data,
        "a packed file of images (.pathfinder), or a folder in the published layout, such as "
        "curv_contour_length_14 with imgs/ and metadata/; empty: generated");
  f.Add("size", &o.generate.size,
        "32, 64, 128 (Path-X) or 256 pixels on a side; images of data must have it, too. 0: 32, or "
        "as data has it",
        {0, 256});
  f.Add("contour", &o.generate.contour,
        "of generated images: dashes of a contour, 6 (easy), 9 or 14 (hard: Long Range Arena)",
        {6, 14});
  f.Add("examples", &o.examples,
        "generated images; Long Range Arena has 200,000. Of data all images are taken",
        {10, int64_t{1} << 28});
  f.Add("data_seed", &o.data_seed, "seed of the generator", {0, int64_t{1} << 62});
  o.pixels.Describe(&f);
  f.Add("valid_share", &o.valid_share, "of the images, for validation", {0.001, 0.9});
  f.Add("test_share", &o.test_share, "of the images, for the test", {0.001, 0.9});
  f.Add("split_seed", &o.split_seed, "of the split", {0, int64_t{1} << 62});
  return f;
}

const TaskInfo& pathfinder_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "pathfinder";
    t.summary =
        "Pathfinder and Path-X of Long Range Arena: whether two discs lie on one dashed contour";
    t.models = {"encoder_classifier"};
    t.metrics = AccuracyMetric();
    t.data = "data";
    t.claims = LooksLikePathfinder;
    t.defaults = {"model.dim=64",       "model.layers=2",        "model.heads=4",
                  "model.ffn_dim=128",  "model.norm=pre",        "model.positions=learned",
                  "model.init_std=0.1", "model.embedding_std=1", "model.position_std=0.02",
                  "task.input=values",  "train.batch=32",        "train.lr=1e-3",
                  "train.seconds=600"};
    t.mechanisms = {"softmax", "latte", "luna", "conv_luna"};
    BindTask<PathfinderTask>(t);
    return t;
  }();
  return info;
}

PathfinderTask::PathfinderTask(const Options& options, const std::string& cache)
    : options_(options), cache_(cache) {
  options_.pixels.Check();
  const int64_t size =
      options_.generate.size > 0 ? options_.generate.size : PathfinderOptions().size;
  SettingsOf({size, options_.generate.contour});
  if (options_.valid_share + options_.test_share >= 1)
    FailUsage("task.pathfinder: valid_share + test_share leave nothing to train on");
  const Options unset;
  if (!options_.data.empty() && (options_.generate.contour != unset.generate.contour ||
                                 options_.data_seed != unset.data_seed)) {
    FailUsage(
        "task.pathfinder: contour and data_seed are of generated images; omit them, or omit data");
  }
  shape_ = {size, size, 1};
  if (!options_.data.empty()) return;
  options_.generate.size = size;
  options_.pixels.CheckShape(shape_);
}

const Metric& PathfinderTask::metric() const { return pathfinder_task().metrics[0]; }

std::unique_ptr<PathfinderSet> PathfinderTask::Generated() {
  const std::string folder = CacheFolder(cache_),
                    name = StrCat("pathfinder-", options_.generate.size, "-",
                                  options_.generate.contour, "-", options_.examples, "-seed",
                                  options_.data_seed, ".pathfinder"),
                    path = folder + "/" + name;
  const FileLock lock(path + ".lock", path, FileLock::Wait::kYes);
  RemoveLeftovers(folder, name);
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)) {
    try {
      return OpenPathfinder(path);
    } catch (const Error& e) {
      notes_.push_back(StrCat("made ", path, " anew: ", e.what()));
    }
  }
  ProgressBar bar({options_.examples, "generate Pathfinder", "images"});
  WritePackedPathfinder(options_.generate, uint64_t(options_.data_seed), options_.examples, path,
                        [&](int64_t done, int64_t) { bar.Update(done); });
  return OpenPathfinder(path);
}

void PathfinderTask::CheckSide(const PathfinderSet& set, const std::string& path,
                               const std::string& why) const {
  CISTERN_CHECK(set.side() == shape_.height, path, ": images of ", set.side(), " x ", set.side(),
                " pixels; expected ", shape_.height, " x ", shape_.height, ", as ", why);
}

void PathfinderTask::Prepare() {
  notes_.clear();
  if (options_.data.empty()) {
    set_ = Generated();
  } else {
    ProgressBar bar({0, "read Pathfinder", "images"});
    set_ = OpenPathfinder(options_.data, [&](int64_t done, int64_t) { bar.Update(done); });
  }
  const bool learn = classes_.empty();  // not LoadAssets
  const Options unset;
  if (learn && options_.generate.size == 0) shape_ = {set_->side(), set_->side(), 1};
  CheckSide(*set_, options_.data,
            learn ? StrCat("task.pathfinder.size=", shape_.height, " says") : kAsTrained);
  options_.pixels.CheckShape(shape_);
  const int64_t count = set_->size();
  // The published experiments say how many images they generate, for those who have none.
  if (!options_.data.empty() && options_.examples != unset.examples && options_.examples != count)
    notes_.push_back(StrCat("task.examples=", options_.examples, " is of generated images; all ",
                            count, " of ", options_.data, " are taken"));
  const auto share = [&](double s) {
    return std::max<int64_t>(1, std::llround(s * double(count)));
  };
  const int64_t valid = share(options_.valid_share), test = share(options_.test_share);
  CISTERN_CHECK(count >= valid + test + 2, options_.data, ": ", count,
                " images are too few for training, validation and test");
  const ShuffledOrder order(count);
  for (auto& part : split_) part.clear();
  for (int64_t i = 0; i < count; ++i) {
    const Split split = i < valid ? Split::kValid : i < valid + test ? Split::kTest : Split::kTrain;
    split_[int(split)].push_back(order.At(uint64_t(options_.split_seed), i, 1));
  }
  const std::vector<int64_t>& train = split_[int(Split::kTrain)];
  order_ = std::make_unique<ShuffledOrder>(int64_t(train.size()));
  if (learn) {
    std::vector<double> counts(2);
    for (const int64_t i : train) ++counts[size_t(set_->Label(i))];
    SetClasses({"0", "1"}, std::move(counts), options_.data);
  }
  if (set_->skipped() > 0)
    notes_.push_back(StrCat(set_->skipped(), " empty images were passed over"));
}

Json PathfinderTask::DataSummary() const {
  return {{"data", options_.data.empty() ? "generated" : options_.data},
          {"xxh64", HexText(set_->Hash())},
          {"side", set_->side()},
          {"train", split_[int(Split::kTrain)].size()},
          {"valid", split_[int(Split::kValid)].size()},
          {"test", split_[int(Split::kTest)].size()},
          {"classes", CountsByClass()},
          {"ids", options_.pixels.Ids()},
          {"notes", notes_}};
}

void PathfinderTask::SaveAssets(const std::string& folder) const {
  SaveClasses(folder + kPathfinderAssets, {{"side", shape_.height}});
}

void PathfinderTask::LoadAssets(const std::string& folder) {
  const std::string path = folder + kPathfinderAssets;
  const Json json = LoadClasses(path);
  const int64_t side =
      json.contains("side") && json["side"].is_number_integer() ? json["side"].get<int64_t>() : 0;
  constexpr int64_t kMost = 4096;
  CISTERN_CHECK(side >= 1 && side <= kMost && classes_.size() == 2, path, " is broken: it has ",
                classes_.size(), " classes and images of ", side, " pixels on a side");
  shape_ = {side, side, 1};
  options_.pixels.CheckShape(shape_);
}

void PathfinderTask::Complete(ModelConfig& config) const {
  config.classes = 2;
  options_.pixels.Complete(shape_, &config);
}

Batch PathfinderTask::MakeBatch(const PathfinderSet& set, const std::vector<int64_t>& rows) const {
  const int64_t bytes = set.side() * set.side();
  std::vector<uint8_t> pixels(rows.size() * size_t(bytes));
  std::vector<std::span<const uint8_t>> images;
  std::vector<int64_t> targets, lines;
  for (size_t r = 0; r < rows.size(); ++r) {
    uint8_t* const image = pixels.data() + int64_t(r) * bytes;
    set.Read(rows[r], image);
    images.emplace_back(image, size_t(bytes));
    targets.push_back(set.Label(rows[r]));
    lines.push_back(set.Line(rows[r]));
  }
  Batch batch;
  options_.pixels.AddImages(images, shape_, &batch);
  AddNumbers("targets", targets, &batch);
  AddNumbers("lines", lines, &batch);
  return batch;
}

Batch PathfinderTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  std::vector<int64_t> picked = PickRows(*order_, seed, step, rows);
  for (int64_t& i : picked) i = split_[int(Split::kTrain)][size_t(i)];
  return MakeBatch(*set_, picked);
}

std::unique_ptr<BatchReader> PathfinderTask::Read(Split split, const ReadOptions& options) const {
  const std::vector<int64_t>& part = split_[int(split)];
  return ReadInOrder(int64_t(part.size()), options, kPathfinderRows,
                     [this, &part](std::vector<int64_t> rows) {
                       for (int64_t& i : rows) i = part[size_t(i)];
                       return MakeBatch(*set_, rows);
                     });
}

std::unique_ptr<BatchReader> PathfinderTask::ReadFile(const std::string& path, bool,
                                                      const ReadOptions& options) const {
  const std::shared_ptr<PathfinderSet> set = OpenPathfinder(path);
  CheckSide(*set, path, kAsTrained);
  return ReadInOrder(
      set->size(), options, kPathfinderRows,
      [this, set](const std::vector<int64_t>& rows) { return MakeBatch(*set, rows); },
      set->skipped());
}

}  // namespace cistern
