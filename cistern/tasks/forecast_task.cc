#include "cistern/tasks/forecast_task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/random.h"
#include "cistern/io/checked_json.h"
#include "cistern/models/forecaster.h"
#include "cistern/tasks/idle_keys.h"
#include "cistern/tasks/row_batch.h"
#include "cistern/tasks/series_task.h"

namespace cistern {
namespace {

constexpr char kForecastAssets[] = "/forecast.json";
constexpr int64_t kForecastRows = 32, kShownChannels = 20;
constexpr uint64_t kWindows = 0x77696e64;  // xor of the seed
constexpr float kUnmeasured = std::numeric_limits<float>::quiet_NaN();

at::Tensor Forecasts(Model& model, const Batch& batch) {
  return dynamic_cast<Forecaster&>(model).Predict(model.ReadOf(batch.tensors));
}

// Of a channel's measured values.
struct ChannelSums {
  int64_t values = 0;
  ExactSum squares, absolute, last_squares, last_absolute, mean_squares, mean_absolute;

  // Errors of the model, of the last value and of the mean.
  void Add(double model, double last, double mean) {
    ++values;
    squares.Add(model * model);
    absolute.Add(std::abs(model));
    last_squares.Add(last * last);
    last_absolute.Add(std::abs(last));
    mean_squares.Add(mean * mean);
    mean_absolute.Add(std::abs(mean));
  }

  void AddTo(int64_t channel, Score* score) const {
    if (values == 0) return;
    score->Add("values", channel, double(values));
    score->Add("squares", channel, squares);
    score->Add("absolute", channel, absolute);
    score->Add("last_squares", channel, last_squares);
    score->Add("last_absolute", channel, last_absolute);
    score->Add("mean_squares", channel, mean_squares);
    score->Add("mean_absolute", channel, mean_absolute);
  }
};

}  // namespace

Fields ForecastTask::Describe(Options& o) {
  Fields f;
  o.input.Describe(false, &f);
  f.Add("length", &o.length, "steps of a row that the model reads", {2, 1 << 24});
  f.Add("context", &o.context,
        "in evaluation: steps of a row that are read and not measured, so that every measured step "
        "has that many before it (fewer at a series' beginning); -1: half of length",
        {-1, 1 << 24});
  f.Add("valid_share", &o.valid_share, "of the steps of each series, for validation", {0.001, 0.9});
  f.Add("test_share", &o.test_share,
        "of the steps of each series, its last ones, where there is no "
        "test file",
        {0.001, 0.9});
  return f;
}

const TaskInfo& forecast_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "forecast";
    t.summary = "the next step of series of real values, from the steps before it";
    t.models = {"forecaster"};
    t.metrics = {
        {"nrmse", "RMSE, in deviations",
         "root of the mean squared error of the next step, each value in deviations of its "
         "channel in the training part; lower is better",
         true}};
    t.data = "data";
    t.defaults = {"model.dim=64",      "model.layers=2", "model.heads=4",
                  "model.ffn_dim=128", "model.norm=pre", "model.positions=sinusoidal",
                  "train.batch=16",    "train.lr=1e-3",  "train.seconds=120"};
    t.mechanisms = {"softmax", "latte", "abc_mlp", "linear"};
    t.of_use = {"header"};
    BindTask<ForecastTask>(t);
    return t;
  }();
  return info;
}

ForecastTask::ForecastTask(const Options& options, const std::string& cache)
    : options_(options), input_(options.input, SeriesFormat::Labels::kNone, cache) {
  if (options_.valid_share + options_.test_share >= 1)
    FailUsage("task.forecast: valid_share + test_share leave nothing to train on");
  if (options_.context >= options_.length)
    FailUsage("task.forecast.context=", options_.context,
              " leaves nothing of length=", options_.length, " to be measured");
}

const Metric& ForecastTask::metric() const { return forecast_task().metrics[0]; }

// The first step has none before it, so it is never predicted.
ForecastTask::Range ForecastTask::PartOf(const SeriesStore& store, int64_t series,
                                         Split split) const {
  const int64_t steps = store.Steps(series);
  const auto share = [&](double of) { return int64_t(of * double(steps) + 0.5); };
  const int64_t test = test_ == all_ ? steps - share(options_.test_share) : steps,
                valid = test - share(options_.valid_share);
  const Range range = split == Split::kTrain   ? Range{0, valid}
                      : split == Split::kValid ? Range{valid, test}
                                               : Range{test_ == all_ ? test : 0, steps};
  return {std::max<int64_t>(1, range.begin), std::max<int64_t>(1, range.end)};
}

void ForecastTask::Prepare() {
  const bool learn = !input_.learned();  // not LoadAssets
  const SeriesFiles files = SeriesFilesOf(options_.input, "forecast", learn);
  RefuseIdle(learn && !files.test.empty() && options_.test_share != Options().test_share,
             "task.forecast.test_share", "test=" + files.test);
  all_ = input_.Open(files.train, false);
  if (learn) input_.TakeNames(*all_);
  test_ = files.test.empty() ? all_ : input_.Open(files.test, false);
  if (learn) {
    input_.Learn(*all_, [&](int64_t i) {
      const Range part = PartOf(*all_, i, Split::kTrain);
      return std::pair<int64_t, int64_t>(0, std::min(part.end, all_->Steps(i)));
    });
  }
  starts_ = {0};
  int64_t predicted[3] = {};
  for (int64_t i = 0; i < all_->size(); ++i) {
    const Range part = PartOf(*all_, i, Split::kTrain);
    // A window may begin at every step that leaves it whole; in a short series at the first alone.
    const int64_t count = part.end - part.begin;
    starts_.push_back(starts_.back() +
                      (count > 0 ? std::max<int64_t>(1, count - options_.length + 1) : 0));
  }
  for (const Split split : {Split::kTrain, Split::kValid, Split::kTest}) {
    const SeriesStore& store = split == Split::kTest ? *test_ : *all_;
    for (int64_t i = 0; i < store.size(); ++i) {
      const Range part = PartOf(store, i, split);
      predicted[int(split)] += part.end - part.begin;
    }
    CISTERN_CHECK(predicted[int(split)] > 0, store.path(), ": no steps are left for the ",
                  SplitName(split), " split; longer series are needed");
  }
  notes_ = input_.Notes(*all_, test_ == all_ ? nullptr : test_.get());
  notes_.push_back(StrCat(predicted[0], " steps to train on, ", predicted[1], " for validation, ",
                          predicted[2], " for the test: ", SplitSummary()));
}

std::string ForecastTask::SplitSummary() const {
  return options_.input.test.empty() && test_ == all_
             ? "the end of each series is the test, what is before it validation"
             : "a test file; the end of each training series is validation";
}

Json ForecastTask::DataSummary() const {
  const bool apart = test_ != all_;
  return {{"data", options_.input.data},
          {"xxh64", HexText(all_->hash() ^ (apart ? test_->hash() * 31 : 0))},
          {"xxh64_exact", HexText(all_->exact_hash() ^ (apart ? test_->exact_hash() * 31 : 0))},
          {"series", all_->size()},
          {"train", starts_.back()},
          {"notes", notes_}};
}

void ForecastTask::SaveAssets(const std::string& folder) const {
  WriteCheckedJson(folder + kForecastAssets, input_.Save());
}

void ForecastTask::LoadAssets(const std::string& folder) {
  input_.Load(ReadCheckedJson(folder + kForecastAssets, "predictions may be others"),
              folder + kForecastAssets);
}

void ForecastTask::Complete(ModelConfig& config) const {
  config.vocab_size = 0;
  config.max_length = std::max(config.max_length, options_.length);
  Json own = config.Own();
  own["inputs"] = input_.width();
  own["outputs"] = input_.channels();
  config.own[config.kind] = own;
}

// Of each step the last value of each channel that is not missing, up to that step; 0, the mean,
// where there is none. raw: the steps from `begin` on, scaled.
void ForecastTask::LastKnown(const SeriesStore& store, int64_t series, int64_t begin,
                             const std::vector<float>& raw, int64_t steps, float* known) const {
  const int64_t channels = input_.channels();
  std::copy_n(raw.begin(), steps * channels, known);
  std::vector<float> before;  // the window may begin where a value is missing
  for (int64_t i = 0; i < steps * channels; ++i) {
    if (!std::isnan(known[i])) continue;
    if (i < channels && before.empty()) before = input_.LastBefore(store, series, begin, true);
    const float found = i < channels ? before[size_t(i)] : known[i - channels];
    known[i] = std::isnan(found) ? 0 : found;
  }
}

// values [B,T,width] of the steps before each target; targets [B,T,channels] scaled, NaN where
// nothing is measured; with_last: last [B,T,channels], the last value before the target that is not
// missing.
Batch ForecastTask::MakeBatch(const SeriesStore& store, const std::vector<Window>& windows,
                              int64_t context, bool with_last) const {
  const auto count = int64_t(windows.size()), channels = input_.channels(), inputs = input_.width();
  int64_t width = 1;
  const auto first = [&](const Window& w) { return std::max<int64_t>(0, w.begin - 1 - context); };
  for (const Window& w : windows) width = std::max(width, w.end - 1 - first(w));
  const auto room = [&](int64_t numbers) { return at::empty({count, width, numbers}, at::kFloat); };
  const at::Tensor values = room(inputs), targets = room(channels),
                   last = with_last ? room(channels) : at::Tensor();
  std::vector<int64_t> lengths, lines, steps;
  std::vector<float> raw;
  Batch batch;
  batch.rows = count;
  for (int64_t r = 0; r < count; ++r) {
    const Window& w = windows[size_t(r)];
    const int64_t begin = first(w), length = w.end - 1 - begin,
                  there = std::min(store.Steps(w.series), w.end) - begin;  // not behind the end
    raw.resize(size_t(there * channels));
    input_.ReadRaw(store, w.series, begin, there, raw.data(), true);
    float* const value = values.mutable_data_ptr<float>() + r * width * inputs;
    input_.FromRaw(store, w.series, begin, length, raw.data(), value, nullptr);
    std::fill(value + length * inputs, value + width * inputs, 0.0f);
    const int64_t measured = std::max<int64_t>(1, w.begin - begin);  // the first step that is
    float* target = targets.mutable_data_ptr<float>() + r * width * channels;
    float* const end = target + width * channels;
    target = std::fill_n(target, (measured - 1) * channels, kUnmeasured);
    if (measured < there) target = std::copy(raw.begin() + measured * channels, raw.end(), target);
    std::fill(target, end, kUnmeasured);
    if (with_last) {
      float* const known = last.mutable_data_ptr<float>() + r * width * channels;
      LastKnown(store, w.series, begin, raw, length, known);
      std::fill(known + length * channels, known + width * channels, 0.0f);
    }
    lengths.push_back(length);
    lines.push_back(store.Line(w.series));
    steps.push_back(store.Steps(w.series));
    batch.tokens += length;
  }
  batch.Add("values", values);
  batch.Add("targets", targets);
  if (with_last) batch.Add("last", last);
  AddNumbers("lengths", lengths, &batch);
  AddNumbers("lines", lines, &batch);
  AddNumbers("steps", steps, &batch);
  return batch;
}

Batch ForecastTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  Random random(seed ^ kWindows, uint64_t(step));
  std::vector<Window> windows;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = random.Below(starts_.back());
    const int64_t i = std::upper_bound(starts_.begin(), starts_.end(), at) - starts_.begin() - 1;
    const Range part = PartOf(*all_, i, Split::kTrain);
    const int64_t begin = part.begin + (at - starts_[size_t(i)]);
    windows.push_back({i, begin, std::min(part.end, begin + options_.length)});
  }
  return MakeBatch(*all_, windows, 0, false);
}

at::Tensor ForecastTask::Loss(Model& model, const Batch& batch, double label_smoothing) const {
  return model.TrainingLoss(model.ReadOf(batch.tensors), label_smoothing);
}

double ForecastTask::Terms(const Batch& batch) const {
  return double(batch["targets"].isnan().logical_not().sum().item<int64_t>());
}

struct ForecastTask::Windows {
  std::vector<int64_t> before = {0};  // windows before each series, and in all
  std::vector<Range> parts;
  int64_t each = 1;  // steps that a window predicts

  Window At(int64_t number) const {
    const int64_t i = std::upper_bound(before.begin(), before.end(), number) - before.begin() - 1;
    const Range& part = parts[size_t(i)];
    const int64_t begin = part.begin + (number - before[size_t(i)]) * each;
    return {i, begin, std::min(part.end, begin + each)};
  }
};

int64_t ForecastTask::ContextOf(const ReadOptions& options) const {
  const int64_t context = options.context >= 0    ? options.context
                          : options_.context >= 0 ? options_.context
                                                  : options_.length / 2;
  if (context >= options_.length)
    FailUsage("a context of ", context, " steps leaves nothing of task.length=", options_.length,
              " to be measured");
  return context;
}

ForecastTask::Windows ForecastTask::WindowsOf(const SeriesStore& store, Split split, bool whole,
                                              int64_t context) const {
  Windows w;
  w.each = options_.length - context;
  for (int64_t i = 0; i < store.size(); ++i) {
    w.parts.push_back(whole ? Range{1, std::max<int64_t>(1, store.Steps(i))}
                            : PartOf(store, i, split));
    const int64_t steps = w.parts.back().end - w.parts.back().begin;
    w.before.push_back(w.before.back() + (steps + w.each - 1) / w.each);
  }
  return w;
}

std::unique_ptr<BatchReader> ForecastTask::ReadWindows(std::shared_ptr<const SeriesStore> store,
                                                       Split split, bool whole,
                                                       const ReadOptions& options) const {
  if (options.length > 0)
    FailUsage("the task forecast cuts series into windows of task.length=", options_.length,
              " as in training; leave out --length");
  const int64_t context = ContextOf(options);
  auto windows = std::make_shared<const Windows>(WindowsOf(*store, split, whole, context));
  return ReadInOrder(
      windows->before.back(), options, kForecastRows,
      [this, store, windows, context](const std::vector<int64_t>& rows) {
        std::vector<Window> picked;
        for (const int64_t i : rows) picked.push_back(windows->At(i));
        return MakeBatch(*store, picked, context, true);
      },
      store->skipped());
}

std::unique_ptr<BatchReader> ForecastTask::Read(Split split, const ReadOptions& options) const {
  return ReadWindows(split == Split::kTest ? test_ : all_, split, false, options);
}

std::unique_ptr<BatchReader> ForecastTask::ReadFile(const std::string& path, bool labelled,
                                                    const ReadOptions& options) const {
  const std::shared_ptr<const SeriesStore> store = input_.Open(path, false);
  if (labelled) {
    CISTERN_CHECK(store->Longest() > 1, path, ": no series has two steps, and what follows a step ",
                  "is measured");
    return ReadWindows(store, Split::kTest, true, options);
  }
  return ReadInOrder(
      store->size(), options, kForecastRows,
      [this, store](const std::vector<int64_t>& rows) {
        std::vector<Window> ends;  // what is predicted is behind the series' end
        for (const int64_t i : rows) ends.push_back({i, store->Steps(i) + 1, store->Steps(i) + 1});
        return MakeBatch(*store, ends, options_.length, false);
      },
      store->skipped());
}

Score ForecastTask::Measure(Model& model, const Batch& batch) const {
  const auto cells = [](const at::Tensor& x) { return x.to(at::kCPU, at::kDouble).contiguous(); };
  const at::Tensor predicted = cells(Forecasts(model, batch)), targets = cells(batch["targets"]),
                   last = cells(batch["last"]);
  const double *p = predicted.const_data_ptr<double>(), *y = targets.const_data_ptr<double>(),
               *l = last.const_data_ptr<double>();
  const auto channels = size_t(input_.channels());
  std::vector<ChannelSums> sums(channels);
  for (int64_t step = 0; step < targets.numel() / int64_t(channels); ++step) {
    for (size_t c = 0; c < channels; ++c, ++p, ++y, ++l) {
      if (std::isnan(*y)) continue;
      CISTERN_CHECK(std::isfinite(*p),
                    "the model's outputs for a row are not finite, so that it has no prediction");
      sums[c].Add(*p - *y, *l - *y, *y);
    }
  }
  Score score;
  score.Add("windows", double(batch.rows));
  for (size_t c = 0; c < channels; ++c) sums[c].AddTo(int64_t(c), &score);
  return score;
}

Json ForecastTask::Metrics(const Score& score) const {
  const int64_t channels = input_.channels();
  const auto over_all = [&](const std::string& name) {
    double sum = 0, values = 0;
    for (int64_t c = 0; c < channels; ++c) {
      sum += score.At(name, c);
      values += score.At("values", c);
    }
    return sum / values;
  };
  Json out = Json::object();
  for (const std::string who : {"", "last_", "mean_"}) {
    out[who + "nrmse"] = std::sqrt(over_all(who + "squares"));
    out[who + "nmae"] = over_all(who + "absolute");
  }
  double values = 0;
  for (int64_t c = 0; c < channels; ++c) values += score.At("values", c);
  out["values"] = int64_t(values);
  out["windows"] = int64_t(score["windows"]);
  for (int64_t c = 0; c < channels && channels <= kShownChannels; ++c) {
    const double n = score.At("values", c), unit = input_.deviation(size_t(c));
    Json& channel = out["channels"][input_.names()[size_t(c)]];
    for (const std::string who : {"", "last_", "mean_"}) {
      channel[who + "rmse"] =
          n > 0 ? unit * std::sqrt(score.At(who + "squares", c) / n) : kUnmeasured;
      channel[who + "mae"] = n > 0 ? unit * score.At(who + "absolute", c) / n : kUnmeasured;
    }
  }
  return out;
}

std::vector<Json> ForecastTask::Predict(Model& model, const Batch& batch) const {
  const at::Tensor y = Forecasts(model, batch).to(at::kCPU, at::kDouble).contiguous(),
                   lengths = batch["lengths"].cpu(), lines = batch["lines"].cpu(),
                   steps = batch["steps"].cpu();
  std::vector<Json> rows;
  for (int64_t r = 0; r < batch.rows; ++r) {
    const int64_t end = lengths.const_data_ptr<int64_t>()[r] - 1;
    Json row = {{"line", lines.const_data_ptr<int64_t>()[r]},
                {"steps", steps.const_data_ptr<int64_t>()[r]}};
    for (int64_t c = 0; c < input_.channels(); ++c) {
      const double scaled = y.const_data_ptr<double>()[(r * y.size(1) + end) * y.size(2) + c],
                   value = input_.mean(size_t(c)) + input_.deviation(size_t(c)) * scaled;
      CISTERN_CHECK(std::isfinite(value), "the model's forecast of the series at ",
                    lines.const_data_ptr<int64_t>()[r], " is not finite");
      row["forecast"][input_.names()[size_t(c)]] = value;
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace cistern
