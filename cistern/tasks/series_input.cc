#include "cistern/tasks/series_input.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cistern/base/error.h"
#include "cistern/tasks/cache.h"

namespace cistern {
namespace {

bool IsMissing(double x) { return std::isnan(x); }

void RefuseMissing(const SeriesStore& store) {
  if (store.missing() == 0) return;
  const int64_t channels = store.channels(), most = std::max<int64_t>(1, kSeriesPiece / channels);
  std::vector<double> values;
  for (int64_t i = 0; i < store.size(); ++i) {
    for (int64_t begin = 0; begin < store.Steps(i); begin += most) {
      const int64_t steps = std::min(most, store.Steps(i) - begin);
      values.resize(size_t(steps * channels));
      store.Read(i, begin, steps, values.data());
      const int64_t at = std::find_if(values.begin(), values.end(), IsMissing) - values.begin();
      CISTERN_CHECK(at == int64_t(values.size()), store.path(), ": the series at ", store.Line(i),
                    " has no value at step ", begin + at / channels + 1, " of channel ",
                    store.channel_names()[size_t(at % channels)], ", and task.missing=refuse");
    }
  }
}

}  // namespace

void SeriesInputOptions::Describe(bool labels, Fields* fields) {
  Fields& f = *fields;
  f.Add(
      "data", &data,
      StrCat("a file .ts (UCR, UEA), .csv, .tsv or .jsonl (these also .gz or .xz) or .npy ([rows, "
             "length, channels] or [rows, length]",
             labels ? "; the labels of X_NAME.npy in y_NAME.npy, of NAME.npy in NAME_labels.npy"
                    : ", or [length]",
             "), or a folder with NAME_TRAIN.ts and NAME_TEST.ts, or X_train.npy and X_test.npy"));
  f.Add("test", &test,
        labels
            ? "the file of the test series; empty: that of the folder, or a share of data"
            : "the file of the test series; empty: that of the folder, or the end of each series");
  f.Add("layout", &layout,
        "of a table: rows, each row a series of one channel, each column a step; steps, each row a "
        "step and each column a channel; auto: steps where there is a series' column" +
            std::string(labels ? "" : " or no other word"),
        {{SeriesFormat::Layout::kAuto, "auto"},
         {SeriesFormat::Layout::kRows, "rows"},
         {SeriesFormat::Layout::kSteps, "steps"}});
  if (labels)
    f.Add("label_column", &label_column,
          "of a table; empty: the column named label, class, target or category");
  f.Add(
      "series_column", &series_column,
      "of layout=steps: rows with the same cell are one series, and follow each other; empty: the "
      "column named series or series_id, if there is one");
  f.Add("ignore", &ignore, "columns of a table that are no values");
  f.Add("header", &header,
        "the first line of a table: auto takes it for a header unless it holds a number; with "
        "numbers, if it names the label's or the series' column, or the columns of the training "
        "table",
        TableHeaders());
  std::vector<std::pair<MissingValues, std::string>> choices = {{MissingValues::kLast, "last"},
                                                                {MissingValues::kMean, "mean"}};
  if (labels) choices.emplace_back(MissingValues::kMask, "mask");
  choices.emplace_back(MissingValues::kRefuse, "refuse");
  f.Add("missing", &missing,
        StrCat(
            "a missing value (?, NaN, an empty cell) is read as: last, the channel's last value "
            "before it, before the first one its mean; mean, the channel's training mean; ",
            labels ? "mask, the mean, and a step without any value is not seen by the model; " : "",
            "refuse: an error"),
        choices);
  f.Add("indicator", &indicator,
        "a further channel beside each one: 1 where its value is missing, else 0");
  f.Add("skip_bad_rows", &skip_bad_rows,
        "pass over series, or rows of a table, that cannot be read, and count them, instead of "
        "stopping");
}

std::shared_ptr<const SeriesStore> SeriesInput::Open(const std::string& path, bool labelled) const {
  SeriesFormat format;
  format.labels = labels_;
  format.need_labels = labelled;
  format.layout = options_.layout;
  format.label_column = options_.label_column.empty() ? label_column_ : options_.label_column;
  format.series_column = options_.series_column;
  format.ignore = options_.ignore;
  format.header = options_.header;
  format.known_columns = value_columns_;
  format.unnamed_columns = unnamed_columns_;
  format.skip_bad = options_.skip_bad_rows;
  format.channels = channels_;
  auto store = std::make_shared<const SeriesStore>(path, format, CacheFolder(cache_));
  CISTERN_CHECK(!learned() || store->channels() == channels(), path, ": expected series of ",
                channels(), " channels, as the model was trained on, got ", store->channels());
  if (options_.missing == MissingValues::kRefuse) RefuseMissing(*store);
  return store;
}

void SeriesInput::TakeNames(const SeriesStore& store) {
  channels_ = store.channel_names();
  label_column_ = store.label_column();
  value_columns_ = store.value_columns();
  unnamed_columns_ = store.unnamed_columns();
}

// Welford 1962: the mean and the squares about it, in one pass.
void SeriesInput::LearnSteps(const double* values, int64_t steps) {
  const size_t channels = channels_.size();
  for (size_t i = 0; i < size_t(steps) * channels; ++i) {
    if (std::isnan(values[i])) continue;
    const size_t c = i % channels;
    const double x = values[i], before = x - means_[c];
    means_[c] += before / ++counts_[c];
    deviations_[c] += before * (x - means_[c]);
  }
}

void SeriesInput::Finish() {
  for (size_t c = 0; c < channels_.size(); ++c) {
    const double deviation = counts_[c] > 0 ? std::sqrt(deviations_[c] / counts_[c]) : 0;
    deviations_[c] = deviation > 0 && std::isfinite(deviation) ? deviation : 1;
  }
}

void SeriesInput::ReadRaw(const SeriesStore& store, int64_t series, int64_t begin, int64_t count,
                          float* out, bool scaled) const {
  const size_t channels = channels_.size();
  std::vector<double> values(size_t(count) * channels);
  store.Read(series, begin, count, values.data());
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t c = i % channels;
    out[i] = float(scaled ? (values[i] - means_[c]) / deviations_[c] : values[i]);
  }
}

std::vector<float> SeriesInput::LastBefore(const SeriesStore& store, int64_t series, int64_t begin,
                                           bool scaled) const {
  const size_t channels = channels_.size();
  std::vector<float> last(channels, std::numeric_limits<float>::quiet_NaN()), raw;
  int64_t end = begin;
  for (int64_t most = 16; end > 0 && std::any_of(last.begin(), last.end(), IsMissing);
       most = std::min<int64_t>(2 * most, 1 << 14)) {
    const int64_t count = std::min(most, end);
    raw.resize(size_t(count) * channels);
    ReadRaw(store, series, end - count, count, raw.data(), scaled);
    for (size_t i = raw.size(); i-- > 0;) {
      float& known = last[i % channels];
      if (IsMissing(known)) known = raw[i];
    }
    end -= count;
  }
  return last;
}

void SeriesInput::Read(const SeriesStore& store, int64_t series, int64_t begin, int64_t count,
                       float* out, bool* seen) const {
  std::vector<float> raw(size_t(count) * channels_.size());
  ReadRaw(store, series, begin, count, raw.data(), options_.scale);
  FromRaw(store, series, begin, count, raw.data(), out, seen);
}

void SeriesInput::FromRaw(const SeriesStore& store, int64_t series, int64_t begin, int64_t count,
                          const float* raw, float* out, bool* seen) const {
  const size_t channels = channels_.size(), width = size_t(this->width());
  const bool use_last = options_.missing == MissingValues::kLast;
  std::vector<float> means(channels, 0.0f), first;
  if (!options_.scale) means.assign(means_.begin(), means_.end());
  if (use_last && count > 0 && std::any_of(raw, raw + channels, IsMissing)) {
    first = LastBefore(store, series, begin, options_.scale);
    for (size_t c = 0; c < channels; ++c) first[c] = IsMissing(first[c]) ? means[c] : first[c];
  }
  for (size_t t = 0; t < size_t(count); ++t, raw += channels, out += width) {
    // What stands for a missing value: the step before already holds the last ones.
    const float* const instead = !use_last ? means.data() : t > 0 ? out - width : first.data();
    size_t missing = 0;
    for (size_t c = 0; c < channels; ++c) {
      const bool gone = IsMissing(raw[c]);
      missing += gone;
      out[c] = gone ? instead[c] : raw[c];
      if (options_.indicator) out[channels + c] = gone ? 1.0f : 0.0f;
    }
    if (seen) seen[t] = missing < channels || options_.missing != MissingValues::kMask;
  }
}

Json SeriesInput::Save() const {
  return {{"channels", channels_},           {"means", means_},
          {"deviations", deviations_},       {"label_column", label_column_},
          {"value_columns", value_columns_}, {"unnamed_columns", unnamed_columns_}};
}

void SeriesInput::Load(const Json& json, const std::string& path) {
  try {
    channels_ = json.at("channels").get<std::vector<std::string>>();
    means_ = json.at("means").get<std::vector<double>>();
    deviations_ = json.at("deviations").get<std::vector<double>>();
    label_column_ = json.at("label_column").get<std::string>();
    // Earlier versions have none of these.
    value_columns_ = json.value("value_columns", value_columns_);
    unnamed_columns_ = json.value("unnamed_columns", unnamed_columns_);
  } catch (const nlohmann::json::exception& e) {
    Fail(path, " is broken: ", e.what());
  }
  const auto good = [](double d) { return std::isfinite(d) && d > 0; };
  CISTERN_CHECK(!channels_.empty() && means_.size() == channels_.size() &&
                    deviations_.size() == channels_.size() &&
                    std::all_of(deviations_.begin(), deviations_.end(), good),
                path, " is broken: its parts do not fit each other");
}

std::vector<std::string> SeriesInput::Notes(const SeriesStore& train,
                                            const SeriesStore* test) const {
  std::vector<std::string> notes = {StrCat(channels(),
                                           channels() == 1 ? " channel, " : " channels, ", "up to ",
                                           train.Longest(), " steps a series")};
  notes.insert(notes.end(), train.notes().begin(), train.notes().end());
  if (const int64_t n = train.skipped() + (test ? test->skipped() : 0); n > 0)
    notes.push_back(StrCat(n, " series or rows could not be read and were skipped"));
  const char* const how = options_.missing == MissingValues::kLast ? "the last one before it"
                          : options_.missing == MissingValues::kMean
                              ? "the channel's training mean"
                              : "the training mean; steps without any value are masked";
  if (const int64_t n = train.missing() + (test ? test->missing() : 0); n > 0)
    notes.push_back(StrCat(n, " missing values: each is read as ", how,
                           options_.indicator ? ", with an indicator" : "", " (task.missing)"));
  if (train.on_disk()) notes.push_back("values are read from disk");
  return notes;
}

}  // namespace cistern
