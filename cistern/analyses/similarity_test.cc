#include "cistern/analyses/similarity.h"

#include <algorithm>
#include <cmath>

#include "cistern/analyses/implied_weights.h"
#include "cistern/analyses/reuse_plan.h"
#include "cistern/analyses/testing_analyses.h"

namespace cistern {
namespace {

using testing::Attention;
using testing::ContextOf;
using testing::ExpectContains;
using testing::Thrown;

ModelConfig SoftmaxLm(int64_t layers) {
  return testing::SmallLm(std::vector<std::string>(size_t(layers), "softmax"));
}

// Spec 5 by plain loops, in double.
std::vector<double> PlainSimilarity(Model& model, const Batch& batch) {
  const at::NoGradGuard guard;
  const std::vector<CapturedLayer> layers = RunLayers(model, batch);
  const size_t per_layer = 2, count = per_layer * layers.size();
  std::vector<double> mean(count * count, 0);
  for (int64_t row = 0; row < batch.rows; ++row) {
    std::vector<std::vector<std::vector<double>>> heads;  // [N][T][S]
    for (const CapturedLayer& l : layers) {
      for (const auto& head : testing::SoftmaxOf(l, row)) heads.push_back(head);
    }
    const auto real = size_t(layers[0].RealQueries(row));
    for (size_t a = 0; a < count; ++a) {
      for (size_t b = 0; b < count; ++b) {
        double sum = 0;
        for (size_t t = 0; t < real; ++t) {
          double distance = 0;
          for (size_t s = 0; s < heads[a][t].size(); ++s)
            distance += std::abs(heads[a][t][s] - heads[b][t][s]);
          sum += 0.5 * distance;
        }
        mean[a * count + b] += (1 - sum / double(real)) / double(batch.rows);
      }
    }
  }
  return mean;
}

void ExpectNear(const std::vector<double>& got, const std::vector<double>& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << i;
}

TEST(Similarity, PlainDoubleLoopsOverPaddedRows) {
  const auto model = testing::Make<DecoderLm>(SoftmaxLm(3));
  // 70 tokens: more than one block of columns.
  const Batch batch = testing::IdsBatch(3, 70, {70, 11, 66});
  SimilarityAnalysis analysis({}, ContextOf(model));
  {
    const at::NoGradGuard guard;
    analysis.Add(batch, RunLayers(*model, batch));
  }
  ExpectNear(analysis.Heads(), PlainSimilarity(*model, batch), 2e-6);
}

TEST(Similarity, PaddingThatReadsIsNoQuery) {
  for (const char* mechanism : {"softmax", "reuse"})
    testing::ExpectPaddingThatReadsLeftOut<SimilarityAnalysis>(mechanism);
}

TEST(Similarity, BestMatchIsTakenAfterTheMeanOverExamples) {
  const auto model = testing::Make<DecoderLm>(SoftmaxLm(2));
  const at::NoGradGuard guard;
  SimilarityAnalysis analysis({}, ContextOf(model));
  const Batch batch = testing::IdsBatch(4, 9);
  analysis.Add(batch, RunLayers(*model, batch));
  const std::vector<double> heads = PlainSimilarity(*model, batch);
  const auto best = analysis.BestMatches(analysis.Heads());
  for (size_t h = 0; h < 2; ++h) {
    EXPECT_NEAR(best[0][h][1], std::max(heads[h * 4 + 2], heads[h * 4 + 3]), 2e-6);
    EXPECT_NEAR(best[1][h][0], std::max(heads[(h + 2) * 4], heads[(h + 2) * 4 + 1]), 2e-6);
    EXPECT_DOUBLE_EQ(best[0][h][0], 1);
  }
}

// Two layers that are one (tied) on the same stream would attend alike: here the queries and keys
// are zero, so that each head is uniform.
TEST(Similarity, IdenticalHeadsGiveOne) {
  const auto model = testing::Make<DecoderLm>(SoftmaxLm(3));
  const at::NoGradGuard guard;
  for (const auto& p : model->named_parameters()) {
    if (p.key().find("q_proj") != std::string::npos) p.value().zero_();
  }
  SimilarityAnalysis analysis({}, ContextOf(model));
  const Batch batch = testing::IdsBatch(2, 12);
  analysis.Add(batch, RunLayers(*model, batch));
  for (const double s : analysis.Heads()) EXPECT_NEAR(s, 1, 1e-6);
  const Figures f = analysis.Report();
  EXPECT_EQ(f.facts()["rows"], 2);
  // All heads may be copied: all layers but the first.
  EXPECT_EQ(f.facts()["reuse"]["placement"], "full");
  EXPECT_EQ(f.facts()["reuse_copied_heads"], 4);
}

// A window of one token against one of all: 1 - mean over t of (1 - 1/(t+1)).
TEST(Similarity, WindowOfOneAgainstUniform) {
  ModelConfig c = testing::SmallLm({"window", "softmax"});
  c.attention_options = Json{{"window", {{"window", 1}}}};
  const auto model = testing::Make<DecoderLm>(c);
  const at::NoGradGuard guard;
  for (const auto& p : model->named_parameters()) {
    if (p.key().find("q_proj") != std::string::npos) p.value().zero_();
  }
  SimilarityAnalysis analysis({}, ContextOf(model));
  const Batch batch = testing::IdsBatch(1, 10);
  analysis.Add(batch, RunLayers(*model, batch));
  double want = 0;
  for (int t = 0; t < 10; ++t) want += 1.0 / (t + 1) / 10;
  const std::vector<double> heads = analysis.Heads();
  EXPECT_NEAR(heads[0 * 4 + 2], want, 1e-6);
  EXPECT_NEAR(heads[3 * 4 + 1], want, 1e-6);
  EXPECT_NEAR(heads[0 * 4 + 1], 1, 1e-6);
}

TEST(Similarity, PartsMerge) {
  const auto model = testing::Make<DecoderLm>(SoftmaxLm(2));
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(5, 9);
  SimilarityAnalysis whole({}, ContextOf(model)), first({}, ContextOf(model)),
      second({}, ContextOf(model)), empty({}, ContextOf(model));
  whole.Add(batch, RunLayers(*model, batch));
  const Batch begin = batch.Rows(0, 2), end = batch.Rows(2, 5);
  first.Add(begin, RunLayers(*model, begin));
  second.Add(end, RunLayers(*model, end));
  first.Merge(second);
  empty.Merge(first);
  ExpectNear(empty.Heads(), whole.Heads(), 1e-6);
  const Figures f = whole.Report();
  const Figures::Table& enough = f.table("examples");
  ASSERT_EQ(enough.rows.size(), 3u);  // after 1, 2 and 4 of 5
  EXPECT_EQ(enough.rows[2][0], 4);
  // After the first row alone: the largest change of a cell of the layers' map.
  SimilarityAnalysis one({}, ContextOf(model));
  const Batch row = batch.Rows(0, 1);
  one.Add(row, RunLayers(*model, row));
  const auto cell = [](const SimilarityAnalysis& a, size_t l, size_t to) {
    const auto best = a.BestMatches(a.Heads());
    return std::max(best[l][0][to], best[l][1][to]);
  };
  double largest = 0;
  for (size_t l = 0; l < 2; ++l)
    largest = std::max(largest, std::abs(cell(one, l, 1 - l) - cell(whole, l, 1 - l)));
  EXPECT_GT(largest, 1e-4);
  EXPECT_NEAR(enough.rows[0][1].get<double>(), largest, 1e-6);
}

TEST(Similarity, WhatIsNoProbabilityIsRefusedOrNormalised) {
  ModelConfig c = testing::SmallLm({"linear", "linear"});
  c.attention_options = Json{{"linear", {{"denominator", false}}}};
  const auto model = testing::Make<DecoderLm>(c);
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(2, 9);
  const auto layers = RunLayers(*model, batch);
  SimilarityAnalysis refuses({}, ContextOf(model));
  ExpectContains(Thrown([&] { refuses.Add(batch, layers); }),
                 {"no probabilities", "similarity.normalise=true"});
  SimilarityAnalysis takes({.normalise = true}, ContextOf(model));
  takes.Add(batch, layers);
  for (const double s : takes.Heads()) {
    EXPECT_GE(s, 0);
    EXPECT_LE(s, 1 + 1e-6);
  }
}

// t2r's features may all be zero. Two heads are compared in the queries that have weights in both,
// by plain loops.
TEST(Similarity, QueriesWithoutWeights) {
  ModelConfig c = testing::SmallLm({"t2r", "t2r"});
  c.attention_options = Json{{"t2r", {{"features", 2}}}};
  const auto model = testing::Make<DecoderLm>(c);
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(2, 60, {60, 40});
  const std::vector<CapturedLayer> layers = RunLayers(*model, batch);
  std::vector<double> sums(16, 0), counts(16, 0);
  int64_t without = 0;
  for (int64_t row = 0; row < 2; ++row) {
    const int64_t real = layers[0].RealQueries(row);
    std::vector<at::Tensor> heads;  // [T,S] each
    for (const CapturedLayer& l : layers) {
      const at::Tensor all = ImpliedWeights(l, row).All().to(at::kDouble).abs();
      for (int64_t h = 0; h < 2; ++h) heads.push_back(all[h].narrow(0, 0, real));
    }
    for (size_t a = 0; a < 4; ++a) {
      without += (heads[a].sum(1) == 0).sum().item<int64_t>();
      for (size_t b = 0; b < 4; ++b) {
        double distance = 0;
        int64_t queries = 0;
        for (int64_t t = 0; t < real; ++t) {
          const at::Tensor x = heads[a][t], y = heads[b][t];
          const double of_x = x.sum().item<double>(), of_y = y.sum().item<double>();
          if (of_x == 0 || of_y == 0) continue;
          ++queries;
          distance += 0.5 * (x / of_x - y / of_y).abs().sum().item<double>();
        }
        if (queries == 0) continue;
        sums[4 * a + b] += 1 - distance / double(queries), ++counts[4 * a + b];
      }
    }
  }
  ASSERT_GT(without, 0);
  SimilarityAnalysis analysis({.normalise = true}, ContextOf(model));
  analysis.Add(batch, layers);
  const std::vector<double> got = analysis.Heads();
  ASSERT_EQ(got.size(), 16u);
  int64_t compared = 0;
  for (size_t i = 0; i < 16; ++i) {
    if (counts[i] == 0) {
      EXPECT_TRUE(std::isnan(got[i])) << i;
      continue;
    }
    EXPECT_NEAR(got[i], sums[i] / counts[i], 1e-4) << i;
    compared += i / 4 != i % 4 ? 1 : 0;
  }
  EXPECT_GT(compared, 0);
  EXPECT_EQ(analysis.Report().facts()["queries_without_weights"], without);
}

TEST(Similarity, Differences) {
  const int64_t count = 5, n = 5000;
  const at::Tensor x = at::rand({count, n}, at::kFloat);
  std::vector<double> sums(count * count, 0);
  AddDifferences(x.const_data_ptr<float>(), count, n, sums.data());
  for (int64_t a = 0; a < count; ++a) {
    for (int64_t b = 0; b < count; ++b) {
      const double want = (x[a].to(at::kDouble) - x[b].to(at::kDouble)).abs().sum().item<double>();
      EXPECT_NEAR(sums[size_t(a * count + b)], want, 1e-4 * (1 + want) * 0.1);
    }
  }
}

// Four layers of two heads; similarities made up.
TEST(ReusePlan, CopiesWhatIsAlikeEnough) {
  ModelConfig c = SoftmaxLm(4);
  std::vector<std::vector<std::vector<double>>> best(
      4, std::vector<std::vector<double>>(2, std::vector<double>(4, 0.1)));
  EXPECT_EQ(RecommendReuse(best, c, 0.5, 64).copied, 0);
  // One head of layers 2 and 4 is like the layer before: alternate, K = 1, both layers.
  best[1][0][0] = 0.9, best[3][1][2] = 0.7;
  const ReuseRecommendation r = RecommendReuse(best, c, 0.5, 63);
  EXPECT_EQ(r.copied, 2);
  EXPECT_EQ(r.options, (Json{{"placement", "alternate"}, {"heads", 1}, {"layers", 2}}));
  EXPECT_DOUBLE_EQ(r.least, 0.7);
  EXPECT_EQ(RecommendReuse(best, c, 0.8, 64).copied, 1);
  // dim 12, heads of 6, ffn 48: a layer has 4 x 144 + 2 x 576 = 1,728 numbers; a copied head saves
  // 2 x 72 of them.
  EXPECT_NEAR(r.parameters_share, (4 * 1728.0 - 2 * 144) / (4 * 1728), 1e-12);
  // A token sees 32 others on average: 2 x 1,728 + 2 x 32 x 6 x (2 + 2) FLOPs a layer; a copied
  // head saves 2 x 144 + 2 x 32 x 6.
  const double layer = 2 * 1728 + 2 * 32 * 6 * 4;
  EXPECT_NEAR(r.flops_share, (4 * layer - 2 * (288 + 384)) / (4 * layer), 1e-12);
  ExpectContains(StrCat(r.settings[0], " ", r.settings[1]),
                 {"model.attention=reuse", "model.attention_options.reuse.placement=alternate"});
}

// Five layers of four heads, three of which are like the layers beside theirs. With K = 3 a layer's
// first heads are a new one and two that it has copied itself: the scores of the layer before that.
TEST(ReusePlan, CopiesOfCopiesComeFromEarlierLayers) {
  ModelConfig c = SoftmaxLm(5);
  c.dim = 16, c.heads = 4;
  std::vector<std::vector<std::vector<double>>> best(
      5, std::vector<std::vector<double>>(4, std::vector<double>(5, 0.1)));
  for (size_t l = 0; l < 5; ++l) {
    for (size_t h = 0; h < 3; ++h) {
      if (l > 0) best[l][h][l - 1] = 0.9;
      if (l < 4) best[l][h][l + 1] = 0.9;
    }
  }
  const ReuseRecommendation apart = RecommendReuse(best, c, 0.75, 64);
  EXPECT_EQ(apart.options, (Json{{"placement", "alternate"}, {"heads", 3}, {"layers", 2}}));
  EXPECT_EQ(apart.copied, 6);
  EXPECT_DOUBLE_EQ(apart.least, 0.9);
  // Layer 3 takes over one head of layer 2 and two of layer 1; layer 4 one each of layers 3, 2, 1.
  best[2][0][0] = best[2][1][0] = 0.85;
  best[3][0][0] = 0.8, best[3][1][1] = 0.85;
  const ReuseRecommendation chain = RecommendReuse(best, c, 0.75, 64);
  EXPECT_EQ(chain.options, (Json{{"placement", "partial"}, {"heads", 3}, {"layers", 3}}));
  EXPECT_EQ(chain.copied, 9);
  EXPECT_DOUBLE_EQ(chain.least, 0.8);
  best[2][1][0] = 0.1;
  EXPECT_EQ(RecommendReuse(best, c, 0.75, 64).copied, 6);
}

TEST(ReusePlan, ScoresAreDividedAsThoseOfTheModel) {
  ModelConfig c = SoftmaxLm(2);
  c.attention_options = Json{{"softmax", {{"scale", "unit"}}}};
  const std::vector<std::vector<std::vector<double>>> best(
      2, std::vector<std::vector<double>>(2, std::vector<double>(2, 0.9)));
  const ReuseRecommendation r = RecommendReuse(best, c, 0.5, 64);
  EXPECT_EQ(r.options["scale"], "unit");
  EXPECT_NE(
      std::find(r.settings.begin(), r.settings.end(), "model.attention_options.reuse.scale=unit"),
      r.settings.end());
}

TEST(ReusePlan, LayersOfOtherOptionsAreNotJoined) {
  ModelConfig c = SoftmaxLm(2);
  c.layer_options = Json{{"1", {{"softmax", {{"scale", "unit"}}}}}};
  const auto model = testing::Make<DecoderLm>(c);
  const at::NoGradGuard guard;
  SimilarityAnalysis analysis({}, ContextOf(model));
  const Batch batch = testing::IdsBatch(1, 8);
  analysis.Add(batch, RunLayers(*model, batch));
  EXPECT_FALSE(analysis.Report().facts().contains("reuse_settings"));
}

// The layers keep the model's numbers where those between them attend to nothing.
TEST(Similarity, NumbersOfLayersThatAttend) {
  ModelConfig c = testing::SmallLm(std::vector<std::string>(4, "reuse"));
  c.attention_options = Json{{"reuse", {{"placement", "skip"}, {"layers", 2}}}};
  const auto model = testing::Make<DecoderLm>(c);
  const at::NoGradGuard guard;
  SimilarityAnalysis analysis({}, ContextOf(model));
  const Batch batch = testing::IdsBatch(1, 8);
  analysis.Add(batch, RunLayers(*model, batch));
  const Figures f = analysis.Report();
  for (const std::vector<Json>& row : f.table("heads").rows) {
    for (const int column : {0, 2})
      EXPECT_TRUE(row[size_t(column)] == 1 || row[size_t(column)] == 4);
  }
  ASSERT_EQ(f.table("distance").rows.size(), 1u);
  EXPECT_EQ(f.table("distance").rows[0][0], 3);
  EXPECT_EQ(f.table("adjacent").rows.size(), 0u);
}

// Layers that are tied cannot copy otherwise than their owner, and have its parameters.
TEST(ReusePlan, TiedLayers) {
  ModelConfig c = SoftmaxLm(4);
  std::vector<std::vector<std::vector<double>>> best(
      4, std::vector<std::vector<double>>(2, std::vector<double>(4, 0.1)));
  best[1][0][0] = best[3][0][2] = 0.9;
  c.tied_layers = {0, 0, 2, 2};
  EXPECT_EQ(RecommendReuse(best, c, 0.5, 63).copied, 0);
  c.tied_layers = {0, 1, 0, 1};
  const ReuseRecommendation r = RecommendReuse(best, c, 0.5, 63);
  EXPECT_EQ(r.copied, 2);
  // As in CopiesWhatIsAlikeEnough, of two layers alone.
  EXPECT_NEAR(r.parameters_share, (2 * 1728.0 - 144) / (2 * 1728), 1e-12);
}

TEST(ReusePlan, CostOfNarrowHeadsAndGatedFeedForwards) {
  ModelConfig c = SoftmaxLm(4);
  c.qkv_dim = 6, c.activation = Activation::kGeglu;
  std::vector<std::vector<std::vector<double>>> best(
      4, std::vector<std::vector<double>>(2, std::vector<double>(4, 0.1)));
  best[1][0][0] = 0.9;
  const ReuseRecommendation r = RecommendReuse(best, c, 0.5, 63);
  ASSERT_EQ(r.copied, 1);
  // dim 12, heads of 3, ffn 48: a layer has 4 x 72 + 3 x 576 = 2,016 numbers; a copied head saves
  // 2 x 36 of them.
  EXPECT_NEAR(r.parameters_share, (4 * 2016.0 - 72) / (4 * 2016), 1e-12);
  const double layer = 2 * 2016 + 2 * 32 * 3 * 4;
  EXPECT_NEAR(r.flops_share, (4 * layer - (144 + 2 * 32 * 3)) / (4 * layer), 1e-12);
}

}  // namespace
}  // namespace cistern
