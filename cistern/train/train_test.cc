#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "cistern/base/error.h"
#include "cistern/base/memory.h"
#include "cistern/base/parallel.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/decoder_lm.h"
#include "cistern/models/encoder_decoder.h"
#include "cistern/ops/testing.h"
#include "cistern/train/checkpoint.h"
#include "cistern/train/optimizer.h"
#include "cistern/train/testing_processes.h"
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

TEST(Checkpoint, RoundTripKeepsTheNewestAlone) {
  const TestFolder folder;
  const std::string run = folder / "run";
  std::filesystem::create_directories(run);
  auto model = MakeModel(TinyConfig(), 1);
  const auto optimizer = MakeOptimizer(*model, {});
  for (const at::Tensor& p : model->parameters()) p.mutable_grad() = at::randn_like(p);
  optimizer->Step(0.01, 1.0);
  RunState state;
  state.step = 1;
  WriteCheckpoint(run, *model, *optimizer, state);
  state.step = 2;
  WriteCheckpoint(run, *model, *optimizer, state);
  EXPECT_FALSE(std::filesystem::exists(run + "/checkpoint-1"));
  const auto newest = NewestCheckpoint(run);
  ASSERT_TRUE(newest);
  auto other = MakeModel(TinyConfig(), 2);
  const auto moments = MakeOptimizer(*other, {});
  EXPECT_EQ(ReadCheckpoint(*newest, *other, *moments).step, 2);
  const auto a = optimizer->Save(), b = moments->Save();
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i].value, b[i].value)) << a[i].name;
  for (size_t i = 0; i < model->parameters().size(); ++i)
    EXPECT_TRUE(at::equal(model->parameters()[i], other->parameters()[i]));
}

// A checkpoint of version 0.1 does not say what wrote its moments: AdamW. Another optimizer's is
// refused, although Adam has moments of the same names.
TEST(Checkpoint, IsOfOneOptimizer) {
  const TestFolder folder;
  const std::string run = folder.path();
  auto model = MakeModel(TinyConfig(), 1);
  const auto optimizer = MakeOptimizer(*model, {});
  for (const at::Tensor& p : model->parameters()) p.mutable_grad() = at::randn_like(p);
  optimizer->Step(0.01, 1.0);
  RunState state;
  state.step = 1;
  WriteCheckpoint(run, *model, *optimizer, state);
  const std::string file = *NewestCheckpoint(run) + "/optimizer.safetensors";
  TensorFile old = LoadTensors(file);
  std::erase_if(old.metadata, [](const auto& entry) { return entry.first == "optimizer"; });
  ASSERT_FALSE(old.metadata.empty());
  SaveTensors(file, old);
  auto other = MakeModel(TinyConfig(), 2);
  const auto loaded = MakeOptimizer(*other, {});
  ReadCheckpoint(*NewestCheckpoint(run), *other, *loaded);
  const auto a = optimizer->Save(), b = loaded->Save();
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i].value, b[i].value)) << a[i].name;
  OptimizerOptions options;
  options.kind = OptimizerKind::kAdam;
  const auto adam = MakeOptimizer(*other, options);
  const std::string message =
      ErrorMessage([&] { ReadCheckpoint(*NewestCheckpoint(run), *other, *adam); });
  EXPECT_NE(message.find("of the optimizer adamw, not adam"), std::string::npos) << message;
}

TEST(Checkpoint, AGoodOneLoadsAndIsFinite) {
  const TestFolder folder;
  const std::string run = folder.path();
  auto model = MakeModel(TinyConfig(), 1);
  const auto optimizer = MakeOptimizer(*model, {});
  RunState state;
  WriteCheckpoint(run, *model, *optimizer, state);
  const std::string checkpoint = *NewestCheckpoint(run);
  EXPECT_EQ(CheckpointProblem(checkpoint), "");
  // The same step again: trainer.json alone.
  state.evaluation_due = true;
  WriteCheckpoint(run, *model, *optimizer, state);
  EXPECT_TRUE(ReadRunState(checkpoint).evaluation_due);
  for (const char* name : {"/model.safetensors", "/optimizer.safetensors", "/trainer.json"}) {
    const std::string path = checkpoint + name, good = ReadFile(path);
    std::string damaged = good;
    damaged[damaged.size() / 2] ^= 1;
    WriteFileAtomically(path, damaged);
    EXPECT_NE(CheckpointProblem(checkpoint).find(path), std::string::npos) << name;
    EXPECT_THROW(ReadCheckpoint(checkpoint, *model, *optimizer), Error);
    WriteFileAtomically(path, good);
  }
  {
    at::NoGradGuard guard;
    model->parameters()[0].fill_(std::nan(""));
  }
  state.step = 1;
  WriteCheckpoint(run, *model, *optimizer, state);
  EXPECT_NE(CheckpointProblem(*NewestCheckpoint(run)).find("not finite"), std::string::npos);
}

TEST(Checkpoint, OnlyThoseOfARunMakeRoomForTheNext) {
  const TestFolder folder;
  const std::string run = folder.path(), theirs = run + "/checkpoint-500/trainer_state.json";
  EnsureDirectory(run + "/checkpoint-500");
  WriteFileAtomically(theirs, "theirs");
  const auto model = MakeModel(TinyConfig(), 1);
  const auto optimizer = MakeOptimizer(*model, {});
  RunState state;
  for (state.step = 0; state.step < 2; ++state.step)
    WriteCheckpoint(run, *model, *optimizer, state);
  EXPECT_EQ(NewestCheckpoint(run), run + "/checkpoint-1");
  EXPECT_EQ(ReadFile(theirs), "theirs");
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(run))
    names.insert(entry.path().filename().string());
  EXPECT_EQ(names, (std::set<std::string>{"checkpoint-1", "checkpoint-500"}));
  // At the place of the next one, too, and a second time.
  for (const char* other : {".other", ".other-2"}) {
    state.step = 500;
    WriteCheckpoint(run, *model, *optimizer, state);
    EXPECT_EQ(NewestCheckpoint(run), run + "/checkpoint-500");
    EXPECT_EQ(ReadFile(run + "/checkpoint-500" + other + "/trainer_state.json"), "theirs");
    state.step = 501;
    WriteCheckpoint(run, *model, *optimizer, state);
    EnsureDirectory(run + "/checkpoint-500");
    WriteFileAtomically(theirs, "theirs");
  }
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
  // A moving average is as large as the weights: two moments of AdamW, weights and gradients.
  TrainOptions averaged, plain;
  averaged.ema = 0.9, plain.optimizer.kind = OptimizerKind::kSgd, plain.optimizer.momentum = 0;
  EXPECT_EQ(averaged.NumbersPerParameter(), 5);
  EXPECT_EQ(plain.NumbersPerParameter(), 2);
  EXPECT_GT(EstimateTrainingBytes(c, 8, 512, 0, 4, 5), EstimateTrainingBytes(c, 8, 512));
  // Threads that take rows: a copy more of the gradients for each but one; with auto not where
  // these are large.
  at::get_num_threads();  // torch sets it when it is first used
  const int threads = NumThreads();
  SetNumThreads(3);
  ModelConfig large = c;
  large.dim = 2048;
  TrainOptions in_rows = plain, automatic = plain, shared = plain;
  in_rows.parallel = ThreadsTake::kRows, shared.parallel = ThreadsTake::kOperations;
  for (const ModelConfig& config : {c, large}) {
    const auto copies = [&](int64_t n) { return EstimateTrainingBytes(config, 6, 9, 0, 4, n); };
    EXPECT_EQ(EstimateRunBytes(config, 6, 9, 4, shared), copies(2));
    EXPECT_EQ(EstimateRunBytes(config, 6, 9, 4, in_rows), copies(4));
    EXPECT_EQ(EstimateRunBytes(config, 6, 9, 4, automatic), copies(config.dim == 8 ? 4 : 2));
    EXPECT_EQ(EstimateRunBytes(config, 1, 9, 4, automatic),
              EstimateTrainingBytes(config, 1, 9, 0, 4, 2));
  }
  // Of rows that go in groups, each thread has one in work.
  const auto text_of = [&](const ModelConfig& config, int64_t rows, int64_t length) {
    return EstimateRunBytes(config, rows, length, 4, in_rows);
  };
  constexpr int64_t kWaiting = 96;  // bytes of a token of the others
  EXPECT_EQ(text_of(c, 100, 5000),
            EstimateTrainingBytes(c, 3 * 2, 5000, 0, 4, 4) + 94 * 5000 * kWaiting);
  EXPECT_EQ(text_of(c, 100, 9000),
            EstimateTrainingBytes(c, 3, 9000, 0, 4, 4) + 97 * 9000 * kWaiting);
  ModelConfig drawn = c;
  drawn.attention = {"performer"};
  EXPECT_EQ(text_of(drawn, 100, 5000), EstimateTrainingBytes(drawn, 100, 5000, 0, 4, 4));
  SetNumThreads(threads);
  // What it says helps.
  const auto refusal = [&](const ModelConfig& config, int64_t rows, int64_t length) {
    return testing::Thrown([&] { CheckMemory(config, rows, length); });
  };
  testing::ExpectContains(refusal(drawn, 1000, 1 << 28),
                          {"(batch 1000 x length 268435456, performer", "lower train.batch"});
  testing::ExpectContains(refusal(c, 1 << 30, 1 << 20), {" rows at once, ", "lower train.batch"});
  testing::ExpectContains(refusal(c, 8, 1ll << 40), {" rows at once, ", "lower task.length"});
  // Sources of another length than the targets.
  ModelConfig both = c;
  both.kind = "encoder_decoder";
  EXPECT_EQ(EstimateRunBytes(both, 1, 9, 4, plain, 90),
            EstimateTrainingBytes(both, 1, 9, 90, 4, 2));
  EXPECT_GT(EstimateRunBytes(both, 1, 9, 4, plain, 90), EstimateRunBytes(both, 1, 9, 4, plain));
}

// Processes share the rows, and each has all weights: two need more than one, of one machine.
TEST(Memory, OfSeveralProcesses) {
  ModelConfig c = TinyConfig();
  c.attention = {"performer"};  // its batches stay whole
  TrainOptions options;
  options.parallel = ThreadsTake::kOperations;
  constexpr int64_t kWaiting = 96;
  EXPECT_EQ(EstimateRunBytes(c, 9, 50, 4, options, 0, 2),
            EstimateTrainingBytes(c, 5, 50) + 4 * 50 * kWaiting);
  // Weights, gradients and two moments that are 0.6 of what is free.
  c = TinyConfig();
  c.vocab_size = int64_t(0.6 * double(AvailableBytes()) / double(4 * 4 * c.dim));
  CheckMemory(c, 2, 16, 4, options);
  const std::vector<std::string> refusals =
      testing::Together(2, [&](const std::shared_ptr<Processes>& processes) {
        EXPECT_EQ(processes->Here(), 2);
        CheckMemory(c, 2, 16, 4, options, 0, *processes);
      });
  for (const std::string& refusal : refusals)
    testing::ExpectContains(refusal, {"2 processes on this machine", "one process"});
}

// A limit of address space (ulimit -v) is for one process, however many there are.
TEST(Memory, OfEachProcessWithinItsOwnLimit) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the address sanitizer reserves more than any limit";
#endif
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  const auto set = [&](int64_t bytes) {
    rlimit limit = before;
    limit.rlim_cur = rlim_t(bytes);
    return setrlimit(RLIMIT_AS, &limit) == 0;
  };
  constexpr int64_t kHuge = int64_t{1} << 46;
  if (!set(kHuge)) GTEST_SKIP() << "a lower limit cannot be raised";
  const int64_t used = kHuge - OwnAvailableBytes(),
                left = std::min(int64_t{4} << 30, SharedAvailableBytes() / 3);
  ASSERT_TRUE(set(used + left));
  TrainOptions options;
  options.parallel = ThreadsTake::kOperations;
  // Weights, gradients and two moments that are a share of what is left to each.
  const auto refusals = [&](double share) {
    ModelConfig c = TinyConfig();
    c.vocab_size = int64_t(share * double(left) / double(4 * 4 * c.dim));
    return testing::Together(2, [&](const std::shared_ptr<Processes>& processes) {
      CheckMemory(c, 2, 16, 4, options, 0, *processes);
    });
  };
  const std::vector<std::string> fit = refusals(0.6), beyond = refusals(1.2);
  setrlimit(RLIMIT_AS, &before);
  EXPECT_EQ(fit, std::vector<std::string>(2));
  for (const std::string& refusal : beyond)
    testing::ExpectContains(refusal, {"each of 2 processes", "ulimit -v", "raise the limit"});
}

// The estimate is not below what a step takes, and not far above. Measured in this process, whose
// libraries are warm; a little less than a half, as the system may take back pages meanwhile.
TEST(Memory, IsForetoldToAHalf) {
  ModelConfig lm;
  lm.vocab_size = 50, lm.dim = 64, lm.heads = 4, lm.layers = 4, lm.max_length = 512,
  lm.attention = {"softmax", "latte", "latte", "softmax"};
  ModelConfig both = lm;
  both.kind = "encoder_decoder", both.layers = 2, both.attention = {"softmax"};
  both.decoder.attention = {"softmax", "latte"}, both.cross.attention = {"latte", "softmax"};
  mallopt(M_MMAP_THRESHOLD, 1 << 17);  // what is freed goes back to the system
  const int64_t rows = 4;
  const auto step = [&](const ModelConfig& config, int64_t length, int64_t source, bool wide,
                        const OptimizerOptions& rule) {
    const auto model = MakeModel(config, 1);
    if (wide) model->to(at::kDouble);
    const auto optimizer = MakeOptimizer(*model, rule);
    const auto ids = [&](int64_t count) {
      return at::randint(0, config.vocab_size, {rows, count}, at::kLong);
    };
    at::Tensor loss;
    if (auto* m = dynamic_cast<EncoderDecoder*>(model.get())) {
      ModelState state = m->Encode(ids(source), {at::full({rows}, source - 1, at::kLong), {}});
      loss = m->Loss(m->Hidden(ids(length), state), ids(length));
    } else {
      auto& decoder = dynamic_cast<DecoderLm&>(*model);
      ModelState state = decoder.EmptyState(rows);
      loss = decoder.Loss(decoder.Hidden(ids(length), state), ids(length));
    }
    loss.backward();
    optimizer->Step(0.01, 1.0);
  };
  struct Case {
    ModelConfig config;
    int64_t length, source;
    bool doubles = false;
    OptimizerOptions rule = {};
  };
  ModelConfig dropped = lm, features = lm, sines = lm;
  dropped.attention = {"softmax"}, dropped.attention_dropout = 0.1;
  features.attention = {"performer"}, features.attention_options["performer"]["features"] = 96;
  sines.attention = {"rfa"}, sines.attention_options["rfa"]["features"] = 96;
  ModelConfig wide = lm;
  wide.vocab_size = 8192;   // logits of 4,096 tokens would be 134 MB, which nothing holds
  ModelConfig square = lm;  // maps of one shape
  square.dim = square.ffn_dim = 256, square.layers = 32, square.attention = {"softmax"};
  OptimizerOptions muon;
  muon.kind = OptimizerKind::kMuon, muon.muon.iterations = 1;
  for (const Case& c : {Case{lm, 1024, 0}, Case{wide, 1024, 0}, Case{both, 512, 512},
                        Case{both, 128, 1024}, Case{both, 1024, 128}, Case{dropped, 1024, 0},
                        Case{features, 1024, 0}, Case{sines, 1024, 0}, Case{lm, 1024, 0, true},
                        Case{features, 1024, 0, true}, Case{square, 8, 0, false, muon}}) {
    step(c.config, 8, 8, c.doubles, c.rule);
    malloc_trim(0);  // else what other tests have freed is taken again, and not counted
    ResetPeakMemory();
    const int64_t before = ResidentBytes();
    if (PeakBytes() > before + (8 << 20))
      GTEST_SKIP() << "the system does not reset the peak of memory";
    step(c.config, c.length, c.source, c.doubles, c.rule);
    const double ratio =
        double(PeakBytes() - before) /
        double(EstimateTrainingBytes(c.config, rows, c.length, c.source, c.doubles ? 8 : 4));
    std::printf("%s, %d and %d tokens: %.2f of the estimate\n", c.config.Summary().c_str(),
                int(c.length), int(c.source), ratio);
    EXPECT_LT(ratio, 1.0) << c.config.Summary();
    EXPECT_GT(ratio, 0.45) << c.config.Summary();
  }
}

}  // namespace
}  // namespace cistern
