// T5's pretraining as a task: batches, measurements, gaps filled.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "cistern/base/error.h"
#include "cistern/base/random.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/language_model.h"
#include "cistern/ops/testing.h"
#include "cistern/tasks/evaluate.h"
#include "cistern/tasks/span_corruption_task.h"

namespace cistern {
namespace {

using testing::ExpectContains;

constexpr int64_t kEnd = 256;  // behind the bytes

class SpanCorruption : public ::testing::Test {
 protected:
  void SetUp() override {
    Random random(4);
    std::string text;
    const std::vector<std::string> words = {"the", "a", "cat", "dog", "sees", "hears", "bird"};
    for (int i = 0; i < 3000; ++i) text += words[size_t(random.Below(7))] + (i % 9 ? " " : ".\n");
    std::ofstream(folder_ / "a.txt", std::ios::binary) << text;
    options_.text = folder_ / "a.txt";
    options_.tokenizer = TokenizerKind::kBytes;
    options_.length = 64, options_.sentinels = 8;
  }
  std::unique_ptr<SpanCorruptionTask> Prepared() {
    auto task = std::make_unique<SpanCorruptionTask>(options_, folder_ / "cache");
    task->Prepare();
    return task;
  }
  static std::shared_ptr<LanguageModel> ModelOf(const Task& task,
                                                PositionKind positions = PositionKind::kSinusoidal,
                                                ModelConfig c = {}) {
    c.kind = "encoder_decoder", c.dim = 12, c.layers = 1, c.heads = 2, c.ffn_dim = 12;
    c.attention = {"softmax"}, c.positions = positions, c.init_std = 0.4, c.max_length = 8;
    c.tie_embeddings = false;
    task.Complete(c);
    auto model = std::dynamic_pointer_cast<LanguageModel>(MakeModel(c, 2));
    model->to(at::kDouble);
    model->eval();
    return model;
  }
  TestFolder folder_;
  SpanCorruptionTask::Options options_;
};

// Hidden 10 of 64 tokens in 3 spans.
TEST_F(SpanCorruption, BatchesHideSpansOfTheText) {
  const auto task = Prepared();
  ModelConfig config;
  task->Complete(config);
  EXPECT_EQ(config.vocab_size, kEnd + 1 + 8);
  EXPECT_EQ(task->tokens_per_row(), 58 + 14);
  EXPECT_EQ(task->tokens_per_sequence(), 58);
  at::Tensor first;
  for (int64_t step = 0; step < 3; ++step) {
    const Batch batch = task->TrainBatch(7, step, 4), again = task->TrainBatch(7, step, 4);
    EXPECT_EQ(batch["source"].sizes(), (std::vector<int64_t>{4, 58}));
    EXPECT_EQ(batch["targets"].sizes(), (std::vector<int64_t>{4, 14}));
    EXPECT_TRUE(at::equal(batch["source"], again["source"]));
    EXPECT_TRUE(batch["ids"].select(1, 0).eq(kEnd).all().item<bool>());
    EXPECT_TRUE(at::equal(batch["ids"].narrow(1, 1, 13), batch["targets"].narrow(1, 0, 13)));
    EXPECT_EQ(batch["source"].gt(kEnd).sum().item<int64_t>(), 4 * 3);
    EXPECT_EQ(batch["targets"].gt(kEnd).sum().item<int64_t>(), 4 * 3);
    EXPECT_EQ(task->Terms(batch), 4 * 14);
    EXPECT_EQ(batch.tokens, 4 * 72);
    if (first.defined()) {
      EXPECT_FALSE(at::equal(first, batch["source"].gt(kEnd)));
    }
    first = batch["source"].gt(kEnd);
  }
}

TEST_F(SpanCorruption, MeasuresTheLossOfTheSameSpans) {
  const auto task = Prepared();
  const auto model = ModelOf(*task);
  double nats = 0, tokens = 0;
  const auto reader = task->Read(Split::kTest, {3, 0, 0});
  while (const auto batch = reader->Next()) {
    nats += task->Loss(*model, *batch, 0).item<double>() * task->Terms(*batch);
    tokens += task->Terms(*batch);
  }
  EvalOptions one;
  one.read.rows = 1;
  for (const EvalOptions& options : {EvalOptions(), one}) {
    const Json m = task->Metrics(Evaluate(*task, *model, Split::kTest, options).score);
    EXPECT_NEAR(m["nats_per_token"].get<double>(), nats / tokens, 1e-9);
    EXPECT_NEAR(m["perplexity"].get<double>(), std::exp(nats / tokens), 1e-6);
    EXPECT_EQ(m["tokens"].get<double>(), tokens);
  }
}

TEST_F(SpanCorruption, GapsOfLinesAreFilled) {
  const auto task = Prepared();
  const auto model = ModelOf(*task);
  std::ofstream(folder_ / "gaps.txt") << "the <mask> sees\n\na <mask> <mask>.\n";
  const Batch batch = *task->ReadFile(folder_ / "gaps.txt", false, {})->Next();
  EXPECT_EQ(batch["source"][0][4].item<int64_t>(), kEnd + 1);
  EXPECT_EQ(batch["source"][1][4].item<int64_t>(), kEnd + 2);
  EXPECT_EQ(batch["source"][0][10].item<int64_t>(), kEnd);
  EXPECT_TRUE(at::equal(batch["source_lengths"], at::tensor({11, 7}, at::kLong)));
  const std::vector<Json> rows = task->Predict(*model, batch);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0]["line"], 1);
  EXPECT_EQ(rows[1]["line"], 3);
  EXPECT_EQ(rows[0]["gaps"].size(), 1u);
  EXPECT_EQ(rows[1]["gaps"].size(), 2u);
  for (const Json& row : rows) {
    const std::string text = row["text"];
    EXPECT_TRUE(text.starts_with(row["line"] == 1 ? "the " : "a ")) << text;
  }
  // Where padding takes part, a row's is none.
  ModelConfig seen;
  seen.encoder.attention = {"conv_luna"};
  seen.attention_options = Json{{"conv_luna", {{"mask", "none"}}}};
  const auto other = ModelOf(*task, PositionKind::kSinusoidal, seen);
  EXPECT_EQ(task->Predict(*other, batch)[1],
            task->Predict(*other, batch.Rows(1, 2).WithoutPadding())[0]);
  std::ofstream(folder_ / "none.txt") << "the <mask> sees\nnothing is missing\n";
  ExpectContains(ErrorMessage([&] { task->ReadFile(folder_ / "none.txt", false, {})->Next(); }),
                 {"none.txt:2: expected <mask>"});
  std::string many;
  for (int i = 0; i < 9; ++i) many += "<mask>a";
  std::ofstream(folder_ / "many.txt") << many << "\n";
  ExpectContains(ErrorMessage([&] { task->ReadFile(folder_ / "many.txt", false, {})->Next(); }),
                 {"many.txt:1: 9 gaps", "trained for 8"});
}

TEST_F(SpanCorruption, RowsLongerThanLearnedPositionsAreRefused) {
  const auto task = Prepared();
  const auto model = ModelOf(*task, PositionKind::kLearned);
  std::ofstream(folder_ / "long.txt") << std::string(80, 'x') << "<mask>\n";
  ExpectContains(ErrorMessage([&] {
                   task->Predict(*model, *task->ReadFile(folder_ / "long.txt", false, {})->Next());
                 }),
                 {"a row of 82 tokens is beyond max_length="});
}

TEST_F(SpanCorruption, Refusals) {
  options_.sentinels = 2;
  ExpectContains(ErrorMessage([&] { Prepared(); }),
                 {"a row of length=64 has 3 hidden spans, and sentinels=2"});
  options_.sentinels = 8, options_.tokenizer = TokenizerKind::kWords;
  ExpectContains(ErrorMessage([&] { Prepared(); }), {"use bpe or bytes"});
}

}  // namespace
}  // namespace cistern
