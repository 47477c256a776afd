#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <cmath>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/memory.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/decoder_lm.h"
#include "cistern/models/encoder_decoder.h"
#include "cistern/train/checkpoint.h"
#include "cistern/train/optimizer.h"
#include "cistern/train/schedule.h"
#include "cistern/train/trainer.h"

namespace cistern {
namespace {

ModelConfig TinyConfig() {
  ModelConfig c;
  c.vocab_size = 17;
  c.dim = 8;
  c.layers = 1;
  c.heads = 2;
  return c;
}

TEST(Schedule, RsqrtIsLongRangeArenas) {  // spec 1.4: base .005, warm-up 1000 peaks at 1.6e-4; base
                                          // .05 at 1.6e-3
  ScheduleOptions o{ScheduleKind::kRsqrt, 0.005, 0, 1000, 50000};
  EXPECT_NEAR(LearningRate(o, 999), 0.005 / std::sqrt(1000.0), 1e-12);
  EXPECT_NEAR(LearningRate(o, 499), 0.5 * 0.005 / std::sqrt(1000.0), 1e-12);
  EXPECT_NEAR(LearningRate(o, 3999), 0.005 / std::sqrt(4000.0), 1e-12);
}

TEST(Schedule, CosineAndLinearEndAtTheFloor) {
  for (const char* kind : {"cosine", "linear"}) {
    ScheduleOptions o{ValueOf(kind, ScheduleKinds()), 1.0, 0.1, 10, 110};
    EXPECT_NEAR(LearningRate(o, 0), 0.1, 1e-12) << kind;
    EXPECT_NEAR(LearningRate(o, 9), 1.0, 1e-12) << kind;
    EXPECT_NEAR(LearningRate(o, 60), 0.55, 1e-9) << kind;
    EXPECT_NEAR(LearningRate(o, 110), 0.1, 1e-12) << kind;
    EXPECT_NEAR(LearningRate(o, 1000), 0.1, 1e-12) << kind;
  }
}

// At a steady speed a budget of time has the rates of as many steps; whatever the speed, no two
// neighbouring updates differ by more than the warm-up's slope.
TEST(Schedule, ABudgetOfTimeIsThatOfItsSteps) {
  for (const char* kind : {"cosine", "linear", "constant"}) {
    const int64_t steps = 2000;
    const ScheduleOptions o{ValueOf(kind, ScheduleKinds()), 1.0, 0.1, steps / 20, steps};
    const TimedScheduleOptions timed{ValueOf(kind, ScheduleKinds()), 1.0, 0.1, 0.05};
    for (int64_t s = 0; s < steps; ++s) {
      EXPECT_NEAR(LearningRate(timed, s, double(s) / double(steps)), LearningRate(o, s), 0.012)
          << kind << " " << s;
    }
  }
}

TEST(Schedule, ABudgetOfTimeNeverJumps) {
  // Steps of very uneven length, the first ones slow.
  const TimedScheduleOptions o{ScheduleKind::kCosine, 1.0, 0, 0.05};
  double share = 0, before = LearningRate(o, 0, 0);
  EXPECT_NEAR(before, 1.0 / double(kSafeWarmup), 1e-12);
  for (int64_t s = 1; share < 1; ++s) {
    share = std::min(1.0, share + (s < 5 ? 0.02 : s % 100 == 0 ? 0.01 : 0.0005));
    const double rate = LearningRate(o, s, share);
    EXPECT_LE(rate - before, 1.0 / double(kSafeWarmup) + 1e-9) << s;
    EXPECT_LE(before - rate, 0.02) << s;
    before = rate;
  }
  EXPECT_NEAR(before, 0, 1e-3);
}

// Two updates of every parameter by the published formula, with and without decay.
TEST(AdamW, FollowsTheFormula) {
  auto model = MakeModel(TinyConfig(), 1);
  model->to(at::kDouble);
  AdamWOptions options;
  options.weight_decay = 0.1;
  AdamW optimizer(*model, options);
  std::vector<at::Tensor> expected, mean, square, gradient;
  for (const at::Tensor& p : model->parameters()) {
    expected.push_back(p.detach().clone());
    mean.push_back(at::zeros_like(p));
    square.push_back(at::zeros_like(p));
    gradient.push_back(at::randn_like(p));
  }
  const double lr = 0.01;
  for (int t = 1; t <= 2; ++t) {
    const auto parameters = model->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = gradient[i].clone();
      const double decay = parameters[i].dim() >= 2 ? options.weight_decay : 0;
      mean[i] = options.beta1 * mean[i] + (1 - options.beta1) * gradient[i];
      square[i] = options.beta2 * square[i] + (1 - options.beta2) * gradient[i] * gradient[i];
      const at::Tensor m = mean[i] / (1 - std::pow(options.beta1, t)),
                       v = square[i] / (1 - std::pow(options.beta2, t));
      expected[i] = expected[i] * (1 - lr * decay) - lr * m / (v.sqrt() + options.eps);
    }
    optimizer.Step(lr, 0);
  }
  const auto parameters = model->parameters();
  for (size_t i = 0; i < parameters.size(); ++i)
    EXPECT_LT((parameters[i].detach() - expected[i]).abs().max().item<double>(), 1e-6);
}

TEST(AdamW, ClipsTheGlobalNorm) {
  auto model = MakeModel(TinyConfig(), 1);
  AdamW optimizer(*model, {});
  double squares = 0;
  for (const at::Tensor& p : model->parameters()) {
    p.mutable_grad() = at::ones_like(p);
    squares += double(p.numel());
  }
  EXPECT_NEAR(optimizer.Step(0.0, 1.0), std::sqrt(squares), 1e-3);
}

TEST(AdamW, NonFiniteGradientChangesNothing) {
  auto model = MakeModel(TinyConfig(), 1);
  AdamW optimizer(*model, {});
  const at::Tensor before = model->parameters()[0].detach().clone();
  for (const at::Tensor& p : model->parameters()) p.mutable_grad() = at::full_like(p, std::nan(""));
  EXPECT_FALSE(std::isfinite(optimizer.Step(0.1, 1.0)));
  EXPECT_TRUE(at::equal(before, model->parameters()[0]));
  EXPECT_FALSE(optimizer.FirstNonFinite(true).empty());
  EXPECT_TRUE(optimizer.FirstNonFinite(false).empty());
}

TEST(Checkpoint, RoundTripKeepsTheNewestAlone) {
  const TestFolder folder;
  const std::string run = folder / "run";
  std::filesystem::create_directories(run);
  auto model = MakeModel(TinyConfig(), 1);
  AdamW optimizer(*model, {});
  for (const at::Tensor& p : model->parameters()) p.mutable_grad() = at::randn_like(p);
  optimizer.Step(0.01, 1.0);
  RunState state;
  state.step = 1;
  WriteCheckpoint(run, *model, optimizer, state);
  state.step = 2;
  WriteCheckpoint(run, *model, optimizer, state);
  EXPECT_FALSE(std::filesystem::exists(run + "/checkpoint-1"));
  const auto newest = NewestCheckpoint(run);
  ASSERT_TRUE(newest);
  auto other = MakeModel(TinyConfig(), 2);
  AdamW moments(*other, {});
  EXPECT_EQ(ReadCheckpoint(*newest, *other, moments).step, 2);
  const auto a = optimizer.Save(), b = moments.Save();
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i].value, b[i].value)) << a[i].name;
  for (size_t i = 0; i < model->parameters().size(); ++i)
    EXPECT_TRUE(at::equal(model->parameters()[i], other->parameters()[i]));
}

TEST(Checkpoint, AGoodOneLoadsAndIsFinite) {
  const TestFolder folder;
  const std::string run = folder.path();
  auto model = MakeModel(TinyConfig(), 1);
  AdamW optimizer(*model, {});
  RunState state;
  WriteCheckpoint(run, *model, optimizer, state);
  const std::string checkpoint = *NewestCheckpoint(run);
  EXPECT_EQ(CheckpointProblem(checkpoint), "");
  // The same step again: trainer.json alone.
  state.evaluation_due = true;
  WriteCheckpoint(run, *model, optimizer, state);
  EXPECT_TRUE(ReadRunState(checkpoint).evaluation_due);
  for (const char* name : {"/model.safetensors", "/optimizer.safetensors", "/trainer.json"}) {
    const std::string path = checkpoint + name, good = ReadFile(path);
    std::string damaged = good;
    damaged[damaged.size() / 2] ^= 1;
    WriteFileAtomically(path, damaged);
    EXPECT_NE(CheckpointProblem(checkpoint).find(path), std::string::npos) << name;
    EXPECT_THROW(ReadCheckpoint(checkpoint, *model, optimizer), Error);
    WriteFileAtomically(path, good);
  }
  {
    at::NoGradGuard guard;
    model->parameters()[0].fill_(std::nan(""));
  }
  state.step = 1;
  WriteCheckpoint(run, *model, optimizer, state);
  EXPECT_NE(CheckpointProblem(*NewestCheckpoint(run)).find("not finite"), std::string::npos);
}

TEST(Checkpoint, AnIncompleteOneIsNotTheNewest) {
  const TestFolder folder;
  const std::string run = folder / "run";
  std::filesystem::create_directories(run +
                                      "/checkpoint-9");  // no trainer.json: it was being written
  EXPECT_FALSE(NewestCheckpoint(run));
}

TEST(Memory, ForetellsWhatCannotFit) {
  ModelConfig c = TinyConfig();
  CheckMemory(c, 1, 16);
  EXPECT_THROW(CheckMemory(c, 1 << 20, 1 << 20), UsageError);
  EXPECT_GT(EstimateTrainingBytes(c, 8, 512), EstimateTrainingBytes(c, 8, 256));
}

// The estimate is not below what a step takes, and not far above. Measured in this process, whose
// libraries are warm.
TEST(Memory, IsForetoldToAHalf) {
  ModelConfig lm;
  lm.vocab_size = 50, lm.dim = 64, lm.heads = 4, lm.layers = 4, lm.max_length = 512,
  lm.attention = {"softmax", "latte", "latte", "softmax"};
  ModelConfig both = lm;
  both.kind = "encoder_decoder", both.layers = 2, both.attention = {"softmax"};
  both.decoder.attention = {"softmax", "latte"}, both.cross.attention = {"latte", "softmax"};
  mallopt(M_MMAP_THRESHOLD, 1 << 17);  // what is freed goes back to the system
  const int64_t rows = 4;
  const auto step = [&](const ModelConfig& config, int64_t length, int64_t source, bool wide) {
    const auto model = MakeModel(config, 1);
    if (wide) model->to(at::kDouble);
    AdamW optimizer(*model, {});
    const auto ids = [&](int64_t count) {
      return at::randint(0, config.vocab_size, {rows, count}, at::kLong);
    };
    at::Tensor loss;
    if (auto* m = dynamic_cast<EncoderDecoder*>(model.get())) {
      ModelState state = m->Encode(ids(source), at::full({rows}, source - 1, at::kLong));
      loss = m->Loss(m->Hidden(ids(length), state), ids(length));
    } else {
      auto& decoder = dynamic_cast<DecoderLm&>(*model);
      ModelState state = decoder.EmptyState(rows);
      loss = decoder.Loss(decoder.Hidden(ids(length), state), ids(length));
    }
    loss.backward();
    optimizer.Step(0.01, 1.0);
  };
  struct Case {
    ModelConfig config;
    int64_t length, source;
    bool doubles = false;
  };
  ModelConfig dropped = lm, features = lm;
  dropped.attention = {"softmax"}, dropped.attention_dropout = 0.1;
  features.attention = {"performer"}, features.attention_options["performer"]["features"] = 96;
  ModelConfig wide = lm;
  wide.vocab_size = 8192;  // logits of 4,096 tokens would be 134 MB, which nothing holds
  for (const Case& c :
       {Case{lm, 1024, 0}, Case{wide, 1024, 0}, Case{both, 512, 512}, Case{both, 128, 1024},
        Case{both, 1024, 128}, Case{dropped, 1024, 0}, Case{features, 1024, 0},
        Case{lm, 1024, 0, true}, Case{features, 1024, 0, true}}) {
    step(c.config, 8, 8, c.doubles);
    ResetPeakMemory();
    const int64_t before = ResidentBytes();
    if (PeakBytes() > before + (8 << 20))
      GTEST_SKIP() << "the system does not reset the peak of memory";
    step(c.config, c.length, c.source, c.doubles);
    const double ratio =
        double(PeakBytes() - before) /
        double(EstimateTrainingBytes(c.config, rows, c.length, c.source, c.doubles ? 8 : 4));
    std::printf("%s, %d and %d tokens: %.2f of the estimate\n", c.config.Summary().c_str(),
                int(c.length), int(c.source), ratio);
    EXPECT_LT(ratio, 1.0) << c.config.Summary();
    EXPECT_GT(ratio, 0.5) << c.config.Summary();
  }
}

}  // namespace
}  // namespace cistern
