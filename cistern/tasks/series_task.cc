#include "cistern/tasks/series_task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/tasks/row_batch.h"

namespace cistern {
namespace {

constexpr char kSeriesAssets[] = "/series.json";
constexpr int64_t kSeriesRows = 32;

bool IsTs(const std::string& path) {
  return path.ends_with(".ts") || path.ends_with(".ts.gz") || path.ends_with(".ts.xz");
}

// NAME_TRAIN.ts or NAME_TEST.ts of a folder; empty: there is none, or several.
std::string TsOfFolder(const std::string& folder, const std::string& part) {
  std::vector<std::string> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (IsTs(name) && name.find("_" + part + ".ts") != name.npos)
      found.push_back(entry.path().string());
  }
  return found.size() == 1 ? found[0] : "";
}

bool IsSeriesFolder(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored);
}

}  // namespace

Fields SeriesTask::Describe(Options& o) {
  Fields f;
  f.Add("data", &o.data,
        "a folder with NAME_TRAIN.ts and NAME_TEST.ts of the UCR or UEA archive, or the file of "
        "the training series; each also .gz or .xz");
  f.Add("test", &o.test, "the file of the test series; empty: that of the folder");
  f.Add("scale", &o.scale,
        "values less the mean, divided by the deviation, of their channel in the training series");
  f.Add("skip_bad_rows", &o.skip_bad_rows,
        "pass over series that cannot be read, and count them, instead of stopping");
  f.Add("valid_share", &o.valid_share, "of the training series, for validation", {0.001, 0.9});
  f.Add("split_seed", &o.split_seed, "of the split", {0, int64_t{1} << 62});
  return f;
}

const TaskInfo& series_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "series";
    t.summary = "classes of time series of one or more channels: the UCR and UEA archives (.ts)";
    t.models = {"encoder_classifier"};
    t.metrics = AccuracyMetric();
    t.data = "data";
    t.claims = [](const std::string& path) {
      // By the archives' names: .ts alone is TypeScript as well.
      return (IsTs(path) && path.find("_TRAIN.ts") != path.npos) ||
             (IsSeriesFolder(path) && !TsOfFolder(path, "TRAIN").empty());
    };
    t.defaults = {"model.dim=64",          "model.layers=2",     "model.heads=4",
                  "model.ffn_dim=128",     "model.norm=pre",     "model.positions=sinusoidal",
                  "model.embedding_std=1", "model.init_std=0.1", "train.batch=16",
                  "train.lr=1e-3",         "train.seconds=120"};
    t.mechanisms = {"softmax", "latte", "luna", "conv_luna"};
    BindTask<SeriesTask>(t);
    return t;
  }();
  return info;
}

SeriesTask::SeriesTask(const Options& options, const std::string&) : options_(options) {}

const Metric& SeriesTask::metric() const { return series_task().metrics[0]; }

void SeriesTask::Prepare() {
  if (options_.data.empty())
    FailUsage("task.series.data is empty: name a folder with NAME_TRAIN.ts and NAME_TEST.ts");
  const bool folder = IsSeriesFolder(options_.data);
  const std::string train = folder ? TsOfFolder(options_.data, "TRAIN") : options_.data,
                    test = !options_.test.empty() ? options_.test
                           : folder               ? TsOfFolder(options_.data, "TEST")
                                                  : "";
  if (train.empty() || test.empty())
    FailUsage(options_.data, train.empty() ? " has not one NAME_TRAIN.ts" : " has no test series",
              "; name the files: task.series.data and task.series.test");
  notes_.clear();
  all_ = ReadSeriesFile(train, options_.skip_bad_rows);
  if (all_.regression)
    FailUsage(train, " has numbers for labels (@targetLabel); this task learns classes");
  std::vector<int64_t> order(size_t(all_.size()));
  const ShuffledOrder shuffled(all_.size());
  for (int64_t i = 0; i < all_.size(); ++i)
    order[size_t(i)] = shuffled.At(uint64_t(options_.split_seed), i, 1);
  const auto held = std::max<int64_t>(1, int64_t(options_.valid_share * double(all_.size()) + 0.5));
  CISTERN_CHECK(all_.size() > held, train, ": ", all_.size(),
                " series are too few to take valid_share of them for validation");
  valid_.assign(order.begin(), order.begin() + held);
  train_.assign(order.begin() + held, order.end());
  if (classes_.empty()) Learn(&all_);  // not LoadAssets
  for (int64_t i = 0; i < all_.size(); ++i) ClassOf(all_, i);
  Fill(&all_);
  test_ = Open(test);
  for (int64_t i = 0; i < test_.size(); ++i) ClassOf(test_, i);
  order_ = std::make_unique<ShuffledOrder>(int64_t(train_.size()));
  notes_.push_back(StrCat(all_.channels, all_.channels == 1 ? " channel, " : " channels, ",
                          "up to ", longest_, " steps a series"));
  if (const int64_t n = all_.skipped + test_.skipped; n > 0)
    notes_.push_back(StrCat(n, " series could not be read and were skipped"));
  if (const int64_t n = all_.missing + test_.missing; n > 0)
    notes_.push_back(StrCat(n, " missing values: each is the last one before it"));
}

// Of the training series alone: classes, means, deviations; of all of them the longest.
void SeriesTask::Learn(SeriesFile* train) {
  const SeriesFile& file = *train;
  std::vector<double> counts(file.classes.size());
  for (const int64_t i : train_) {
    const auto at = std::find(file.classes.begin(), file.classes.end(), file.labels[size_t(i)]);
    ++counts[size_t(at - file.classes.begin())];
  }
  SetClasses(file.classes, counts, options_.data);
  const auto channels = size_t(file.channels);
  std::vector<double> n(channels), sums(channels), squares(channels);
  const auto each = [&](const auto& use) {
    for (const int64_t i : train_) {
      for (int64_t t = 0; t < file.Steps(i); ++t) {
        for (size_t c = 0; c < channels; ++c) {
          const double x = file.At(i)[size_t(t) * channels + c];
          if (!std::isnan(x)) use(c, x);
        }
      }
    }
  };
  each([&](size_t c, double x) { n[c] += 1, sums[c] += x; });
  means_.assign(channels, 0);
  deviations_.assign(channels, 1);
  for (size_t c = 0; c < channels; ++c) means_[c] = n[c] > 0 ? sums[c] / n[c] : 0;
  each([&](size_t c, double x) { squares[c] += (x - means_[c]) * (x - means_[c]); });
  for (size_t c = 0; c < channels; ++c) {
    const double deviation = n[c] > 0 ? std::sqrt(squares[c] / n[c]) : 0;
    if (deviation > 0) deviations_[c] = deviation;
  }
  longest_ = 1;
  for (int64_t i = 0; i < file.size(); ++i) longest_ = std::max(longest_, file.Steps(i));
}

void SeriesTask::Fill(SeriesFile* file) const {
  CISTERN_CHECK(file->channels == int64_t(means_.size()), "expected series of ", means_.size(),
                " channels, as the model was trained on, got ", file->channels);
  const auto channels = size_t(file->channels);
  for (int64_t i = 0; i < file->size(); ++i) {
    float* const series = file->values.data() + file->begins[size_t(i)] * file->channels;
    for (size_t c = 0; c < channels; ++c) {
      double last = means_[c];
      for (int64_t t = 0; t < file->Steps(i); ++t) {
        float& x = series[size_t(t) * channels + c];
        if (!std::isnan(x)) last = x;
        x = options_.scale ? float((last - means_[c]) / deviations_[c]) : float(last);
      }
    }
  }
}

SeriesFile SeriesTask::Open(const std::string& path) const {
  SeriesFile file = ReadSeriesFile(path, options_.skip_bad_rows);
  CISTERN_CHECK(!file.regression, path, " has numbers for labels (@targetLabel), not classes");
  try {
    Fill(&file);
  } catch (const Error& e) {
    Fail(path, ": ", e.what());
  }
  return file;
}

int64_t SeriesTask::ClassOf(const SeriesFile& file, int64_t i) const {
  const std::string& label = file.labels[size_t(i)];
  const auto at = std::find(classes_.begin(), classes_.end(), label);
  if (at == classes_.end())
    throw Error(UnknownName(StrCat("class of the series at line ", file.lines[size_t(i)]), label,
                            classes_));
  return at - classes_.begin();
}

Json SeriesTask::DataSummary() const {
  const auto hash = [](const SeriesFile& file) {
    uint64_t sum = XxHash64(
        {reinterpret_cast<const char*>(file.values.data()), file.values.size() * sizeof(float)});
    for (int64_t i = 0; i < file.size(); ++i)
      sum = XxHash64(StrCat(file.labels[size_t(i)], ":", file.Steps(i)), sum);
    return sum;
  };
  return {{"data", options_.data},  {"xxh64", HexText(hash(all_) ^ (hash(test_) * 31))},
          {"train", train_.size()}, {"valid", valid_.size()},
          {"test", test_.size()},   {"classes", CountsByClass()},
          {"notes", notes_}};
}

void SeriesTask::SaveAssets(const std::string& folder) const {
  SaveClasses(folder + kSeriesAssets,
              {{"means", means_}, {"deviations", deviations_}, {"longest", longest_}});
}

void SeriesTask::LoadAssets(const std::string& folder) {
  const std::string path = folder + kSeriesAssets;
  const Json json = LoadClasses(path);
  try {
    means_ = json.at("means").get<std::vector<double>>();
    deviations_ = json.at("deviations").get<std::vector<double>>();
    longest_ = json.at("longest").get<int64_t>();
  } catch (const nlohmann::json::exception& e) {
    Fail(path, " is broken: ", e.what());
  }
  const auto good = [](double d) { return std::isfinite(d) && d > 0; };
  CISTERN_CHECK(!means_.empty() && means_.size() == deviations_.size() && longest_ >= 1 &&
                    std::all_of(deviations_.begin(), deviations_.end(), good),
                path, " is broken: its parts do not fit each other");
}

void SeriesTask::Complete(ModelConfig& config) const {
  config.classes = int64_t(classes_.size());
  config.vocab_size = 0;
  config.max_length = std::max(config.max_length, longest_);
  Json own = config.Own();
  own["input"] = "values";
  own["channels"] = int64_t(means_.size());
  config.own[config.kind] = own;
}

Batch SeriesTask::MakeBatch(const SeriesFile& file, const std::vector<int64_t>& rows) const {
  int64_t width = 1;
  for (const int64_t i : rows) width = std::max(width, file.Steps(i));
  const auto count = int64_t(rows.size());
  const at::Tensor values = at::zeros({count, width, file.channels}, at::kFloat);
  std::vector<int64_t> lengths, targets, lines;
  Batch batch;
  batch.rows = count;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t i = rows[size_t(r)], steps = file.Steps(i);
    std::copy_n(file.At(i), steps * file.channels,
                values.mutable_data_ptr<float>() + r * width * file.channels);
    lengths.push_back(steps);
    const auto at = std::find(classes_.begin(), classes_.end(), file.labels[size_t(i)]);
    targets.push_back(at == classes_.end() ? 0 : at - classes_.begin());
    lines.push_back(file.lines[size_t(i)]);
    batch.tokens += steps;
  }
  batch.Add("values", values);
  AddNumbers("lengths", lengths, &batch);
  AddNumbers("targets", targets, &batch);
  AddNumbers("lines", lines, &batch);
  return batch;
}

Batch SeriesTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  std::vector<int64_t> picked = PickRows(*order_, seed, step, rows);
  for (int64_t& i : picked) i = train_[size_t(i)];
  return MakeBatch(all_, picked);
}

std::unique_ptr<BatchReader> SeriesTask::Read(Split split, const ReadOptions& options) const {
  const int64_t rows = options.rows > 0 ? options.rows : kSeriesRows;
  if (split == Split::kTest)
    return ReadInOrder(test_.size(), rows,
                       [this](const std::vector<int64_t>& r) { return MakeBatch(test_, r); });
  const std::vector<int64_t>& part = split == Split::kTrain ? train_ : valid_;
  return ReadInOrder(int64_t(part.size()), rows, [this, &part](std::vector<int64_t> picked) {
    for (int64_t& i : picked) i = part[size_t(i)];
    return MakeBatch(all_, picked);
  });
}

std::unique_ptr<BatchReader> SeriesTask::ReadFile(const std::string& path, bool labelled,
                                                  const ReadOptions& options) const {
  const auto file = std::make_shared<SeriesFile>(Open(path));
  for (int64_t i = 0; labelled && i < file->size(); ++i) ClassOf(*file, i);
  return ReadInOrder(
      file->size(), options.rows > 0 ? options.rows : kSeriesRows,
      [this, file](const std::vector<int64_t>& rows) { return MakeBatch(*file, rows); });
}

}  // namespace cistern
