#include "cistern/analyses/slots.h"

#include <cmath>

#include "cistern/analyses/implied_weights.h"
#include "cistern/analyses/testing_analyses.h"
#include "cistern/models/masked_lm.h"

namespace cistern {
namespace {

using testing::Cell;
using testing::Classifier;
using testing::ContextOf;
using testing::ExpectContains;
using testing::Thrown;

std::shared_ptr<DecoderLm> Lm(const std::string& mechanism, const Json& options) {
  ModelConfig c = testing::SmallLm({mechanism, mechanism});
  c.attention_options = Json::object();
  if (!options.empty()) c.attention_options[mechanism] = options;
  return testing::Make<DecoderLm>(c);
}

// Latte's definition in double: each latent holds softmax_s(k_s) of the values, and is read by
// softmax_l(q_t).
TEST(SlotWeights, LatteByPlainLoops) {
  const auto model = Lm("latte", {{"latents", 6}});
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(2, 11, {11, 7});
  const auto layers = RunLayers(*model, batch);
  for (int64_t row = 0; row < 2; ++row) {
    const int64_t length = layers[1].RealQueries(row);
    const std::vector<SlotMoment> moments = WatchSlots(layers[1], row, {3, length});
    ASSERT_EQ(moments.size(), 2u);
    for (const SlotMoment& m : moments) {
      const at::Tensor q = layers[1].x[0][row], k = layers[1].x[1][row];
      for (int64_t h = 0; h < 2; ++h) {
        double queries = 0;
        for (int64_t l = 0; l < 3; ++l) queries += std::exp(q[h][m.tokens - 1][l].item<double>());
        for (int64_t l = 0; l < 3; ++l) {
          double sum = 0;
          for (int64_t s = 0; s < m.tokens; ++s) sum += std::exp(k[h][s][l].item<double>());
          for (int64_t s = 0; s < m.tokens; ++s)
            EXPECT_NEAR(m.write[h][l][s].item<double>(), std::exp(k[h][s][l].item<double>()) / sum,
                        1e-9);
          EXPECT_NEAR(m.read[h][0][l].item<double>(),
                      std::exp(q[h][m.tokens - 1][l].item<double>()) / queries, 1e-9);
        }
      }
    }
  }
}

// What is read of what is held is the implied attention, for every mechanism with slots.
TEST(SlotWeights, ReadTimesWriteIsTheImpliedAttention) {
  const at::NoGradGuard guard;
  const std::vector<std::pair<std::string, Json>> cases = {
      {"latte", {{"latents", 6}}},
      {"latte", {{"latents", 6}, {"gate", "slot"}}},
      {"efficient", Json::object()},
      {"efficient", {{"normaliser", "scaling"}, {"divisor", "length"}}},
      {"abc_mlp", {{"slots", 3}}},
      {"abc_mlp", {{"slots", 9}, {"activation", "relu"}}},
      {"abc_random", {{"slots", 4}}},
      {"abc_compressive", {{"slots", 4}, {"divisor", "ratio"}, {"ratio", 4}}},
      {"abc_cluster", {{"slots", 4}}},
      {"gated_slots", {{"slots", 3}, {"temperature", 1.0}}},
      {"linformer", {{"slots", 4}, {"sharing", "none"}}},
      {"luna_causal", {{"slots", 4}}},
      {"linear", Json::object()},
      {"t2r", Json::object()},
      {"rfa", Json::object()},
      {"rfa_gate", Json::object()},
      {"performer", {{"features", 8}}}};
  for (const auto& entry : cases) {
    SCOPED_TRACE(StrCat(entry.first, " ", entry.second.dump()));
    const auto model = Lm(entry.first, entry.second);
    const Batch batch = testing::IdsBatch(2, 13, {13, 9});
    const auto layers = RunLayers(*model, batch);
    const at::Tensor implied = ImpliedWeights(layers[0], 1).All();  // [H,T,S]
    for (const SlotMoment& m : WatchSlots(layers[0], 1, {1, 5, 9})) {
      const at::Tensor got = at::matmul(m.read, m.write.to(at::kDouble)).select(1, 0);
      const at::Tensor want = implied.select(1, m.tokens - 1).narrow(1, 0, m.tokens);
      EXPECT_LT((got - want).abs().max().item<double>(), 1e-7) << m.tokens;
    }
  }
}

TEST(SlotWeights, BidirectionalAndMemoryStreams) {
  const at::NoGradGuard guard;
  for (const char* mechanism : {"latte", "luna", "conv_luna", "set_transformer", "linear"}) {
    SCOPED_TRACE(mechanism);
    Json options = Json::object();
    if (std::string(mechanism) == "latte") options["latents"] = 8;
    if (std::string(mechanism) == "luna") options["slots"] = 5;
    const auto model = testing::Make<EncoderClassifier>(Classifier(mechanism, options));
    const Batch batch = testing::IdsBatch(2, 9, {9, 6});
    const auto layers = RunLayers(*model, batch);
    const at::Tensor implied = ImpliedWeights(layers[0], 1).All();
    const std::vector<SlotMoment> moments = WatchSlots(layers[0], 1, {6});
    ASSERT_EQ(moments.size(), 1u);
    ASSERT_EQ(moments[0].tokens, 6);
    // Packing's heads are mixed before a memory stream is read: their mean.
    const bool stream = layers[0].packed.defined();
    const at::Tensor held = moments[0].write.to(at::kDouble),
                     write = stream ? held.mean(0, true) : held;
    const at::Tensor got = at::matmul(moments[0].read, write);
    EXPECT_LT((got - implied.narrow(1, 0, 6).narrow(2, 0, 6)).abs().max().item<double>(), 1e-7);
  }
}

// A group of heads is watched as a layer of its own mechanism, its heads counted in the layer.
TEST(SlotWeights, GroupsOfHeads) {
  ModelConfig c = testing::SmallLm({"window:1+latte:1", "softmax"});
  c.attention_options = {{"latte", {{"latents", 3}}}};
  const auto model = testing::Make<DecoderLm>(c);
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(2, 13, {13, 9});
  const auto layers = RunLayers(*model, batch);
  const std::vector<CapturedLayer> parts = ByHeadGroup(layers[0]);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[1].name, "layer 1, latte");
  EXPECT_EQ(ByHeadGroup(layers[1]).size(), 1u);
  const at::Tensor whole = ImpliedWeights(layers[0], 1).All();  // [2,T,S]
  for (size_t g = 0; g < 2; ++g) {
    const at::Tensor own = ImpliedWeights(parts[g], 1).All();
    EXPECT_LT((own[0] - whole[int64_t(g)]).abs().max().item<double>(), 1e-12) << g;
  }
  for (const SlotMoment& m : WatchSlots(parts[1], 1, {2, 9})) {
    const at::Tensor got = at::matmul(m.read, m.write.to(at::kDouble))[0][0];
    const at::Tensor want = whole[1][m.tokens - 1].narrow(0, 0, m.tokens);
    EXPECT_LT((got - want).abs().max().item<double>(), 1e-7) << m.tokens;
  }
  SlotsAnalysis::Options second;
  second.head = 2, second.layers = {1};
  SlotsAnalysis analysis(second, ContextOf(model));
  analysis.Add(batch, layers);
  const Figures f = analysis.Report();
  ASSERT_EQ(f.table("layers").rows.size(), 1u);  // the window has no slots
  EXPECT_EQ(Cell(f.table("layers"), 0, "layer"), "layer 1, latte");
  EXPECT_EQ(Cell(f.table("layers"), 0, "mechanism"), "latte");
  ASSERT_EQ(f.table("slots").rows.size(), 3u);
  EXPECT_EQ(Cell(f.table("slots"), 0, "head"), 2);
  EXPECT_EQ(Cell(f.table("slots"), 0, "slot"), 1);
  HtmlReport page("x");
  f.AddTo(page);
  ExpectContains(page.Html(), {"layer 1, latte, head 2: who reads it"});
}

// A memory of as many slots as tokens that takes one token a slot holds n of n: tokens held 1,
// rank n, and no slot is used twice.
TEST(Slots, OneTokenASlot) {
  const auto model = Lm("abc_compressive", {{"slots", 8}, {"ratio", 1}});
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(2, 8);
  SlotsAnalysis analysis({}, ContextOf(model));
  analysis.Add(batch, RunLayers(*model, batch));
  const Figures f = analysis.Report();
  for (size_t layer = 0; layer < 2; ++layer) {
    EXPECT_NEAR(Cell(f.table("layers"), layer, "tokens held").get<double>(), 1, 1e-9);
    EXPECT_NEAR(Cell(f.table("layers"), layer, "effective rank").get<double>(), 8, 1e-6);
    EXPECT_NEAR(Cell(f.table("layers"), layer, "age").get<double>(), 3.5, 1e-9);
    EXPECT_EQ(Cell(f.table("layers"), layer, "empty share").get<double>(), 0);
    EXPECT_EQ(Cell(f.table("layers"), layer, "slots"), 8);
  }
  ASSERT_EQ(f.table("slots").rows.size(), 2u * 2 * 8);
  EXPECT_NEAR(Cell(f.table("slots"), 3, "age").get<double>(), 4, 1e-9);  // token 3 of 8
  // Half as many tokens: the other slots are empty.
  const Batch half = testing::IdsBatch(1, 4);
  SlotsAnalysis begun({}, ContextOf(model));
  begun.Add(half, RunLayers(*model, half));
  const Figures g = begun.Report();
  EXPECT_NEAR(Cell(g.table("layers"), 0, "empty share").get<double>(), 0.5, 1e-12);
  EXPECT_NEAR(Cell(g.table("layers"), 0, "tokens held").get<double>(), 1, 1e-9);
}

// A text of one token over and over: every slot holds the mean of all, and its rank is 1.
TEST(Slots, OneTokenOverAndOver) {
  const auto model = Lm("abc_mlp", {{"slots", 3}});
  const at::NoGradGuard guard;
  Batch batch = testing::IdsBatch(1, 12);
  batch.Add("ids", at::full({1, 12}, 5, at::kLong));
  SlotsAnalysis::Options options;
  options.times = 5;
  SlotsAnalysis analysis(options, ContextOf(model));
  analysis.Add(batch, RunLayers(*model, batch));
  const Figures f = analysis.Report();
  EXPECT_NEAR(Cell(f.table("layers"), 0, "tokens held").get<double>(), 12, 1e-6);
  EXPECT_NEAR(Cell(f.table("layers"), 0, "effective rank").get<double>(), 1, 1e-5);
  EXPECT_NEAR(Cell(f.table("layers"), 0, "age").get<double>(), 5.5, 1e-6);
}

// t2r's features may all be zero: such a query reads no slot.
TEST(Slots, QueriesThatReadNothing) {
  const auto model = Lm("t2r", {{"features", 2}});
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(6, 8);
  const auto layers = RunLayers(*model, batch);
  SlotsAnalysis analysis({}, ContextOf(model));
  analysis.Add(batch, layers);
  const auto effective = [](double a, double b) {
    double entropy = 0;
    for (const double w : {a, b}) entropy -= w > 0 ? w / (a + b) * std::log(w / (a + b)) : 0;
    return a + b > 0 ? std::exp(entropy) : 0;
  };
  double read = 0, used = 0;
  int64_t nothing = 0;
  for (int64_t row = 0; row < 6; ++row) {
    const std::vector<SlotMoment> moments = WatchSlots(layers[0], row, {2, 4, 6, 8});
    for (int64_t h = 0; h < 2; ++h) {
      double first = 0, second = 0;
      for (const SlotMoment& m : moments) {
        const double a = std::abs(m.read[h][0][0].item<double>()),
                     b = std::abs(m.read[h][0][1].item<double>());
        read += effective(a, b) / 48;
        nothing += a + b == 0 ? 1 : 0;
        if (a + b > 0) first += a / (a + b), second += b / (a + b);
      }
      used += effective(first, second) / 12;
    }
  }
  ASSERT_GT(nothing, 0);
  const Figures f = analysis.Report();
  EXPECT_NEAR(Cell(f.table("layers"), 0, "slots a query reads").get<double>(), read, 1e-9);
  EXPECT_NEAR(Cell(f.table("layers"), 0, "slots in use").get<double>(), used, 1e-9);
}

TEST(Slots, PartsMergeAndPictures) {
  const auto model = Lm("gated_slots", {{"slots", 3}});
  const at::NoGradGuard guard;
  AnalysisContext context = ContextOf(model);
  context.token = [](int64_t id) { return StrCat(" w", id); };
  const Batch batch = testing::IdsBatch(3, 9, {9, 1, 5});
  SlotsAnalysis::Options options;
  options.row = 2;
  SlotsAnalysis whole(options, context), first(options, context), second(options, context);
  whole.Add(batch, RunLayers(*model, batch));
  const Batch begin = batch.Rows(0, 2), end = batch.Rows(2, 3);
  first.Add(begin, RunLayers(*model, begin));
  second.Add(end, RunLayers(*model, end));
  first.Merge(second);
  const Figures a = whole.Report(), b = first.Report();
  for (const char* column :
       {"tokens held", "age", "empty share", "slots a query reads", "slots in use"})
    EXPECT_NEAR(Cell(a.table("layers"), 1, column).get<double>(),
                Cell(b.table("layers"), 1, column).get<double>(), 1e-9)
        << column;
  HtmlReport page("x");
  a.AddTo(page);
  ExpectContains(page.Html(), {"who reads it", "over time", "what slot ", "> w", "tokens held"});
  // The words are those of the row that was asked for, of five tokens.
  const auto words = [](const Figures& f) {
    HtmlReport some("x");
    f.AddTo(some);
    const std::string html = some.Html();
    size_t count = 0;
    for (size_t at = 0; (at = html.find("> w", at)) != std::string::npos; ++at) ++count;
    return count;
  };
  options.row = 0;
  SlotsAnalysis alone(options, context);
  alone.Add(end, RunLayers(*model, end));
  EXPECT_EQ(words(a), words(alone.Report()));
}

TEST(Slots, RefusesWhatDoesNotFit) {
  ExpectContains(FindAnalysis("slots").refusal(testing::SmallLm({"softmax", "window"})),
                 {"memory of slots", "gated_slots"});
  EXPECT_EQ(FindAnalysis("slots").refusal(testing::SmallLm({"softmax", "latte"})), "");
  EXPECT_EQ(FindAnalysis("slots").refusal(Classifier("luna", {{"slots", 3}})), "");
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"softmax", "latte"}));
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(1, 5);
  const auto layers = RunLayers(*model, batch);
  EXPECT_EQ(FindAnalysis("slots").refusal(testing::SmallLm({"window:1+latte:1"})), "");
  ExpectContains(FindAnalysis("slots").refusal(testing::SmallLm({"window:1+softmax:1"})),
                 {"memory of slots"});
  SlotsAnalysis::Options first, third;
  first.layers = {1}, third.layers = {3};
  SlotsAnalysis softmax(first, ContextOf(model)), beyond(third, ContextOf(model));
  ExpectContains(Thrown([&] { softmax.Add(batch, layers); }), {"softmax", "has no slots"});
  ExpectContains(Thrown([&] { beyond.Add(batch, layers); }), {"slots.layers=3", "2 layers"});
}

}  // namespace
}  // namespace cistern
