#include "cistern/io/svg_plot.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>

#include "cistern/io/atomic_file.h"
#include "cistern/io/png.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

size_t Count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size()))
    ++n;
  return n;
}

// CISTERN_TEST_OUTPUT=DIR keeps the picture, to look at.
void Keep(const std::string& name, const std::string& svg) {
  if (const char* folder = std::getenv("CISTERN_TEST_OUTPUT"))
    WriteFileAtomically(std::string(folder) + "/" + name, svg);
}

TEST(SvgPlot, Lines) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  LineChart chart{.title = "Time per token <by length> & \"mechanism\"",
                  .x_label = "length (tokens)",
                  .y_label = "microseconds",
                  .series = {}};
  chart.log_x = true;
  const std::vector<double> n = {256, 512, 1024, 2048, 4096, 8192, 16384};
  chart.series = {{"softmax", n, {3.1, 4.9, 8.8, 16.5, 32.0, 63.9, nan}},
                  {"latte", n, {4.0, 4.1, 4.0, 4.05, 4.1, 4.0, 4.1}},
                  {"abc-mlp", n, {5.2, 5.3, 5.2, 5.25, 5.3, 5.2, 5.3}},
                  {"luna", n, {6.2, 6.1, nan, 6.3, 6.2, 6.2, 6.4}}};
  const std::string svg = RenderSvg(chart);
  Keep("lines.svg", svg);
  EXPECT_NE(svg.find("width=\"720\" height=\"420\" viewBox=\"0 0 720 420\""), std::string::npos);
  EXPECT_NE(svg.find("Time per token &lt;by length&gt; &amp; &quot;mechanism&quot;"),
            std::string::npos);
  EXPECT_EQ(svg.find("<by"), std::string::npos);
  EXPECT_EQ(Count(svg, "<circle"), 6u + 1u);  // one point is skipped; one in the legend
  EXPECT_EQ(Count(svg, "fill=\"none\""), 4u);
  EXPECT_EQ(Count(svg, ">16384<"), 1u);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

TEST(SvgPlot, Dots) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  DotChart chart{.title = "Text & <more>", .x_label = "accuracy", .groups = {}};
  chart.groups = {{"1 slot", {50, 52, 54}, 52, 51, 53}, {"16 slots", {60, nan}, 60, nan, 61}};
  const std::string svg = RenderSvg(chart);
  Keep("dots.svg", svg);
  EXPECT_EQ(Count(svg, "<circle"), 4u);     // a value that is none has no dot
  EXPECT_EQ(Count(svg, "<rect"), 2u + 1u);  // means, and the interval that is one
  EXPECT_EQ(Count(svg, "height=\"10\""), 1u);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("<more"), std::string::npos);
  // The scale goes from 50 to 62 (ticks of 2 or 2.5): the mean stands in the middle of its
  // interval.
  const auto x_of = [&](const std::string& before) {
    const size_t at = svg.find(before);
    return at == std::string::npos ? nan : std::atof(svg.c_str() + svg.rfind("x=\"", at) + 3);
  };
  const double mean = x_of("height=\"18\"") + 1, low = x_of("height=\"10\"");
  EXPECT_GT(mean, low);
  EXPECT_NE(svg.find("width=\"" + std::to_string(int(2 * (mean - low)))), std::string::npos);
  for (const double odd : {nan, 1e308, -std::numeric_limits<double>::infinity()})
    RenderSvg(DotChart{.title = "", .x_label = "", .groups = {{"a", {odd, odd}, odd, odd, odd}}});
  RenderSvg(DotChart{});
}

// Where no power of ten, nor twice or five times one, lies among the values, or only one does.
TEST(SvgPlot, AShortLogarithmicAxisHasTicks) {
  for (const auto& points : std::vector<std::vector<double>>{
           {95752, 99336}, {2.1, 4.9}, {9, 11}, {0.00021, 0.00022}, {1000, 1000.2}}) {
    LineChart chart;
    chart.series = {{"a", points, points}};
    chart.log_x = chart.log_y = true;
    const std::string svg = RenderSvg(chart);
    EXPECT_GE(Count(svg, "text-anchor=\"end\""), 2u) << svg;     // of y
    EXPECT_GE(Count(svg, "text-anchor=\"middle\""), 2u) << svg;  // of x
  }
  LineChart chart;
  chart.series = {{"a", {1, 2}, {95752, 99336}}};
  chart.log_y = true;
  const std::string svg = RenderSvg(chart);
  for (const char* tick : {">96000<", ">97000<", ">98000<", ">99000<"})
    EXPECT_EQ(Count(svg, tick), 1u) << tick;
  EXPECT_EQ(Count(svg, ">95000<") + Count(svg, ">100000<") + Count(svg, ">100k<"), 0u);
}

TEST(SvgPlot, OddInput) {
  const double inf = std::numeric_limits<double>::infinity(), huge = 1e308;
  for (const bool log : {false, true}) {
    for (const auto& points : std::vector<std::vector<double>>{{},
                                                               {5},
                                                               {0, 0},
                                                               {-1, 2},
                                                               {inf, NAN},
                                                               {-huge, huge},
                                                               {1e-300, 1e-299},
                                                               {1e9, 1e9 + 1}}) {
      LineChart chart;
      chart.series = {{"a", points, points}};
      chart.log_x = chart.log_y = log;
      const std::string svg = RenderSvg(chart);
      EXPECT_EQ(svg.find("nan"), std::string::npos) << svg;
      EXPECT_EQ(svg.find("inf"), std::string::npos) << svg;
    }
  }
  LineChart bad;
  bad.series = {{"a", {1}, {}}};
  EXPECT_EQ(ErrorMessage([&] { RenderSvg(bad); }), "[svg] series 'a' has 1 x and 0 y");
}

// The grey picture within an SVG: its PNG's bytes, from base64.
std::string PictureOf(const std::string& svg) {
  const std::string begin = "data:image/png;base64,";
  const size_t at = svg.find(begin) + begin.size();
  const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  uint32_t word = 0;
  int bits = 0;
  for (size_t i = at; svg[i] != '"' && svg[i] != '='; ++i) {
    word = word << 6 | uint32_t(digits.find(svg[i]));
    bits += 6;
    if (bits >= 8) out += char(word >> (bits -= 8) & 255);
  }
  return out;
}

TEST(SvgPlot, HeatMap) {
  HeatMap map{
      .title = "a<b", .x_label = "x", .y_label = "y", .rows = 2, .columns = 3, .values = {}};
  map.values = {0, 1, 2, 3, 4, NAN};
  std::string svg = RenderSvg(map);
  Keep("heat.svg", svg);
  EXPECT_NE(svg.find("a&lt;b"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(Count(svg, "<image"), 2u);            // the map and its scale
  EXPECT_EQ(Count(svg, "font-size=\"11\""), 5u);  // numbers in cells, but for NaN
  const auto labels = [&](int number) {
    return Count(svg, StrCat("text-anchor=\"middle\" fill=\"#777777\">", number, "</text>"));
  };
  EXPECT_EQ(labels(0), 0u);  // cells count from 1
  EXPECT_EQ(labels(3), 1u);
  const GreyImage image = ReadPng(PictureOf(svg), "picture");
  EXPECT_EQ(image.height, 2);
  EXPECT_EQ(image.width, 3);
  EXPECT_EQ(image.pixels, (std::vector<uint8_t>{0, 64, 128, 191, 255, 0}));

  // Signed: 0 is in the middle. Names in place of numbers.
  map.signed_values = true;
  map.values = {-1, 0, 1, 2, 0, 0};
  map.row_names = {"first", "second"};
  svg = RenderSvg(map);
  EXPECT_NE(svg.find(">second<"), std::string::npos);
  EXPECT_EQ(ReadPng(PictureOf(svg), "picture").pixels,
            (std::vector<uint8_t>{64, 128, 191, 255, 128, 128}));

  // 4 x 4 cells as means of 2 x 2.
  HeatMap large{.title = "", .x_label = "", .y_label = "", .rows = 4, .columns = 4, .values = {}};
  large.most_cells = 2;
  for (int r = 0; r < 4; ++r) {
    for (int c = 0; c < 4; ++c) large.values.push_back(r < 2 ? 0 : c < 2 ? (c == 0 ? 2 : 0) : 4);
  }
  EXPECT_EQ(ReadPng(PictureOf(RenderSvg(large)), "picture").pixels,
            (std::vector<uint8_t>{0, 0, 64, 255}));

  EXPECT_EQ(RenderSvg(HeatMap{}).find("nan"), std::string::npos);
  HeatMap bad = map;
  bad.values.pop_back();
  EXPECT_EQ(ErrorMessage([&] { RenderSvg(bad); }), "[svg] a heat map of 2 x 3 cells has 5 values");
  bad = map;
  bad.row_names = {"one"};
  EXPECT_NE(ErrorMessage([&] { RenderSvg(bad); }).find("1 names of rows"), std::string::npos);
}

TEST(SvgPlot, Ticks) {
  EXPECT_EQ(NiceTicks(0, 10, 5), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  EXPECT_EQ(NiceTicks(-1, 1, 4), (std::vector<double>{-1, -0.5, 0, 0.5, 1}));
  EXPECT_EQ(NiceTicks(3.1, 63.9, 5).back(), 80);
}

TEST(EscapeXml, Text) {
  EXPECT_EQ(EscapeXml("a<b>&\"'\xc3\xa9\n"), "a&lt;b&gt;&amp;&quot;&#39;\xc3\xa9\n");
  EXPECT_EQ(EscapeXml(std::string("\0x\xff\xc3", 4)), "\xef\xbf\xbdx\xef\xbf\xbd\xef\xbf\xbd");
}

}  // namespace
}  // namespace cistern
