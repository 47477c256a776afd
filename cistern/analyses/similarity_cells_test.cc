#include "cistern/analyses/similarity_cells.h"

#include "cistern/analyses/similarity.h"
#include "cistern/analyses/testing_analyses.h"

namespace cistern {
namespace {

using testing::Cell;
using testing::ContextOf;
using testing::ExpectContains;
using testing::Thrown;

// Similarity falls by `step` with each layer apart, from 1.
SimilarityCell Falling(const std::string& model, bool random, int64_t layers, double step) {
  SimilarityCell c;
  c.model = model, c.random = random, c.data = random ? "random ids" : "rows";
  c.rows = 3, c.tokens = 8;
  for (int64_t l = 0; l < layers; ++l) {
    c.layers.push_back(l + 1);
    for (int64_t to = 0; to < layers; ++to) c.most.push_back(1 - step * double(std::abs(l - to)));
  }
  c.mean = c.most;
  return c;
}

Json AnswerTo(const Figures& f, const std::string& claim) {
  const Figures::Table& t = f.table("checks");
  for (size_t i = 0; i < t.rows.size(); ++i) {
    if (Cell(t, i, "claim").get<std::string>().starts_with(claim)) return Cell(t, i, "answer");
  }
  ADD_FAILURE() << "no claim " << claim;
  return {};
}

TEST(SimilarityCells, MeansAndDifferences) {
  const SimilarityCell a = Falling("a", false, 4, 0.1), b = Falling("b", false, 4, 0.2);
  EXPECT_NEAR(MeanApart(a, a.most, 1), 0.9, 1e-12);
  EXPECT_NEAR(MeanApart(a, a.most, 3), 0.7, 1e-12);
  // 6 pairs one apart, 4 two apart, 2 three apart, of 12.
  EXPECT_NEAR(MeanApart(a, a.most, 0), 1 - 0.1 * (6 + 4 * 2 + 2 * 3) / 12, 1e-12);
  EXPECT_NEAR(MapDifference(a, b), 0.1 * (6 + 4 * 2 + 2 * 3) / 12, 1e-12);
  EXPECT_THROW(MapDifference(a, Falling("c", false, 3, 0.1)), Error);
}

// Layers 1 and 4 are as like an adjacent layer as one that is further away.
TEST(SimilarityCells, ATieIsNoOtherLayersWin) {
  SimilarityCell c = Falling("a", false, 4, 0.1);
  EXPECT_EQ(MostLikeAdjacent(c), 4);
  c.most[0 * 4 + 2] = c.most[0 * 4 + 1], c.most[3 * 4 + 0] = c.most[3 * 4 + 2];
  EXPECT_EQ(MostLikeAdjacent(c), 4);
  c.most[3 * 4 + 0] += 0.01;
  EXPECT_EQ(MostLikeAdjacent(c), 3);
}

// Of layers 1, 14 and 15 two are adjacent.
TEST(SimilarityCells, LayersThatAttendToNothingLieBetween) {
  SimilarityCell c = Falling("a", false, 3, 0.1);
  c.layers = {1, 14, 15};
  EXPECT_NEAR(MeanApart(c, c.most, 1), 0.9, 1e-12);
  EXPECT_NEAR(MeanApart(c, c.most, 14), 0.8, 1e-12);
  EXPECT_EQ(MostLikeAdjacent(c), 2);
}

TEST(SimilarityCells, ChecksHaveAnswers) {
  Figures f;
  AddCells({Falling("text", false, 4, 0.1), Falling("text", true, 4, 0.11),
            Falling("random", false, 4, 0.3), Falling("random", true, 4, 0.29)},
           &f);
  EXPECT_EQ(AnswerTo(f, "adjacent layers are the most alike: text on rows"), "holds");
  EXPECT_EQ(AnswerTo(f, "similarity depends more on the model"), "holds");
  EXPECT_EQ(f.table("cells").rows.size(), 4u);
  EXPECT_EQ(Cell(f.table("cells"), 3, "data"), "random ids");
  EXPECT_NEAR(Cell(f.table("cells"), 2, "adjacent layers").get<double>(), 0.7, 1e-12);
  // The other way round: the maps follow the data.
  Figures g;
  AddCells({Falling("text", false, 4, 0.1), Falling("text", true, 4, 0.3),
            Falling("random", false, 4, 0.11), Falling("random", true, 4, 0.29)},
           &g);
  EXPECT_EQ(AnswerTo(g, "similarity depends more on the model"), "does not hold");
  // One model on both: each check says which data it is of.
  Figures both;
  AddCells({Falling("", false, 4, 0.1), Falling("", true, 4, -0.1)}, &both);
  EXPECT_EQ(AnswerTo(both, "adjacent layers are the most alike: rows"), "holds");
  EXPECT_EQ(AnswerTo(both, "adjacent layers are the most alike: random ids"), "does not hold");
  // Layers that are more alike the further apart.
  Figures h;
  AddCells({Falling("", false, 4, -0.1)}, &h);
  EXPECT_EQ(AnswerTo(h, "adjacent layers"), "does not hold");
  Figures two;
  AddCells({Falling("a", false, 2, 0.1), Falling("b", false, 2, 0.2)}, &two);
  ExpectContains(AnswerTo(two, "adjacent layers").get<std::string>(), {"cannot be said"});
  ExpectContains(AnswerTo(two, "similarity depends").get<std::string>(), {"similarity.data=both"});
}

TEST(SimilarityCells, ImagesAgainstText) {
  SimilarityCell vit = Falling("vit", false, 4, 0.05), bert = Falling("bert", false, 6, 0.1);
  vit.images = true;
  Figures f;
  AddCells({bert, vit}, &f);
  EXPECT_EQ(AnswerTo(f, "image models"), "holds");
  std::swap(vit.images, bert.images);
  Figures g;
  AddCells({bert, vit}, &g);
  EXPECT_EQ(AnswerTo(g, "image models"), "does not hold");
}

// The analysis of random ids is that of a batch with those ids in place of its own.
TEST(SimilarityCells, RandomIdsInPlaceOfTheRows) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"softmax", "softmax", "softmax"}));
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(4, 12, {12, 5, 9, 12});
  SimilarityAnalysis::Options both, only;
  both.data = SimilarityAnalysis::Data::kBoth, only.data = SimilarityAnalysis::Data::kRandom;
  SimilarityAnalysis analysis(both, ContextOf(model)), random(only, ContextOf(model)),
      parts(both, ContextOf(model)), plain({}, ContextOf(model)), drawn({}, ContextOf(model));
  analysis.Add(batch, RunLayers(*model, batch));
  random.Add(batch, RunLayers(*model, batch));
  plain.Add(batch, RunLayers(*model, batch));
  const Batch other = WithRandomIds(batch, model->config().vocab_size, ContextOf(model).seed, 0);
  drawn.Add(other, RunLayers(*model, other));
  for (const auto& [begin, end] : {std::pair{0, 1}, std::pair{1, 4}}) {
    const Batch part = batch.Rows(begin, end);
    parts.Add(part, RunLayers(*model, part));
  }
  for (size_t i = 0; i < plain.Heads().size(); ++i) {
    EXPECT_NEAR(analysis.Heads()[i], plain.Heads()[i], 1e-9);
    EXPECT_NEAR(analysis.Heads(true)[i], drawn.Heads()[i], 1e-9);
    EXPECT_NEAR(random.Heads(true)[i], drawn.Heads()[i], 1e-9);
    EXPECT_NEAR(parts.Heads(true)[i], drawn.Heads()[i], 1e-6);
  }
  EXPECT_GT(std::abs(plain.Heads()[2] - drawn.Heads()[2]), 1e-6);
  const Figures f = analysis.Report();
  EXPECT_EQ(f.table("cells").rows.size(), 2u);
  EXPECT_EQ(random.Report().facts()["data"], "random ids");
  // Padding is as it was, ids are below the vocabulary, and each stands for its own row.
  EXPECT_TRUE(at::equal(other["ids"][1].narrow(0, 5, 7), batch["ids"][1].narrow(0, 5, 7)));
  EXPECT_FALSE(at::equal(other["ids"][0], other["ids"][3]));
  EXPECT_LT(other["ids"].max().item<int64_t>(), model->config().vocab_size);
  EXPECT_GE(other["ids"].min().item<int64_t>(), 0);
}

TEST(SimilarityCells, RowsThatAreNoIds) {
  Batch batch;
  batch.rows = 1;
  batch.Add("values", at::zeros({1, 4, 3}));
  ExpectContains(Thrown([&] { WithRandomIds(batch, 7, 1, 0); }), {"no ids", "data=rows"});
}

}  // namespace
}  // namespace cistern
