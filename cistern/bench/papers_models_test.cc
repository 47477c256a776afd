// Figures of whole models: sizes beside the printed ones, turns, memory, refusals. No speeds.
#include "cistern/bench/papers_models.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistern/bench/model.h"
#include "cistern/kernels/isa.h"
#include "cistern/tensors/device.h"

namespace cistern::bench {
namespace {

Case Here() {
  Case like;
  like.isa = ActiveIsa();
  return like;
}

MeasureSettings Quick(int64_t runs) {
  MeasureSettings settings;
  settings.timer.seconds = 0, settings.timer.runs = runs;
  return settings;
}

Protocol Made() {
  Protocol p;
  p.name = "made";
  p.lengths = {8};
  p.arms = {{"a", "softmax"}, {"b", "latte", {{"latents", 4}}}, {"c", "softmax"}};
  p.whole = WholeModel{};
  p.whole->model = {{"kind", "decoder_lm"}, {"vocab_size", 30}, {"dim", 8},
                    {"heads", 2},           {"layers", 1},      {"max_length", 8}};
  return p;
}

int64_t Parameters(const Protocol& p, const Arm& arm) {
  SetActiveDevice(at::kMeta);
  const int64_t count = MakeModel(ConfigOf(p, arm, p.lengths[0]), 1)->ParameterCount();
  SetActiveDevice(at::kCPU);
  return count;
}

TEST(PapersModels, SizesBesideTheBaseAreThePrintedOnes) {
  struct Printed {
    const char* figure;
    std::vector<double> shares;  // of the arms after the base
    std::vector<int> digits;     // behind the point
  };
  for (const Printed& printed : {Printed{"reuse-table2-base", {.92, .90, 1.0}, {2, 2, 1}},
                                 Printed{"reuse-table2-large", {.90, 1.0}, {2, 1}},
                                 Printed{"reuse-table3", {.93, .92, 1.01}, {2, 2, 2}}}) {
    const Protocol p = ChosenProtocols({printed.figure}).at(0);
    ASSERT_EQ(p.arms.size(), printed.shares.size() + 1);
    const auto base = double(Parameters(p, p.arms[0]));
    for (size_t i = 0; i < printed.shares.size(); ++i) {
      const double share = double(Parameters(p, p.arms[i + 1])) / base,
                   unit = std::pow(10, printed.digits[i]);
      EXPECT_EQ(std::round(share * unit), std::round(printed.shares[i] * unit))
          << p.name << ", " << p.arms[i + 1].name << ": " << share;
    }
  }
  // As transformers counts t5-base and t5-large, and timm vit_base_patch16_384.
  const auto base_of = [](const char* figure) {
    const Protocol p = ChosenProtocols({figure}).at(0);
    return Parameters(p, p.arms[0]);
  };
  EXPECT_EQ(base_of("reuse-table2-base"), 222'903'552);
  EXPECT_EQ(base_of("reuse-table2-large"), 737'668'096);
  EXPECT_EQ(base_of("reuse-table3"), 86'859'496);
}

// Each list of T5's scores is copied.
TEST(PapersModels, AllStacksHaveTheMechanismOfTheArm) {
  const Protocol p = ChosenProtocols({"reuse-table2-base"}).at(0);
  for (const Arm& arm : p.arms) {
    const ModelConfig config = ConfigOf(p, arm, 512);
    for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
      const StackOptions o = config.Stack(form).options();
      EXPECT_EQ(o.attention, std::vector<std::string>{arm.mechanism}) << arm.name;
      EXPECT_EQ(o.attention_options[arm.mechanism]["scale"], "unit") << arm.name;
    }
  }
}

TEST(PapersModels, RowsAreInOrderWithRunsOfAllRounds) {
  Protocol p = Made();
  p.lengths = {8, 16};
  int64_t asked = 0;
  MeasureSettings settings = Quick(7);
  settings.progress = [&](const Case& next, int64_t done) {
    EXPECT_EQ(next.length, asked < 9 ? 8 : 16);
    EXPECT_LT(done, 6);
    ++asked;
  };
  const std::vector<Row> rows = MeasureWholeModels(p, Here(), settings);
  EXPECT_EQ(asked, 2 * 3 * 3);  // lengths, rounds, arms
  ASSERT_EQ(rows.size(), 6u);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    ASSERT_EQ(row.skipped, "");
    EXPECT_EQ(row.what["figure"], "made");
    EXPECT_EQ(row.what["arm"], p.arms[i % 3].name);
    EXPECT_EQ(row.what["length"], i < 3 ? 8 : 16);
    EXPECT_EQ(row.ms.runs, 9);  // of each round three, so that there are seven or more
    EXPECT_EQ(row.figures["parameters"], Parameters(p, p.arms[i % 3]));
    EXPECT_DOUBLE_EQ(row.figures["tokens_per_s"].get<double>(),
                     double(p.lengths[i / 3]) * row.figures["steps_per_s"].get<double>());
  }
  EXPECT_EQ(MeasureWholeModels(Made(), Here(), Quick(1)).at(0).ms.runs, 1);
}

// Weights, gradients and two moments.
TEST(PapersModels, MemoryIsThatOfTheWholeStep) {
  Protocol p = Made();
  p.whole->model["vocab_size"] = 200'000, p.whole->model["dim"] = 32;
  const std::vector<Row> rows = MeasureWholeModels(p, Here(), Quick(1));
  for (const Row& row : rows) {
    ASSERT_EQ(row.skipped, "");
    if (!row.figures.contains("peak_bytes")) GTEST_SKIP() << "the system does not say";
    const double weights = 4 * row.figures["parameters"].get<double>();
    EXPECT_GT(row.figures["peak_bytes"].get<double>(), 3.9 * weights) << row.what;
    EXPECT_LT(row.figures["peak_bytes"].get<double>(), 8 * weights) << row.what;
  }
  MeasureSettings without = Quick(1);
  without.memory = false;
  EXPECT_FALSE(MeasureWholeModels(Made(), Here(), without)[0].figures.contains("peak_bytes"));
}

TEST(PapersModels, AModelThatDoesNotFitIsSkippedAndTheOthersAreMeasured) {
  for (const auto& [work, kind] : {std::pair{ModelWork::kTraining, "decoder_lm"},
                                   std::pair{ModelWork::kInference, "encoder_classifier"},
                                   std::pair{ModelWork::kTranslation, "encoder_decoder"}}) {
    Protocol p = Made();
    p.whole->work = work;
    p.whole->model["kind"] = kind;
    if (work == ModelWork::kInference) p.whole->model["classes"] = 2;
    p.arms[1].model = {{"dim", 16384}, {"layers", 10}};
    const std::vector<Row> rows = MeasureWholeModels(p, Here(), Quick(1));
    EXPECT_NE(rows[1].skipped.find("of memory"), std::string::npos) << rows[1].skipped;
    EXPECT_NE(rows[1].skipped.find("--scale"), std::string::npos) << rows[1].skipped;
    EXPECT_EQ(rows[0].skipped + rows[2].skipped, "");
  }
}

TEST(PapersModels, StoppingKeepsWhatWasMeasured) {
  MeasureSettings settings = Quick(3);
  int64_t steps = 0;  // questions before steps, and before arms
  settings.stop = [&] { return ++steps > 4; };
  const std::vector<Row> rows = MeasureWholeModels(Made(), Here(), settings);
  EXPECT_EQ(rows[0].ms.runs, 1);
  EXPECT_EQ(rows[1].ms.runs, 1);
  EXPECT_EQ(rows[0].skipped + rows[1].skipped, "");
  EXPECT_EQ(rows[2].skipped, "interrupted");
}

TEST(PapersModels, InferenceIsOfClassifiersWithoutDropoutAndGradients) {
  Protocol p = Made();
  EXPECT_THROW(Inference(MakeModel(ConfigOf(p, p.arms[0], 8), 1), {}), UsageError);
  p.whole->model.update({{"kind", "encoder_classifier"}, {"classes", 2}, {"dropout", 0.5}});
  const auto model = MakeModel(ConfigOf(p, p.arms[0], 8), 1);
  ModelSettings settings;
  settings.length = 8;
  Inference work(model, settings);
  const at::Tensor logits = work.Run();
  EXPECT_TRUE(at::equal(logits, work.Run()));
  EXPECT_FALSE(logits.requires_grad());
  EXPECT_TRUE(model->is_training());  // as it was
}

// The likeliest token after those before it, as the whole target at once has it.
TEST(PapersModels, TranslationIsGreedy) {
  Protocol p = Made();
  EXPECT_THROW(Translation(MakeModel(ConfigOf(p, p.arms[0], 8), 1), {}), UsageError);
  p.whole->model.update({{"kind", "encoder_decoder"},
                         {"dropout", 0.5},
                         {"init_std", 0.5},
                         {"positions", "learned"},
                         {"max_length", 9}});
  for (const Arm& arm : p.arms) {
    const auto model = MakeModel(ConfigOf(p, arm, 8), 1);
    ModelSettings settings;
    settings.batch = 2, settings.length = 8, settings.target_length = 6;
    at::manual_seed(3);
    Translation work(model, settings);
    EXPECT_EQ(work.tokens(), 12);
    const at::Tensor said = work.Run();
    EXPECT_EQ(said.sizes(), (at::IntArrayRef{2, 6}));
    EXPECT_TRUE(model->is_training());  // as it was
    EXPECT_TRUE(at::equal(said, work.Run()));
    at::manual_seed(3);
    const at::Tensor source = at::randint(30, {2, 8}, at::kLong);
    auto& lm = dynamic_cast<LanguageModel&>(*model);
    lm.eval();
    at::NoGradGuard guard;
    ModelState state = lm.Encode(source, {});
    const at::Tensor before = at::cat({at::zeros({2, 1}, at::kLong), said.narrow(1, 0, 5)}, 1);
    EXPECT_TRUE(at::equal(lm.Extend(before, state).argmax(-1), said)) << arm.name;
    settings.length = 10;
    EXPECT_THROW(Translation(model, settings), UsageError);
  }
}

TEST(PapersModels, TranslationsAreAsLongAsTheirSources) {
  Protocol p = Made();
  p.whole->work = ModelWork::kTranslation, p.batch = 2;
  p.whole->model["kind"] = "encoder_decoder";
  for (const Row& row : MeasureWholeModels(p, Here(), Quick(1))) {
    ASSERT_EQ(row.skipped, "");
    EXPECT_EQ(row.what["pass"], "translation");
    EXPECT_DOUBLE_EQ(row.figures["tokens_per_s"].get<double>(),
                     2 * 8 * row.figures["steps_per_s"].get<double>());
  }
}

// The encoder's attention is softmax, the decoder's and that to the source the arm's.
TEST(PapersModels, AnArmMayBeOfTheDecoderAlone) {
  const Protocol p = ChosenProtocols({"abc-fig1-model"}).at(0);
  ASSERT_EQ(p.arms.size(), 4u);
  for (const Arm& arm : p.arms) {
    const ModelConfig config = ConfigOf(p, arm, 64);
    const auto of = [&](Form form) { return config.Stack(form).options(); };
    EXPECT_EQ(of(Form::kBidirectional).attention[0], "softmax");
    EXPECT_EQ(of(Form::kCausal).attention[0], arm.mechanism);
    EXPECT_EQ(of(Form::kCross).attention[0], arm.mechanism);
    if (arm.mechanism == "softmax") continue;
    const char* size = arm.mechanism == "abc_mlp" ? "slots" : "features";
    const int64_t half = arm.mechanism == "rfa" ? 2 : 1;
    const Json cross = of(Form::kCross).attention_options[arm.mechanism],
               own = of(Form::kCausal).attention_options[arm.mechanism];
    EXPECT_EQ(arm.name.substr(arm.name.find(' ') + 1),
              StrCat(half * cross[size].get<int64_t>(), "/", half * own[size].get<int64_t>()));
  }
}

}  // namespace
}  // namespace cistern::bench
