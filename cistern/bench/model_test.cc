// What the rows of a model are told apart by; what cannot be measured. No speeds.
#include "cistern/bench/model.h"

#include <gtest/gtest.h>

#include <set>

#include "cistern/base/parallel.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/testing.h"

namespace cistern::bench {
namespace {

using testing::ExpectContains;
using testing::Thrown;

ModelConfig Tiny() {
  ModelConfig config;
  config.vocab_size = 30, config.dim = 16, config.heads = 2, config.layers = 1;
  return config;
}

ModelSettings Quick() {
  ModelSettings settings;
  settings.batch = 2, settings.length = 8;
  settings.timer.seconds = 0, settings.timer.runs = 1, settings.timer.shortest = 0;
  return settings;
}

std::vector<std::string> Whats(const ModelConfig& config, const ModelSettings& settings) {
  Json peaks = Json::array();
  std::vector<std::string> whats;
  for (const Row& row : MeasureModel(MakeModel(config, 1), settings, &peaks))
    whats.push_back(row.what.dump());
  return whats;
}

// All of them have one summary: latte, 1 layers x 16, 2 heads.
TEST(BenchModel, OtherSettingsAreOtherRows) {
  ModelSettings settings = Quick();
  settings.decode = false;
  ModelConfig wide = Tiny(), words = Tiny(), slots = Tiny();
  wide.ffn_dim = 24;
  words.vocab_size = 40;
  slots.attention_options = {{"latte", {{"latents", 4}}}};
  std::set<std::string> whats;
  for (const ModelConfig& config : {Tiny(), wide, words, slots, Tiny()})
    whats.insert(Whats(config, settings).at(0));
  EXPECT_EQ(whats.size(), 4u);
  settings.optimizer.kind = OptimizerKind::kSgd;
  whats.insert(Whats(Tiny(), settings).at(0));
  settings.optimizer.momentum = 0;
  whats.insert(Whats(Tiny(), settings).at(0));
  EXPECT_EQ(whats.size(), 6u);
}

// So that bench diff does not take one for the other.
TEST(BenchModel, OtherWorkIsAnotherRow) {
  ModelSettings decode = Quick(), train = Quick();
  decode.train = train.decode = false;
  decode.positions = {0}, decode.sequences = {}, decode.decoded = 2;
  ExpectContains(Whats(Tiny(), decode).at(0), {"\"decoded\":2", "\"implementation\":\"kernel\""});
  std::set<std::string> whats;
  const auto is_new = [&] { return whats.insert(Whats(Tiny(), train).at(0)).second; };
  const int threads = NumThreads();
  SetNumThreads(2);
  train.parallel = ThreadsTake::kOperations;
  EXPECT_TRUE(is_new());
  train.parallel = ThreadsTake::kRows;
  EXPECT_TRUE(is_new());
  train.parallel = ThreadsTake::kAuto;  // which takes rows here
  EXPECT_FALSE(is_new());
  SetNumThreads(threads);
  train.clip = 0.5;
  EXPECT_TRUE(is_new());
  const ops::ImplScope reference(ops::Impl::kReference);
  EXPECT_TRUE(is_new());
}

// As a trainer does: a block that is left out in a step keeps its weights.
TEST(BenchModel, EachStepDrawsAnew) {
  ModelConfig config = Tiny();
  config.layer_drop = 0.5;
  ModelSettings settings = Quick();
  settings.optimizer.kind = OptimizerKind::kSgd;
  settings.optimizer.momentum = settings.optimizer.weight_decay = 0;
  const auto model = MakeModel(config, 1);
  TrainingStep step(model, settings);
  const auto block = [&] {
    std::vector<at::Tensor> weights;
    for (const auto& p : model->named_parameters()) {
      if (p.key().starts_with("layers.")) weights.push_back(p.value().detach().flatten());
    }
    return at::cat(weights).clone();
  };
  int taken = 0;
  for (int i = 0; i < 20; ++i) {
    const at::Tensor before = block();
    step.Run();
    taken += !at::equal(block(), before);
  }
  EXPECT_GT(taken, 3);
  EXPECT_LT(taken, 17);
}

// As `cistern train` counts them: of two texts, and of a source and its target, both.
TEST(BenchModel, TokensAreThoseOfBothTexts) {
  ModelSettings settings = Quick();
  const auto tokens = [&](const std::string& kind) {
    ModelConfig config = Tiny();
    config.kind = kind;
    if (config.info().classifies) config.classes = 3;
    return TrainingStep(MakeModel(config, 1), settings).tokens();
  };
  EXPECT_EQ(tokens("decoder_lm"), 2 * 8);
  EXPECT_EQ(tokens("encoder_classifier"), 2 * 8);
  EXPECT_EQ(tokens("two_tower"), 2 * (8 + 8));
  EXPECT_EQ(tokens("encoder_decoder"), 2 * (8 + 8));
  settings.target_length = 5;
  EXPECT_EQ(tokens("encoder_decoder"), 2 * (8 + 5));
}

// Of two texts, the memory of both, as `cistern train` estimates it.
TEST(BenchModel, MemoryIsThatOfBothTexts) {
  ModelSettings settings = Quick();
  ModelConfig config = Tiny();
  config.classes = 3, settings.length = 1 << 24, settings.batch = 1 << 20;
  config.kind = "two_tower";
  ExpectContains(Thrown([&] { CheckStepMemory(config, settings); }), {"length 33554432"});
  config.kind = "encoder_classifier";
  ExpectContains(Thrown([&] { CheckStepMemory(config, settings); }), {"length 16777216"});
}

TEST(BenchModel, NoRowIsMeasuredTwice) {
  ModelSettings settings = Quick();
  settings.train = false, settings.decoded = 1;
  settings.positions = {0}, settings.sequences = {1, 3};
  const std::vector<std::string> whats = Whats(Tiny(), settings);
  EXPECT_EQ(whats.size(), 2u);  // a sequence at the start, and three
  EXPECT_NE(whats.at(0), whats.at(1));
  settings.sequences = {3, 3};
  ExpectContains(Thrown([&] { Whats(Tiny(), settings); }), {"--sequences names 3 twice"});
}

// A row says that linformer knows no such position; the others are measured.
TEST(BenchModel, WhatAModelCannotReachIsARowThatSaysSo) {
  ModelConfig config = Tiny();
  config.attention = {"linformer"}, config.max_length = 16;
  ModelSettings settings = Quick();
  settings.decoded = 4, settings.positions = {0, 8, 100}, settings.sequences = {3};
  Json peaks = Json::array();
  const std::vector<Row> rows = MeasureModel(MakeModel(config, 1), settings, &peaks);
  ASSERT_EQ(rows.size(), 5u);
  for (const Row& row : rows) {
    const bool beyond = row.what["phase"] == "decode" && row.what["position"] == 100;
    EXPECT_EQ(row.skipped.empty(), !beyond) << row.what.dump() << row.skipped;
    EXPECT_EQ(row.ms.runs > 0, !beyond) << row.what.dump();
    if (beyond) ExpectContains(row.skipped, {"[linformer] position", "max_length=16"});
  }
}

// By the positions of the stack that reads them.
TEST(BenchModel, LengthsBeyondLearnedPositionsAreRefused) {
  ModelConfig pair = Tiny();
  pair.kind = "encoder_decoder", pair.decoder.positions = PositionKind::kLearned;
  pair.decoder.max_length = 10;
  ModelSettings settings = Quick();
  settings.decode = false, settings.length = 20, settings.target_length = 10;
  EXPECT_EQ(Whats(pair, settings).size(), 1u);
  settings.target_length = 11;
  ExpectContains(Thrown([&] { Whats(pair, settings); }),
                 {"--target-length 11", "10 tokens", "max_length=10"});
  ModelConfig one = Tiny();
  one.decoder.positions = PositionKind::kLearned, one.decoder.max_length = 10;
  settings = Quick();
  settings.train = false, settings.decoded = 4, settings.positions = {0, 8};
  ExpectContains(Thrown([&] { Whats(one, settings); }), {"--positions", "10 tokens"});
}

TEST(BenchModel, NothingToMeasureSaysWhy) {
  ModelSettings settings = Quick();
  settings.train = settings.decode = false;
  ExpectContains(Thrown([&] { Whats(Tiny(), settings); }), {"omit --no-train or --no-decode"});
  settings.decode = true;
  ModelConfig pair = Tiny();
  pair.kind = "encoder_decoder";
  ExpectContains(Thrown([&] { Whats(pair, settings); }),
                 {"encoder_decoder does not decode without a source", "omit --no-train"});
}

}  // namespace
}  // namespace cistern::bench
