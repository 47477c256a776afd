#include "cistern/io/table_reader.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <map>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/io/json_text.h"

namespace cistern {
namespace {

bool IsNumber(const std::string& cell) {
  if (cell.empty()) return false;
  char* end = nullptr;
  std::strtod(cell.c_str(), &end);
  return *end == '\0';
}

// Whether a first line is of such a text: its mark, or the zeros of its letters.
bool IsUtf16(std::string_view line) {
  return line.starts_with("\xff\xfe") || line.starts_with("\xfe\xff") ||
         line.find('\0') != line.npos;
}

// Whether a first line is a row, not a header. pandas leaves the name of its first column, the
// index, empty.
bool LooksLikeData(const std::vector<std::string>& cells) {
  for (size_t i = 0; i < cells.size(); ++i) {
    if (IsNumber(cells[i]) || (cells[i].empty() && (i > 0 || cells.size() == 1))) return true;
  }
  return false;
}

std::vector<std::string> SplitTabs(const std::string& line) {
  std::vector<std::string> cells;
  for (size_t begin = 0;;) {
    const size_t end = line.find('\t', begin);
    cells.push_back(line.substr(begin, end - begin));
    if (end == std::string::npos) return cells;
    begin = end + 1;
  }
}

// A row that cannot be read, where what follows can.
class BadRow : public Error {
 public:
  using Error::Error;
};

#define CISTERN_ROW_CHECK(condition, ...)                \
  do {                                                   \
    if (!(condition)) throw BadRow(StrCat(__VA_ARGS__)); \
  } while (false)

std::string CellOf(const Json& value) {
  if (value.is_null()) return "";
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// Whether it may be a whole number beyond 64 bits, which Json rounds.
bool MayBeRounded(const Json& value) {
  return value.is_number_float() && std::abs(value.get<double>()) >= 0x1p63;
}

// Such numbers of an object's own keys, as they are written.
class LongIntegers : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::map<std::string, std::string> found;  // by key

  bool number_float(number_float_t, const string_t& written) override {
    if (depth_ == 1 && written.find_first_of(".eE") == written.npos) found[key_] = written;
    return true;
  }
  bool key(string_t& key) override {
    if (depth_ == 1) key_ = key;
    return true;
  }
  bool start_object(size_t) override { return Open(); }
  bool end_object() override { return Close(); }
  bool start_array(size_t) override { return Open(); }
  bool end_array() override { return Close(); }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) override {
    return false;
  }

 private:
  bool Open() { return ++depth_ > 0; }
  bool Close() { return --depth_ >= 0; }

  int depth_ = 0;
  std::string key_;
};

}  // namespace

std::string_view TrimmedCell(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == text.npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

bool ParseFinite(std::string_view text, double* value) {
  if (text.starts_with('+') && !text.starts_with("+-")) text.remove_prefix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  if (end != text.data() + text.size()) return false;
  if (error == std::errc::result_out_of_range) {  // also where it rounds to 0
    *value = std::strtod(std::string(text).c_str(), nullptr);
  } else if (error != std::errc()) {
    return false;
  }
  return std::isfinite(*value);
}

const EnumNames<TableOptions::Header>& TableHeaders() {
  using Header = TableOptions::Header;
  static const EnumNames<Header> names = {
      {Header::kAuto, "auto"}, {Header::kYes, "yes"}, {Header::kNo, "no"}};
  return names;
}

bool TableReader::FormatOf(const std::string& path, Format* format) {
  const std::string name = WithoutCompression(path);
  if (name.ends_with(".tsv") || name.ends_with(".tab")) {
    *format = Format::kTsv;
  } else if (name.ends_with(".csv")) {
    *format = Format::kCsv;
  } else if (name.ends_with(".jsonl") || name.ends_with(".ndjson") || name.ends_with(".json")) {
    *format = Format::kJsonl;
  } else {
    return false;
  }
  return true;
}

TableReader::TableReader(const std::string& path, const TableOptions& options)
    : lines_(path), options_(options) {
  if (!FormatOf(path, &format_)) {
    FailUsage(path,
              ": a table's name ends in .tsv, .csv or .jsonl, which may be followed by .gz or .xz");
  }
  if (format_ == Format::kJsonl) {
    CISTERN_CHECK(Next(&first_), path, " has no rows");
    has_first_ = true;
    return;
  }
  CISTERN_CHECK(NextRow(&first_), path, " has no rows");
  has_first_ = true;
  if (options.header == TableOptions::Header::kYes ||
      (options.header == TableOptions::Header::kAuto && !LooksLikeData(first_))) {
    columns_ = first_;
    has_first_ = false;
    for (size_t i = 0; i < columns_.size(); ++i) {
      CISTERN_CHECK(std::find(columns_.begin(), columns_.begin() + int64_t(i), columns_[i]) ==
                        columns_.begin() + int64_t(i),
                    path, ":1: two columns are named '", columns_[i], "'");
    }
    return;
  }
  has_names_ = false;
  for (size_t i = 1; i <= first_.size(); ++i) columns_.push_back(std::to_string(i));
}

std::vector<std::string> TableReader::NamedColumns() const {
  std::vector<std::string> named = columns_;
  std::erase(named, "");
  return named;
}

std::string TableReader::HeaderHint() const {
  const bool unnamed = std::find(columns_.begin(), columns_.end(), "") != columns_.end();
  return unnamed ? "; if the first line is a row: --set task.header=no" : "";
}

size_t TableReader::Column(const std::string& name) const {
  const auto found = std::find(columns_.begin(), columns_.end(), name);
  if (found == columns_.end())
    Fail(path(), ": ", UnknownName("column", name, columns_),
         format_ == Format::kJsonl ? "; the columns of JSON lines are the keys of the first row: "
                                     "where only later ones have it, put it there, with null"
                                   : "");
  return size_t(found - columns_.begin());
}

// A quoted cell may go on over line ends.
bool TableReader::SplitCsv(std::string line, std::vector<std::string>* cells) {
  std::string cell;
  bool quoted = false;
  for (size_t i = 0;; ++i) {
    if (i == line.size()) {
      if (!quoted) break;
      CISTERN_CHECK(lines_.Next(&line), path(), ":", row_line_,
                    ": a quoted cell has no end, so that all lines after it belong to it");
      cell += '\n';
      i = size_t(-1);
      continue;
    }
    const char c = line[i];
    if (quoted) {
      if (c != '"') {
        cell += c;
      } else if (i + 1 < line.size() && line[i + 1] == '"') {
        cell += c;
        ++i;
      } else {
        quoted = false;
        CISTERN_ROW_CHECK(i + 1 == line.size() || line[i + 1] == ',', path(), ":", lines_.number(),
                          ": text after the closing quote of a cell");
      }
    } else if (c == '"' && cell.empty()) {
      quoted = true;
    } else if (c == ',') {
      cells->push_back(std::move(cell));
      cell.clear();
    } else {
      cell += c;
    }
  }
  cells->push_back(std::move(cell));
  return true;
}

void TableReader::ReadJson(const std::string& line, std::vector<std::string>* cells) {
  Json row;
  try {
    row = ParseJson(line, path(), size_t(row_line_));
  } catch (const Error& e) {
    throw BadRow(e.what());
  }
  CISTERN_ROW_CHECK(row.is_object() && !(row.empty() && columns_.empty()), path(), ":", row_line_,
                    ": expected an object {\"text\": ..., \"label\": ...}");
  if (columns_.empty()) {
    for (const auto& [key, value] : row.items()) columns_.push_back(key);
  }
  for (const size_t column : required_)
    CISTERN_ROW_CHECK(row.contains(columns_[column]), path(), ":", row_line_, ": the row has no '",
                      columns_[column], "'; give it \"\" or null where it is empty");
  LongIntegers integers;
  if (std::any_of(row.begin(), row.end(), MayBeRounded)) nlohmann::json::sax_parse(line, &integers);
  cells->assign(columns_.size(), "");
  for (const auto& [key, value] : row.items()) {
    const auto at = std::find(columns_.begin(), columns_.end(), key);
    CISTERN_ROW_CHECK(at != columns_.end() || !options_.all_columns, path(), ":", row_line_,
                      ": the first row, whose keys are the columns, has no '", key,
                      "'; put it there, with null");
    if (at == columns_.end()) continue;
    const auto integer = integers.found.find(key);
    (*cells)[size_t(at - columns_.begin())] =
        integer == integers.found.end() ? CellOf(value) : integer->second;
  }
}

// Empty lines are no rows, but for those of a table of one column with others after them.
bool TableReader::NextLine(std::string* line) {
  if (!ahead_) {
    int64_t empty = 0;
    for (;; ++empty) {
      if (!lines_.Next(line)) return false;
      if (lines_.number() == 1 && IsUtf16(*line))
        FailUsage(
            path(),
            " is UTF-16 or no text at all: it begins with the mark of UTF-16 or has bytes of 0; "
            "a text is converted by iconv -f UTF-16 -t UTF-8");
      if (!line->empty()) break;
    }
    empty_ = columns_.size() == 1 && format_ != Format::kJsonl ? empty : 0;
    ahead_ = std::move(*line);
  }
  row_line_ = lines_.number() - empty_;
  if (empty_-- > 0) {
    line->clear();
    return true;
  }
  *line = *std::exchange(ahead_, std::nullopt);
  return true;
}

bool TableReader::NextRow(std::vector<std::string>* cells) {
  std::string line;
  if (!NextLine(&line)) return false;
  cells->clear();
  switch (format_) {
    case Format::kTsv:
      *cells = SplitTabs(line);
      break;
    case Format::kCsv:
      SplitCsv(std::move(line), cells);
      break;
    case Format::kJsonl:
      ReadJson(line, cells);
      break;
  }
  return true;
}

bool TableReader::Next(std::vector<std::string>* cells) {
  if (has_first_) {
    has_first_ = false;
    *cells = std::move(first_);
    return true;
  }
  for (;;) {
    try {
      if (!NextRow(cells)) return false;
      CISTERN_ROW_CHECK(cells->size() == columns_.size(), path(), ":", row_line_, ": ",
                        cells->size(), " cells, and ", columns_.size(), " columns (",
                        columns_.front(), " ... ", columns_.back(), ")");
      return true;
    } catch (const BadRow&) {
      if (!options_.skip_bad) throw;
      ++skipped_;
    }
  }
}

}  // namespace cistern
