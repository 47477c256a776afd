// Series of .npy files.
#include <cmath>
#include <filesystem>
#include <optional>

#include "cistern/base/error.h"
#include "cistern/io/npy.h"
#include "cistern/io/series_source.h"

namespace cistern {
namespace {

constexpr int64_t kPieceNumbers = 1 << 18, kMostNpyChannels = 1 << 16;

class NpyReader : public SeriesSource {
 public:
  NpyReader(const std::string& path, const SeriesFormat& format) : file_(path), format_(format) {
    const std::vector<int64_t>& shape = file_.shape();
    const bool one = shape.size() == 1 && format.labels == SeriesFormat::Labels::kNone;
    CISTERN_CHECK(one || shape.size() == 2 || shape.size() == 3, path,
                  ": expected an array of shape [rows, length, channels] or [rows, length], got ",
                  file_.ShapeText());
    rows_ = one ? 1 : shape[0];
    length_ = shape[one ? 0 : 1];
    width_ = shape.size() == 3 ? shape[2] : 1;
    CISTERN_CHECK(rows_ > 0 && length_ > 0 && width_ > 0 && width_ <= kMostNpyChannels, path,
                  ": the shape ", file_.ShapeText(), " has no series, or more than ",
                  kMostNpyChannels, " channels");
    for (int64_t c = 1; c <= width_; ++c) channels_.push_back(std::to_string(c));
    if (format.labels == SeriesFormat::Labels::kNone || !format.need_labels) return;
    const std::string labels = NpyLabelsOf(path);
    std::error_code error;
    CISTERN_CHECK(std::filesystem::exists(labels, error), path, ": expected its labels in ",
                  labels);
    labels_.emplace(labels);
    CISTERN_CHECK(labels_->shape() == std::vector<int64_t>{rows_}, labels, ": expected the shape (",
                  rows_, ",), one number for each row of ", path, ", got ", labels_->ShapeText());
    if (format.labels == SeriesFormat::Labels::kClasses && !labels_->whole())
      FailUsage(labels, " holds real numbers, and classes are whole ones; set ",
                "task.series.regression=true, or save it with .astype('int64')");
  }

  bool Next(SeriesPiece* piece) override {
    while (row_ < rows_) {
      const int64_t steps = std::min(std::max<int64_t>(1, kPieceNumbers / width_), length_ - step_);
      piece->first = step_ == 0;
      piece->steps = steps;
      piece->line = row_ + 1;
      piece->name.clear();
      piece->label.clear();
      try {
        if (piece->first && labels_) piece->label = Label();
        piece->values.resize(size_t(steps * width_));
        file_.Read((row_ * length_ + step_) * width_, steps * width_, piece->values.data());
        for (const double x : piece->values)
          CISTERN_CHECK(std::isnan(x) || FiniteInFloat(x), file_.path(), ": the value ", x,
                        " is not finite in float32");
      } catch (const Error& e) {
        // A piece of a series that has begun cannot be taken back.
        if (!format_.skip_bad || !piece->first) Fail("row ", row_ + 1, ": ", e.what());
        ++skipped_;
        step_ = 0;
        ++row_;
        continue;
      }
      for (const double x : piece->values) missing_ += std::isnan(x);
      step_ += steps;
      if (step_ == length_) {
        step_ = 0;
        ++row_;
      }
      return true;
    }
    return false;
  }
  int64_t done() const override { return row_; }
  int64_t total() const override { return rows_; }

 private:
  std::string Label() const {
    double value = 0;
    labels_->Read(row_, 1, &value);
    CISTERN_CHECK(!std::isnan(value), labels_->path(), ": the label of row ", row_ + 1, " is NaN");
    // Labels are told apart by their digits, so no whole number may become another one.
    CISTERN_CHECK(!labels_->whole() || std::abs(value) < 9007199254740992.0, labels_->path(),
                  ": the label of row ", row_ + 1,
                  " is not below 2^53, and float64 does not hold it exactly");
    if (labels_->whole()) return std::to_string(int64_t(value));
    char text[32];
    std::snprintf(text, sizeof(text), "%.17g", value);
    return text;
  }

  NpyFile file_;
  std::optional<NpyFile> labels_;
  SeriesFormat format_;
  int64_t rows_ = 0, length_ = 0, width_ = 0, row_ = 0, step_ = 0;
};

}  // namespace

std::unique_ptr<SeriesSource> OpenNpySeries(const std::string& path, const SeriesFormat& format) {
  return std::make_unique<NpyReader>(path, format);
}

}  // namespace cistern
