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

// What can be held without a browser; how it looks at 1,200 and 400 px was looked at in one.
TEST(HtmlReport, ReadsOnSmallDarkAndPrintedPages) {
  const std::string svg = RenderSvg(LineChart{
      .title = "t", .x_label = "", .y_label = "", .series = {{"a", {1, 2, 3}, {1, 2, 3}}}});
  HtmlReport report("t");
  report.Svg(svg, "one")
      .Svg(svg, "two")
      .Paragraph("p")
      .Svg(svg)
      .Table({.header = {"a"}, .rows = {{"1"}}});
  const std::string html = report.Html();
  for (const char* needed :
       {"<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">",
        "@media (prefers-color-scheme: dark)", "@media print", "color-scheme: light dark",
        "figure svg { max-width: max(100%, 34rem)", "<div class=\"wide\"><table>"})
    EXPECT_NE(html.find(needed), std::string::npos) << needed;
  // Nothing is fetched, and nothing runs.
  for (const char* banned : {"<script", "<link", "src=", "url(", "@import", "<iframe"})
    EXPECT_EQ(html.find(banned), std::string::npos) << banned;
  std::string rest = html;
  const std::string space = "http://www.w3.org/2000/svg";
  for (size_t at = rest.find(space); at != rest.npos; at = rest.find(space))
    rest.erase(at, space.size());
  EXPECT_EQ(rest.find("http"), std::string::npos);
  // The style has no width in pixels, so that nothing but pictures, which shrink or scroll in their
  // figure, can be wider than the page.
  const std::string style =
      html.substr(html.find("<style>"), html.find("</style>") - html.find("<style>"));
  EXPECT_EQ(style.find("width: 1px"), std::string::npos);
  for (size_t at = style.find("width:"); at != style.npos; at = style.find("width:", at + 1)) {
    const std::string value = style.substr(at + 6, style.find_first_of(";}", at) - at - 6);
    EXPECT_EQ(value.find("px"), std::string::npos) << value;
  }
  // Pictures that follow each other share a line; text between them ends it.
  const auto count = [&](const std::string& what) {
    int n = 0;
    for (size_t at = html.find(what); at != html.npos; at = html.find(what, at + 1)) ++n;
    return n;
  };
  EXPECT_EQ(count("<div class=\"figures\">"), 2);
  EXPECT_EQ(count("<figure>"), 3);
  EXPECT_EQ(count("</figure>"), 3);
  EXPECT_EQ(count("<div"), count("</div>"));
  EXPECT_EQ(count("viewBox="), 3);
}

// A sentence in a cell does not push the next column out of the page.
TEST(HtmlReport, SentencesInCellsAreBroken) {
  HtmlReport page("x");
  page.Table({{"claim", "answer"}, {{"a sentence of more than forty bytes, in a cell", "holds"}}});
  const std::string html = page.Html();
  EXPECT_NE(html.find("<td class=\"long\">a sentence of"), std::string::npos);
  EXPECT_NE(html.find("<td>holds</td>"), std::string::npos);
  EXPECT_NE(html.find("td.long { white-space: normal;"), std::string::npos);
}

TEST(HtmlReport, RowsMustFit) {
  EXPECT_EQ(ErrorMessage([] {
              HtmlReport("t").Table({.header = {"a"}, .rows = {{"1", "2"}}});
            }),
            "[report] a row has 2 cells, the header 1");
}

}  // namespace
}  // namespace cistern
