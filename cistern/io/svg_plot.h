#pragma once
// Small charts as SVG text: lines over x, dots with intervals, and heat maps. Colours are safe for
// colour-blind readers (Okabe and Ito), series differ by marker too, and text and grid are a grey
// that reads on white and on dark pages. All text is XML-escaped; points that are NaN or infinite
// are skipped, and so are those at or below 0 on a logarithmic axis.
#include <cstdint>
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

// A line for each group of values: its values as dots, their mean as a stroke, and an interval of
// the mean as a bar.
struct DotChart {
  struct Group {
    std::string name;
    std::vector<double> values;
    double mean = 0, low = 0, high = 0;
  };
  std::string title, x_label;
  std::vector<Group> groups;
  int width = 520;
};

std::string RenderSvg(const DotChart& chart);

// A matrix as colours, from light (low) to dark blue (high), or from blue over white (0) to red
// where it is `signed_values`. Sides of more than `most_cells` are shown as means of neighbouring
// cells; matrices of at most 16 x 16 cells have their numbers written in them. NaN: no number, and
// the colour of the lowest value.
struct HeatMap {
  std::string title, x_label, y_label;
  int64_t rows = 0, columns = 0;
  std::vector<double> values;  // [rows,columns]
  // What the lightest and the darkest colour stand for; low = high: the smallest and the largest
  // value.
  double low = 0, high = 0;
  bool signed_values = false;
  std::vector<std::string> row_names = {}, column_names = {};  // none: numbers from 1
  int width = 480;
  int64_t most_cells = 256;
  // Rows as high as columns are wide; false: the whole is about as high as wide at most.
  bool square = true;
};

// Error where the values are not as many as rows times columns, or names not as many as those.
std::string RenderSvg(const HeatMap& map);

// & < > " ' escaped, for XML and HTML; control characters, which XML forbids, and bytes that are
// not UTF-8 become U+FFFD.
std::string EscapeXml(std::string_view text);

// Round values that cover [min, max]: steps of 1, 2, 2.5 or 5 times a power of ten, about `count`
// of them.
std::vector<double> NiceTicks(double min, double max, int count);

}  // namespace cistern
