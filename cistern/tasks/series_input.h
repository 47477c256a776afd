#pragma once
// What the tasks of series share: their options of files and columns, what becomes of missing
// values, and the channels' scales, which are learned from the training part and kept with a model.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cistern/io/series_store.h"
#include "cistern/tasks/task.h"

namespace cistern {

// What a missing value is read as.
enum class MissingValues {
  kLast,   // the last one of its channel before it; before the first one, the mean
  kMean,   // the channel's mean in the training part
  kMask,   // the mean, and a step without any value is masked: the model does not see it
  kRefuse  // an error that says where it is
};

struct SeriesInputOptions {
  std::string data, test;
  SeriesFormat::Layout layout = SeriesFormat::Layout::kAuto;
  std::string label_column, series_column;
  std::vector<std::string> ignore;
  TableOptions::Header header = TableOptions::Header::kAuto;
  MissingValues missing = MissingValues::kLast;
  bool indicator = false, scale = true, skip_bad_rows = false;

  // `labels`: of a task that has them.
  void Describe(bool labels, Fields* fields);
};

class SeriesInput {
 public:
  // `cache`: the folder for what does not fit in memory.
  SeriesInput(const SeriesInputOptions& options, SeriesFormat::Labels labels, std::string cache)
      : options_(options), labels_(labels), cache_(std::move(cache)) {}

  // Reads a file; its channels are those that were learned, if they were. labels: they are needed.
  std::shared_ptr<const SeriesStore> Open(const std::string& path, bool labelled) const;
  // The names of the training file's channels and columns, by which all others are read.
  void TakeNames(const SeriesStore& store);
  // Then means and deviations, of steps `part(i)` = {begin, end} of each series i; O(1) memory.
  template <class Part>
  void Learn(const SeriesStore& store, const Part& part);
  bool learned() const { return !channels_.empty(); }  // TakeNames, Load

  int64_t channels() const { return int64_t(channels_.size()); }
  const std::vector<std::string>& names() const { return channels_; }
  double mean(size_t c) const { return means_[c]; }
  double deviation(size_t c) const { return deviations_[c]; }
  // Numbers of a step as the model reads it: the channels, then their indicators (1: missing).
  int64_t width() const { return channels() * (options_.indicator ? 2 : 1); }
  // Steps begin .. begin + count - 1 of a series as the model reads them, [count,width]. seen:
  // which of them are not masked; may be null.
  void Read(const SeriesStore& store, int64_t series, int64_t begin, int64_t count, float* out,
            bool* seen) const;
  // The same as they are in the file, in the channels' units or scaled, [count,channels]; NaN:
  // missing.
  void ReadRaw(const SeriesStore& store, int64_t series, int64_t begin, int64_t count, float* out,
               bool scaled) const;
  // Read() of values that ReadRaw() has read, scaled if options.scale is set.
  void FromRaw(const SeriesStore& store, int64_t series, int64_t begin, int64_t count,
               const float* raw, float* out, bool* seen) const;

  // Of each channel the last value before `begin` that is not missing; NaN: there is none.
  std::vector<float> LastBefore(const SeriesStore& store, int64_t series, int64_t begin,
                                bool scaled) const;

  Json Save() const;
  void Load(const Json& json, const std::string& path);  // Error where it is broken
  // What was read, and what was done to it: notes for a run's record.
  std::vector<std::string> Notes(const SeriesStore& train, const SeriesStore* test) const;

 private:
  void LearnSteps(const double* values, int64_t steps);
  void Finish();

  SeriesInputOptions options_;
  SeriesFormat::Labels labels_;
  std::string cache_, label_column_;
  std::vector<std::string> channels_, value_columns_;
  size_t unnamed_columns_ = 0;
  std::vector<double> means_, deviations_;
  std::vector<double> counts_;  // while learning
};

// Series are read in pieces of so many numbers.
inline constexpr int64_t kSeriesPiece = 1 << 18;

template <class Part>
void SeriesInput::Learn(const SeriesStore& store, const Part& part) {
  means_.assign(channels_.size(), 0);
  deviations_ = counts_ = means_;
  std::vector<double> values;
  for (int64_t i = 0; i < store.size(); ++i) {
    const auto [begin, end] = part(i);
    const int64_t most = std::max<int64_t>(1, kSeriesPiece / channels());
    for (int64_t at = begin; at < end; at += most) {
      const int64_t steps = std::min(most, end - at);
      values.resize(size_t(steps * channels()));
      store.Read(i, at, steps, values.data());
      LearnSteps(values.data(), steps);
    }
  }
  Finish();
}

}  // namespace cistern
