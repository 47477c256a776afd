#include "cistern/io/html_report.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "cistern/io/svg_plot.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

TEST(HtmlReport, EscapesAndAligns) {
  HtmlReport report("Latte & <softmax>", "2 threads");
  report.Heading("Speed").Paragraph("a < b").Table(
      {.header = {"mechanism", "ms"}, .rows = {{"latte", "1.5"}, {"<x>", "-"}}, .best_row = 0});
  report.Preformatted("x & y")
      .Details("more", "<z>")
      .Svg(RenderSvg(LineChart{.title = "t", .x_label = "", .y_label = "", .series = {}}),
           "fig <1>");
  const std::string html = report.Html();
  EXPECT_NE(html.find("<title>Latte &amp; &lt;softmax&gt;</title>"), std::string::npos);
  EXPECT_NE(html.find("<p>a &lt; b</p>"), std::string::npos);
  EXPECT_NE(html.find("<tr class=\"best\"><td>latte</td><td class=\"number\">1.5</td></tr>"),
            std::string::npos);
  EXPECT_NE(html.find("<td>&lt;x&gt;</td><td class=\"number\">-</td>"), std::string::npos);
  EXPECT_NE(html.find("<pre>x &amp; y</pre>"), std::string::npos);
  EXPECT_NE(html.find("<figcaption>fig &lt;1&gt;</figcaption>"), std::string::npos);
  EXPECT_EQ(html.find("<script"), std::string::npos);
  TestFolder folder;
  const char* keep = std::getenv("CISTERN_TEST_OUTPUT");
  report.Write(keep != nullptr ? std::string(keep) + "/report.html" : folder / "report.html");
}

TEST(HtmlReport, RowsMustFit) {
  EXPECT_EQ(ErrorMessage([] {
              HtmlReport("t").Table({.header = {"a"}, .rows = {{"1", "2"}}});
            }),
            "[report] a row has 2 cells, the header 1");
}

}  // namespace
}  // namespace cistern
