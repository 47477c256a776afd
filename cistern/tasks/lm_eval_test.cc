#include "cistern/tasks/lm_eval.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistern/base/random.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

constexpr int64_t kTokens = 333;

std::shared_ptr<DecoderLm> EvalModel(const std::string& mechanism,
                                     const std::string& positions = "none") {
  ModelConfig c;
  c.vocab_size = 11;
  c.dim = 16;
  c.layers = 2;
  c.heads = 2;
  c.conv = 2;
  c.init_std = 0.3;
  c.dropout = 0.5;  // off in evaluation
  c.max_length = 64;
  c.positions = positions;
  c.attention = {mechanism};
  auto model = std::dynamic_pointer_cast<DecoderLm>(MakeModel(c, 5));
  model->to(at::kDouble);
  return model;
}

const std::vector<int64_t> kText = [] {
  Random random(3);
  std::vector<int64_t> out;
  for (int64_t i = 0; i < kTokens; ++i) out.push_back(random.Below(11));
  return out;
}();
const std::vector<int32_t> kBytes = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0};

void Read(int64_t begin, int64_t count, int64_t* out) {
  ASSERT_TRUE(begin >= 0 && begin + count <= kTokens);
  std::copy_n(kText.begin() + begin, count, out);
}

// Nats of tokens begin+1 .. begin+length from the empty state at `begin`, one by one.
std::vector<double> Nats(DecoderLm& model, int64_t begin, int64_t length) {
  at::NoGradGuard guard;
  model.eval();
  ModelState state = model.EmptyState(1);
  const at::Tensor ids = at::tensor(kText, at::kLong).narrow(0, begin, length + 1);
  const at::Tensor logp =
      at::log_softmax(model.Extend(ids.narrow(0, 0, length).unsqueeze(0), state)[0], -1);
  const at::Tensor nats =
      -logp.gather(1, ids.narrow(0, 1, length).unsqueeze(1)).squeeze(1).contiguous();
  return {nats.const_data_ptr<double>(), nats.const_data_ptr<double>() + length};
}

TEST(LmEval, BlocksPredictEveryTokenButTheFirstOnce) {
  const auto model = EvalModel("latte");
  double expected = 0;
  for (int64_t begin = 0; begin < kTokens - 1; begin += 32) {
    for (const double x : Nats(*model, begin, std::min<int64_t>(32, kTokens - 1 - begin)))
      expected += x;
  }
  int64_t bytes = 0;
  for (int64_t i = 1; i < kTokens; ++i) bytes += kBytes[size_t(kText[size_t(i)])];
  model->train();
  for (const int64_t batch : {1, 3, 100}) {
    LmEvalOptions options;
    options.length = 32;
    options.batch = batch;
    const LmScore score = EvaluateBlocks(*model, Read, kTokens, kBytes, options);
    EXPECT_EQ(score.tokens, kTokens - 1);
    EXPECT_EQ(score.bytes, bytes);
    EXPECT_NEAR(score.nats, expected, 1e-8);
    EXPECT_NEAR(score.bits_per_byte(), expected / std::log(2.0) / double(bytes), 1e-10);
    EXPECT_GT(score.accuracy(), 0);
  }
  EXPECT_TRUE(model->is_training());  // as before
  LmEvalOptions some;
  some.length = 32;
  some.max_tokens = 40;
  EXPECT_EQ(EvaluateBlocks(*model, Read, kTokens, kBytes, some).tokens, 40);
}

TEST(LmEval, PositionsCarryTheStateOn) {
  for (const char* mechanism : {"latte", "abc_mlp", "softmax"}) {
    const auto model = EvalModel(mechanism);
    ByPositionOptions options;
    options.rows = 2;
    options.piece = 20;
    options.first_bucket = 16;
    const auto buckets = EvaluateByPosition(*model, Read, kTokens, kBytes, options);
    const int64_t stride = (kTokens - 1) / 2;
    const std::vector<double> first = Nats(*model, 0, stride),
                              second = Nats(*model, stride, stride);
    ASSERT_EQ(buckets.size(), 5u);  // 16 32 64 128 166
    EXPECT_EQ(buckets.back().end, stride);
    for (const PositionBucket& b : buckets) {
      double expected = 0;
      for (int64_t t = b.begin; t < b.end; ++t) expected += first[size_t(t)] + second[size_t(t)];
      EXPECT_NEAR(b.score.nats, expected, 1e-8) << mechanism << b.begin;
      EXPECT_EQ(b.score.tokens, 2 * (b.end - b.begin));
      if (std::string(mechanism) != "softmax") {
        EXPECT_EQ(b.state_bytes, buckets[0].state_bytes);
      }
    }
    options.buckets = 4;
    options.max_positions = 100;
    const auto equal = EvaluateByPosition(*model, Read, kTokens, kBytes, options);
    ASSERT_EQ(equal.size(), 4u);
    EXPECT_EQ(equal[1].begin, 25);
    EXPECT_EQ(equal[3].end, 100);
  }
}

TEST(LmEval, InterruptKeepsWhatIsDone) {
  const auto model = EvalModel("latte");
  std::atomic<bool> interrupt{false};
  LmEvalOptions options;
  options.length = 32;
  options.batch = 1;
  options.interrupt = &interrupt;
  options.progress = [&](int64_t done, int64_t) { interrupt = done >= 64; };
  const LmScore score = EvaluateBlocks(*model, Read, kTokens, kBytes, options);
  EXPECT_TRUE(score.interrupted);
  EXPECT_EQ(score.tokens, 64);
  interrupt = false;
  ByPositionOptions positions;
  positions.piece = 10;
  positions.interrupt = &interrupt;
  positions.progress = [&](int64_t done, int64_t) { interrupt = done >= 30; };
  const auto buckets = EvaluateByPosition(*model, Read, kTokens, kBytes, positions);
  ASSERT_EQ(buckets.size(), 1u);
  EXPECT_EQ(buckets[0].end, 30);
}

TEST(LmEval, Errors) {
  const auto learned = EvalModel("latte", "learned");
  LmEvalOptions options;
  options.length = 65;
  EXPECT_NE(ErrorMessage([&] {
              EvaluateBlocks(*learned, Read, kTokens, kBytes, options);
            }).find("max_length=64"),
            std::string::npos);
  options.length = 0;
  EXPECT_NE(ErrorMessage([&] {
              EvaluateBlocks(*learned, Read, kTokens, kBytes, options);
            }).find("length must be"),
            std::string::npos);
  options.length = 8;
  EXPECT_NE(ErrorMessage([&] {
              EvaluateBlocks(*learned, Read, 1, kBytes, options);
            }).find("the text has 1 tokens"),
            std::string::npos);
  ByPositionOptions positions;
  EXPECT_EQ(EvaluateByPosition(*learned, Read, kTokens, kBytes, positions).back().end,
            64);  // as far as they reach
  positions.max_positions = 70;
  EXPECT_NE(ErrorMessage([&] {
              EvaluateByPosition(*learned, Read, kTokens, kBytes, positions);
            }).find("learned positions"),
            std::string::npos);
}

TEST(LmEval, TokenBytes) {
  const auto tokenizer = MakeByteTokenizer();
  const std::vector<int32_t> bytes = TokenBytes(*tokenizer);
  EXPECT_EQ(int64_t(bytes.size()), tokenizer->vocab_size());
  EXPECT_EQ(bytes[65], 1);
}

}  // namespace
}  // namespace cistern
