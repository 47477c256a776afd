#include "cistern/analyses/weighted_words.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/io/svg_plot.h"

namespace cistern {
namespace {

// Text of one token on one line: what is no printable character is a dot.
std::string OnOneLine(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 32 || byte == 127 ? "·" : std::string(1, c);
  }
  return out.empty() ? "·" : out;
}

int64_t Characters(const std::string& text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

}  // namespace

std::vector<std::string> WordsOf(const at::Tensor& ids,
                                 const std::function<std::string(int64_t)>& token) {
  std::vector<std::string> words;
  if (!token) return words;
  const at::Tensor on_cpu = ids.to(at::kCPU, at::kLong).contiguous();
  for (int64_t t = 0; t < on_cpu.numel(); ++t) words.push_back(token(on_cpu[t].item<int64_t>()));
  return words;
}

std::string RenderWords(const std::string& title, const std::vector<WeightedWord>& words,
                        int64_t marked) {
  constexpr int kWidth = 720;
  constexpr double kWide = 8, kHigh = 24;  // of a character, of a line
  double largest = 0;
  for (const WeightedWord& w : words) {
    if (std::isfinite(w.weight)) largest = std::max(largest, std::abs(w.weight));
  }
  std::string body;
  double x = 12, y = 56;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string text = OnOneLine(words[i].text);
    const double wide = kWide * double(Characters(text)) + 2;
    if (x + wide > kWidth - 12 && x > 12) x = 12, y += kHigh;
    const double weight = words[i].weight;
    const double share = largest > 0 && std::isfinite(weight) ? std::abs(weight) / largest : 0;
    body += StrCat("<g><title>", i + 1, ": ", std::isfinite(weight) ? Significant(weight, 3) : "-",
                   "</title>");
    if (share > 0.004 || int64_t(i) == marked) {
      body +=
          StrCat("<rect x=\"", Trimmed(x, 1), "\" y=\"", Trimmed(y - 16, 1), "\" width=\"",
                 Trimmed(wide - 1, 1), "\" height=\"20\" rx=\"3\" fill=\"",
                 weight < 0 ? "#D55E00" : "#0072B2", "\" fill-opacity=\"", Trimmed(0.6 * share, 3),
                 "\"", int64_t(i) == marked ? " stroke=\"#D55E00\" stroke-width=\"2\"" : "", "/>");
    }
    body += StrCat("<text x=\"", Trimmed(x + 1, 1), "\" y=\"", Trimmed(y - 1, 1),
                   "\" class=\"word\" xml:space=\"preserve\" textLength=\"", Trimmed(wide - 2, 1),
                   "\" lengthAdjust=\"spacingAndGlyphs\" fill=\"",
                   share > 0.6 ? "#ffffff" : "#777777", "\">", EscapeXml(text), "</text></g>\n");
    x += wide;
  }
  const int height = int(y + 20);
  return StrCat("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", kWidth, "\" height=\"",
                height, "\" viewBox=\"0 0 ", kWidth, " ", height,
                "\" role=\"img\" font-family=\"ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', "
                "monospace\" font-size=\"13\">\n<title>",
                EscapeXml(title),
                "</title>\n<text x=\"12\" y=\"24\" font-weight=\"600\" fill=\"#777777\" "
                "font-family=\"system-ui, Arial, 'DejaVu Sans', sans-serif\">",
                EscapeXml(title), "</text>\n", body, "</svg>\n");
}

}  // namespace cistern
