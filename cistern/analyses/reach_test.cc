#include "cistern/analyses/reach.h"

#include <ATen/ATen.h>

#include "cistern/analyses/input_gradient.h"
#include "cistern/analyses/testing_analyses.h"
#include "cistern/models/masked_lm.h"

namespace cistern {
namespace {

using testing::Cell;
using testing::ContextOf;
using testing::ExpectContains;
using testing::Thrown;

at::Tensor TableOf(Model& model) {
  for (const auto& p : model.named_parameters()) {
    if (p.key() == "embed_tokens.weight") return p.value();
  }
  return {};
}

// The exact norm is that of finite differences of the embedding of a token that comes once.
TEST(InputGradient, FiniteDifferences) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"latte", "softmax"}));
  const at::NoGradGuard guard;
  const at::Tensor ids = at::tensor({4, 9, 2, 7, 11, 3}, at::kLong).unsqueeze(0);
  const at::Tensor got = InputGradients(*model, ids, {2, 5}, 0, 1), table = TableOf(*model);
  for (const int64_t query : {2, 5}) {
    for (int64_t s = 0; s < 6; ++s) {
      const at::Tensor row = table[ids[0][s].item<int64_t>()];
      double square = 0;
      for (int64_t c = 0; c < 12; ++c) {
        const double step = 1e-5, was = row[c].item<double>();
        row[c] = was + step;
        const at::Tensor up = OutputsOf(*model, ids)[0][query].clone();
        row[c] = was - step;
        const at::Tensor down = OutputsOf(*model, ids)[0][query].clone();
        row[c] = was;
        square += ((up - down) / (2 * step)).square().sum().item<double>();
      }
      EXPECT_NEAR(got[query == 2 ? 0 : 1][s].item<double>(), std::sqrt(square),
                  1e-6 * (1 + std::sqrt(square)));
      if (s > query) {
        EXPECT_EQ(got[0][s].item<double>(), 0);
      }
    }
  }
  // Probes estimate it: the mean square over many is near.
  const at::Tensor many = InputGradients(*model, ids, {5}, 400, 3);
  EXPECT_LT(((many[0] - got[1]) / got[1]).abs().max().item<double>(), 0.15);
}

// The model is as it was, although its table was another one meanwhile.
TEST(InputGradient, LeavesTheModelAsItWas) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"latte"}));
  const at::NoGradGuard guard;
  const at::Tensor ids = testing::Ids(1, 40), before = TableOf(*model).clone(),
                   predictions = Predictions(*model, ids);  // more tokens than the vocabulary has
  InputGradients(*model, ids, {39}, 1, 1);
  EXPECT_TRUE(at::equal(before, TableOf(*model)));
  EXPECT_TRUE(at::equal(predictions, Predictions(*model, ids)));
}

// Tokens that are masks have no embedding of their own; the others keep theirs, whatever their
// place.
TEST(InputGradient, MasksOfAMaskedLm) {
  ModelConfig c = testing::SmallLm({"softmax", "latte"});
  c.kind = "masked_lm";
  const auto model = testing::Make<MaskedLm>(c);
  const at::NoGradGuard guard;
  at::Tensor ids = testing::Ids(1, 30);  // beyond the mask's id, 23
  ids[0][4] = 23, ids[0][25] = 23;
  const at::Tensor got = InputGradients(*model, ids, {10}, 0, 1);
  for (int64_t s = 0; s < 30; ++s) {
    EXPECT_EQ(got[0][s].item<double>() > 0, s != 4 && s != 25) << s;
  }
}

// Two layers of a window of 3 tokens reach 4 tokens back, exactly.
TEST(Reach, WindowsReachAsFarAsTheyAreWide) {
  ModelConfig c = testing::SmallLm({"window", "window"});
  c.attention_options = Json{{"window", {{"window", 3}}}};
  const auto model = testing::Make<DecoderLm>(c);
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(2, 20);
  ReachAnalysis::Options options;
  options.queries = 20, options.probes = 0, options.changes = 20, options.threshold = 1e-9;
  ReachAnalysis analysis(options, ContextOf(model));
  analysis.Add(batch, RunLayers(*model, batch));
  const Figures f = analysis.Report();
  const Figures::Table &by = f.table("distance"), &length = f.table("length");
  ASSERT_EQ(Cell(by, 3, "from"), 4);  // 4 to 7
  EXPECT_GT(Cell(by, 3, "gradient share").get<double>(), 0);
  EXPECT_GT(Cell(by, 3, "change").get<double>(), 0);
  EXPECT_EQ(Cell(by, 4, "from"), 8);
  EXPECT_EQ(Cell(by, 4, "gradient share").get<double>(), 0);
  EXPECT_EQ(Cell(by, 4, "change").get<double>(), 0);
  EXPECT_LE(Cell(length, 0, "99 % of it").get<double>(), 4);
  EXPECT_EQ(Cell(length, 0, "predictions change"), 7);  // the end of the bin of 4
  const at::Tensor ids = batch["ids"].narrow(0, 0, 1), g = InputGradients(*model, ids, {15}, 0, 1);
  for (int64_t s = 0; s < 20; ++s) EXPECT_EQ(g[0][s].item<double>() > 0, s >= 11 && s <= 15) << s;
}

TEST(Reach, PartsMergeAndPictures) {
  const auto model = testing::Make<DecoderLm>(testing::SmallLm({"latte", "softmax"}));
  const at::NoGradGuard guard;
  AnalysisContext context = ContextOf(model);
  context.token = [](int64_t id) { return StrCat(" w", id); };
  const Batch batch = testing::IdsBatch(3, 9, {9, 4, 7});
  ReachAnalysis::Options options;
  options.probes = 0, options.row = 2, options.changes = 0;
  ReachAnalysis whole(options, context), first(options, context), second(options, context);
  whole.Add(batch, {});
  first.Add(batch.Rows(0, 1), {});
  second.Add(batch.Rows(1, 3), {});
  first.Merge(second);
  const Figures a = whole.Report(), b = first.Report();
  for (size_t i = 0; i < a.table("distance").rows.size(); ++i)
    EXPECT_NEAR(Cell(a.table("distance"), i, "gradient share").get<double>(),
                Cell(b.table("distance"), i, "gradient share").get<double>(), 1e-12);
  EXPECT_NEAR(Cell(a.table("length"), 0, "90 % of it").get<double>(),
              Cell(b.table("length"), 0, "90 % of it").get<double>(), 1e-12);
  HtmlReport page("x");
  a.AddTo(page);
  ExpectContains(page.Html(), {"Influence by distance", "the output at token 7", "> w"});
  // Tokens of the map count from 1, as its lines do.
  const std::string html = page.Html(), map = html.substr(html.find("What each output depends on"));
  ExpectContains(map, {"text-anchor=\"middle\" fill=\"#777777\">7</text>"});
}

TEST(Reach, ClassifiersHaveOneOutput) {
  ModelConfig c;
  c.kind = "encoder_classifier";
  c.vocab_size = 23, c.classes = 3, c.dim = 12, c.heads = 2, c.layers = 1, c.max_length = 64;
  c.attention = {"latte"};
  const auto model = testing::Make<EncoderClassifier>(c);
  const at::NoGradGuard guard;
  const Batch batch = testing::IdsBatch(2, 6, {6, 3});
  ReachAnalysis analysis({}, ContextOf(model));
  analysis.Add(batch, {});
  HtmlReport page("x");
  analysis.Report().AddTo(page);
  ExpectContains(page.Html(), {"What the decision depends on"});
}

TEST(Reach, RefusesWhatDoesNotFit) {
  ModelConfig towers;
  towers.kind = "two_tower";
  ExpectContains(FindAnalysis("reach").refusal(towers), {"two_tower", "decoder_lm"});
  ModelConfig bands = testing::SmallLm({"latte"});
  EXPECT_EQ(FindAnalysis("reach").refusal(bands), "");
  const auto model = testing::Make<DecoderLm>(bands);
  ReachAnalysis analysis({}, ContextOf(model));
  Batch batch = testing::IdsBatch(1, 5);
  batch.Add("starts", at::zeros({1, 5}, at::kBool));
  ExpectContains(Thrown([&] { analysis.Add(batch, {}); }), {"several documents"});
}

}  // namespace
}  // namespace cistern
