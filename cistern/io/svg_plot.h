#pragma once
// Small charts as SVG text: lines over x, and grouped bars. Colours are safe for colour-blind
// readers (Okabe and Ito), series differ by marker too, and text and grid are a grey that reads on
// white and on dark pages. All text is XML-escaped; points that are NaN or infinite are skipped,
// and so are those at or below 0 on a logarithmic axis.
#include <string>
#include <string_view>
#include <vector>

namespace cistern {

struct Series {
  std::string name;
  std::vector<double> x, y;  // of one length
};

struct LineChart {
  std::string title, x_label, y_label;
  std::vector<Series> series;
  bool log_x = false, log_y = false;
  bool y_from_zero = false;  // the y axis includes 0
  int width = 720, height = 420;
};

std::string RenderSvg(const LineChart& chart);  // Error when x and y of a series differ in length

// & < > " ' escaped, for XML and HTML; control characters, which XML forbids, and bytes that are
// not UTF-8 become U+FFFD.
std::string EscapeXml(std::string_view text);

// Round values that cover [min, max]: steps of 1, 2, 2.5 or 5 times a power of ten, about `count`
// of them.
std::vector<double> NiceTicks(double min, double max, int count);

}  // namespace cistern
