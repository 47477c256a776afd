#pragma once
// One self-contained HTML page: no scripts, no links to other files; reads well in light and dark,
// and on paper. All text is escaped.
#include <string>
#include <vector>

namespace cistern {

struct HtmlTable {
  std::vector<std::string> header;
  std::vector<std::vector<std::string>>
      rows;  // each as long as the header; cells that are numbers are set to the right
  std::string caption = "";
  int best_row = -1;  // drawn bold
};

class HtmlReport {
 public:
  explicit HtmlReport(const std::string& title, const std::string& subtitle = "");

  HtmlReport& Heading(const std::string& text);
  HtmlReport& Paragraph(const std::string& text);
  HtmlReport& Table(const HtmlTable& table);  // Error when a row's length differs from the header's
  HtmlReport& Preformatted(const std::string& text);
  HtmlReport& Svg(const std::string& svg,
                  const std::string& caption = "");  // RenderSvg's output, taken as it is
  HtmlReport& Details(const std::string& summary,
                      const std::string& preformatted);  // closed at first

  std::string Html() const;
  void Write(const std::string& path) const;  // atomically

 private:
  std::string title_, subtitle_, body_;
};

}  // namespace cistern
