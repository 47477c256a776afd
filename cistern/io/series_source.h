#pragma once
// Series of real values as files have them, one after the other, so that the size of a file does
// not matter.
//
// .ts (UCR and UEA archives, as sktime and aeon write it), plain, .gz or .xz: lines of `#` are
// comments, lines of `@` say what is in the file, and after `@data` each line is a series: its
// channels between `:`, their values between `,`, then the label.
//   @classLabel true a b     labels are of these classes; @targetLabel true: they are numbers
//   @dimensions 2            channels; not said: those of the first series
//   @seriesLength 50         where @equalLength is true, every channel has that many values
//   ?, NaN                   a value that is missing
//
// Tables (.csv, .tsv, .jsonl, each also .gz or .xz; io/table_reader.h), in one of two layouts:
//   rows    a row is a series of one channel: every column but that of the label is a time step, in
//           the order of the columns. Empty cells at its end are behind the series' end
//   steps   a row is a time step, and columns are channels. Rows of a series follow each other and
//           have the same cell in the series' column (and in the label's); without that column all
//           rows are one series
// Where no labels are asked for, columns named label, class or category are left out, with a note.
//   empty, ?, NaN            a value that is missing (but for the end of a row, see above)
//
// .npy (io/npy.h): [rows, length, channels], [rows, length], or [length] where there are no labels;
// NaN is missing. The labels of X_NAME.npy are in y_NAME.npy, those of NAME.npy in
// NAME_labels.npy, one number a row.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cistern/io/table_reader.h"

namespace cistern {

struct SeriesFormat {
  enum class Layout { kAuto, kRows, kSteps };  // auto: steps where there is a series' column
  enum class Labels { kNone, kClasses, kNumbers };
  Labels labels = Labels::kClasses;
  bool need_labels = true;  // else a file may be without them, and they are not looked at
  Layout layout = Layout::kAuto;
  std::string label_column;           // empty: label, class, target or category
  std::string series_column;          // empty: series or series_id, where there is one
  std::vector<std::string> ignore;    // columns that are no values
  std::vector<std::string> channels;  // of columns, in this order; empty: as the file has them
  TableOptions::Header header = TableOptions::Header::kAuto;
  // Names of a header's columns of values: with header=auto a line of numbers that lists them is
  // one, as a file without labels has it. Where a file of layout=rows names its columns, they are
  // read in this order, then others behind them; Error where one of either is between them.
  std::vector<std::string> known_columns;
  // Columns of a training table without names; 0: it had names. A file without labels, which are
  // not needed, may have one fewer.
  size_t unnamed_columns = 0;
  bool skip_bad = false;  // series, or rows of a table, that cannot be read are passed over
};

// A series, or the next steps of it: a long one comes in pieces.
struct SeriesPiece {
  bool first = true;           // of its series
  std::vector<double> values;  // [steps,channels]; NaN: missing
  int64_t steps = 0;
  std::string label, name;  // of the first piece; name: of the series' column
  int64_t line = 0;         // where the series begins; of .npy its row, from 1
};

class SeriesSource {
 public:
  virtual ~SeriesSource() = default;
  // False at the end. Error "file.ts:12: ..." with what was expected.
  virtual bool Next(SeriesPiece* piece) = 0;
  virtual int64_t done() const = 0;  // of total() bytes or rows
  virtual int64_t total() const = 0;

  // Known once Next has been called.
  const std::vector<std::string>& channels() const { return channels_; }  // their names
  const std::vector<std::string>& classes() const { return classes_; }    // that the file lists
  const std::vector<std::string>& notes() const { return notes_; }
  const std::string& label_column() const { return label_column_; }
  // The columns of values of a table that names its columns.
  const std::vector<std::string>& value_columns() const { return value_columns_; }
  size_t unnamed_columns() const { return unnamed_columns_; }  // of a table that does not
  int64_t skipped() const { return skipped_; }                 // series, or rows of a table
  int64_t missing() const { return missing_; }                 // values

 protected:
  std::vector<std::string> channels_, classes_, notes_, value_columns_;
  std::string label_column_;
  size_t unnamed_columns_ = 0;
  int64_t skipped_ = 0, missing_ = 0;
};

// By the name of the file. UsageError for another one, and where its columns are not told.
std::unique_ptr<SeriesSource> OpenSeries(const std::string& path, const SeriesFormat& format);
bool IsTsFile(const std::string& path);
bool IsNpyFile(const std::string& path);
// Where the labels of a .npy file are.
std::string NpyLabelsOf(const std::string& path);

// What the readers share beside io/table_reader.h: whether a value is finite in float32, as models
// read it; such a value of a cell that may be missing, else false.
bool FiniteInFloat(double value);
bool ParseSeriesValue(std::string_view cell, bool empty_is_missing, double* value);

std::unique_ptr<SeriesSource> OpenTsSeries(const std::string& path, const SeriesFormat& format);
std::unique_ptr<SeriesSource> OpenTableSeries(const std::string& path, const SeriesFormat& format);
std::unique_ptr<SeriesSource> OpenNpySeries(const std::string& path, const SeriesFormat& format);

}  // namespace cistern
