#include "cistern/io/series_source.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "cistern/base/error.h"
#include "cistern/io/line_reader.h"

namespace cistern {
namespace {

constexpr int64_t kMostTsChannels = 1 << 16;

std::string TsLower(std::string_view text) {
  std::string low(text);
  for (char& c : low) c = c >= 'A' && c <= 'Z' ? char(c + 32) : c;
  return low;
}

std::vector<std::string> TsWords(std::string_view text) {
  std::vector<std::string> words;
  std::string word;
  for (const char c : text) {
    if (c != ' ' && c != '\t') {
      word += c;
    } else if (!word.empty()) {
      words.push_back(std::move(word));
      word.clear();
    }
  }
  if (!word.empty()) words.push_back(std::move(word));
  return words;
}

class TsReader : public SeriesSource {
 public:
  TsReader(const std::string& path, const SeriesFormat& format) : lines_(path), format_(format) {
    for (std::string line; !data_ && lines_.Next(&line);) {
      const std::string_view text = TrimmedCell(line);
      if (text.empty() || text[0] == '#') continue;
      CISTERN_CHECK(text[0] == '@', Where(),
                    "expected a line of # or @, or @data, before the first series");
      data_ = Header(text);
    }
    CISTERN_CHECK(data_, lines_.path(), ": expected a line @data, and series after it");
  }

  bool Next(SeriesPiece* piece) override {
    for (std::string line; lines_.Next(&line);) {
      const std::string_view text = TrimmedCell(line);
      if (text.empty() || text[0] == '#') continue;
      const int64_t channels = known_, missing = missing_;
      try {
        Parse(text, piece);
        return true;
      } catch (const Error&) {
        if (!format_.skip_bad) throw;
        known_ = channels;
        missing_ = missing;
        ++skipped_;
      }
    }
    return false;
  }
  int64_t done() const override { return lines_.bytes_read(); }
  int64_t total() const override { return lines_.bytes_total(); }

 private:
  std::string Where() const { return StrCat(lines_.path(), ":", lines_.number(), ": "); }

  // True at @data.
  bool Header(std::string_view text) {
    const std::vector<std::string> words = TsWords(text);
    const std::string key = TsLower(words[0]);
    const auto yes = [&] { return words.size() > 1 && TsLower(words[1]) == "true"; };
    const auto count = [&](int64_t most) {
      double value = 0;
      CISTERN_CHECK(words.size() > 1 && ParseFinite(words[1], &value) && value >= 1 &&
                        value <= double(most) && value == std::floor(value),
                    Where(), words[0], " must be a whole number from 1 to ", most);
      return int64_t(value);
    };
    if (key == "@data") {
      if (format_.labels == SeriesFormat::Labels::kNone || !format_.need_labels) return true;
      CISTERN_CHECK(labelled_, lines_.path(),
                    ": expected @classLabel true or @targetLabel true before @data");
      if (numbers_ != (format_.labels == SeriesFormat::Labels::kNumbers))
        FailUsage(lines_.path(),
                  numbers_ ? " has numbers for labels (@targetLabel)"
                           : " has classes for labels (@classLabel)",
                  "; set task.series.regression=", numbers_ ? "true" : "false");
      return true;
    }
    if (key == "@timestamps") {
      CISTERN_CHECK(!yes(), Where(), "series with timestamps are not read; write them as values ",
                    "at equal steps, with ? where there is none");
    } else if (key == "@univariate") {
      if (yes()) known_ = 1;
    } else if (key == "@dimensions" || key == "@dimension") {
      known_ = count(kMostTsChannels);
    } else if (key == "@equallength") {
      equal_ = yes();
    } else if (key == "@serieslength") {
      length_ = count(int64_t{1} << 40);
    } else if (key == "@classlabel" && yes()) {
      labelled_ = true;
      classes_.assign(words.begin() + 2, words.end());
      CISTERN_CHECK(classes_.size() >= 2, Where(), "@classLabel true needs two classes or more");
    } else if (key == "@targetlabel" && yes()) {
      labelled_ = numbers_ = true;
    }
    return false;  // others, such as @problemName, say nothing that is needed
  }

  void Parse(std::string_view text, SeriesPiece* piece) {
    std::vector<std::string_view> parts;
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find(':', begin), text.size());
      parts.push_back(TrimmedCell(text.substr(begin, end - begin)));
      begin = end + 1;
    }
    std::string label;
    if (labelled_) {
      label = std::string(parts.back());
      parts.pop_back();
    }
    if (known_ == 0) known_ = int64_t(parts.size());
    CISTERN_CHECK(!parts.empty() && int64_t(parts.size()) == known_ && known_ <= kMostTsChannels,
                  Where(), "expected ", known_ == 0 ? 1 : known_, " channels",
                  labelled_ ? " and a label" : "", " between ':', got ", parts.size(), " channels");
    CheckLabel(label);
    piece->values.clear();
    int64_t steps = -1;
    for (size_t c = 0; c < parts.size(); ++c) {
      const int64_t here = Channel(parts[c]);
      if (c == 0) {
        steps = here;
        CISTERN_CHECK(!equal_ || length_ == 0 || steps == length_, Where(), "expected ", length_,
                      " values, as @seriesLength says, got ", steps);
        piece->values.resize(size_t(steps * known_));
      }
      CISTERN_CHECK(here == steps, Where(), "channel ", c + 1, " has ", here, " values, channel 1 ",
                    steps);
      double* to = piece->values.data() + c;
      for (const double v : channel_) {
        *to = v;
        to += known_;
      }
    }
    piece->first = true;
    piece->steps = steps;
    piece->label = std::move(label);
    piece->name.clear();
    piece->line = lines_.number();
    for (int64_t c = int64_t(channels_.size()); c < known_; ++c)
      channels_.push_back(std::to_string(c + 1));
  }

  void CheckLabel(const std::string& label) const {
    if (format_.labels == SeriesFormat::Labels::kNone || !format_.need_labels) return;
    double number = 0;
    CISTERN_CHECK(numbers_ ? ParseFinite(label, &number)
                           : std::find(classes_.begin(), classes_.end(), label) != classes_.end(),
                  Where(), "the label '", label, "' is ",
                  numbers_ ? "not a finite number" : "no class of @classLabel");
  }

  // Into channel_; the number of values.
  int64_t Channel(std::string_view text) {
    channel_.clear();
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find(',', begin), text.size());
      const std::string_view cell = TrimmedCell(text.substr(begin, end - begin));
      double value = 0;
      CISTERN_CHECK(ParseSeriesValue(cell, false, &value), Where(), "value ", channel_.size() + 1,
                    " is '", cell, "', not a finite number or ?");
      missing_ += std::isnan(value);
      channel_.push_back(value);
      begin = end + 1;
    }
    return int64_t(channel_.size());
  }

  LineReader lines_;
  SeriesFormat format_;
  bool data_ = false, equal_ = false, labelled_ = false, numbers_ = false;
  int64_t length_ = 0, known_ = 0;  // known_: channels
  std::vector<double> channel_;
};

}  // namespace

std::unique_ptr<SeriesSource> OpenTsSeries(const std::string& path, const SeriesFormat& format) {
  return std::make_unique<TsReader>(path, format);
}

}  // namespace cistern
