#include "cistern/analyses/memory.h"

#include <algorithm>
#include <cmath>

#include "cistern/analyses/attention_logits.h"
#include "cistern/analyses/testing_analyses.h"

namespace cistern {
namespace {

using testing::Cell;
using testing::Classifier;
using testing::ContextOf;
using testing::ExpectContains;

TEST(SlotStats, KnownCases) {
  // One slot, repeated: stripes.
  const at::Tensor slot = testing::Normal({1, 12});
  const SlotStats same = StatsOfSlots(slot.expand({8, 12}));
  EXPECT_NEAR(same.rank, 1, 1e-6);
  EXPECT_NEAR(same.participation, 1, 1e-9);
  EXPECT_NEAR(same.cosine, 1, 1e-12);
  EXPECT_EQ(same.centred_rank, 0);
  EXPECT_NEAR(same.unique, 1.0 / 8, 1e-12);
  // Two groups of four orthogonal slots: blocks. The singular values are 2 and 2; centred, one.
  at::Tensor blocks = at::zeros({8, 12}, at::kDouble);
  blocks.narrow(0, 0, 4).select(1, 0).fill_(3);
  blocks.narrow(0, 4, 4).select(1, 5).fill_(0.5);
  const SlotStats two = StatsOfSlots(blocks);
  EXPECT_NEAR(two.rank, 2, 1e-9);
  EXPECT_NEAR(two.participation, 2, 1e-9);
  EXPECT_NEAR(two.centred_rank, 1, 1e-6);
  EXPECT_NEAR(two.cosine, (2 * 4 * 3) / 56.0, 1e-12);
  EXPECT_NEAR(two.unique, 2.0 / 8, 1e-12);
  // Orthogonal slots: all of them.
  const SlotStats all = StatsOfSlots(at::eye(6, at::kDouble) * 0.1);
  EXPECT_NEAR(all.rank, 6, 1e-9);
  EXPECT_NEAR(all.participation, 6, 1e-9);
  EXPECT_NEAR(all.cosine, 0, 1e-12);
  EXPECT_NEAR(all.unique, 1, 1e-12);
  EXPECT_NEAR(all.centred_rank, 5, 1e-9);
  // A common offset hides variety from the raw figures, not from the centred ones.
  const SlotStats offset = StatsOfSlots(at::eye(6, at::kDouble) * 0.05 + 1);
  EXPECT_LT(offset.rank, 1.3);
  EXPECT_GT(offset.centred_rank, 4.9);
}

// Slots of zeros are empty: the figures are those of the others.
TEST(SlotStats, EmptySlotsAreLeftOut) {
  at::Tensor memory = at::zeros({6, 4}, at::kDouble);
  memory[1][0] = 2, memory[3][0] = 1, memory[4][2] = 1;
  const SlotStats three = StatsOfSlots(memory);
  EXPECT_EQ(three.empty, 0.5);
  EXPECT_NEAR(three.cosine, 1.0 / 3, 1e-12);
  EXPECT_NEAR(three.unique, 2.0 / 3, 1e-12);
  EXPECT_NEAR(three.rank_share, three.rank / 3, 1e-12);
  EXPECT_NEAR(MeanCosine(memory), 1.0 / 3, 1e-12);
  for (const int64_t left : {1, 0}) {
    const SlotStats few = StatsOfSlots(memory.narrow(0, 0, 1 + left));
    EXPECT_EQ(few.rank, left);
    for (const double x : {few.cosine, few.unique, few.rank_share, few.centred_rank})
      EXPECT_TRUE(std::isnan(x)) << left;
  }
}

TEST(SlotStats, PlainLoops) {
  const at::Tensor m = testing::Normal({7, 40});
  const auto number = m.accessor<double, 2>();
  double sum = 0;
  int64_t joined = 0;
  for (int64_t a = 0; a < 7; ++a) {
    for (int64_t b = 0; b < 7; ++b) {
      if (a == b) continue;
      double dot = 0, x = 0, y = 0;
      for (int64_t i = 0; i < 40; ++i) {
        dot += number[a][i] * number[b][i];
        x += number[a][i] * number[a][i], y += number[b][i] * number[b][i];
      }
      sum += dot / std::sqrt(x * y);
      joined += dot / std::sqrt(x * y) > 0.95 ? 1 : 0;
    }
  }
  EXPECT_NEAR(MeanCosine(m), sum / 42, 1e-12);
  EXPECT_EQ(joined, 0);
  EXPECT_NEAR(StatsOfSlots(m).unique, 1, 1e-12);
  // Chains count as one: 0, 15, 30 degrees, of which the ends have a cosine below 0.95.
  const double step = std::acos(-1.0) / 12;
  at::Tensor chain = at::zeros({3, 2}, at::kDouble);
  for (int64_t i = 0; i < 3; ++i) {
    chain[i][0] = std::cos(step * double(i));
    chain[i][1] = std::sin(step * double(i));
  }
  EXPECT_NEAR(StatsOfSlots(chain).unique, 1.0 / 3, 1e-12);
  const at::Tensor p = at::softmax(testing::Normal({4, 6}), 1);
  double likeness = 0;
  for (int64_t a = 0; a < 4; ++a) {
    for (int64_t b = 0; b < a; ++b) {
      double distance = 0;
      for (int64_t s = 0; s < 6; ++s)
        distance += 0.5 * std::abs(p[a][s].item<double>() - p[b][s].item<double>());
      likeness += (1 - distance) / 6;
    }
  }
  EXPECT_NEAR(MeanLikeness(p), likeness, 1e-12);
  EXPECT_TRUE(std::isnan(MeanCosine(m.narrow(0, 0, 1))));
}

// Layers of softmax beside those with slots pack nothing, and those of latte are no memory of
// slots.
TEST(Memory, AttentionBesideAMemoryIsNoPacking) {
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(2, 9);
  const auto summary = [&](const std::vector<std::string>& attention) {
    const auto model = testing::Make<DecoderLm>(testing::SmallLm(attention));
    MemoryAnalysis analysis({}, ContextOf(model));
    analysis.Add(batch, RunLayers(*model, batch));
    return analysis.Summary("it");
  };
  const auto packs = [](const MemorySummary& m) {
    const auto checks = MemoryChecks(m);
    return std::any_of(checks.begin(), checks.end(), [](const PaperClaim& c) {
      return c.claim.find("packing is nearly uniform") != std::string::npos;
    });
  };
  const MemorySummary slots = summary({"softmax", "abc_mlp"}), none = summary({"softmax", "latte"});
  EXPECT_EQ(slots.mechanism, "abc_mlp");
  EXPECT_TRUE(slots.softmax);
  EXPECT_EQ(slots.trained.entropy.count, 0);
  EXPECT_GT(slots.trained.cosine.count, 0);
  EXPECT_FALSE(packs(slots));
  EXPECT_EQ(none.mechanism, "");
  EXPECT_EQ(none.trained.entropy.count, 1);
  EXPECT_FALSE(packs(none));
}

// The scores of an arm of softmax may be divided by nothing, and a memory may be written otherwise.
TEST(Memory, ArmsSayTheirDivisor) {
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(2, 9);
  for (const char* scale : {"sqrt", "unit"}) {
    ModelConfig c = testing::SmallLm({"softmax"});
    c.attention_options = Json{{"softmax", {{"scale", scale}}}};
    const auto model = testing::Make<DecoderLm>(c);
    MemoryAnalysis analysis({}, ContextOf(model));
    analysis.Add(batch, RunLayers(*model, batch));
    const Figures f = CompareMemories({analysis.Summary("it")});
    EXPECT_EQ(Cell(f.table("arms"), 0, "divisor"), scale);
  }
  for (const auto& [mechanism, divisor] :
       std::vector<std::pair<std::string, std::string>>{{"luna", "sqrt"},
                                                        {"set_transformer", "sqrt"},
                                                        {"conv_luna", "learn"},
                                                        {"shared_workspace", "unit"},
                                                        {"abc_mlp", ""}}) {
    MemorySummary arm;
    arm.mechanism = mechanism;
    EXPECT_EQ(Cell(CompareMemories({arm}).table("arms"), 0, "divisor"), divisor) << mechanism;
  }
}

TEST(Memory, PaddingThatReadsIsNoToken) {
  testing::ExpectPaddingThatReadsLeftOut<MemoryAnalysis>("softmax");
}

// A learned memory of one repeated slot attends alike with all of its slots; one of keys that are
// all the same is uniform.
TEST(Memory, OneRepeatedSlot) {
  for (const char* mechanism : {"luna", "conv_luna", "only_scaling", "set_transformer"}) {
    SCOPED_TRACE(mechanism);
    const auto model = testing::Make<EncoderClassifier>(Classifier(mechanism, Json{{"slots", 5}}));
    const at::NoGradGuard guard;
    for (const auto& p : model->named_parameters()) {
      if (p.key().ends_with("core.memory")) p.value().copy_(p.value().narrow(1, 0, 1).clone());
    }
    const Batch batch = testing::IdsBatch(3, 9, {9, 4, 7});
    MemoryAnalysis analysis({}, ContextOf(model));
    analysis.Add(batch, RunLayers(*model, batch));
    const Figures f = analysis.Report();
    const Figures::Table &slots = f.table("slots"), &packing = f.table("packing");
    ASSERT_EQ(Cell(slots, 0, "memory"), "learned");
    EXPECT_EQ(Cell(slots, 0, "model"), "trained");
    EXPECT_NEAR(Cell(slots, 0, "effective rank").get<double>(), 1, 1e-5);
    EXPECT_NEAR(Cell(slots, 0, "unique share").get<double>(), 0.2, 1e-12);
    EXPECT_NEAR(Cell(packing, 0, "likeness of slots' attention").get<double>(), 1, 1e-9);
    EXPECT_NEAR(Cell(packing, 0, "cosine over slots").get<double>(), 1, 1e-9);
    EXPECT_LT(Cell(packing, 0, "entropy / ln(keys)").get<double>(), 1 + 1e-9);
    // The reference has slots of its own.
    bool random = false;
    for (size_t i = 0; i < slots.rows.size(); ++i) {
      if (Cell(slots, i, "model") != "random" || Cell(slots, i, "memory") != "learned") continue;
      random = true;
      EXPECT_GT(Cell(slots, i, "effective rank").get<double>(), 2);
    }
    EXPECT_TRUE(random);
  }
}

// A last block whose memory the head reads: its tokens end there, and it packs all the same.
TEST(Memory, BlocksThatPackAlone) {
  for (const char* mechanism : {"luna", "conv_luna", "shared_workspace"}) {
    SCOPED_TRACE(mechanism);
    for (const int64_t layers : {1, 2}) {
      ModelConfig c = Classifier(mechanism, Json{{"slots", 5}});
      c.layers = layers, c.pooling = PoolingKind::kMemory;
      const auto model = testing::Make<EncoderClassifier>(c);
      const Batch batch = testing::IdsBatch(3, 9, {9, 4, 7});
      const at::NoGradGuard guard;
      MemoryAnalysis analysis({}, ContextOf(model));
      analysis.Add(batch, RunLayers(*model, batch));
      const Figures f = analysis.Report();
      std::vector<std::string> seen;
      for (size_t i = 0; i < f.table("slots").rows.size(); ++i) {
        if (Cell(f.table("slots"), i, "model") != "trained") continue;
        seen.push_back(StrCat(Cell(f.table("slots"), i, "layer").get<std::string>(), " ",
                              Cell(f.table("slots"), i, "memory").get<std::string>()));
      }
      std::vector<std::string> want = {"layer 1 learned", "layer 1 packed"};
      if (layers == 2) want.insert(want.end(), {"layer 2 input", "layer 2 packed"});
      EXPECT_EQ(seen, want);
      const size_t packs = f.table("packing").rows.size() - 2;  // trained, then random
      EXPECT_EQ(Cell(f.table("packing"), packs, "layer"), StrCat("layer ", layers));
      EXPECT_GT(Cell(f.table("packing"), packs, "variance of packed slots").get<double>(), 0);
      EXPECT_TRUE(Cell(f.table("packing"), packs, "cosine over tokens").is_null());
    }
    // Nothing reads in a single block of that kind, so nothing attends to tokens.
    ModelConfig c = Classifier(mechanism, Json{{"slots", 5}});
    c.layers = 1, c.pooling = PoolingKind::kMemory;
    const auto model = testing::Make<EncoderClassifier>(c);
    const Batch batch = testing::IdsBatch(1, 9, {9});
    const at::NoGradGuard guard;
    for (const char* name : {"maps", "slots", "similarity"}) {
      const AnalysisInfo& info = FindAnalysis(name);
      ExpectContains(
          testing::Thrown([&] {
            info.make(Json::object(), ContextOf(model))->Add(batch, RunLayers(*model, batch));
          }),
          {name, "model.pooling=memory"});
    }
  }
}

// A filter by the maximum leaves no weights of the tokens; the figures are of its keys.
TEST(Memory, FilterByTheMaximum) {
  const auto model = testing::Make<EncoderClassifier>(
      Classifier("conv_luna", Json{{"slots", 5}, {"kernel", 3}, {"filter", "maxpool"}}));
  const Batch batch = testing::IdsBatch(2, 9, {9, 6});
  const at::NoGradGuard guard;
  const auto layers = RunLayers(*model, batch);
  MemoryAnalysis::Options options;
  options.reference = false;
  MemoryAnalysis analysis(options, ContextOf(model));
  analysis.Add(batch, layers);
  const Figures f = analysis.Report();
  double likeness = 0;
  for (int64_t row = 0; row < 2; ++row) {
    const at::Tensor p = at::softmax(PackingLogits(layers[0], row)->values, 2);
    for (int64_t g = 0; g < p.size(0); ++g) likeness += MeanLikeness(p[g]) / double(2 * p.size(0));
  }
  EXPECT_NEAR(Cell(f.table("packing"), 0, "likeness of slots' attention").get<double>(), likeness,
              1e-9);
  EXPECT_GT(Cell(f.table("packing"), 0, "reading: entropy / ln(slots)").get<double>(), 0);
}

// Entropy of packing by plain loops over what luna's first layer was given.
TEST(Memory, EntropyOfPacking) {
  const auto model = testing::Make<EncoderClassifier>(Classifier("luna", Json{{"slots", 3}}));
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(2, 8, {8, 5});
  const auto layers = RunLayers(*model, batch);
  MemoryAnalysis analysis({.reference = false}, ContextOf(model));
  analysis.Add(batch, layers);
  double want = 0;
  for (int64_t row = 0; row < 2; ++row) {
    const int64_t keys = layers[0].RealSources(row);
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t m = 0; m < 3; ++m) {
        std::vector<double> p;
        double sum = 0, entropy = 0;
        for (int64_t s = 0; s < keys; ++s) {
          double dot = 0;
          for (int64_t c = 0; c < 6; ++c)
            dot += layers[0].x[2][0][h][m][c].item<double>() *
                   layers[0].x[1][row][h][s][c].item<double>();
          p.push_back(std::exp(dot / std::sqrt(6.0)));
          sum += p.back();
        }
        for (const double x : p) entropy -= x / sum * std::log(x / sum);
        want += entropy / std::log(double(keys)) / 12;
      }
    }
  }
  const Figures f = analysis.Report();
  EXPECT_NEAR(Cell(f.table("packing"), 0, "entropy / ln(keys)").get<double>(), want, 1e-9);
  for (size_t i = 0; i < f.table("slots").rows.size(); ++i)
    EXPECT_EQ(Cell(f.table("slots"), i, "model"), "trained");
}

TEST(Memory, PartsMerge) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"abc_mlp", "gated_slots"}));
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(4, 9);
  MemoryAnalysis whole({}, ContextOf(model)), first({}, ContextOf(model)),
      second({}, ContextOf(model));
  whole.Add(batch, RunLayers(*model, batch));
  const Batch begin = batch.Rows(0, 1), end = batch.Rows(1, 4);
  first.Add(begin, RunLayers(*model, begin));
  second.Add(end, RunLayers(*model, end));
  first.Merge(second);
  const Figures a = whole.Report(), b = first.Report();
  ASSERT_EQ(a.table("slots").rows.size(), 8u);  // two memories, two layers, two models
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_NEAR(Cell(a.table("slots"), i, "effective rank").get<double>(),
                Cell(b.table("slots"), i, "effective rank").get<double>(), 1e-9);
    EXPECT_NEAR(Cell(a.table("slots"), i, "cosine").get<double>(),
                Cell(b.table("slots"), i, "cosine").get<double>(), 1e-9);
  }
}

// reference_rows: the random model's figures are those of so many rows, the trained one's of all.
TEST(Memory, ReferenceOfFewerRows) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"abc_mlp"}));
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(3, 9);
  MemoryAnalysis::Options few, all;
  few.reference_rows = 1;
  MemoryAnalysis a(few, ContextOf(model)), b(all, ContextOf(model)), first(all, ContextOf(model));
  const Batch one = batch.Rows(0, 1);
  a.Add(batch, RunLayers(*model, batch));
  b.Add(batch, RunLayers(*model, batch));
  first.Add(one, RunLayers(*model, one));
  const Figures of_one = a.Report(), of_all = b.Report(), of_first = first.Report();
  const Figures::Table& slots = of_one.table("slots");
  int random = 0;
  for (size_t i = 0; i < slots.rows.size(); ++i) {
    const bool trained = Cell(slots, i, "model") == "trained";
    random += trained ? 0 : 1;
    for (const char* column : {"effective rank", "cosine"}) {
      const auto got = Cell(slots, i, column).get<double>();
      EXPECT_NEAR(got, Cell((trained ? of_all : of_first).table("slots"), i, column).get<double>(),
                  1e-9);
      EXPECT_GT(
          std::abs(got -
                   Cell((trained ? of_first : of_all).table("slots"), i, column).get<double>()),
          1e-9);
    }
  }
  EXPECT_EQ(random, 2 * 2);  // two memories, two layers
}

// A gated or ABC memory of the whole row is what the definition's weights make of the values.
TEST(Memory, RefusesModelsWithoutSlots) {
  ModelConfig c = testing::SmallLm({"window", "latte"});
  ExpectContains(FindAnalysis("memory").refusal(c), {"memory of slots", "conv_luna"});
  EXPECT_EQ(FindAnalysis("memory").refusal(testing::SmallLm({"softmax", "abc_mlp"})), "");
  // Softmax of whose logits nothing is measured.
  c = testing::SmallLm({"softmax"});
  EXPECT_EQ(FindAnalysis("memory").refusal(c), "");
  c.positions = PositionKind::kRelative;
  ExpectContains(FindAnalysis("memory").refusal(c), {"memory of slots"});
  c = testing::SmallLm({"latte"});
  c.kind = "encoder_decoder", c.cross.attention = {"softmax"};
  ExpectContains(FindAnalysis("memory").refusal(c), {"memory of slots"});
  c.cross.attention = {"abc_mlp"};
  EXPECT_EQ(FindAnalysis("memory").refusal(c), "");
}

TEST(Memory, ARowThatIsNotReadIsSaid) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"abc_mlp"}));
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(2, 5);
  for (const int64_t row : {1, 2}) {
    MemoryAnalysis memory({.row = row}, ContextOf(model));
    memory.Add(batch, RunLayers(*model, batch));
    const bool said =
        memory.Report().Plain().find("Row 2 was not among the 2 rows") != std::string::npos;
    EXPECT_EQ(said, row == 2);
  }
}

// A group of heads with slots has the figures that its state's memories have.
TEST(Memory, GroupsOfHeads) {
  ModelConfig c = testing::SmallLm({"window:1+abc_mlp:1"});
  c.layers = 1;
  c.attention_options = {{"abc_mlp", {{"slots", 3}}}};
  EXPECT_EQ(FindAnalysis("memory").refusal(c), "");
  const auto model = testing::Make<DecoderLm>(c);
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(1, 11);
  const auto layers = RunLayers(*model, batch);
  MemoryAnalysis::Options options;
  options.reference = false;
  MemoryAnalysis analysis(options, testing::ContextOf(model));
  analysis.Add(batch, layers);
  const Figures f = analysis.Report();
  const CapturedLayer part = ByHeadGroup(layers[0])[1];
  State state = part.core->EmptyState(1, part.y.options());
  part.core->Write(part.x, state, {});
  const SlotStats want = StatsOfSlots(state["value_memory"][0][0]);
  ASSERT_EQ(f.table("slots").rows.size(), 2u);
  EXPECT_EQ(testing::Cell(f.table("slots"), 1, "layer"), "layer 1, abc_mlp");
  EXPECT_NEAR(testing::Cell(f.table("slots"), 1, "effective rank").get<double>(), want.rank, 1e-9);
  EXPECT_NEAR(testing::Cell(f.table("slots"), 1, "cosine").get<double>(), want.cosine, 1e-9);
}

}  // namespace
}  // namespace cistern
