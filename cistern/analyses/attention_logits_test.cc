#include "cistern/analyses/attention_logits.h"

#include <cmath>
#include <limits>

#include "cistern/analyses/memory.h"
#include "cistern/analyses/testing_analyses.h"

namespace cistern {
namespace {

using testing::Cell;
using testing::Classifier;
using testing::ContextOf;
using testing::ExpectContains;

TEST(AttentionLogits, FiguresByPlainLoops) {
  const double inf = std::numeric_limits<double>::infinity();
  at::Tensor x = testing::Normal({2, 3, 5});
  x[0][0][4] = -inf, x[0][0][2] = -inf;
  x[1][2].fill_(-inf);
  x[1][2][0] = 3;  // sees one key: does not count
  double entropy = 0, variance = 0;
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t t = 0; t < 3; ++t) {
      std::vector<double> seen;
      for (int64_t s = 0; s < 5; ++s) {
        if (const double l = x[h][t][s].item<double>(); std::isfinite(l)) seen.push_back(l);
      }
      if (seen.size() < 2) continue;
      double sum = 0, mean = 0, squares = 0, e = 0;
      for (const double l : seen) sum += std::exp(l), mean += l / double(seen.size());
      for (const double l : seen) {
        squares += (l - mean) * (l - mean) / double(seen.size());
        e -= std::exp(l) / sum * std::log(std::exp(l) / sum) / std::log(double(seen.size()));
      }
      entropy += e / 5, variance += squares / 5;  // 5 queries count
    }
  }
  const LogitFigures f = FiguresOf(x);
  EXPECT_NEAR(f.entropy, entropy, 1e-12);
  EXPECT_NEAR(f.variance, variance, 1e-12);
  // Uniform: entropy 1, variance 0; one key of ln-weight far above: entropy 0.
  EXPECT_NEAR(FiguresOf(at::full({1, 2, 7}, 2.0, at::kDouble)).entropy, 1, 1e-12);
  EXPECT_EQ(FiguresOf(at::full({1, 2, 7}, 2.0, at::kDouble)).variance, 0);
  at::Tensor one = at::zeros({1, 1, 4}, at::kDouble);
  one[0][0][1] = 800;
  EXPECT_NEAR(FiguresOf(one).entropy, 0, 1e-12);
  EXPECT_NEAR(FiguresOf(one).variance, 800.0 * 800 * 3 / 16, 1e-6);
}

// Packing's logits of every kind give what was packed (the function checks it), and variances by
// the definition.
TEST(AttentionLogits, PackingOfEveryKind) {
  const at::NoGradGuard guard;
  const std::vector<std::pair<std::string, Json>> cases = {
      {"luna", {{"slots", 5}}},
      {"luna", {{"slots", 5}, {"tie_kv", false}, {"sharing", "all"}, {"packing_heads", 1}}},
      {"set_transformer", {{"slots", 5}}},
      {"conv_luna", {{"slots", 5}, {"kernel", 4}}},
      {"conv_luna", {{"slots", 5}, {"kernel", 1}, {"temperature", "unit"}}},
      {"conv_luna", {{"slots", 5}, {"kernel", 3}, {"stride", 2}, {"temperature", "sqrt"}}},
      {"conv_luna", {{"slots", 5}, {"kernel", 3}, {"stride", 2}, {"mask", "none"}}},
      {"conv_luna", {{"slots", 5}, {"kernel", 4}, {"filter", "maxpool"}}},
      {"conv_luna", {{"slots", 5}, {"kernel", 3}, {"stride", 2}, {"filter", "maxpool"}}},
      {"conv_luna", {{"slots", 5}, {"kernel", 4}, {"filter", "maxpool"}, {"mask", "none"}}},
      {"only_scaling", {{"slots", 5}}},
      {"only_filtering", {{"slots", 5}, {"kernel", 4}}}};
  for (const auto& entry : cases) {
    SCOPED_TRACE(StrCat(entry.first, " ", entry.second.dump()));
    const auto model = testing::Make<EncoderClassifier>(Classifier(entry.first, entry.second));
    const Batch batch = testing::IdsBatch(2, 9, {9, 6});
    const auto layers = RunLayers(*model, batch);
    for (int64_t row = 0; row < 2; ++row) {
      const auto logits = PackingLogits(layers[1], row);
      ASSERT_TRUE(logits);
      EXPECT_GT(FiguresOf(logits->values).variance, 0);
    }
  }
  // Without slots, or of another kind of packing: none.
  const auto other = testing::Make<EncoderClassifier>(Classifier("softmax", Json::object()));
  EXPECT_FALSE(PackingLogits(RunLayers(*other, testing::IdsBatch(1, 5, {5}))[0], 0));
}

TEST(AttentionLogits, SoftmaxOfQueriesAndKeys) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"softmax"}));
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(2, 8, {8, 5});
  const auto layers = RunLayers(*model, batch);
  const auto logits = SoftmaxLogits(layers[0], 1);
  ASSERT_TRUE(logits);
  const testing::Attention want = testing::SoftmaxOf(layers[0], 1);
  const at::Tensor p = at::softmax(logits->values, 2);
  ASSERT_EQ(p.size(1), 5);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t t = 0; t < 5; ++t) {
      for (int64_t s = 0; s < 5; ++s)
        EXPECT_NEAR(p[h][t][s].item<double>(), want[size_t(h)][size_t(t)][size_t(s)], 1e-9);
    }
  }
}

// Keys that are all the same are packed uniformly by logits that do not vary, whatever the divisor.
TEST(AttentionLogits, UniformPackingAndItsDivisor) {
  const at::NoGradGuard guard;
  for (const char* temperature : {"unit", "sqrt", "learn"}) {
    SCOPED_TRACE(temperature);
    const auto model = testing::Make<EncoderClassifier>(
        Classifier("conv_luna", {{"slots", 4}, {"kernel", 1}, {"temperature", temperature}}));
    for (const auto& p : model->named_parameters()) {
      if (p.key().ends_with("core.tau")) p.value().fill_(0.7);
    }
    Batch batch = testing::IdsBatch(2, 9, {9, 6});
    MemoryAnalysis analysis({.reference = false}, ContextOf(model));
    analysis.Add(batch, RunLayers(*model, batch));
    const Figures f = analysis.Report();
    const double divisor = Cell(f.table("packing"), 0, "divisor").get<double>();
    EXPECT_NEAR(divisor,
                std::string(temperature) == "unit"   ? 1
                : std::string(temperature) == "sqrt" ? std::sqrt(6.0)
                                                     : std::exp(0.7),
                1e-6);
    EXPECT_NEAR(Cell(f.table("packing"), 0, "variance of products").get<double>(),
                Cell(f.table("packing"), 0, "variance of logits").get<double>() * divisor * divisor,
                1e-9);
    for (const auto& p : model->named_parameters()) {
      if (p.key().find("k_proj.weight") != std::string::npos) p.value().zero_();
    }
    MemoryAnalysis even({.reference = false}, ContextOf(model));
    even.Add(batch, RunLayers(*model, batch));
    const Figures g = even.Report();
    EXPECT_NEAR(Cell(g.table("packing"), 0, "entropy / ln(keys)").get<double>(), 1, 1e-9);
    EXPECT_NEAR(Cell(g.table("packing"), 0, "variance of logits").get<double>(), 0, 1e-12);
    ExpectContains(Cell(g.table("checks"), 0, "answer").get<std::string>(), {"holds"});
  }
}

// Softmax is there to be compared with; the variance of outputs by plain loops.
TEST(AttentionLogits, SoftmaxInTheMemoryAnalysis) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"softmax", "softmax"}));
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(2, 7, {7, 4});
  const auto layers = RunLayers(*model, batch);
  MemoryAnalysis analysis({}, ContextOf(model));
  analysis.Add(batch, layers);
  const Figures f = analysis.Report();
  double want = 0;
  for (int64_t row = 0; row < 2; ++row) {
    const int64_t n = row == 0 ? 7 : 4;
    double squares = 0;
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t c = 0; c < 6; ++c) {
        double mean = 0;
        for (int64_t t = 0; t < n; ++t)
          mean += layers[0].y[row][h][t][c].item<double>() / double(n);
        for (int64_t t = 0; t < n; ++t)
          squares += std::pow(layers[0].y[row][h][t][c].item<double>() - mean, 2);
      }
    }
    want += squares / double(2 * 6 * n) / 2;
  }
  ASSERT_EQ(f.table("packing").rows.size(), 4u);
  EXPECT_NEAR(Cell(f.table("packing"), 0, "variance of outputs").get<double>(), want, 1e-9);
  EXPECT_EQ(Cell(f.table("packing"), 1, "model"), "random");
  EXPECT_TRUE(f.table("slots").rows.empty());
  EXPECT_TRUE(FindAnalysis("memory").for_comparison(model->config()));
  EXPECT_FALSE(FindAnalysis("memory").for_comparison(testing::SmallLm({"softmax", "abc_mlp"})));
}

MemorySummary Arm(const std::string& label, const std::string& mechanism, const Json& options,
                  double result, double entropy, double rank, double products, double output) {
  MemorySummary m;
  m.label = label, m.mechanism = mechanism, m.options = options;
  m.softmax = mechanism.empty();
  m.result = {{"label", "accuracy"}, {"value", result}, {"steps", {1, 2}}, {"values", {1, result}}};
  m.trained.entropy.Add(entropy), m.trained.products.Add(products), m.random.products.Add(products);
  m.trained.tokens.Add(entropy), m.random.output.Add(output);
  if (!mechanism.empty()) {
    m.trained.rank.Add(rank), m.trained.cosine.Add(1 - rank), m.trained.unique.Add(rank);
    m.random.rank.Add(0.9), m.random.cosine.Add(0.1), m.random.unique.Add(0.9);
  }
  return m;
}

std::string AnswerTo(const Figures& f, const std::string& claim) {
  const Figures::Table& t = f.table("checks");
  for (size_t i = 0; i < t.rows.size(); ++i) {
    if (Cell(t, i, "claim").get<std::string>().find(claim) != std::string::npos)
      return Cell(t, i, "answer").get<std::string>();
  }
  ADD_FAILURE() << "no claim " << claim;
  return "";
}

TEST(MemoryClaims, ArmsHaveAnswers) {
  const MemorySummary luna = Arm("luna", "luna", Json::object(), 30, 0.97, 0.2, 0.1, 0.01),
                      softmax = Arm("softmax", "", Json::object(), 40, 0.5, 0, 2.0, 0.3);
  const auto arm = [](const std::string& label, const std::string& temperature, int kernel,
                      double result, double output) {
    return Arm(label, "conv_luna", {{"temperature", temperature}, {"kernel", kernel}}, result, 0.6,
               0.5, 0.2, output);
  };
  const Figures f =
      CompareMemories({luna, softmax, arm("s", "sqrt", 1, 30, 0.01), arm("u", "unit", 1, 36, 0.2),
                       arm("l", "learn", 1, 37, 0.2), arm("uf", "unit", 4, 38, 0.2)});
  EXPECT_EQ(AnswerTo(f, "luna: training makes the slots alike"), "holds");
  EXPECT_EQ(AnswerTo(f, "luna: packing is nearly uniform"), "holds");
  EXPECT_EQ(AnswerTo(f, "s: packing is nearly uniform"), "does not hold");
  EXPECT_EQ(f.Plain().find("u: packing is nearly uniform"), std::string::npos);  // the remedy
  EXPECT_EQ(AnswerTo(f, "more entropy than the attention of a vanilla"), "holds");
  EXPECT_EQ(AnswerTo(f, "before training"), "holds");
  EXPECT_EQ(AnswerTo(f, "a divisor of 1 gives outputs more variance"), "holds");
  EXPECT_EQ(AnswerTo(f, "start matters more than its training"), "holds");  // 6 against 1
  EXPECT_EQ(AnswerTo(f, "slots collapse in Luna"), "holds");
  const Figures::Table& effects = f.table("effects");
  ASSERT_EQ(effects.rows.size(), 3u);
  EXPECT_NEAR(Cell(effects, 0, "result").get<double>(), 6, 1e-12);
  EXPECT_EQ(f.table("arms").rows.size(), 6u);
  ExpectContains(f.Plain(), {"Does P000's explanation hold"});
  // What the remedy does to packing is no evidence about packing without it.
  MemorySummary cured =
      Arm("cured", "conv_luna", {{"temperature", "learn"}, {"kernel", 4}}, 38, 0, 0.9, 9.0, 0.2);
  EXPECT_EQ(AnswerTo(CompareMemories({luna, softmax, cured, cured, cured}), "a vanilla"), "holds");
  // A metric of which less is better: what it takes away is what is gained.
  MemorySummary s = arm("s", "sqrt", 1, 3.0, 0.1), u = arm("u", "unit", 1, 2.9, 0.1),
                l = arm("l", "learn", 1, 2.5, 0.1);
  for (MemorySummary* m : {&s, &u, &l}) m->result["lower_is_better"] = true;
  EXPECT_EQ(AnswerTo(CompareMemories({s, u, l}), "start matters more"), "does not hold");
  ExpectContains(AnswerTo(CompareMemories({s, u}), "start matters more"), {"cannot be said"});
  ExpectContains(AnswerTo(CompareMemories({luna, s}), "vanilla"), {"--beside"});
}

// Arms that differ in something besides say nothing of the option.
TEST(MemoryClaims, EffectsAreOfOneOptionAlone) {
  const auto arm = [](const std::string& mechanism, const Json& options) {
    return Arm("an arm", mechanism, options, 30, 0.6, 0.5, 0.2, 0.1);
  };
  const auto effects = [](const std::vector<MemorySummary>& models) -> size_t {
    const Figures f = CompareMemories(models);
    for (const Figures::Table& t : f.tables()) {
      if (t.name == "effects") return t.rows.size();
    }
    return 0;
  };
  MemorySummary root = arm("conv_luna", {{"temperature", "sqrt"}, {"kernel", 4}}),
                unit = arm("conv_luna", {{"kernel", 4}, {"temperature", "unit"}});
  EXPECT_EQ(effects({root, unit}), 1u);
  for (const Json& other : {Json{{"slots", 256}}, Json{{"stride", 4}}, Json{{"filter", "maxpool"}},
                            Json{{"kernel", 5}}, Json{{"values", "separate"}}}) {
    MemorySummary changed = unit;
    changed.options.update(other);
    EXPECT_EQ(effects({root, changed}), 0u) << other;
  }
  // Said or not, a default is the same; so are the ablations, which are ConvLuna by other names.
  MemorySummary said = unit;
  said.options.update({{"stride", 1}, {"filter", "conv"}});
  EXPECT_EQ(effects({root, said}), 1u);
  EXPECT_EQ(effects({arm("only_filtering", {{"kernel", 4}}), said}), 1u);
  EXPECT_EQ(effects({arm("only_scaling", {{"temperature", "unit"}}), said}), 1u);
  EXPECT_EQ(effects({arm("only_scaling", {{"temperature", "sqrt"}}), said}), 0u);
  // Of models: another width, another second layer.
  MemorySummary wide = unit;
  wide.config["dim"] = 64;
  EXPECT_EQ(effects({root, wide}), 0u);
  for (MemorySummary* m : {&root, &unit})
    m->layers = {{m->mechanism, m->options}, {m->mechanism, m->options}};
  EXPECT_EQ(effects({root, unit}), 1u);
  unit.layers[1] = {"luna", Json::object()};
  EXPECT_EQ(effects({root, unit}), 0u);
}

// The models themselves are compared.
TEST(MemoryClaims, EffectsOfModels) {
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(1, 6, {6});
  std::vector<std::shared_ptr<EncoderClassifier>> models;
  std::vector<std::unique_ptr<MemoryAnalysis>> analyses;
  for (const auto& [temperature, ffn] : {std::pair("sqrt", 48), {"unit", 48}, {"learn", 24}}) {
    ModelConfig c = testing::Classifier(
        "conv_luna", {{"slots", 3}, {"kernel", 1}, {"temperature", temperature}});
    c.ffn_dim = ffn;
    models.push_back(testing::Make<EncoderClassifier>(c));
    MemoryAnalysis::Options options;
    options.reference = false;
    analyses.push_back(
        std::make_unique<MemoryAnalysis>(options, testing::ContextOf(models.back())));
    analyses.back()->Add(batch, RunLayers(*models.back(), batch));
  }
  std::vector<ComparedModel> compared;
  for (size_t i = 0; i < models.size(); ++i)
    compared.push_back({StrCat(i), analyses[i].get(), &models[i]->config(), Json::object()});
  const Figures f = FindAnalysis("memory").compare(compared);
  ASSERT_EQ(f.table("effects").rows.size(), 1u);
  EXPECT_EQ(Cell(f.table("effects"), 0, "from"), "0");
  EXPECT_EQ(Cell(f.table("effects"), 0, "to"), "1");
}

}  // namespace
}  // namespace cistern
