#include "cistern/io/html_report.h"

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/svg_plot.h"

namespace cistern {
namespace {

constexpr const char* kStyle = R"css(
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5d6875; --line: #d9dee4; --page: #ffffff; --shade: #f5f7f9; --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --soft: #9aa5b1; --line: #343c46; --page: #14181d; --shade: #1c2229; --accent: #56b4e9; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.6 system-ui, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 0.75rem; padding-top: 0.75rem; border-top: 1px solid var(--line); }
.subtitle { color: var(--soft); margin: 0.4rem 0 2rem; }
p { margin: 0.75rem 0; max-width: 46rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; min-width: 50%; }
caption { caption-side: top; text-align: left; color: var(--soft); padding-bottom: 0.4rem; }
th, td { padding: 0.35rem 0.6rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { border-bottom: 2px solid var(--line); font-weight: 600; white-space: normal; vertical-align: bottom; }
th.number, td.number { text-align: right; }
td.long { white-space: normal; min-width: 15rem; }
tbody tr:hover { background: var(--shade); }
tr.best td { font-weight: 700; color: var(--accent); }
pre { background: var(--shade); border: 1px solid var(--line); border-radius: 6px; padding: 0.8rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 0.85rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.figures { display: flex; flex-wrap: wrap; align-items: flex-start; column-gap: 2rem; }
figure { margin: 1.25rem 0; max-width: 100%; overflow-x: auto; }
figure svg { max-width: max(100%, 34rem); height: auto; display: block; }
figure svg [fill="#777777"] { fill: var(--soft); }
figure svg .word { fill: var(--ink); }
figcaption { color: var(--soft); font-size: 0.9rem; margin-top: 0.3rem; contain: inline-size; }
summary { cursor: pointer; color: var(--accent); margin: 0.75rem 0; }
@media print {
  :root { color-scheme: light; --ink: #000000; --soft: #444444; --line: #bbbbbb; --page: #ffffff; --shade: #f5f5f5; --accent: #004f7c; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  h2, h3 { break-after: avoid; }
  figure, tr { break-inside: avoid; }
  figure, .wide { overflow: visible; }
  figure svg { max-width: 100%; }
  th, td, td.long { white-space: normal; min-width: 0; padding: 0.2rem 0.4rem; }
  table { font-size: 0.75rem; }
}
)css";

constexpr size_t kLongCell = 40;  // bytes: sentences, whose lines are broken

bool LooksLikeNumber(const std::string& cell) {
  const size_t first = cell.find_first_not_of("+-~<>= .");
  return cell == "-" || cell == "n/a" ||
         (first != std::string::npos && cell[first] >= '0' && cell[first] <= '9');
}

}  // namespace

HtmlReport::HtmlReport(const std::string& title, const std::string& subtitle)
    : title_(title), subtitle_(subtitle) {}

HtmlReport& HtmlReport::Heading(const std::string& text) {
  body_ += "<h2>" + EscapeXml(text) + "</h2>\n";
  return *this;
}

HtmlReport& HtmlReport::Paragraph(const std::string& text) {
  body_ += "<p>" + EscapeXml(text) + "</p>\n";
  return *this;
}

HtmlReport& HtmlReport::Table(const HtmlTable& table) {
  std::vector<bool> number(table.header.size(), !table.rows.empty());
  for (const auto& row : table.rows) {
    CISTERN_CHECK(row.size() == table.header.size(), "[report] a row has ", row.size(),
                  " cells, the header ", table.header.size());
    for (size_t i = 0; i < row.size(); ++i)
      number[i] = number[i] && (row[i].empty() || LooksLikeNumber(row[i]));
  }
  const auto cells = [&](const std::vector<std::string>& row, const std::string& tag) {
    for (size_t i = 0; i < row.size(); ++i) {
      const char* of = number[i]                   ? " class=\"number\">"
                       : row[i].size() > kLongCell ? " class=\"long\">"
                                                   : ">";
      body_ += StrCat("<", tag, of, EscapeXml(row[i]), "</", tag, ">");
    }
    body_ += "</tr>\n";
  };
  body_ += "<div class=\"wide\"><table>\n";
  if (!table.caption.empty()) body_ += "<caption>" + EscapeXml(table.caption) + "</caption>\n";
  body_ += "<thead><tr>";
  cells(table.header, "th");
  body_ += "</thead>\n<tbody>\n";
  for (size_t r = 0; r < table.rows.size(); ++r) {
    body_ += int(r) == table.best_row ? "<tr class=\"best\">" : "<tr>";
    cells(table.rows[r], "td");
  }
  body_ += "</tbody></table></div>\n";
  return *this;
}

HtmlReport& HtmlReport::Preformatted(const std::string& text) {
  body_ += "<pre>" + EscapeXml(text) + "</pre>\n";
  return *this;
}

HtmlReport& HtmlReport::Svg(const std::string& svg, const std::string& caption) {
  // Those that follow each other share a line where they fit.
  constexpr std::string_view kEnd = "</figure></div>\n";
  if (body_.ends_with(kEnd)) {
    body_.resize(body_.size() - kEnd.size() + 9);
    body_ += "\n";
  } else {
    body_ += "<div class=\"figures\">";
  }
  body_ += "<figure>\n" + svg;
  if (!caption.empty()) body_ += "<figcaption>" + EscapeXml(caption) + "</figcaption>\n";
  body_ += kEnd;
  return *this;
}

HtmlReport& HtmlReport::Details(const std::string& summary, const std::string& preformatted) {
  body_ += "<details><summary>" + EscapeXml(summary) + "</summary>\n<pre>" +
           EscapeXml(preformatted) + "</pre></details>\n";
  return *this;
}

std::string HtmlReport::Html() const {
  std::string html = "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  html += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
          EscapeXml(title_) + "</title>\n";
  html += "<style>" + std::string(kStyle) + "</style>\n</head>\n<body>\n<main>\n<h1>" +
          EscapeXml(title_) + "</h1>\n";
  if (!subtitle_.empty()) html += "<p class=\"subtitle\">" + EscapeXml(subtitle_) + "</p>\n";
  return html + body_ + "</main>\n</body>\n</html>\n";
}

void HtmlReport::Write(const std::string& path) const { WriteFileAtomically(path, Html()); }

}  // namespace cistern
