#include "cistern/io/series_file.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <string_view>

#include "cistern/base/error.h"
#include "cistern/io/line_reader.h"

namespace cistern {
namespace {

constexpr int64_t kMostTsChannels = 1 << 16;

std::string_view TsTrimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == text.npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

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

// A finite number; false for anything else.
bool ParseTsNumber(std::string_view text, double* value) {
  if (text.starts_with('+')) text.remove_prefix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && std::isfinite(*value);
}

class TsReader {
 public:
  TsReader(const std::string& path, bool skip_bad) : lines_(path), skip_bad_(skip_bad) {}

  SeriesFile Read() {
    bool data = false;
    for (std::string line; lines_.Next(&line);) {
      if (lines_.number() == 1 && line.starts_with("\xef\xbb\xbf")) line.erase(0, 3);
      const std::string_view text = TsTrimmed(line);
      if (text.empty() || text[0] == '#') continue;
      if (!data && text[0] == '@') {
        data = Header(text);
      } else if (!data) {
        Fail(Where(), "expected a line of # or @, or @data, before the first series");
      } else {
        Series(text);
      }
    }
    CISTERN_CHECK(data, lines_.path(), ": expected a line @data, and series after it");
    CISTERN_CHECK(
        file_.size() > 0, lines_.path(), ": there is no series after @data",
        file_.skipped > 0 ? StrCat(" that can be read (", file_.skipped, " skipped)") : "");
    return std::move(file_);
  }

 private:
  std::string Where() const { return StrCat(lines_.path(), ":", lines_.number(), ": "); }

  // True at @data.
  bool Header(std::string_view text) {
    const std::vector<std::string> words = TsWords(text);
    const std::string key = TsLower(words[0]);
    const auto yes = [&] { return words.size() > 1 && TsLower(words[1]) == "true"; };
    const auto count = [&](int64_t most) {
      double value = 0;
      CISTERN_CHECK(words.size() > 1 && ParseTsNumber(words[1], &value) && value >= 1 &&
                        value <= double(most) && value == std::floor(value),
                    Where(), words[0], " must be a whole number from 1 to ", most);
      return int64_t(value);
    };
    if (key == "@data") {
      CISTERN_CHECK(labelled_, lines_.path(),
                    ": expected @classLabel true or @targetLabel true before @data");
      return true;
    }
    if (key == "@timestamps") {
      CISTERN_CHECK(!yes(), Where(), "series with timestamps are not read; write them as values ",
                    "at equal steps, with ? where there is none");
    } else if (key == "@univariate") {
      if (yes()) file_.channels = 1;
    } else if (key == "@dimensions" || key == "@dimension") {
      file_.channels = count(kMostTsChannels);
    } else if (key == "@equallength") {
      equal_ = yes();
    } else if (key == "@serieslength") {
      length_ = count(int64_t{1} << 40);
    } else if (key == "@classlabel" && yes()) {
      labelled_ = true;
      file_.classes.assign(words.begin() + 2, words.end());
      CISTERN_CHECK(file_.classes.size() >= 2, Where(),
                    "@classLabel true needs two classes or more");
    } else if (key == "@targetlabel" && yes()) {
      labelled_ = file_.regression = true;
    }
    return false;  // others, such as @problemName, say nothing that is needed
  }

  void Series(std::string_view text) {
    const size_t values = file_.values.size();
    const int64_t channels = file_.channels, missing = file_.missing;
    try {
      Parse(text);
    } catch (const Error&) {
      if (!skip_bad_) throw;
      file_.values.resize(values);
      file_.channels = channels;
      file_.missing = missing;
      ++file_.skipped;
    }
  }

  void Parse(std::string_view text) {
    std::vector<std::string_view> parts;
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find(':', begin), text.size());
      parts.push_back(TsTrimmed(text.substr(begin, end - begin)));
      begin = end + 1;
    }
    const std::string label(parts.back());
    parts.pop_back();
    if (file_.channels == 0) file_.channels = int64_t(parts.size());
    CISTERN_CHECK(!parts.empty() && int64_t(parts.size()) == file_.channels &&
                      file_.channels <= kMostTsChannels,
                  Where(), "expected ", file_.channels == 0 ? 1 : file_.channels,
                  " channels and a label between ':', got ", parts.size(), " channels");
    double number = 0;
    CISTERN_CHECK(file_.regression ? ParseTsNumber(label, &number)
                                   : std::find(file_.classes.begin(), file_.classes.end(), label) !=
                                         file_.classes.end(),
                  Where(), "the label '", label, "' is ",
                  file_.regression ? "not a finite number" : "no class of @classLabel");
    int64_t steps = -1;
    for (size_t c = 0; c < parts.size(); ++c) {
      const int64_t here = Channel(parts[c]);
      if (c == 0) {
        steps = here;
        CISTERN_CHECK(!equal_ || length_ == 0 || steps == length_, Where(), "expected ", length_,
                      " values, as @seriesLength says, got ", steps);
        const size_t need = size_t(steps * file_.channels);
        file_.values.resize(file_.values.size() + need);
      }
      CISTERN_CHECK(here == steps, Where(), "channel ", c + 1, " has ", here, " values, channel 1 ",
                    steps);
      float* to = file_.values.data() + file_.values.size() - size_t(steps * file_.channels) + c;
      for (const float v : channel_) {
        *to = v;
        to += file_.channels;
      }
    }
    file_.begins.push_back(file_.begins.back() + steps);
    file_.labels.push_back(label);
    file_.lines.push_back(lines_.number());
  }

  // Into channel_; the number of values.
  int64_t Channel(std::string_view text) {
    channel_.clear();
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find(',', begin), text.size());
      const std::string_view cell = TsTrimmed(text.substr(begin, end - begin));
      double value = 0;
      if (cell == "?" || TsLower(cell) == "nan") {
        value = std::numeric_limits<double>::quiet_NaN();
        ++file_.missing;
      } else {
        CISTERN_CHECK(ParseTsNumber(cell, &value) && std::isfinite(float(value)), Where(), "value ",
                      channel_.size() + 1, " is '", cell, "', not a finite number or ?");
      }
      channel_.push_back(float(value));
      begin = end + 1;
    }
    return int64_t(channel_.size());
  }

  LineReader lines_;
  bool skip_bad_, equal_ = false, labelled_ = false;
  int64_t length_ = 0;
  SeriesFile file_;
  std::vector<float> channel_;
};

}  // namespace

SeriesFile ReadSeriesFile(const std::string& path, bool skip_bad) {
  return TsReader(path, skip_bad).Read();
}

}  // namespace cistern
