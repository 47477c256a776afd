#pragma once
// Rows of named columns from TSV, CSV (RFC 4180: quoted cells may hold commas, quotes and line
// ends) and JSON lines, plain or compressed, as a stream.
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cistern/io/fields.h"
#include "cistern/io/line_reader.h"

namespace cistern {

struct TableOptions {
  enum class Header { kAuto, kYes, kNo };
  // kAuto: the first line is a header unless one of its cells is a number, or one behind the first
  // is empty.
  Header header = Header::kAuto;
  bool skip_bad = false;  // rows that cannot be read are counted and passed over
  // JSON lines: a key that the first row lacks is an Error, for who reads all columns; else it is
  // passed over.
  bool all_columns = false;
};

const EnumNames<TableOptions::Header>& TableHeaders();  // auto, yes, no

class TableReader {
 public:
  enum class Format { kTsv, kCsv, kJsonl };
  // By the name: .tsv, .csv, .jsonl, .json, each also with .gz or .xz; false for another.
  static bool FormatOf(const std::string& path, Format* format);

  // UsageError for another name; Error where the file cannot be read or is empty. Reads the header.
  TableReader(const std::string& path, const TableOptions& options = {});

  // Column names: of the header, or "1", "2", ...; of JSON lines the keys of the first row.
  const std::vector<std::string>& columns() const { return columns_; }
  // Whether the file names them itself.
  bool has_names() const { return has_names_; }
  // Those with a name: pandas gives none to the first one, which numbers the rows.
  std::vector<std::string> NamedColumns() const;
  // What to say besides where a column is asked for and a first line without a name in its first
  // cell may be a row; else empty.
  std::string HeaderHint() const;
  // Of JSON lines: from now on a row without the key of this column cannot be read.
  void Require(size_t column) { required_.push_back(column); }
  // The next row's cells in the order of columns(); false at the end. Integers of JSON are as
  // written, whatever their size, other numbers in their shortest form; null, or a key that is not
  // there, is an empty cell. Error "data.tsv:12: ..." where a row has another number of cells or is
  // not valid, unless skip_bad.
  bool Next(std::vector<std::string>* cells);
  int64_t line() const { return row_line_; }  // where the last row begins
  int64_t skipped() const { return skipped_; }
  const std::string& path() const { return lines_.path(); }
  const LineReader& lines() const { return lines_; }
  // Column `name`, or an Error that lists the columns.
  size_t Column(const std::string& name) const;

 private:
  bool NextLine(std::string* line);
  bool NextRow(std::vector<std::string>* cells);
  bool SplitCsv(std::string line, std::vector<std::string>* cells);
  void ReadJson(const std::string& line, std::vector<std::string>* cells);

  Format format_ = Format::kTsv;
  LineReader lines_;
  TableOptions options_;
  std::vector<std::string> columns_, first_;  // first_: a first line that is no header
  bool has_first_ = false, has_names_ = true;
  std::vector<size_t> required_;
  int64_t row_line_ = 0, skipped_ = 0;
  std::optional<std::string> ahead_;  // a line that was read already, behind `empty_` empty ones
  int64_t empty_ = 0;
};

// What readers of numbers share: a cell without blanks at its ends; a finite decimal number (one
// below the smallest double is 0), else false.
std::string_view TrimmedCell(std::string_view text);
bool ParseFinite(std::string_view text, double* value);

}  // namespace cistern
