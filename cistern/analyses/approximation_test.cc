#include "cistern/analyses/approximation.h"

#include <ATen/ATen.h>

#include "cistern/analyses/testing_analyses.h"

namespace cistern {
namespace {

using testing::Cell;
using testing::ContextOf;
using testing::ExpectContains;
using testing::Thrown;

double Of(const Figures& f, const std::string& mechanism, int64_t size, const std::string& column) {
  const Figures::Table& table = f.table("means");
  for (size_t i = 0; i < table.rows.size(); ++i) {
    if (Cell(table, i, "mechanism") == mechanism && Cell(table, i, "size") == size)
      return Cell(table, i, column).get<double>();
  }
  ADD_FAILURE() << mechanism << " " << size;
  return std::nan("");
}

ApproximationAnalysis::Options Sizes(std::vector<int64_t> sizes) {
  ApproximationAnalysis::Options o;
  o.drawn_size = sizes[0];
  o.sizes = std::move(sizes);
  return o;
}

// A window by plain loops in double over the captured queries and keys, and the cases that are
// exact: a window of all tokens, full rank.
TEST(Approximation, WindowByPlainLoopsAndExactCases) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"softmax", "softmax"}));
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(2, 12, {12, 12});
  const auto layers = RunLayers(*model, batch);
  ApproximationAnalysis analysis(Sizes({3, 12}), ContextOf(model));
  analysis.Add(batch, layers);
  const Figures f = analysis.Report();
  EXPECT_LT(Of(f, "window", 12, "rows"), 1e-9);
  EXPECT_LT(Of(f, "window", 12, "outputs"), 1e-9);
  EXPECT_LT(Of(f, "best of rank k", 12, "rows"), 1e-9);
  double want = 0, outputs = 0;
  for (const CapturedLayer& l : layers) {
    for (int64_t row = 0; row < 2; ++row) {
      const auto exact = testing::SoftmaxOf(l, row);
      for (int64_t h = 0; h < 2; ++h) {
        double missed = 0, size = 0, out_missed = 0, out_size = 0;
        for (int64_t t = 0; t < 12; ++t) {
          const std::vector<double>& p = exact[size_t(h)][size_t(t)];
          double inside = 0;
          for (int64_t s = std::max<int64_t>(0, t - 2); s <= t; ++s) inside += p[size_t(s)];
          std::vector<double> difference(12, 0);
          for (int64_t s = 0; s < 12; ++s) {
            const double w = s <= t && s > t - 3 ? p[size_t(s)] / inside : 0;
            difference[size_t(s)] = w - p[size_t(s)];
            missed += difference[size_t(s)] * difference[size_t(s)];
            size += p[size_t(s)] * p[size_t(s)];
          }
          for (int64_t c = 0; c < 6; ++c) {
            double d = 0, y = 0;
            for (int64_t s = 0; s < 12; ++s) {
              const double v = l.x[2][row][h][s][c].item<double>();
              d += difference[size_t(s)] * v, y += p[size_t(s)] * v;
            }
            out_missed += d * d, out_size += y * y;
          }
        }
        want += std::sqrt(missed / size) / 8;
        outputs += std::sqrt(out_missed / out_size) / 8;
      }
    }
  }
  EXPECT_NEAR(Of(f, "window", 3, "rows"), want, 1e-9);
  EXPECT_NEAR(Of(f, "window", 3, "outputs"), outputs, 1e-9);
  // Nothing of rank 3 is nearer than the best of rank 3.
  for (const char* name : {"abc_compressive", "abc_random"})
    EXPECT_GE(Of(f, name, 3, "rows"), Of(f, "best of rank k", 3, "rows") - 1e-9) << name;
  EXPECT_EQ(f.table("errors").rows.size() % 4, 0u);  // two layers, two heads
}

// Zero queries: attention is a mean, of rank 1, which every mean over all tokens gives.
TEST(Approximation, AMeanHasRankOne) {
  ModelConfig c;
  c.kind = "encoder_classifier";
  c.vocab_size = 23, c.classes = 2, c.dim = 12, c.heads = 2, c.layers = 1, c.max_length = 64;
  c.attention = {"softmax"};
  const auto model = testing::Make<EncoderClassifier>(c);
  const at::NoGradGuard guard;
  for (const auto& p : model->named_parameters()) {
    if (p.key().find("q_proj") != std::string::npos) p.value().zero_();
  }
  const Batch batch = testing::IdsBatch(2, 16, {16, 16});
  ApproximationAnalysis::Options options = Sizes({1, 4, 8});
  ApproximationAnalysis analysis(options, ContextOf(model));
  analysis.Add(batch, RunLayers(*model, batch));
  const Figures f = analysis.Report();
  EXPECT_NEAR(Cell(f.table("spectra"), 0, "effective rank").get<double>(), 1, 1e-6);
  EXPECT_EQ(Cell(f.table("spectra"), 0, "values with 90 % of the energy"), 1);
  EXPECT_LT(Of(f, "best of rank k", 1, "rows"), 1e-9);
  EXPECT_LT(Of(f, "nystrom", 4, "rows"), 1e-6);
  EXPECT_LT(Of(f, "abc_compressive", 4, "rows"), 1e-9);
}

// More random features are nearer to softmax; the bound is there where it says something.
TEST(Approximation, MoreFeaturesAreNearer) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"softmax"}));
  const at::NoGradGuard guard;
  for (const auto& p : model->named_parameters()) {
    if (p.key().find("q_proj") != std::string::npos) p.value().mul_(0.2);
  }
  const Batch batch = testing::IdsBatch(2, 20);
  ApproximationAnalysis::Options options = Sizes({4, 2048});
  options.mechanisms = {"performer"};
  ApproximationAnalysis analysis(options, ContextOf(model));
  analysis.Add(batch, RunLayers(*model, batch));
  const Figures f = analysis.Report();
  EXPECT_LT(Of(f, "performer", 2048, "rows"), 0.5 * Of(f, "performer", 4, "rows"));
  HtmlReport page("x");
  f.AddTo(page);
  ExpectContains(page.Html(), {"Linformer&#39;s bound", "exact softmax", "performer, 4"});
}

// A row that is too short for the largest size is in none of the means: at the smaller sizes alone
// it would bend the curve.
TEST(Approximation, EverySizeIsOfTheSameRows) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"softmax"}));
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(3, 12, {5, 12, 11}), rows = batch.Rows(1, 3);
  const ApproximationAnalysis::Options options = Sizes({2, 8, 16});
  ApproximationAnalysis all(options, ContextOf(model)), long_ones(options, ContextOf(model)),
      first(options, ContextOf(model)), rest(options, ContextOf(model));
  all.Add(batch, RunLayers(*model, batch));
  long_ones.Add(rows, RunLayers(*model, rows));
  const Batch begin = batch.Rows(0, 1);
  first.Add(begin, RunLayers(*model, begin));
  rest.Add(rows, RunLayers(*model, rows));
  first.Merge(rest);
  const Figures want = long_ones.Report();
  EXPECT_EQ(want.Plain().find("left out"), std::string::npos);
  for (const Figures& f : {all.Report(), first.Report()}) {
    EXPECT_EQ(Cell(f.table("spectra"), 0, "rows"), 2);
    ExpectContains(f.Plain(), {"layer 1: 1 of 3 rows are left out", "shorter than 8 tokens"});
    for (const char* name : {"window", "linformer", "performer", "best of rank k"})
      EXPECT_NEAR(Of(f, name, 2, "rows"), Of(want, name, 2, "rows"), 1e-9) << name;
  }
}

TEST(Approximation, OneLongRowLeavesOutNoOther) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"softmax"}));
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(3, 12, {5, 12, 4});
  ApproximationAnalysis::Options options = Sizes({2, 8});
  options.mechanisms = {"window", "performer"};
  ApproximationAnalysis analysis(options, ContextOf(model));
  analysis.Add(batch, RunLayers(*model, batch));
  const Figures f = analysis.Report();
  EXPECT_EQ(f.Plain().find("left out"), std::string::npos);
  EXPECT_EQ(Cell(f.table("spectra"), 0, "rows"), 3);
  std::string sizes;
  for (size_t i = 0; i < f.table("means").rows.size(); ++i)
    sizes += StrCat(Cell(f.table("means"), i, "mechanism").get<std::string>(), " ",
                    Cell(f.table("means"), i, "size").get<int64_t>(), ";");
  EXPECT_EQ(sizes, "best of rank k 2;performer 2;performer 8;window 2;");
}

TEST(Approximation, PartsMergeAndRefusals) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"softmax", "latte"}));
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(3, 9);
  const ApproximationAnalysis::Options options = Sizes({2, 4});
  ApproximationAnalysis whole(options, ContextOf(model)), first(options, ContextOf(model)),
      second(options, ContextOf(model));
  whole.Add(batch, RunLayers(*model, batch));
  const Batch begin = batch.Rows(0, 1), end = batch.Rows(1, 3);
  first.Add(begin, RunLayers(*model, begin));
  second.Add(end, RunLayers(*model, end));
  first.Merge(second);
  const Figures a = whole.Report(), b = first.Report();
  for (const char* name : {"window", "linformer", "rfa"})
    EXPECT_NEAR(Of(a, name, 4, "rows"), Of(b, name, 4, "rows"), 1e-9) << name;
  ExpectContains(FindAnalysis("approximation").refusal(testing::SmallLm({"latte"})),
                 {"exact softmax", "model.attention=softmax"});
  ApproximationAnalysis::Options learned = options;
  learned.mechanisms = {"abc_mlp"};
  ApproximationAnalysis refused(learned, ContextOf(model));
  ExpectContains(Thrown([&] { refused.Add(batch, RunLayers(*model, batch)); }),
                 {"abc_mlp", "learned maps of its own"});
  ApproximationAnalysis::Options other = options;
  other.drawn_size = 3;
  ExpectContains(Thrown([&] { ApproximationAnalysis(other, ContextOf(model)); }), {"drawn_size=3"});
  ApproximationAnalysis::Options beyond = options;
  beyond.head = 9;
  ApproximationAnalysis none(beyond, ContextOf(model));
  ExpectContains(Thrown([&] { none.Add(batch, RunLayers(*model, batch)); }),
                 {"approximation.head=9", "layer 1"});
}

TEST(Figures, PicturesSideBySide) {
  HeatMap map;
  map.title = "one", map.rows = 2, map.columns = 2, map.values = {1, 2, 3, 4}, map.width = 300;
  const std::string svg = RenderSvg(map), three = SideBySide({svg, svg, svg}, 2);
  ExpectContains(three, {"width=\"600\"", "x=\"300\" y=\"0\"", "x=\"0\" y=\""});
}

}  // namespace
}  // namespace cistern
