#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <utility>

#include "cistern/base/random.h"
#include "cistern/io/test_folder.h"
#include "cistern/ops/testing.h"
#include "cistern/tasks/evaluate.h"
#include "cistern/tasks/mlm_task.h"

namespace cistern {
namespace {

using testing::ExpectContains;

std::string Words() {
  Random random(4);
  std::string text;
  const std::vector<std::string> words = {"the", "a", "cat", "dog", "sees", "hears", "bird"};
  for (int i = 0; i < 4000; ++i) text += words[size_t(random.Below(7))] + (i % 9 ? " " : ".\n");
  return text;
}

class Mlm : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ofstream(folder_ / "a.txt", std::ios::binary) << Words();
    options_.text = folder_ / "a.txt";
    options_.tokenizer = TokenizerKind::kBytes;
    options_.length = 64;
  }
  std::unique_ptr<MlmTask> Prepared() {
    auto task = std::make_unique<MlmTask>(options_, folder_ / "cache");
    task->Prepare();
    return task;
  }
  static std::shared_ptr<MaskedLm> ModelOf(const Task& task, PositionKind positions,
                                           ModelConfig c = {}) {
    c.kind = "masked_lm";
    c.dim = 16, c.layers = 2, c.heads = 2, c.init_std = 0.3, c.positions = positions;
    task.Complete(c);
    auto model = std::dynamic_pointer_cast<MaskedLm>(MakeModel(c, 3));
    model->to(at::kDouble);
    model->eval();
    return model;
  }
  TestFolder folder_;
  MlmTask::Options options_;
};

TEST_F(Mlm, MasksTheSharesThatAreAskedFor) {
  options_.mask_share = 0.25, options_.hidden_share = 0.6, options_.random_share = 0.3;
  const auto task = Prepared();
  double all = 0, chosen = 0, hidden = 0, kept = 0;
  at::Tensor first;
  for (int64_t step = 0; step < 20; ++step) {
    const Batch batch = task->TrainBatch(7, step, 8), again = task->TrainBatch(7, step, 8);
    const at::Tensor &ids = batch["ids"], &targets = batch["targets"];
    EXPECT_TRUE(ids.equal(again["ids"]) && targets.equal(again["targets"]));
    if (step == 0) first = targets;
    const at::Tensor wanted = targets.ne(-100);
    all += double(ids.numel());
    chosen += double(wanted.sum().item<int64_t>());
    hidden += double(ids.eq(256).sum().item<int64_t>());
    kept += double(ids.eq(targets).sum().item<int64_t>());
    // A row has its share, rounded up or down, and what is not chosen is the text.
    const at::Tensor each = wanted.sum(1);
    EXPECT_TRUE(each.ge(16).logical_and(each.le(17)).all().item<bool>());
    EXPECT_TRUE(ids.eq(256).logical_and(wanted.logical_not()).sum().item<int64_t>() == 0);
    EXPECT_TRUE(ids.le(256).all().item<bool>() && targets.lt(256).all().item<bool>());
  }
  EXPECT_NEAR(chosen / all, 0.25, 0.01);
  EXPECT_NEAR(hidden / chosen, 0.6, 0.03);
  EXPECT_NEAR(kept / chosen, 0.1, 0.02);  // and one in 256 of the random ones
  EXPECT_FALSE(first.equal(task->TrainBatch(8, 0, 8)["targets"]));
  // The text itself: what was hidden is put back.
  const Batch batch = task->TrainBatch(7, 3, 4);
  const at::Tensor text = at::where(batch["targets"].ne(-100), batch["targets"], batch["ids"]);
  std::string row;
  for (int64_t t = 0; t < 64; ++t) row += char(text[1][t].item<int64_t>());
  EXPECT_NE(Words().find(row), std::string::npos) << row;
}

// The sums are those of the definition, however many rows are measured at once.
TEST_F(Mlm, MeasuresTheSameTokensAlways) {
  const auto task = Prepared();
  const auto model = ModelOf(*task, PositionKind::kSinusoidal);
  double nats = 0, correct = 0, tokens = 0, unigram = 0;
  std::map<int64_t, double> counts;
  const auto train = task->Read(Split::kTrain, {});
  while (const auto batch = train->Next()) {
    const at::Tensor text =
        at::where((*batch)["targets"].ne(-100), (*batch)["targets"], (*batch)["ids"]);
    for (int64_t i = 0; i < text.numel(); ++i) ++counts[text.reshape({-1})[i].item<int64_t>()];
  }
  double total = 256;
  for (const auto& [id, n] : counts) total += n;
  const auto reader = task->Read(Split::kTest, {});
  const at::NoGradGuard guard;
  while (const auto batch = reader->Next()) {
    const at::Tensor logp = at::log_softmax(model->Logits(model->Hidden((*batch)["ids"])), -1);
    for (int64_t r = 0; r < batch->rows; ++r) {
      for (int64_t t = 0; t < (*batch)["ids"].size(1); ++t) {
        const int64_t target = (*batch)["targets"][r][t].item<int64_t>();
        if (target == -100) continue;
        nats -= logp[r][t][target].item<double>();
        correct += logp[r][t].argmax().item<int64_t>() == target;
        unigram -= std::log((1 + counts[target]) / total);
        ++tokens;
      }
    }
  }
  for (const int64_t rows : {1, 3, 1000}) {
    const Evaluation done = Evaluate(*task, *model, Split::kTest, {{rows}});
    EXPECT_TRUE(done.complete);
    const Json metrics = task->Metrics(done.score);
    EXPECT_EQ(metrics["tokens"], int64_t(tokens));
    EXPECT_NEAR(metrics["nats_per_token"].get<double>(), nats / tokens, 1e-9);
    EXPECT_NEAR(metrics["perplexity"].get<double>(), std::exp(nats / tokens), 1e-6);
    EXPECT_NEAR(metrics["accuracy"].get<double>(), 100 * correct / tokens, 1e-9);
    EXPECT_NEAR(metrics["unigram_perplexity"].get<double>(), std::exp(unigram / tokens), 1e-9);
  }
  // A file of the same text has the same figures; without the training text there is no baseline.
  MlmTask loaded(options_, folder_ / "cache");
  task->SaveAssets(folder_.path());
  loaded.LoadAssets(folder_.path());
  const auto file = loaded.ReadFile(options_.text, true, {});
  const Json metrics = loaded.Metrics(Evaluate(loaded, *model, *file).score);
  EXPECT_FALSE(metrics.contains("unigram_perplexity"));
  EXPECT_GT(metrics["tokens"].get<int64_t>(), 1000);
}

TEST_F(Mlm, LossIsThatOfTheChosenTokens) {
  const auto task = Prepared();
  const auto model = ModelOf(*task, PositionKind::kLearned);
  const Batch batch = task->TrainBatch(1, 0, 3);
  const at::Tensor logits = model->Logits(model->Hidden(batch["ids"]));
  EXPECT_NEAR(task->Loss(*model, batch, 0.1).item<double>(),
              NextTokenLoss(logits, batch["targets"], 0.1).item<double>(), 1e-10);
}

TEST_F(Mlm, FillsInMasks) {
  options_.tokenizer = TokenizerKind::kBpe, options_.vocab_size = 280;
  const auto task = Prepared();
  const auto model = ModelOf(*task, PositionKind::kSinusoidal);
  const std::string lines = folder_ / "lines.txt";
  std::ofstream(lines) << "the <mask> sees<mask>\n\na dog hears the <mask>.\n";
  // Beside other rows or alone: padding is never seen.
  std::vector<Json> together, alone;
  for (const int64_t rows : {8, 1}) {
    const auto reader = task->ReadFile(lines, false, {rows});
    while (const auto batch = reader->Next()) {
      for (Json& row : task->Predict(*model, *batch))
        (rows == 8 ? together : alone).push_back(std::move(row));
    }
  }
  ASSERT_EQ(together.size(), 2u);
  EXPECT_EQ(together[1]["line"], 3);
  ASSERT_EQ(together[0]["masks"].size(), 2u);
  for (size_t row = 0; row < 2; ++row) {
    EXPECT_EQ(together[row]["text"], alone[row]["text"]);
    for (size_t m = 0; m < together[row]["masks"].size(); ++m) {
      const Json &a = together[row]["masks"][m][0], &b = alone[row]["masks"][m][0];
      EXPECT_EQ(a["token"], b["token"]);
      EXPECT_NEAR(a["probability"].get<double>(), b["probability"].get<double>(), 1e-9);
    }
  }
  // The space before a mask is part of it, as it is part of BPE's tokens.
  const std::string token = together[1]["masks"][0][0]["token"].get<std::string>();
  EXPECT_EQ(together[1]["text"], "a dog hears the" + token + ".");
}

// By a mechanism's setting; rows of training and measuring have none.
TEST_F(Mlm, LinesAreReadApartWherePaddingTakesPart) {
  const auto task = Prepared();
  const std::string lines = folder_ / "lines.txt";
  std::ofstream(lines) << "the <mask> sees\na dog hears the <mask>at and the bird.\n";
  ModelConfig conv, nystrom;
  conv.attention = {"conv_luna"}, nystrom.attention = {"nystrom"};
  conv.attention_options = Json{{"conv_luna", {{"mask", "none"}}}};
  nystrom.attention_options = Json{{"nystrom", {{"padding", "zeroes"}}}};
  for (const ModelConfig& config : {conv, nystrom}) {
    const auto model = ModelOf(*task, PositionKind::kSinusoidal, config);
    const auto first = [&](int64_t rows) {
      return task->Predict(*model, *task->ReadFile(lines, false, {rows})->Next())[0]["masks"];
    };
    const double together = first(2)[0][0]["probability"], alone = first(1)[0][0]["probability"];
    EXPECT_NEAR(together, alone, 1e-12);
  }
}

TEST_F(Mlm, Errors) {
  const auto task = Prepared();
  const std::string lines = folder_ / "lines.txt";
  std::ofstream(lines) << "a <mask>\nno gap\n";
  const auto reader = task->ReadFile(lines, false, {1});
  EXPECT_TRUE(reader->Next().has_value());
  ExpectContains(ErrorMessage([&] { reader->Next(); }), {"lines.txt:2", "<mask>"});
  const auto model = ModelOf(*task, PositionKind::kLearned);
  ModelConfig config = model->config();
  const Batch batch = *task->Read(Split::kTrain, {0, 0, 2000})->Next();
  ExpectContains(ErrorMessage([&] { task->Measure(*model, batch); }),
                 {"beyond max_length=", std::to_string(config.max_length)});
  bool more = true;
  const auto text = [&] { return std::exchange(more, false) ? "a b" : std::string_view(); };
  const std::shared_ptr<const Tokenizer> words = TrainWords(text, 300);
  ExpectContains(ErrorMessage([&] { MlmTask(options_, "").TakeTokenizer(words); }),
                 {"task.mlm: the other model's tokenizer is of words"});
  options_.vocab_size = 300;
  ExpectContains(ErrorMessage([&] { Prepared(); }),
                 {"task.mlm.vocab_size=300 has no effect with tokenizer=bytes; leave it out"});
  options_.hidden_share = 0.95;
  ExpectContains(ErrorMessage([&] { MlmTask(options_, ""); }), {"hidden_share=0.95"});
  options_.text.clear(), options_.hidden_share = 0.8;
  ExpectContains(ErrorMessage([&] { MlmTask(options_, "").Prepare(); }), {"task.mlm.text"});
  config.attention = {"perceiver"};
  ExpectContains(ErrorMessage([&] { config.Validate(); }), {"perceiver", "latents"});
}

}  // namespace
}  // namespace cistern
