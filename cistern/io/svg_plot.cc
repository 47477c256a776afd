#include "cistern/io/svg_plot.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/io/png.h"

namespace cistern {
namespace {

constexpr const char* kColours[] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                    "#E69F00", "#56B4E9", "#7F7F7F", "#A6761D"};
constexpr size_t kColourCount = sizeof(kColours) / sizeof(kColours[0]);
constexpr const char* kInk = "#777777";   // text: contrast 4.5 on white, 4.7 on black
constexpr const char* kGrid = "#808080";  // drawn faintly
// Of the lines of a series: colours come again with other dashes.
const char* Dashes(size_t series) {
  constexpr const char* kDashes[] = {"", " stroke-dasharray=\"5 3\"", " stroke-dasharray=\"1.5 3\"",
                                     " stroke-dasharray=\"9 3 2 3\""};
  return kDashes[series / kColourCount % 4];
}

constexpr double kFont = 12, kTitleFont = 15, kCharWidth = 6.9;

std::string Number(double x) { return Trimmed(x, 2); }  // a coordinate

// Characters of UTF-8 text, as a guess of its width.
double TextWidth(const std::string& text) {
  return kCharWidth * double(std::count_if(text.begin(), text.end(), [](char c) {
           return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
         }));
}

// The position of the character after the one that begins at i, or i when the bytes there are not
// UTF-8.
size_t NextCharacter(std::string_view text, size_t i) {
  const auto byte = [&](size_t k) { return static_cast<unsigned char>(text[k]); };
  const unsigned char c = byte(i);
  const size_t n = c < 0x80                ? 1
                   : c >= 0xC2 && c < 0xE0 ? 2
                   : c >= 0xE0 && c < 0xF0 ? 3
                   : c >= 0xF0 && c < 0xF5 ? 4
                                           : 0;
  if (n == 0 || i + n > text.size()) return i;
  for (size_t k = i + 1; k < i + n; ++k) {
    if ((byte(k) & 0xC0) != 0x80) return i;
  }
  const bool overlong = (c == 0xE0 && byte(i + 1) < 0xA0) || (c == 0xF0 && byte(i + 1) < 0x90);
  const bool outside = (c == 0xED && byte(i + 1) >= 0xA0) || (c == 0xF4 && byte(i + 1) >= 0x90);
  const bool noncharacter = c == 0xEF && byte(i + 1) == 0xBF && byte(i + 2) >= 0xBE;
  return overlong || outside || noncharacter ? i : i + n;
}

struct Axis {
  double min = 0, max = 1;
  bool log = false;
  double from = 0, to = 1;  // pixels
  std::vector<double> ticks;

  bool Shows(double x) const { return std::isfinite(x) && (!log || x > 0); }
  double operator()(double x) const {
    const double part = log ? (std::log(x) - std::log(min)) / (std::log(max) - std::log(min))
                            : (x - min) / (max - min);
    return from + part * (to - from);
  }
};

// Powers of ten (of two, when all values are powers of two: sequence lengths), or 1-2-5 when the
// range is short; round values where the range lies between two of those.
void LogTicks(const std::vector<double>& values, Axis* axis) {
  const bool binary =
      axis->max / axis->min <= 4096 && std::all_of(values.begin(), values.end(), [](double x) {
        int exponent;
        return std::frexp(x, &exponent) == 0.5;
      });
  if (binary) {
    for (double x = axis->min; x <= axis->max; x *= 2) axis->ticks.push_back(x);
    return;
  }
  const int low = int(std::floor(std::log10(axis->min) + 1e-9)),
            high = int(std::ceil(std::log10(axis->max) - 1e-9));
  const int step = std::max(1, (high - low) / 8);
  for (int e = low; e <= high; ++e) {
    for (const double m : {1.0, 2.0, 5.0}) {
      const double x = m * std::pow(10, e);
      if (high - low > 2 && (m != 1 || (e - low) % step != 0)) continue;
      if (x >= axis->min * (1 - 1e-9) && x <= axis->max * (1 + 1e-9)) axis->ticks.push_back(x);
    }
  }
  if (axis->ticks.size() > 1) return;
  axis->ticks = NiceTicks(axis->min, axis->max, 5);
  std::erase_if(axis->ticks, [&](double x) { return x < axis->min || x > axis->max; });
}

Axis MakeAxis(const std::vector<double>& values, bool log, bool nice, int ticks) {
  Axis axis;
  axis.log = log;
  axis.min = std::numeric_limits<double>::infinity();
  axis.max = -axis.min;
  std::vector<double> shown;
  for (const double x : values) {
    if (!axis.Shows(x)) continue;
    shown.push_back(x);
    axis.min = std::min(axis.min, x);
    axis.max = std::max(axis.max, x);
  }
  if (shown.empty()) {
    axis.min = log ? 1 : 0;
    axis.max = log ? 10 : 1;
  }
  if (log) {
    if (axis.max / axis.min < 1.0001) {
      axis.max = std::min(axis.max * 2, 1e308);
      axis.min /= 2;
    }
    LogTicks(shown, &axis);
    return axis;
  }
  axis.min = std::max(axis.min, -1e300);
  axis.max = std::min(axis.max, 1e300);
  const double spread = std::max(std::abs(axis.min), std::abs(axis.max));
  if (axis.max - axis.min <= 1e-9 * spread || axis.max == axis.min) {
    const double pad = spread > 0 ? spread * 0.1 : 1;
    axis.min -= pad;
    axis.max += pad;
  }
  axis.ticks = NiceTicks(axis.min, axis.max, ticks);
  // Nothing lies between numbers of layers, heads or steps.
  const auto whole = [](double x) { return x == std::floor(x); };
  if (!nice && axis.max - axis.min >= 1 && std::all_of(shown.begin(), shown.end(), whole))
    std::erase_if(axis.ticks, [&](double tick) { return !whole(tick); });
  if (nice) {  // the axis ends at ticks
    axis.min = std::min(axis.min, axis.ticks.front());
    axis.max = std::max(axis.max, axis.ticks.back());
  } else {
    std::erase_if(axis.ticks, [&](double t) {
      return t < axis.min - 1e-9 * spread || t > axis.max + 1e-9 * spread;
    });
  }
  return axis;
}

class Svg {
 public:
  Svg(int width, int height, const std::string& title) {
    out_ = StrCat("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", width, "\" height=\"",
                  height, "\" viewBox=\"0 0 ", width, " ", height,
                  "\" role=\"img\" font-family=\"system-ui, 'Helvetica Neue', Arial, 'DejaVu "
                  "Sans', sans-serif\" font-size=\"",
                  kFont, "\">\n<title>", EscapeXml(title), "</title>\n");
  }
  void Line(double x1, double y1, double x2, double y2, double opacity) {
    out_ += StrCat("<line x1=\"", Number(x1), "\" y1=\"", Number(y1), "\" x2=\"", Number(x2),
                   "\" y2=\"", Number(y2), "\" stroke=\"", kGrid, "\" stroke-opacity=\"", opacity,
                   "\"/>\n");
  }
  void Text(double x, double y, const std::string& text, const char* anchor,
            const std::string& more = "") {
    out_ += StrCat("<text x=\"", Number(x), "\" y=\"", Number(y), "\" text-anchor=\"", anchor,
                   "\" fill=\"", kInk, "\"", more, ">", EscapeXml(text), "</text>\n");
  }
  void Title(double width, const std::string& title) {
    Text(width / 2, 24, title, "middle",
         StrCat(" font-size=\"", kTitleFont, "\" font-weight=\"600\""));
  }
  void Marker(size_t series, double x, double y) {
    const double r = 3.6;
    const std::string fill = StrCat("\" fill=\"", kColours[series % kColourCount], "\"/>\n");
    switch (series % 4) {
      case 0:
        out_ += StrCat("<circle cx=\"", Number(x), "\" cy=\"", Number(y), "\" r=\"", r, fill);
        break;
      case 1:
        out_ += StrCat("<rect x=\"", Number(x - 3.2), "\" y=\"", Number(y - 3.2),
                       "\" width=\"6.4\" height=\"6.4", fill);
        break;
      case 2:
        out_ += StrCat("<path d=\"M", Number(x), " ", Number(y - 4.4), "L", Number(x + 4.2), " ",
                       Number(y + 3.2), "H", Number(x - 4.2), "Z", fill);
        break;
      default:
        out_ += StrCat("<path d=\"M", Number(x), " ", Number(y - 4.8), "L", Number(x + 4.4), " ",
                       Number(y), "L", Number(x), " ", Number(y + 4.8), "L", Number(x - 4.4), " ",
                       Number(y), "Z", fill);
    }
  }
  void Raw(const std::string& text) { out_ += text; }
  std::string Done() { return out_ + "</svg>\n"; }

 private:
  std::string out_;
};

struct Frame {
  double left, right, top, bottom;
};

// The legend stands under the title, in as many rows as it takes. Returns its height.
constexpr double kLegendRow = 20;
std::vector<std::vector<size_t>> LegendRows(const std::vector<std::string>& names, double width) {
  std::vector<std::vector<size_t>> rows;
  double used = width;
  for (size_t i = 0; i < names.size(); ++i) {
    const double item = 44 + TextWidth(names[i]);
    if (used + item > width) {
      rows.emplace_back();
      used = 0;
    }
    used += item;
    rows.back().push_back(i);
  }
  return rows;
}

void DrawLegend(Svg* svg, const std::vector<std::string>& names,
                const std::vector<std::vector<size_t>>& rows, const Frame& frame, double y) {
  for (const auto& row : rows) {
    double total = -16;
    for (const size_t i : row) total += 44 + TextWidth(names[i]);
    double x = std::max(frame.left, (frame.left + frame.right - total) / 2);
    for (const size_t i : row) {
      svg->Raw(StrCat("<line x1=\"", Number(x), "\" y1=\"", Number(y), "\" x2=\"", Number(x + 20),
                      "\" y2=\"", Number(y), "\" stroke=\"", kColours[i % kColourCount],
                      "\" stroke-width=\"2\"", Dashes(i), "/>\n"));
      svg->Marker(i, x + 10, y);
      svg->Text(x + 26, y + 4, names[i], "start");
      x += 44 + TextWidth(names[i]);
    }
    y += kLegendRow;
  }
}

Frame MakeFrame(int width, int height, bool title, bool y_label, bool x_label, size_t legend_rows,
                const Axis& y) {
  double widest = 0;
  for (const double tick : y.ticks) widest = std::max(widest, TextWidth(Tick(tick)));
  Frame frame;
  frame.left = 16 + widest + (y_label ? 24 : 0);
  frame.right = width - 20;
  frame.top = (title ? 40 : 16) + double(legend_rows) * kLegendRow + (legend_rows > 0 ? 4 : 0);
  frame.bottom = height - (x_label ? 52 : 32);
  return frame;
}

void DrawYAxis(Svg* svg, const Axis& y, const Frame& frame, const std::string& label) {
  for (const double tick : y.ticks) {
    svg->Line(frame.left, y(tick), frame.right, y(tick), 0.25);
    svg->Text(frame.left - 8, y(tick) + 4, Tick(tick), "end");
  }
  if (label.empty()) return;
  const double middle = (frame.top + frame.bottom) / 2;
  svg->Text(16, middle, label, "middle",
            StrCat(" transform=\"rotate(-90 16 ", Number(middle), ")\""));
}

}  // namespace

std::vector<double> NiceTicks(double min, double max, int count) {
  const double rough = std::max((max - min) / std::max(count, 1), 1e-300);
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double m : {5.0, 2.5, 2.0, 1.0}) {
    if (m * power >= rough * (1 - 1e-9)) step = m * power;
  }
  std::vector<double> ticks;
  const double first = std::floor(min / step + 1e-9);
  for (int i = 0; i < 1000; ++i) {
    const double tick = (first + i) * step;
    ticks.push_back(std::abs(tick) < step * 1e-9 ? 0 : tick);
    if (tick >= max - step * 1e-9) break;
  }
  return ticks;
}

std::string EscapeXml(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const size_t next = NextCharacter(text, i);
    const char c = text[i];
    if (next == i || (static_cast<unsigned char>(c) < 32 && c != '\n' && c != '\t') || c == 127) {
      out += "\xef\xbf\xbd";
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else if (c == '\'') {
      out += "&#39;";
    } else {
      out += text.substr(i, next - i);
    }
    i = std::max(next, i + 1);
  }
  return out;
}

std::string RenderSvg(const LineChart& chart) {
  std::vector<double> xs, ys;
  std::vector<std::string> names;
  if (chart.y_from_zero && !chart.log_y) ys.push_back(0);
  for (const Series& s : chart.series) {
    CISTERN_CHECK(s.x.size() == s.y.size(), "[svg] series '", s.name, "' has ", s.x.size(),
                  " x and ", s.y.size(), " y");
    for (size_t i = 0; i < s.x.size(); ++i) {
      if (!std::isfinite(s.x[i]) || !std::isfinite(s.y[i])) continue;
      if ((chart.log_x && s.x[i] <= 0) || (chart.log_y && s.y[i] <= 0)) continue;
      xs.push_back(s.x[i]);
      ys.push_back(s.y[i]);
    }
    names.push_back(s.name);
  }
  Axis x = MakeAxis(xs, chart.log_x, false, 7), y = MakeAxis(ys, chart.log_y, true, 5);
  const auto rows =
      names.size() > 1 ? LegendRows(names, chart.width - 60) : std::vector<std::vector<size_t>>();
  const Frame frame = MakeFrame(chart.width, chart.height, !chart.title.empty(),
                                !chart.y_label.empty(), !chart.x_label.empty(), rows.size(), y);
  x.from = frame.left + 10;
  x.to = frame.right - 10;
  y.from = frame.bottom;
  y.to = frame.top;

  Svg svg(chart.width, chart.height, chart.title.empty() ? chart.y_label : chart.title);
  if (!chart.title.empty()) svg.Title(chart.width, chart.title);
  DrawLegend(&svg, names, rows, frame, chart.title.empty() ? 20 : 46);
  DrawYAxis(&svg, y, frame, chart.y_label);
  svg.Line(frame.left, frame.bottom, frame.right, frame.bottom, 0.9);
  double last = -1e9;
  for (const double tick : x.ticks) {
    const double half = TextWidth(Tick(tick)) / 2;
    svg.Line(x(tick), frame.bottom, x(tick), frame.bottom + 5, 0.9);
    if (x(tick) - half < last + 6) continue;  // no room
    svg.Text(x(tick), frame.bottom + 19, Tick(tick), "middle");
    last = x(tick) + half;
  }
  if (!chart.x_label.empty())
    svg.Text((frame.left + frame.right) / 2, chart.height - 12, chart.x_label, "middle");

  for (size_t i = 0; i < chart.series.size(); ++i) {
    const Series& s = chart.series[i];
    std::string path;
    std::vector<std::pair<double, double>> points;
    bool pen_down = false;  // a skipped point leaves a gap
    for (size_t k = 0; k < s.x.size(); ++k) {
      const bool shown = x.Shows(s.x[k]) && y.Shows(s.y[k]);
      if (shown) {
        points.emplace_back(x(s.x[k]), y(s.y[k]));
        path += (pen_down ? "L" : "M") + Number(points.back().first) + " " +
                Number(points.back().second);
      }
      pen_down = shown;
    }
    if (path.empty()) continue;
    svg.Raw(StrCat("<path d=\"", path, "\" fill=\"none\" stroke=\"", kColours[i % kColourCount],
                   "\" stroke-width=\"2\" stroke-linejoin=\"round\" stroke-linecap=\"round\"",
                   Dashes(i), "/>\n"));
    if (points.size() > 60) continue;  // markers would hide the line
    for (const auto& [px, py] : points) svg.Marker(i, px, py);
  }
  return svg.Done();
}

namespace {

// Colours of a heat map at equal steps; sequential is light to dark blue, diverging blue to red
// (both of ColorBrewer's kind: told apart without seeing red and green).
struct Scale {
  const char *red, *green, *blue;  // 0 .. 1 each, at equal steps
};
constexpr Scale kSequential = {"0.97 0.78 0.42 0.13 0.03", "0.98 0.86 0.68 0.44 0.19",
                               "1 0.94 0.84 0.71 0.42"};
constexpr Scale kDiverging = {"0.13 0.57 0.97 0.96 0.7", "0.4 0.77 0.97 0.65 0.09",
                              "0.67 0.87 0.97 0.51 0.17"};

std::string Base64(std::string_view bytes) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t word = 0;
    for (size_t k = 0; k < 3; ++k)
      word = word << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0u);
    for (size_t k = 0; k < 4; ++k)
      out += i + k > bytes.size() ? '=' : kDigits[word >> (18 - 6 * k) & 63];
  }
  return out;
}

// The means of blocks of neighbouring cells, so that no side has more than `most`; NaN is left out.
HeatMap Reduced(const HeatMap& map, int64_t most) {
  const int64_t down = (map.rows + most - 1) / most, right = (map.columns + most - 1) / most;
  if (down <= 1 && right <= 1) return map;
  HeatMap out = map;
  out.rows = (map.rows + down - 1) / down;
  out.columns = (map.columns + right - 1) / right;
  out.values.assign(size_t(out.rows * out.columns), 0);
  std::vector<double> counts(out.values.size(), 0);
  for (int64_t r = 0; r < map.rows; ++r) {
    for (int64_t c = 0; c < map.columns; ++c) {
      const double value = map.values[size_t(r * map.columns + c)];
      const auto to = size_t(r / down * out.columns + c / right);
      if (!std::isfinite(value)) continue;
      out.values[to] += value;
      counts[to] += 1;
    }
  }
  for (size_t i = 0; i < counts.size(); ++i)
    out.values[i] = counts[i] > 0 ? out.values[i] / counts[i] : std::nan("");
  return out;
}

// Names beside one side of a heat map, as many as there is room for; `at` gives the middle of a
// cell.
template <class Draw>
void NameCells(int64_t cells, const std::vector<std::string>& names, double cell, double room,
               Draw&& draw) {
  const auto step = std::max<int64_t>(1, int64_t(std::ceil(room / cell)));
  for (int64_t i = 0; i < cells; i += step)
    draw(i, names.empty() ? std::to_string(i + 1) : names[size_t(i)]);
}

}  // namespace

std::string RenderSvg(const DotChart& chart) {
  constexpr double kRow = 26;
  std::vector<double> shown;
  double widest = 0;
  for (const DotChart::Group& g : chart.groups) {
    widest = std::max(widest, TextWidth(g.name));
    shown.insert(shown.end(), g.values.begin(), g.values.end());
    shown.insert(shown.end(), {g.mean, g.low, g.high});
  }
  Axis x = MakeAxis(shown, false, true, 5);
  const double top = chart.title.empty() ? 16 : 40, left = 20 + widest,
               bottom = top + kRow * double(chart.groups.size());
  const int height = int(bottom) + (chart.x_label.empty() ? 32 : 52);
  x.from = left, x.to = chart.width - 30;
  Svg svg(chart.width, height, chart.title.empty() ? chart.x_label : chart.title);
  if (!chart.title.empty()) svg.Title(chart.width, chart.title);
  for (const double tick : x.ticks) {
    svg.Line(x(tick), top, x(tick), bottom, 0.25);
    svg.Text(x(tick), bottom + 18, Tick(tick), "middle");
  }
  if (!chart.x_label.empty()) svg.Text((x.from + x.to) / 2, bottom + 40, chart.x_label, "middle");
  for (size_t i = 0; i < chart.groups.size(); ++i) {
    const DotChart::Group& g = chart.groups[i];
    const double y = top + kRow * (double(i) + 0.5);
    svg.Text(left - 10, y + 4, g.name, "end");
    const auto bar = [&](double from, double to, double high, const char* opacity) {
      svg.Raw(StrCat("<rect x=\"", Number(from), "\" y=\"", Number(y - high / 2), "\" width=\"",
                     Number(to - from), "\" height=\"", Number(high), "\" fill=\"", kColours[0],
                     "\" fill-opacity=\"", opacity, "\"/>\n"));
    };
    if (x.Shows(g.low) && x.Shows(g.high) && g.low <= g.high) bar(x(g.low), x(g.high), 10, "0.3");
    if (x.Shows(g.mean)) bar(x(g.mean) - 1, x(g.mean) + 1, 18, "1");
    for (const double value : g.values) {
      if (x.Shows(value))
        svg.Raw(StrCat("<circle cx=\"", Number(x(value)), "\" cy=\"", Number(y),
                       "\" r=\"3.2\" fill=\"none\" stroke=\"", kColours[1],
                       "\" stroke-width=\"1.5\"/>\n"));
    }
  }
  return svg.Done();
}

std::string RenderSvg(const HeatMap& map) {
  CISTERN_CHECK(
      map.rows >= 0 && map.columns >= 0 && int64_t(map.values.size()) == map.rows * map.columns,
      "[svg] a heat map of ", map.rows, " x ", map.columns, " cells has ", map.values.size(),
      " values");
  CISTERN_CHECK((map.row_names.empty() || int64_t(map.row_names.size()) == map.rows) &&
                    (map.column_names.empty() || int64_t(map.column_names.size()) == map.columns),
                "[svg] a heat map of ", map.rows, " x ", map.columns, " cells has ",
                map.row_names.size(), " names of rows and ", map.column_names.size(),
                " of columns");
  const HeatMap shown = Reduced(map, std::max<int64_t>(1, map.most_cells));
  double low = map.low, high = map.high;
  if (low == high) {
    low = std::numeric_limits<double>::infinity(), high = -low;
    for (const double v : shown.values) {
      if (std::isfinite(v)) low = std::min(low, v), high = std::max(high, v);
    }
    if (low > high) low = high = 0;
  }
  if (map.signed_values) {
    high = std::max(std::abs(low), std::abs(high));
    low = -high;
  }
  const double range = high > low ? high - low : 1;

  double names = 0;
  for (const std::string& name : map.row_names) names = std::max(names, TextWidth(name));
  if (map.row_names.empty()) names = TextWidth(std::to_string(map.rows));
  const double left = (map.y_label.empty() ? 8 : 26) + names + 8, top = map.title.empty() ? 16 : 40,
               bar = 14, after = 14 + bar + 6 + 48;
  const double across = std::max(40.0, map.width - left - after);
  const double cells_down = double(std::max<int64_t>(1, map.rows)),
               cells_across = double(std::max<int64_t>(1, map.columns));
  double down = across * cells_down / cells_across;
  if (!map.square) down = std::min(down, across);
  down = std::clamp(down, map.square ? 12.0 : 60.0, 3 * across);
  const int height = int(std::ceil(top + down + (map.x_label.empty() ? 28 : 50)));

  GreyImage image{std::max<int64_t>(1, shown.rows), std::max<int64_t>(1, shown.columns), {}};
  image.pixels.assign(size_t(image.height * image.width), 0);
  for (size_t i = 0; i < shown.values.size(); ++i) {
    const double v = shown.values[i];
    if (std::isfinite(v))
      image.pixels[i] = uint8_t(std::lround(255 * std::clamp((v - low) / range, 0.0, 1.0)));
  }
  GreyImage steps{128, 1, {}};  // the scale beside the map, high above
  for (int i = 127; i >= 0; --i) steps.pixels.push_back(uint8_t(2 * i + 1));

  Svg svg(map.width, height, map.title);
  const Scale& scale = map.signed_values ? kDiverging : kSequential;
  const std::string filter = map.signed_values ? "heat-diverging" : "heat-sequential";
  const auto channel = [](const char* name, const char* table) {
    return StrCat("<feFunc", name, " type=\"table\" tableValues=\"", table, "\"/>");
  };
  svg.Raw(StrCat("<filter id=\"", filter,
                 "\" color-interpolation-filters=\"sRGB\" x=\"0\" y=\"0\" width=\"1\" "
                 "height=\"1\"><feComponentTransfer>",
                 channel("R", scale.red), channel("G", scale.green), channel("B", scale.blue),
                 "</feComponentTransfer></filter>\n"));
  const auto picture = [&](const GreyImage& of, double x, double y, double w, double h) {
    svg.Raw(StrCat("<image x=\"", Number(x), "\" y=\"", Number(y), "\" width=\"", Number(w),
                   "\" height=\"", Number(h),
                   "\" preserveAspectRatio=\"none\" style=\"image-rendering: pixelated\" "
                   "filter=\"url(#",
                   filter, ")\" href=\"data:image/png;base64,", Base64(PngBytes(of)), "\"/>\n"));
  };
  if (!map.title.empty()) svg.Title(map.width, map.title);
  picture(image, left, top, across, down);
  const double cell_width = across / cells_across, cell_height = down / cells_down;
  NameCells(map.rows, map.row_names, cell_height, 15, [&](int64_t i, const std::string& name) {
    svg.Text(left - 6, top + (double(i) + 0.5) * cell_height + 4, name, "end");
  });
  double widest = TextWidth(std::to_string(map.columns));
  for (const std::string& name : map.column_names) widest = std::max(widest, TextWidth(name));
  const bool upright = widest <= 60;  // longer names would overlap: as many as fit
  NameCells(map.columns, map.column_names, cell_width, (upright ? widest : 60) + 6,
            [&](int64_t i, const std::string& name) {
              svg.Text(left + (double(i) + 0.5) * cell_width, top + down + 16, name, "middle");
            });
  if (!map.x_label.empty()) svg.Text(left + across / 2, height - 10, map.x_label, "middle");
  if (!map.y_label.empty())
    svg.Text(16, top + down / 2, map.y_label, "middle",
             StrCat(" transform=\"rotate(-90 16 ", Number(top + down / 2), ")\""));
  if (map.rows <= 16 && map.columns <= 16 && cell_width >= 28 && cell_height >= 14) {
    for (int64_t r = 0; r < map.rows; ++r) {
      for (int64_t c = 0; c < map.columns; ++c) {
        const double v = map.values[size_t(r * map.columns + c)];
        if (!std::isfinite(v)) continue;
        const double part = (v - low) / range;
        const bool dark = map.signed_values ? std::abs(part - 0.5) > 0.35 : part > 0.55;
        svg.Raw(StrCat("<text x=\"", Number(left + (double(c) + 0.5) * cell_width), "\" y=\"",
                       Number(top + (double(r) + 0.5) * cell_height + 4),
                       "\" text-anchor=\"middle\" font-size=\"11\" fill=\"",
                       dark ? "#ffffff" : "#1c2430", "\">", Significant(v, 2), "</text>\n"));
      }
    }
  }
  const double scale_left = left + across + 14, scale_down = std::min(down, 200.0);
  picture(steps, scale_left, top, bar, scale_down);
  svg.Text(scale_left + bar + 4, top + 10, Significant(high, 3), "start");
  svg.Text(scale_left + bar + 4, top + scale_down, Significant(low, 3), "start");
  return svg.Done();
}

}  // namespace cistern
