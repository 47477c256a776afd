#include "cistern/analyses/figures.h"

#include <algorithm>
#include <cmath>

#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/json_text.h"

namespace cistern {
namespace {

bool IsNan(const Json& value) {
  return value.is_number_float() && !std::isfinite(value.get<double>());
}

// Texts of all cells, the header first.
std::vector<std::vector<std::string>> CellTexts(const Figures::Table& table) {
  std::vector<std::vector<std::string>> out = {table.columns};
  for (const auto& row : table.rows) {
    out.emplace_back();
    for (const Json& cell : row) out.back().push_back(CellText(cell));
  }
  return out;
}

// The number of an attribute of the <svg> tag: width or height.
int Attribute(const std::string& svg, const std::string& name) {
  const std::string key = " " + name + "=\"";
  const size_t at = svg.find(key);
  CISTERN_CHECK(svg.starts_with("<svg ") && at < svg.find('>'), "[figures] a picture without ",
                name);
  return std::stoi(svg.substr(at + key.size()));
}

}  // namespace

std::string SideBySide(const std::vector<std::string>& svgs, int columns) {
  CISTERN_CHECK(columns >= 1, "[figures] ", columns, " pictures in a line");
  int width = 0, height = 0;
  std::string body;
  for (size_t begin = 0; begin < svgs.size(); begin += size_t(columns)) {
    int x = 0, line = 0;
    for (size_t i = begin; i < std::min(svgs.size(), begin + size_t(columns)); ++i) {
      body += StrCat("<svg x=\"", x, "\" y=\"", height, "\" ", svgs[i].substr(5));
      x += Attribute(svgs[i], "width");
      line = std::max(line, Attribute(svgs[i], "height"));
    }
    width = std::max(width, x);
    height += line;
  }
  return StrCat("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", width, "\" height=\"", height,
                "\" viewBox=\"0 0 ", width, " ", height, "\" role=\"img\">\n", body, "</svg>\n");
}

std::string CsvCell(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string out = "\"";
  for (const char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + "\"";
}

std::string CellText(const Json& value) {
  if (value.is_null() || IsNan(value)) return "";
  if (value.is_number_float()) return Significant(value.get<double>(), 4);
  return value.is_string() ? value.get<std::string>() : value.dump();
}

Figures::Table ChecksTable(const std::string& paper, const std::vector<PaperClaim>& checks) {
  Figures::Table table{"checks",
                       StrCat("What ", paper, " says, and what is seen here"),
                       {"claim", "measured", "answer"},
                       {}};
  for (const PaperClaim& c : checks) table.rows.push_back({c.claim, c.measured, c.answer});
  return table;
}

Figures& Figures::Heading(const std::string& text) {
  parts_.push_back({Part::Kind::kHeading, text, "", ""});
  return *this;
}
Figures& Figures::Text(const std::string& paragraph) {
  parts_.push_back({Part::Kind::kText, paragraph, "", ""});
  return *this;
}
Figures& Figures::Preformatted(const std::string& text) {
  parts_.push_back({Part::Kind::kPreformatted, text, "", ""});
  return *this;
}

Figures& Figures::Add(Table table) {
  for (const auto& row : table.rows)
    CISTERN_CHECK(row.size() == table.columns.size(), "[figures] table ", table.name,
                  " has a row of ", row.size(), " cells and ", table.columns.size(), " columns");
  parts_.push_back({Part::Kind::kTable, "", "", table.name, tables_.size()});
  tables_.push_back(std::move(table));
  return *this;
}

Figures& Figures::Svg(const std::string& name, const std::string& svg, const std::string& caption) {
  parts_.push_back({Part::Kind::kPicture, caption, svg, name});
  return *this;
}
Figures& Figures::Add(const std::string& name, const HeatMap& map, const std::string& caption) {
  return Svg(name, RenderSvg(map), caption);
}
Figures& Figures::Add(const std::string& name, const LineChart& chart, const std::string& caption) {
  return Svg(name, RenderSvg(chart), caption);
}
Figures& Figures::Add(const std::string& name, const DotChart& chart, const std::string& caption) {
  return Svg(name, RenderSvg(chart), caption);
}

Figures& Figures::Fact(const std::string& key, Json value) {
  facts_[key] = IsNan(value) ? Json() : std::move(value);
  return *this;
}

const Figures::Table& Figures::table(const std::string& name) const {
  for (const Table& t : tables_) {
    if (t.name == name) return t;
  }
  Fail("[figures] there is no table ", name);
}

Json Figures::ToJson() const {
  Json all = facts_;
  for (const Table& t : tables_) {
    Json rows = Json::array();
    for (const auto& row : t.rows) {
      Json object = Json::object();
      for (size_t i = 0; i < row.size(); ++i)
        object[t.columns[i]] = IsNan(row[i]) ? Json() : row[i];
      rows.push_back(std::move(object));
    }
    all["tables"][t.name] = std::move(rows);
  }
  return all;
}

std::vector<std::string> Figures::Write(const std::string& folder,
                                        const std::string& analysis) const {
  std::vector<std::string> files;
  const auto write = [&](const std::string& name, const std::string& text) {
    WriteFileAtomically(folder + "/" + name, text);
    files.push_back(name);
  };
  for (const Table& t : tables_) {
    std::string csv;
    for (size_t i = 0; i < t.columns.size(); ++i)
      csv += (i == 0 ? "" : ",") + CsvCell(t.columns[i]);
    for (const auto& row : t.rows) {
      csv += "\n";
      for (size_t i = 0; i < row.size(); ++i) {
        const bool none = row[i].is_null() || IsNan(row[i]);
        csv += i == 0 ? "" : ",";
        csv += none ? "" : row[i].is_string() ? CsvCell(row[i].get<std::string>()) : row[i].dump();
      }
    }
    write(analysis + "-" + t.name + ".csv", csv + "\n");
  }
  for (const Part& p : parts_) {
    if (p.kind == Part::Kind::kPicture) write(analysis + "-" + p.name + ".svg", p.svg);
  }
  write(analysis + ".json", JsonFileText(ToJson()));
  return files;
}

void Figures::AddTo(HtmlReport& page) const {
  for (const Part& p : parts_) {
    switch (p.kind) {
      case Part::Kind::kHeading:
        page.Heading(p.text);
        break;
      case Part::Kind::kText:
        page.Paragraph(p.text);
        break;
      case Part::Kind::kPreformatted:
        page.Preformatted(p.text);
        break;
      case Part::Kind::kPicture:
        page.Svg(p.svg, p.text);
        break;
      case Part::Kind::kTable: {
        const Table& t = tables_[p.table];
        if (!t.on_page) break;
        const auto texts = CellTexts(t);
        page.Table({texts[0], {texts.begin() + 1, texts.end()}, t.caption});
      }
    }
  }
}

std::string Figures::Plain() const {
  std::string out;
  for (const Part& p : parts_) {
    if (p.kind == Part::Kind::kHeading) out += "\n" + p.text + "\n";
    if (p.kind == Part::Kind::kText || p.kind == Part::Kind::kPreformatted) out += p.text + "\n";
    if (p.kind != Part::Kind::kTable || !tables_[p.table].on_page) continue;
    const auto texts = CellTexts(tables_[p.table]);
    std::vector<size_t> widths(texts[0].size());
    for (const auto& row : texts) {
      for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    if (!tables_[p.table].caption.empty()) out += tables_[p.table].caption + "\n";
    for (const auto& row : texts) {
      for (size_t i = 0; i < row.size(); ++i) {
        const std::string space(widths[i] - row[i].size(), ' ');
        out += i == 0 ? row[i] + space : "  " + space + row[i];
      }
      out += "\n";
    }
  }
  return out;
}

}  // namespace cistern
