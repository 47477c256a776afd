#include "cistern/tasks/series_task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/io/checked_json.h"
#include "cistern/models/classifier.h"
#include "cistern/tasks/idle_keys.h"
#include "cistern/tasks/row_batch.h"

namespace cistern {
namespace {

constexpr char kSeriesAssets[] = "/series.json";
constexpr int64_t kSeriesRows = 32;

// NAME_TRAIN.ts, X_train.npy; NAME_TEST.ts, X_test.npy. Empty: there is none, or several.
std::string SeriesPart(const std::string& folder, bool test) {
  std::vector<std::string> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if ((IsTsFile(name) && name.find(test ? "_TEST.ts" : "_TRAIN.ts") != name.npos) ||
        name == (test ? "X_test.npy" : "X_train.npy"))
      found.push_back(entry.path().string());
  }
  return found.size() == 1 ? found[0] : "";
}

bool IsSeriesFolder(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored);
}

// Keys of tables, of which other files know nothing.
void RefuseTableKeys(const SeriesInputOptions& o, const std::string& task,
                     const SeriesFiles& files) {
  const auto other = [](const std::string& path) {
    return path.empty() || IsTsFile(path) || IsNpyFile(path);
  };
  if (!other(files.train) || !other(files.test)) return;
  const SeriesInputOptions unset;
  const char* key = o.layout != unset.layout   ? "layout"
                    : !o.label_column.empty()  ? "label_column"
                    : !o.series_column.empty() ? "series_column"
                    : !o.ignore.empty()        ? "ignore"
                    : o.header != unset.header ? "header"
                                               : nullptr;
  RefuseIdle(key != nullptr, StrCat("task.", task, ".", key ? key : ""),
             files.train + ", which is no table");
}

}  // namespace

SeriesFiles SeriesFilesOf(const SeriesInputOptions& o, const std::string& task, bool learn) {
  if (o.data.empty())
    FailUsage("task.", task,
              ".data is empty: name a file of series (.csv, .npy, .ts), or a folder ",
              "with NAME_TRAIN.ts and NAME_TEST.ts, or X_train.npy and X_test.npy");
  const auto checked = [&](SeriesFiles files) {
    if (learn) RefuseTableKeys(o, task, files);
    return files;
  };
  if (!IsSeriesFolder(o.data)) return checked({o.data, o.test});
  const std::string train = SeriesPart(o.data, false),
                    test = o.test.empty() ? SeriesPart(o.data, true) : o.test;
  if (train.empty() || test.empty())
    FailUsage(o.data, " has not one ",
              train.empty() ? "NAME_TRAIN.ts or X_train.npy" : "NAME_TEST.ts or X_test.npy",
              "; name the files: task.", task, ".data and task.", task, ".test");
  return checked({train, test});
}

bool LooksLikeSeries(const std::string& path) {
  // By the archives' names: .ts alone is TypeScript as well.
  return IsNpyFile(path) || (IsTsFile(path) && path.find("_TRAIN.ts") != path.npos) ||
         (IsSeriesFolder(path) && !SeriesPart(path, false).empty());
}

Fields SeriesTask::Describe(Options& o) {
  Fields f;
  o.input.Describe(true, &f);
  f.Add("scale", &o.input.scale,
        "values less the mean, divided by the deviation, of their channel in the training series");
  f.Add("regression", &o.regression, "the label is a number to be predicted, not a class");
  f.Add("group_by_length", &o.group_by_length,
        "training batches of series of about one length: less padding, so faster");
  f.Add("valid_share", &o.valid_share, "of the training series, for validation", {0.001, 0.9});
  f.Add("test_share", &o.test_share, "of the series, where there is no test file", {0.001, 0.9});
  f.Add("split_seed", &o.split_seed, "of the split", {0, int64_t{1} << 62});
  return f;
}

const TaskInfo& series_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "series";
    t.summary = "a class, or a number, for each series of real values: .ts (UCR, UEA), CSV, npy";
    t.models = {"encoder_classifier"};
    t.metrics = AccuracyMetric();
    t.metrics.push_back(RmseMetric());
    t.data = "data";
    t.claims = LooksLikeSeries;
    t.defaults = {"model.dim=64",          "model.layers=2",     "model.heads=4",
                  "model.ffn_dim=128",     "model.norm=pre",     "model.positions=sinusoidal",
                  "model.embedding_std=1", "model.init_std=0.1", "train.batch=16",
                  "train.lr=1e-3",         "train.seconds=120"};
    t.mechanisms = {"softmax", "latte", "luna", "conv_luna"};
    t.of_use = {"header"};
    BindTask<SeriesTask>(t);
    return t;
  }();
  return info;
}

SeriesTask::SeriesTask(const Options& options, const std::string& cache)
    : options_(options),
      input_(options.input,
             options.regression ? SeriesFormat::Labels::kNumbers : SeriesFormat::Labels::kClasses,
             cache) {
  if (options_.valid_share + options_.test_share >= 1)
    FailUsage("task.series: valid_share + test_share leave nothing to train on");
}

const Metric& SeriesTask::metric() const {
  return series_task().metrics[options_.regression ? 1 : 0];
}

void SeriesTask::Prepare() {
  const bool learn = !input_.learned();  // not LoadAssets
  const SeriesFiles files = SeriesFilesOf(options_.input, "series", learn);
  RefuseIdle(learn && !files.test.empty() && options_.test_share != Options().test_share,
             "task.series.test_share", "test=" + files.test);
  all_ = input_.Open(files.train, true);
  if (learn) input_.TakeNames(*all_);
  test_ = files.test.empty() ? all_ : input_.Open(files.test, true);
  std::vector<int64_t> order(size_t(all_->size()));
  const ShuffledOrder shuffled(all_->size());
  for (int64_t i = 0; i < all_->size(); ++i)
    order[size_t(i)] = shuffled.At(uint64_t(options_.split_seed), i, 1);
  const auto share = [&](double of) {
    return std::max<int64_t>(1, int64_t(of * double(all_->size()) + 0.5));
  };
  const int64_t valid = share(options_.valid_share),
                test = test_ == all_ ? share(options_.test_share) : 0;
  CISTERN_CHECK(all_->size() > valid + test, files.train, ": ", all_->size(),
                " series are too few to take valid_share", test > 0 ? " and test_share" : "",
                " of them");
  valid_.assign(order.begin(), order.begin() + valid);
  test_rows_.assign(order.begin() + valid, order.begin() + valid + test);
  train_.assign(order.begin() + valid + test, order.end());
  if (learn) Learn(*all_);
  KnownRows(*all_, /*skip=*/false);
  if (test == 0) test_rows_ = KnownRows(*test_, options_.input.skip_bad_rows);
  std::vector<int64_t> lengths;
  for (const int64_t i : train_) lengths.push_back(all_->Steps(i));
  const bool vary = std::any_of(lengths.begin(), lengths.end(),
                                [&](int64_t length) { return length != lengths[0]; });
  order_ = vary && options_.group_by_length
               ? std::make_unique<ShuffledOrder>(std::move(lengths))
               : std::make_unique<ShuffledOrder>(int64_t(train_.size()));
  notes_ = input_.Notes(*all_, test_ == all_ ? nullptr : test_.get());
  if (const int64_t n = test_->size() - int64_t(test_rows_.size()); test == 0 && n > 0)
    notes_.push_back(StrCat(n, " series of ", files.test, " are of unknown classes, and skipped"));
}

// Of the training series alone: classes or the labels' scale, means, deviations; of all of them the
// longest.
void SeriesTask::Learn(const SeriesStore& store) {
  if (options_.regression) {
    std::vector<double> labels;
    for (const int64_t i : train_) labels.push_back(store.Number(i));
    scale_ = NumberScale::Of(labels, store.path());
  } else {
    std::vector<std::string> classes = store.classes();
    if (classes.empty()) {
      classes = store.labels();
      std::sort(classes.begin(), classes.end());
    }
    const bool fractions = std::any_of(classes.begin(), classes.end(), [](const std::string& c) {
      double value = 0;
      return ParseFinite(c, &value) && value != std::floor(value);
    });
    if (fractions && store.classes().empty())
      FailUsage(store.path(), ": labels such as ", classes.front(), " and ", classes.back(),
                " are ", classes.size(), " classes; to predict the number, set ",
                "task.series.regression=true");
    std::vector<double> counts(classes.size());
    for (const int64_t i : train_) {
      const std::string& label = store.labels()[size_t(store.Label(i))];
      ++counts[size_t(std::find(classes.begin(), classes.end(), label) - classes.begin())];
    }
    for (size_t c = 0; c < classes.size(); ++c) {
      if (counts[c] == 0 && int64_t(train_.size()) < store.size())
        FailUsage(
            store.path(), ": the split leaves no series of the class '", classes[c],
            "' to train on; take another task.series.split_seed, smaller shares, or files of ",
            "their own for validation and test");
    }
    SetClasses(classes, counts, store.path());
  }
  std::vector<bool> trained(size_t(store.size()));
  for (const int64_t i : train_) trained[size_t(i)] = true;
  input_.Learn(store, [&](int64_t i) {
    return std::pair<int64_t, int64_t>(0, trained[size_t(i)] ? store.Steps(i) : 0);
  });
  longest_ = store.Longest();
}

int64_t SeriesTask::ClassOf(const SeriesStore& store, int64_t i) const {
  const std::string& label = store.labels()[size_t(store.Label(i))];
  return std::find(classes_.begin(), classes_.end(), label) - classes_.begin();
}

std::vector<int64_t> SeriesTask::KnownRows(const SeriesStore& store, bool skip) const {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < store.size(); ++i) {
    if (options_.regression || ClassOf(store, i) < int64_t(classes_.size())) {
      rows.push_back(i);
    } else if (!skip) {
      throw Error(UnknownName(StrCat("class of the series at ", store.path(), ":", store.Line(i)),
                              store.labels()[size_t(store.Label(i))], classes_));
    }
  }
  CISTERN_CHECK(!rows.empty(), store.path(), ": no series is of a class that the model knows (",
                store.size(), " skipped)");
  return rows;
}

Json SeriesTask::DataSummary() const {
  const bool apart = test_ != all_;
  return {{"data", options_.input.data},
          {"xxh64", HexText(all_->hash() ^ (apart ? test_->hash() * 31 : 0))},
          {"xxh64_exact", HexText(all_->exact_hash() ^ (apart ? test_->exact_hash() * 31 : 0))},
          {"train", train_.size()},
          {"valid", valid_.size()},
          {"test", test_rows_.size()},
          {"classes", CountsByClass()},
          {"notes", notes_}};
}

void SeriesTask::SaveAssets(const std::string& folder) const {
  Json json = input_.Save();
  json["longest"] = longest_;
  if (!options_.regression) return SaveClasses(folder + kSeriesAssets, std::move(json));
  json["label_mean"] = scale_.mean;
  json["label_deviation"] = scale_.deviation;
  WriteCheckedJson(folder + kSeriesAssets, std::move(json));
}

void SeriesTask::LoadAssets(const std::string& folder) {
  const std::string path = folder + kSeriesAssets;
  const Json json =
      options_.regression ? ReadCheckedJson(path, "predictions may be others") : LoadClasses(path);
  input_.Load(json, path);
  try {
    longest_ = json.at("longest").get<int64_t>();
    if (options_.regression) {
      scale_.mean = json.at("label_mean").get<double>();
      scale_.deviation = json.at("label_deviation").get<double>();
    }
  } catch (const nlohmann::json::exception& e) {
    Fail(path, " is broken: ", e.what());
  }
  CISTERN_CHECK(longest_ >= 1 && scale_.Good(), path,
                " is broken: its parts do not fit each other");
}

void SeriesTask::Complete(ModelConfig& config) const {
  config.classes = options_.regression ? 1 : int64_t(classes_.size());
  config.vocab_size = 0;
  config.max_length = std::max(config.max_length, longest_);
  Json own = config.Own();
  own["input"] = "values";
  own["channels"] = input_.width();
  config.own[config.kind] = own;
  for (const auto& store : {all_, test_}) {
    if (!store) continue;  // not prepared
    int64_t longest = 0;
    for (int64_t i = 1; i < store->size(); ++i) {
      if (store->Steps(i) > store->Steps(longest)) longest = i;
    }
    config.Reach(Form::kBidirectional, store->Steps(longest),
                 StrCat("the series at ", store->path(), ":", store->Line(longest)));
  }
  const bool masks = options_.input.missing == MissingValues::kMask;
  const auto same = [&](const SeriesStore& store) {
    for (int64_t i = 0; i < store.size(); ++i) {
      if (store.Steps(i) != longest_) return false;
    }
    return true;
  };
  if (masks || !all_ || !same(*all_) || !same(*test_)) CheckPadding(config);
  if (masks) CheckGivenPositions(config, "task.missing=mask");
}

Batch SeriesTask::MakeBatch(const SeriesStore& store, const std::vector<int64_t>& rows,
                            bool labelled) const {
  int64_t width = 1;
  for (const int64_t i : rows) width = std::max(width, store.Steps(i));
  const auto count = int64_t(rows.size());
  const bool masks = options_.input.missing == MissingValues::kMask;
  const at::Tensor values = at::zeros({count, width, input_.width()}, at::kFloat),
                   seen = at::ones({count, width}, at::kBool);
  std::vector<int64_t> lengths, classes, lines;
  std::vector<double> numbers;
  Batch batch;
  batch.rows = count;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t i = rows[size_t(r)], steps = store.Steps(i);
    input_.Read(store, i, 0, steps, values.mutable_data_ptr<float>() + r * width * input_.width(),
                seen.mutable_data_ptr<bool>() + r * width);
    lengths.push_back(steps);
    lines.push_back(store.Line(i));
    batch.tokens += steps;
    if (!labelled) continue;
    if (options_.regression) {
      numbers.push_back(scale_.Scaled(store.Number(i)));
    } else {
      classes.push_back(ClassOf(store, i));
    }
  }
  batch.Add("values", values);
  AddNumbers("lengths", lengths, &batch);
  if (!masks || seen.all().item<bool>()) {
    batch.padded = {{"values", "lengths"}};
  } else {
    batch.Add("valid", seen);
    batch.Add("positions", at::arange(width, at::kLong).expand({count, width}).contiguous());
  }
  if (labelled && options_.regression) batch.Add("targets", at::tensor(numbers, at::kDouble));
  if (labelled && !options_.regression) AddNumbers("targets", classes, &batch);
  AddNumbers("lines", lines, &batch);
  return batch;
}

Batch SeriesTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  std::vector<int64_t> picked = PickRows(*order_, seed, step, rows);
  for (int64_t& i : picked) i = train_[size_t(i)];
  return MakeBatch(*all_, picked, true);
}

std::unique_ptr<BatchReader> SeriesTask::Read(Split split, const ReadOptions& options) const {
  const std::vector<int64_t>& part = split == Split::kTrain   ? train_
                                     : split == Split::kValid ? valid_
                                                              : test_rows_;
  const SeriesStore& store = split == Split::kTest ? *test_ : *all_;
  return ReadInOrder(int64_t(part.size()), options, kSeriesRows,
                     [this, &part, &store](std::vector<int64_t> picked) {
                       for (int64_t& i : picked) i = part[size_t(i)];
                       return MakeBatch(store, picked, true);
                     });
}

std::unique_ptr<BatchReader> SeriesTask::ReadFile(const std::string& path, bool labelled,
                                                  const ReadOptions& options) const {
  const std::shared_ptr<const SeriesStore> store = input_.Open(path, labelled);
  std::vector<int64_t> known(size_t(store->size()));
  std::iota(known.begin(), known.end(), 0);
  if (labelled) known = KnownRows(*store, options_.input.skip_bad_rows);
  const auto count = int64_t(known.size());
  return ReadInOrder(
      count, options, kSeriesRows,
      [this, store, labelled, known = std::move(known)](std::vector<int64_t> rows) {
        for (int64_t& i : rows) i = known[size_t(i)];
        return MakeBatch(*store, rows, labelled);
      },
      store->skipped() + store->size() - count);
}

at::Tensor SeriesTask::Loss(Model& model, const Batch& batch, double label_smoothing) const {
  if (!options_.regression) return ClassTask::Loss(model, batch, label_smoothing);
  return NumberLoss(dynamic_cast<Classifier&>(model).Logits(model.ReadOf(batch.tensors)),
                    batch["targets"], label_smoothing);
}

std::string SeriesTask::WhyNoSmoothing(const Model& model) const {
  return options_.regression ? kNumbersAreNoClasses : ClassTask::WhyNoSmoothing(model);
}

// Series of a file may differ in length where those of the training data did not.
bool SeriesTask::PaddingSeen(const Model& model, const Batch& batch) {
  return batch.rows > 1 && batch["lengths"].ne(batch["values"].size(1)).any().item<bool>() &&
         !dynamic_cast<const Classifier&>(model).SeesPadding().empty();
}

Score SeriesTask::Measure(Model& model, const Batch& batch) const {
  if (PaddingSeen(model, batch)) {
    Score score;
    for (int64_t r = 0; r < batch.rows; ++r)
      score.Merge(Measure(model, batch.Rows(r, r + 1).WithoutPadding()));
    return score;
  }
  if (!options_.regression) return ClassTask::Measure(model, batch);
  return MeasureNumbers(dynamic_cast<Classifier&>(model).Logits(model.ReadOf(batch.tensors)),
                        batch["targets"], scale_);
}

Json SeriesTask::Metrics(const Score& score) const {
  return options_.regression ? NumberFigures(score) : ClassTask::Metrics(score);
}

std::vector<Json> SeriesTask::Predict(Model& model, const Batch& batch) const {
  if (PaddingSeen(model, batch))
    return PredictApart(batch, [&](const Batch& row) { return Predict(model, row); });
  if (!options_.regression) return ClassTask::Predict(model, batch);
  const at::Tensor lines = batch["lines"].cpu();
  std::vector<Json> rows;
  for (int64_t r = 0; r < batch.rows; ++r)
    rows.push_back({{"line", lines.const_data_ptr<int64_t>()[r]}});
  return PredictNumbers(dynamic_cast<Classifier&>(model).Logits(model.ReadOf(batch.tensors)),
                        scale_, std::move(rows));
}

}  // namespace cistern
