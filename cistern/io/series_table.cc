// Series of tables: a row a series, or a row a time step.
#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "cistern/base/error.h"
#include "cistern/io/series_source.h"

namespace cistern {
namespace {

using Layout = SeriesFormat::Layout;
using Names = std::vector<std::string>;

constexpr int64_t kPieceSteps = 1 << 14;
constexpr size_t kNoColumn = size_t(-1);

std::string Listed(const Names& names) {
  std::string out;
  for (size_t i = 0; i < names.size() && i < 12; ++i) out += (i > 0 ? ", " : "") + names[i];
  return out + (names.size() > 12 ? StrCat(", ... (", names.size(), ")") : "");
}

class TableSeries : public SeriesSource {
 public:
  TableSeries(const std::string& path, const SeriesFormat& format)
      : format_(format), table_(path, Options(path, format)) {
    const bool more = table_.Next(&cells_);  // of JSON lines, the columns are those of the first
    ended_ = !more;
    FindColumns();
  }

  bool Next(SeriesPiece* piece) override {
    return layout_ == Layout::kRows ? NextRow(piece) : NextSteps(piece);
  }
  int64_t done() const override { return table_.lines().bytes_read(); }
  int64_t total() const override { return table_.lines().bytes_total(); }

 private:
  static TableOptions Options(const std::string& path, const SeriesFormat& format) {
    TableOptions o;
    o.header = format.header;
    o.skip_bad = format.skip_bad;
    o.all_columns = true;
    if (o.header != TableOptions::Header::kAuto) return o;
    // Steps may have numbers for names, which a header of another table does not have.
    TableReader first(path, o);
    Names cells;
    if (!first.has_names() && first.Next(&cells)) {
      if (Lists(cells, format.known_columns)) o.header = TableOptions::Header::kYes;
      for (const std::string& name :
           {format.label_column, format.series_column, std::string("label"), std::string("class"),
            std::string("target"), std::string("category"), std::string("series"),
            std::string("series_id")}) {
        if (!name.empty() && !IsPlace(name, cells.size()) && Listing(cells, name))
          o.header = TableOptions::Header::kYes;
      }
    }
    return o;
  }

  // Whether it is the number of a column, from 1, as a table without names has them.
  static bool IsPlace(const std::string& name, size_t columns) {
    for (size_t c = 1; c <= columns; ++c) {
      if (name == std::to_string(c)) return true;
    }
    return false;
  }

  // Whether a line has these names in their order, as far as both go.
  static bool Lists(const Names& cells, const Names& names) {
    size_t found = 0;
    for (const std::string& cell : cells) found += found < names.size() && cell == names[found];
    return found > 0 && (found == names.size() || found == cells.size());
  }

  // The column with one of the names; kNoColumn: there is none.
  size_t Named(const std::string& asked, std::initializer_list<const char*> names) const {
    if (!asked.empty()) return Column(asked);
    for (const char* name : names) {
      if (Listing(columns_, name)) return Column(name);
    }
    return kNoColumn;
  }

  size_t Column(const std::string& name) const {
    const auto at = std::find(columns_.begin(), columns_.end(), name);
    return at == columns_.end() ? table_.Column(name) : size_t(at - columns_.begin());
  }

  // A model whose training table names no columns knows the label's by its place, which a file
  // without labels lacks.
  void NameColumns() {
    columns_ = table_.columns();
    const size_t here = columns_.size(), trained = format_.unnamed_columns;
    if (!table_.has_names()) unnamed_columns_ = here;
    if (trained == 0 || format_.label_column.empty()) return;
    const bool lacks = !format_.need_labels && here + 1 == trained;
    CISTERN_CHECK(format_.need_labels || lacks || here == trained, table_.path(), ": ", here,
                  " columns, and the training table, which names none, had ", trained,
                  " with the label's; give as many, or one fewer without labels (behind a series' "
                  "end cells are empty)");
    columns_.clear();
    for (size_t c = 1; columns_.size() < here; ++c) {
      const std::string place = std::to_string(c);
      if (!lacks || place != format_.label_column) columns_.push_back(place);
    }
  }

  // Of rows: the model's columns in its order, as far as the table goes, and steps behind them.
  void TakeKnownColumns(const Names& found) {
    const Names& known = format_.known_columns;
    CISTERN_CHECK(std::any_of(found.begin(), found.end(),
                              [&](const std::string& name) { return Listing(known, name); }),
                  table_.path(), ": it has none of the columns of the training table, '", known[0],
                  "' and so on, but '", found.empty() ? "" : found[0],
                  "'; columns go by their names");
    Names order, fresh;
    for (const std::string& name : found) {
      if (!Listing(known, name)) fresh.push_back(name);
      CISTERN_CHECK(fresh.empty() || !Listing(known, name), table_.path(), ": the column '",
                    fresh[0], "' was not in the training table, and stands before its column '",
                    name, "'; leave it out, or put it last where it is a further step");
    }
    for (const std::string& name : known) {
      if (Listing(found, name)) order.push_back(name);
    }
    order.insert(order.end(), fresh.begin(), fresh.end());
    for (size_t i = 0; i < std::min(order.size(), known.size()); ++i)
      CISTERN_CHECK(order[i] == known[i], table_.path(), ": there is no column '", known[i],
                    "', a step of the training table with others behind it; add it (an empty cell "
                    "is a missing value)");
    values_.clear();
    for (const std::string& name : order) values_.push_back(Column(name));
  }

  void FindColumns() {
    NameColumns();
    const Names &columns = columns_, named = table_.NamedColumns();
    const std::string& path = table_.path();
    const bool labels = format_.labels != SeriesFormat::Labels::kNone;
    if (labels && (format_.need_labels || Has(format_.label_column)))
      label_ = Named(format_.label_column, {"label", "class", "target", "category"});
    if (labels && format_.need_labels && label_ == kNoColumn)
      FailUsage(path, ": which column is the label? Its columns are ", Listed(named),
                "; name it: --set task.label_column=", named.empty() ? "..." : named[0],
                "; without labels, --task forecast learns to continue series", table_.HeaderHint());
    if (label_ != kNoColumn) label_column_ = columns[label_];
    series_ = Named(format_.series_column, {"series", "series_id"});
    if (series_ == label_) series_ = kNoColumn;
    layout_ = format_.layout;
    if (layout_ == Layout::kAuto)
      layout_ = series_ != kNoColumn || !labels ? Layout::kSteps : Layout::kRows;
    if (format_.channels.empty()) {  // of what is learned from, a name that is not there
      for (const std::string& name : format_.ignore) Column(name);
    }
    if (layout_ == Layout::kSteps && !format_.channels.empty()) {
      for (const std::string& name : format_.channels) {
        CISTERN_CHECK(Listing(columns, name), path, ": there is no column '", name,
                      "', a channel that the model was trained on; its columns are ",
                      Listed(columns));
        values_.push_back(Column(name));
      }
      channels_ = format_.channels;
      return;
    }
    Names left_out, no_values;
    for (size_t c = 0; c < columns.size(); ++c) {
      if (c == label_ || c == series_ || Listing(format_.ignore, columns[c])) continue;
      if (columns[c].empty()) {
        notes_.push_back("the column without a name: not read, as it numbers the rows");
        continue;
      }
      if (layout_ == Layout::kSteps &&
          Listing({"date", "time", "timestamp", "datetime"}, columns[c])) {
        left_out.push_back(columns[c]);
        continue;
      }
      // Not target, which is what many call the value to be forecast.
      if (!labels && Listing({"label", "class", "category"}, columns[c])) {
        no_values.push_back(columns[c]);
        continue;
      }
      values_.push_back(c);
      if (layout_ == Layout::kSteps) channels_.push_back(columns[c]);
    }
    if (layout_ == Layout::kRows) channels_ = {"1"};
    for (const size_t c : values_) {
      if (table_.has_names()) value_columns_.push_back(columns[c]);
    }
    if (layout_ == Layout::kRows && table_.has_names() && !format_.known_columns.empty())
      TakeKnownColumns(value_columns_);
    if (values_.empty())
      FailUsage(path, ": no columns of values among ", Listed(named),
                no_values.empty()
                    ? ""
                    : StrCat("; ", Listed(no_values),
                             " is taken for a label: give it another name to read it"),
                table_.HeaderHint());
    if (!left_out.empty())
      notes_.push_back(StrCat("column ", Listed(left_out),
                              ": not read; rows are taken in their order, at equal steps"));
    if (!no_values.empty())
      notes_.push_back(StrCat("column ", Listed(no_values),
                              ": not read, for a label is no value; under another name it is"));
  }

  bool Has(const std::string& column) const { return !column.empty() && Listing(columns_, column); }
  static bool Listing(const Names& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  }

  // The cells of the next row, the first of which has been read already.
  bool NextCells() {
    if (ended_) return false;
    if (ahead_) {
      ahead_ = false;
      return true;
    }
    ended_ = !table_.Next(&cells_);
    return !ended_;
  }
  int64_t line() const { return table_.line(); }
  std::string Where() const { return StrCat(table_.path(), ":", line(), ": "); }

  std::string Label() const {
    if (label_ == kNoColumn) return "";
    std::string label(TrimmedCell(cells_[label_]));
    if (!format_.need_labels) return label;
    CISTERN_CHECK(!label.empty(), Where(), "the label is empty");
    double number = 0;
    CISTERN_CHECK(format_.labels != SeriesFormat::Labels::kNumbers || ParseFinite(label, &number),
                  Where(), "the label '", label, "' is not a finite number");
    return label;
  }

  // The values of `columns` of the row, after those in `out`.
  void Append(const std::vector<size_t>& columns, size_t count, std::vector<double>* out) {
    int64_t missing = 0;
    for (size_t i = 0; i < count; ++i) {
      const std::string_view cell = TrimmedCell(cells_[columns[i]]);
      double value = 0;
      CISTERN_CHECK(ParseSeriesValue(cell, true, &value), Where(), "column ", columns_[columns[i]],
                    " is '", cell.substr(0, 40),
                    "', not a finite number; a column that is no value is named in task.ignore");
      missing += std::isnan(value);
      out->push_back(value);
    }
    missing_ += missing;
  }

  bool NextRow(SeriesPiece* piece) {
    while (NextCells()) {
      try {
        size_t count = values_.size();  // without the empty cells behind the series' end
        while (count > 0 && TrimmedCell(cells_[values_[count - 1]]).empty()) --count;
        CISTERN_CHECK(count > 0, Where(), "the row has no values");
        piece->label = Label();
        piece->values.clear();
        Append(values_, count, &piece->values);
        piece->first = true;
        piece->steps = int64_t(count);
        piece->name.clear();
        piece->line = line();
        skipped_ = bad_ + table_.skipped();
        return true;
      } catch (const Error&) {
        if (!format_.skip_bad) throw;
        skipped_ = ++bad_ + table_.skipped();
      }
    }
    skipped_ = bad_ + table_.skipped();
    return false;
  }

  // The steps up to the end of the series, or a piece of them.
  bool NextSteps(SeriesPiece* piece) {
    piece->values.clear();
    piece->steps = 0;
    while (piece->steps < kPieceSteps && NextCells()) {
      try {
        const std::string name = series_ == kNoColumn ? "" : cells_[series_];
        CISTERN_CHECK(series_ == kNoColumn || !name.empty(), Where(), "the series' name is empty");
        const bool first = !begun_ || name != name_;
        if (first && piece->steps > 0) {  // it begins the next piece
          ahead_ = true;
          break;
        }
        CISTERN_CHECK(!first || !names_.contains(name), Where(), "the series '", name,
                      "' has ended before; its rows must follow each other");
        const std::string label = Label();
        CISTERN_CHECK(first || label == label_text_, Where(), "the label is '", label,
                      "', and that of the series so far is '", label_text_, "'");
        const size_t before = piece->values.size();
        try {
          Append(values_, values_.size(), &piece->values);
        } catch (const Error&) {
          piece->values.resize(before);
          throw;
        }
        if (first) {
          begun_ = true;
          name_ = name;
          label_text_ = label;
          line_ = line();
          if (series_ != kNoColumn) names_.insert(name);
        }
        if (piece->steps == 0) piece->first = first;
        ++piece->steps;
      } catch (const Error&) {
        if (!format_.skip_bad) throw;
        ++bad_;
      }
    }
    skipped_ = bad_ + table_.skipped();
    piece->name = name_;
    piece->label = label_text_;
    piece->line = line_;
    return piece->steps > 0;
  }

  SeriesFormat format_;
  TableReader table_;
  Layout layout_ = Layout::kRows;
  size_t label_ = kNoColumn, series_ = kNoColumn;
  std::vector<size_t> values_;  // columns
  Names columns_, cells_;
  bool ahead_ = true, ended_ = false, begun_ = false;
  int64_t bad_ = 0, line_ = 0;
  std::string name_, label_text_;
  std::unordered_set<std::string> names_;
};

}  // namespace

std::unique_ptr<SeriesSource> OpenTableSeries(const std::string& path, const SeriesFormat& format) {
  return std::make_unique<TableSeries>(path, format);
}

}  // namespace cistern
