#pragma once
// What an analysis ends in: named tables and pictures with a paragraph each on how to read them,
// as files (JSON, CSV, SVG) and as sections of one HTML page.
#include <string>
#include <vector>

#include "cistern/io/fields.h"
#include "cistern/io/html_report.h"
#include "cistern/io/svg_plot.h"

namespace cistern {

class Figures {
 public:
  // A table's cells are numbers, texts or null (no number: an empty cell).
  struct Table {
    std::string name, caption;  // name: of its file, letters, digits and '-'
    std::vector<std::string> columns;
    std::vector<std::vector<Json>> rows;
    bool on_page = true;  // false: in the files alone, for tables of many rows
  };

  // In the order in which they are to be read.
  Figures& Heading(const std::string& text);
  Figures& Text(const std::string& paragraph);
  Figures& Preformatted(const std::string& text);
  Figures& Add(Table table);  // Error where a row is not as long as the header
  Figures& Add(const std::string& name, const HeatMap& map, const std::string& caption);
  Figures& Add(const std::string& name, const LineChart& chart, const std::string& caption);
  Figures& Add(const std::string& name, const DotChart& chart, const std::string& caption);
  Figures& Svg(const std::string& name, const std::string& svg, const std::string& caption);
  // A single number or text of the JSON file, such as the count of rows.
  Figures& Fact(const std::string& key, Json value);

  const Json& facts() const { return facts_; }
  const std::vector<Table>& tables() const { return tables_; }
  const Table& table(const std::string& name) const;  // Error where there is none

  Json ToJson() const;  // facts, and all tables as {"tables": {NAME: [{COLUMN: cell}]}}
  // FOLDER/ANALYSIS.json (facts and all tables), FOLDER/ANALYSIS-TABLE.csv and
  // FOLDER/ANALYSIS-PICTURE.svg, each whole or not at all. Returns their names.
  std::vector<std::string> Write(const std::string& folder, const std::string& analysis) const;
  void AddTo(HtmlReport& page) const;
  std::string Plain() const;  // headings, paragraphs and tables for a terminal

 private:
  struct Part {
    enum class Kind { kHeading, kText, kPreformatted, kTable, kPicture } kind;
    std::string text, svg, name;  // text: of a picture, its caption
    size_t table = 0;
  };
  std::vector<Part> parts_;
  std::vector<Table> tables_;
  Json facts_ = Json::object();
};

// What a paper says, what was measured of it, and whether it holds: "holds", "does not hold",
// "cannot be said: why".
struct PaperClaim {
  std::string claim, measured, answer;
};
Figures::Table ChecksTable(const std::string& paper, const std::vector<PaperClaim>& checks);

// Pictures of RenderSvg in one, `columns` in a line, each line as high as its highest.
std::string SideBySide(const std::vector<std::string>& svgs, int columns);

// A cell of CSV (RFC 4180), quoted where it has to be.
std::string CsvCell(const std::string& text);
// A number or text as people read it; empty for null and NaN.
std::string CellText(const Json& value);

}  // namespace cistern
