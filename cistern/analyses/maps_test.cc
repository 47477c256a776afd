#include "cistern/analyses/maps.h"

#include "cistern/analyses/implied_weights.h"
#include "cistern/analyses/testing_analyses.h"
#include "cistern/analyses/weighted_words.h"

namespace cistern {
namespace {

using testing::Cell;
using testing::ContextOf;
using testing::ExpectContains;
using testing::Thrown;

// Entropy, its share, distance, row sums by plain loops over rows of different lengths.
TEST(Maps, NumbersArePlainLoops) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"softmax", "softmax"}));
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(3, 13, {13, 1, 7});
  const std::vector<CapturedLayer> layers = RunLayers(*model, batch);
  MapsAnalysis analysis({}, ContextOf(model));
  analysis.Add(batch, layers);
  const Figures f = analysis.Report();
  const Figures::Table& table = f.table("heads");
  ASSERT_EQ(table.rows.size(), 4u);
  for (size_t l = 0; l < 2; ++l) {
    for (size_t h = 0; h < 2; ++h) {
      double entropy = 0, share = 0, distance = 0;
      int64_t queries = 0, several = 0;
      for (int64_t row = 0; row < 3; ++row) {
        const auto head = testing::SoftmaxOf(layers[l], row)[h];
        for (int64_t t = 0; t < layers[l].RealQueries(row); ++t, ++queries) {
          double e = 0;
          for (int64_t s = 0; s <= t; ++s) {
            const double p = head[size_t(t)][size_t(s)];
            e -= p * std::log(p);
            distance += p * double(t - s);
          }
          entropy += e;
          if (t > 0) share += e / std::log(double(t + 1)), ++several;
        }
      }
      const size_t at = 2 * l + h;
      EXPECT_NEAR(Cell(table, at, "entropy").get<double>(), entropy / double(queries), 1e-10);
      EXPECT_NEAR(Cell(table, at, "share of ln(tokens)").get<double>(), share / double(several),
                  1e-10);
      EXPECT_NEAR(Cell(table, at, "distance").get<double>(), distance / double(queries), 1e-10);
      EXPECT_NEAR(Cell(table, at, "row sum").get<double>(), 1, 1e-10);
      EXPECT_EQ(Cell(table, at, "negative").get<double>(), 0);
      EXPECT_EQ(Cell(table, at, "layer"), StrCat("layer ", l + 1));
    }
  }
}

TEST(Maps, PaddingThatReadsIsNoQuery) {
  for (const char* mechanism : {"softmax", "reuse"})
    testing::ExpectPaddingThatReadsLeftOut<MapsAnalysis>(mechanism);
}

// Cases with a known answer: a window of one token is the identity, its rank is T and its entropy
// 0; zero queries see all tokens alike: a mean of rank 1 would be bidirectional.
TEST(Maps, KnownCases) {
  ModelConfig c;
  c.kind = "encoder_classifier";
  c.vocab_size = 23, c.classes = 2, c.dim = 12, c.heads = 2, c.layers = 2, c.max_length = 64;
  c.attention = {"softmax"};
  const auto model = testing::Make<EncoderClassifier>(c);
  const at::NoGradGuard guard;
  for (const auto& p : model->named_parameters()) {
    if (p.key().find("q_proj") != std::string::npos) p.value().zero_();
  }
  const Batch batch = testing::IdsBatch(2, 8, {8, 6});
  MapsAnalysis uniform({}, ContextOf(model));
  uniform.Add(batch, RunLayers(*model, batch));
  const Figures f = uniform.Report();
  EXPECT_NEAR(Cell(f.table("heads"), 0, "effective rank").get<double>(), 1, 1e-9);
  EXPECT_NEAR(Cell(f.table("heads"), 0, "share of ln(tokens)").get<double>(), 1, 1e-12);

  ModelConfig w = testing::SmallLm({"window", "window"});
  w.attention_options = Json{{"window", {{"window", 1}}}};
  const auto narrow = testing::Make<DecoderLm>(w);
  MapsAnalysis identity({}, ContextOf(narrow));
  const Batch rows = testing::IdsBatch(2, 9);
  identity.Add(rows, RunLayers(*narrow, rows));
  const Figures g = identity.Report();
  EXPECT_NEAR(Cell(g.table("heads"), 0, "effective rank").get<double>(), 9, 1e-9);
  EXPECT_NEAR(Cell(g.table("heads"), 0, "entropy").get<double>(), 0, 1e-12);
  EXPECT_NEAR(Cell(g.table("heads"), 0, "distance").get<double>(), 0, 1e-12);
}

// t2r's features may all be zero: such a query looks nowhere, and is no part of the means but for
// the row sum.
TEST(Maps, QueriesWithoutWeights) {
  ModelConfig c = testing::SmallLm({"t2r"});
  c.layers = 1;
  c.attention_options = Json{{"t2r", {{"features", 3}}}};
  const auto model = testing::Make<DecoderLm>(c);
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(2, 40, {40, 17});
  const std::vector<CapturedLayer> layers = RunLayers(*model, batch);
  MapsAnalysis analysis({}, ContextOf(model));
  analysis.Add(batch, layers);
  const Figures f = analysis.Report();
  int64_t without = 0;
  for (int64_t h = 0; h < 2; ++h) {
    double entropy = 0, share = 0, distance = 0, total = 0;
    int64_t queries = 0, looking = 0, several = 0;
    for (int64_t row = 0; row < 2; ++row) {
      const at::Tensor all = ImpliedWeights(layers[0], row).All().to(at::kDouble).contiguous();
      const auto w = all.accessor<double, 3>();
      for (int64_t t = 0; t < layers[0].RealQueries(row); ++t, ++queries) {
        double sum = 0, e = 0, far = 0;
        for (int64_t s = 0; s <= t; ++s) sum += w[h][t][s];
        total += sum;
        if (sum == 0) continue;
        ++looking;
        for (int64_t s = 0; s <= t; ++s) {
          const double p = w[h][t][s] / sum;
          if (p > 0) e -= p * std::log(p);
          far += p * double(t - s);
        }
        entropy += e, distance += far;
        if (t > 0) share += e / std::log(double(t + 1)), ++several;
      }
    }
    ASSERT_GT(looking, 0);
    without += queries - looking;
    const Figures::Table& table = f.table("heads");
    const auto at = size_t(h);
    EXPECT_NEAR(Cell(table, at, "entropy").get<double>(), entropy / double(looking), 1e-9);
    EXPECT_NEAR(Cell(table, at, "share of ln(tokens)").get<double>(), share / double(several),
                1e-9);
    EXPECT_NEAR(Cell(table, at, "distance").get<double>(), distance / double(looking), 1e-9);
    EXPECT_NEAR(Cell(table, at, "row sum").get<double>(), total / double(queries), 1e-9);
    EXPECT_EQ(Cell(table, at, "negative").get<double>(), 0);
  }
  ASSERT_GT(without, 0);
  EXPECT_EQ(f.facts().value("queries_without_weights", int64_t{0}), without);
}

// 300 tokens: more than one block of columns, and a picture of means of two.
TEST(Maps, LongRowsAndParts) {
  ModelConfig c = testing::SmallLm({"latte", "softmax"});
  c.max_length = 512;
  const auto model = testing::Make<DecoderLm>(c);
  const at::NoGradGuard guard;
  AnalysisContext context = ContextOf(model);
  context.token = [](int64_t id) { return StrCat(" w", id); };
  const Batch batch = testing::IdsBatch(2, 300);
  MapsAnalysis::Options options;
  options.row = 1, options.rank_rows = 0;
  MapsAnalysis whole(options, context), first(options, context), second(options, context);
  whole.Add(batch, RunLayers(*model, batch));
  const Batch begin = batch.Rows(0, 1), end = batch.Rows(1, 2);
  first.Add(begin, RunLayers(*model, begin));
  second.Add(end, RunLayers(*model, end));
  first.Merge(second);
  const Figures a = whole.Report(), b = first.Report();
  for (size_t i = 0; i < 4; ++i) {
    for (const char* column : {"entropy", "distance", "row sum"})
      EXPECT_NEAR(Cell(a.table("heads"), i, column).get<double>(),
                  Cell(b.table("heads"), i, column).get<double>(), 1e-9)
          << column;
    EXPECT_TRUE(Cell(a.table("heads"), i, "effective rank").is_null());
  }
  HtmlReport page("x");
  a.AddTo(page);
  ExpectContains(page.Html(), {"query / 2", "what token 300 attends to", "> w", "data:image/png"});
  // The row that was asked for is drawn: another one has another picture.
  const auto picture = [](const Figures& f) {
    HtmlReport some("x");
    f.AddTo(some);
    const std::string html = some.Html();
    return html.substr(html.find("data:image/png"), 2000);
  };
  options.row = 0;
  MapsAnalysis other(options, context);
  other.Add(batch, RunLayers(*model, batch));
  EXPECT_NE(picture(other.Report()), picture(a));
}

// The layers of each form have a line, and its numbers.
TEST(Maps, FormsHaveLinesOfTheirOwn) {
  ModelConfig c = testing::SmallLm({"softmax"});
  c.kind = "encoder_decoder", c.layers = 2;
  c.encoder.attention = c.decoder.attention = c.cross.attention = {"softmax"};
  const auto model = testing::Make<Model>(c);
  const at::NoGradGuard guard;
  Batch batch = testing::IdsBatch(1, 7);
  batch.Add("source", testing::Ids(1, 9));
  MapsAnalysis analysis({}, ContextOf(model));
  analysis.Add(batch, RunLayers(*model, batch));
  HtmlReport page("x");
  analysis.Report().AddTo(page);
  const std::string html = page.Html(), entropy = html.substr(html.find("Entropy by layer")),
                    chart = entropy.substr(0, entropy.find("</svg>"));
  ExpectContains(chart, {">bidirectional<", ">causal<", ">cross<", ">2<"});
  EXPECT_EQ(chart.find(">3<"), std::string::npos) << chart;
  EXPECT_EQ(chart.find(">6<"), std::string::npos) << chart;
}

TEST(Maps, OptionsThatDoNotFit) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"softmax", "softmax"}));
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(1, 5);
  const auto layers = RunLayers(*model, batch);
  MapsAnalysis::Options third, fifth;
  third.layers = {3}, fifth.heads = {5};
  MapsAnalysis layer(third, ContextOf(model)), head(fifth, ContextOf(model));
  ExpectContains(Thrown([&] { layer.Add(batch, layers); }), {"maps.layers=3", "2 layers"});
  ExpectContains(Thrown([&] { head.Add(batch, layers); }), {"maps.heads=5", "2 heads"});
  ModelConfig towers;
  towers.kind = "two_tower";
  ExpectContains(FindAnalysis("maps").refusal(towers), {"two texts"});
}

TEST(WeightedWords, EscapesAndMarks) {
  const std::string svg =
      RenderWords("a<b", {{" sea&", 1}, {"\n", 0.5}, {"x", -0.25}, {"y", NAN}}, 2);
  ExpectContains(svg, {"a&lt;b", "> sea&amp;<", "·", "#D55E00", "stroke=\"#D55E00\"", "4: -"});
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

}  // namespace
}  // namespace cistern
