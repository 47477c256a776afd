#include "cistern/tasks/lm_blocks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistern/base/random.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"
#include "cistern/tasks/by_position.h"
#include "cistern/tasks/evaluate.h"
#include "cistern/tasks/lm_task.h"

namespace cistern {
namespace {

constexpr int64_t kTokens = 333;

std::shared_ptr<LanguageModel> EvalModel(const std::string& mechanism,
                                         const std::string& positions = "none",
                                         const StackOptions& decoder = {}) {
  ModelConfig c;
  c.vocab_size = 11;
  c.dim = 16;
  c.layers = 2;
  c.heads = 2;
  c.conv = 2;
  c.init_std = 0.3;
  c.dropout = 0.5;  // off in evaluation
  c.max_length = 64;
  c.positions = ValueOf(positions, PositionKinds());
  c.attention = {mechanism};
  c.decoder = decoder;
  auto model = std::dynamic_pointer_cast<LanguageModel>(MakeModel(c, 5));
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

void CopyText(int64_t begin, int64_t count, int64_t* out) {
  ASSERT_TRUE(begin >= 0 && begin + count <= kTokens);
  std::copy_n(kText.begin() + begin, count, out);
}

TokenText Tokens(int64_t tokens = kTokens, std::vector<int64_t> ends = {}) {
  return {tokens, CopyText, kBytes, 0, std::move(ends)};
}

// A task that has nothing but the text above.
class BlockTask : public Task {
 public:
  void SaveAssets(const std::string&) const override {}
  void LoadAssets(const std::string&) override {}
  void Prepare() override {}
  Json DataSummary() const override { return {}; }
  void Complete(ModelConfig&) const override {}
  int64_t tokens_per_row() const override { return 32; }
  Batch TrainBatch(uint64_t, int64_t, int64_t) const override { return {}; }
  at::Tensor Loss(Model&, const Batch&, double) const override { return {}; }
  std::unique_ptr<BatchReader> Read(Split, const ReadOptions& o) const override {
    return ReadBlocks(Tokens(), {o.length, o.rows, o.max_tokens, std::max<int64_t>(0, o.context)});
  }
  Score Measure(Model& model, const Batch& batch) const override {
    return MeasureBlocks(dynamic_cast<LanguageModel&>(model), batch, kBytes);
  }
  Json Metrics(const Score& score) const override { return TokenMetrics(score); }
  const Metric& metric() const override { return BitsPerByte(); }
};

Evaluation EvaluateText(LanguageModel& model, const ReadOptions& read) {
  return Evaluate(BlockTask(), model, Split::kTest, {read});
}

// Nats of tokens begin+1 .. begin+length from the empty state at `begin`, one by one.
std::vector<double> Nats(LanguageModel& model, int64_t begin, int64_t length) {
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
    const Evaluation done = EvaluateText(*model, {batch, 0, 32});
    EXPECT_TRUE(done.complete);
    EXPECT_EQ(done.tokens, kTokens - 1);
    const Json metrics = TokenMetrics(done.score);
    EXPECT_EQ(metrics["tokens"], kTokens - 1);
    EXPECT_EQ(metrics["bytes"], bytes);
    EXPECT_NEAR(done.score["nats"], expected, 1e-8);
    EXPECT_NEAR(metrics["bits_per_byte"].get<double>(), expected / std::log(2.0) / double(bytes),
                1e-10);
    EXPECT_GT(metrics["accuracy"].get<double>(), 0);
  }
  EXPECT_TRUE(model->is_training());  // as before
  EXPECT_EQ(EvaluateText(*model, {8, 40, 32}).tokens, 40);
}

// Of several pieces every token but the first of each is predicted once, from its own piece alone.
TEST(LmEval, RowsStayInTheirPiece) {
  const std::vector<int64_t> ends = {100, 101, 233, kTokens};
  const auto rows = [&](int64_t max_tokens) {
    std::vector<std::pair<int64_t, int64_t>> found;  // begin, length
    TextRows cut(Tokens(kTokens, ends), 32, max_tokens, 1);
    for (auto r = cut.Next(3); !r.begins.empty(); r = cut.Next(3)) {
      EXPECT_LE(r.begins.size(), 3u);
      for (const int64_t begin : r.begins) found.emplace_back(begin, r.length);
    }
    EXPECT_EQ(cut.done(), cut.total());
    return found;
  };
  using Rows = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(rows(0), (Rows{{0, 32},
                           {32, 32},
                           {64, 32},
                           {101, 32},
                           {133, 32},
                           {165, 32},
                           {197, 32},
                           {233, 32},
                           {265, 32},
                           {297, 32},
                           {96, 3},
                           {229, 3},
                           {329, 3}}));
  // Six rows over four pieces: 1, 2, 1, 2; the second piece has none to give.
  EXPECT_EQ(rows(170), (Rows{{0, 32}, {101, 32}, {233, 32}, {265, 32}}));
  const auto model = EvalModel("latte");
  double expected = 0;
  int64_t tokens = 0;
  for (const auto& [begin, length] : rows(0)) {
    tokens += length;
    for (const double x : Nats(*model, begin, length)) expected += x;
  }
  EXPECT_EQ(tokens, kTokens - 4);
  Score score;
  const auto reader = ReadBlocks(Tokens(kTokens, ends), {32, 4, 0, 0});
  while (const auto batch = reader->Next()) score.Merge(MeasureBlocks(*model, *batch, kBytes));
  EXPECT_NEAR(score["nats"], expected, 1e-8);
  EXPECT_EQ(score["tokens"], double(tokens));
}

TEST(LmEval, StartingPointsStayInTheirPiece) {
  const TokenText text = Tokens(kTokens, {100, 200, kTokens});
  EXPECT_EQ(StartingPoints(text, 2).begins, (std::vector<int64_t>{0, 100}));
  EXPECT_EQ(StartingPoints(text, 2).positions, 99);
  EXPECT_EQ(StartingPoints(text, 3).begins, (std::vector<int64_t>{0, 100, 200}));
  EXPECT_EQ(StartingPoints(text, 7).begins, (std::vector<int64_t>{0, 49, 100, 149, 200, 266}));
  EXPECT_EQ(StartingPoints(text, 7).positions, 49);
  const auto model = EvalModel("latte");
  ByPositionOptions options;
  options.rows = 3;
  options.buckets = 1;
  const auto buckets = EvaluateByPosition(*model, text, options);
  double expected = 0;
  for (const int64_t begin : {0, 100, 200}) {
    for (const double x : Nats(*model, begin, 99)) expected += x;
  }
  ASSERT_EQ(buckets.size(), 1u);
  EXPECT_NEAR(buckets[0].score["nats"], expected, 1e-8);
}

// fairseq's --context-window: each token once, from the `context` tokens before it and those of its
// block.
TEST(LmEval, AContextIsReadAndNotMeasuredAgain) {
  const auto model = EvalModel("latte");
  constexpr int64_t kContext = 24, kStride = 32 - kContext;
  double expected = 0;
  for (int64_t begin = 0; begin < kTokens - 1; begin += kStride) {
    const int64_t before = std::min(begin, kContext),
                  measured = std::min(kStride, kTokens - 1 - begin);
    const std::vector<double> nats = Nats(*model, begin - before, before + measured);
    for (int64_t i = before; i < before + measured; ++i) expected += nats[size_t(i)];
  }
  for (const int64_t batch : {1, 3, 100}) {
    const Evaluation done = EvaluateText(*model, {batch, 0, 32, kContext});
    EXPECT_EQ(done.tokens, kTokens - 1);
    EXPECT_EQ(TokenMetrics(done.score)["tokens"], kTokens - 1);
    EXPECT_NEAR(done.score["nats"], expected, 1e-8) << batch;
  }
  EXPECT_EQ(ReadBlocks(Tokens(), {32, 8, 0, 24})->Facts(), (Json{{"length", 32}, {"context", 24}}));
  EXPECT_EQ(ReadBlocks(Tokens(), {32, 8, 64})->Facts(),
            (Json{{"length", 32}, {"part", StrCat("the first 64 of ", kTokens - 1, " tokens")}}));
  EXPECT_EQ(ReadBlocks(Tokens(kTokens, {100, kTokens}), {32, 8, 64})->Facts()["part"],
            StrCat("64 of ", kTokens - 2, " tokens, the first of each of 2 blocks"));
  EXPECT_EQ(ReadBlocks(Tokens(), {32, 8, kTokens})->Facts(), (Json{{"length", 32}}));
  EXPECT_NE(ErrorMessage([] {
              ReadBlocks(Tokens(), {32, 8, 0, 32});
            }).find("below length=32"),
            std::string::npos);
}

TEST(LmEval, PositionsCarryTheStateOn) {
  for (const char* mechanism : {"latte", "abc_mlp", "softmax"}) {
    const auto model = EvalModel(mechanism);
    ByPositionOptions options;
    options.rows = 2;
    options.piece = 20;
    options.first_bucket = 16;
    const auto buckets = EvaluateByPosition(*model, Tokens(), options);
    const int64_t stride = (kTokens - 1) / 2;
    const std::vector<double> first = Nats(*model, 0, stride),
                              second = Nats(*model, stride, stride);
    ASSERT_EQ(buckets.size(), 5u);  // 16 32 64 128 166
    EXPECT_EQ(buckets.back().end, stride);
    for (const PositionBucket& b : buckets) {
      double expected = 0;
      for (int64_t t = b.begin; t < b.end; ++t) expected += first[size_t(t)] + second[size_t(t)];
      EXPECT_NEAR(b.score["nats"], expected, 1e-8) << mechanism << b.begin;
      EXPECT_EQ(b.score["tokens"], 2 * (b.end - b.begin));
      if (std::string(mechanism) != "softmax") {
        EXPECT_EQ(b.state_bytes, buckets[0].state_bytes);
      }
    }
    options.buckets = 4;
    options.max_positions = 100;
    const auto equal = EvaluateByPosition(*model, Tokens(), options);
    ASSERT_EQ(equal.size(), 4u);
    EXPECT_EQ(equal[1].begin, 25);
    EXPECT_EQ(equal[3].end, 100);
  }
  ByPositionOptions each;  // no more buckets than positions
  each.rows = 1, each.buckets = int64_t{1} << 62, each.max_positions = 5;
  const auto single = EvaluateByPosition(*EvalModel("latte"), Tokens(), each);
  ASSERT_EQ(single.size(), 5u);
  EXPECT_EQ(single[3].end, 4);
}

TEST(LmEval, InterruptKeepsWhatIsDone) {
  const auto model = EvalModel("latte");
  std::atomic<bool> interrupt{false};
  EvalOptions options;
  options.read = {1, 0, 32};
  options.interrupted = &interrupt;
  options.progress = [&](const BatchReader& reader) { interrupt = reader.done() >= 64; };
  const Evaluation done = Evaluate(BlockTask(), *model, Split::kTest, options);
  EXPECT_FALSE(done.complete);
  EXPECT_EQ(done.tokens, 64);
  interrupt = false;
  ByPositionOptions positions;
  positions.piece = 10;
  positions.interrupt = &interrupt;
  positions.progress = [&](int64_t done, int64_t) { interrupt = done >= 30; };
  const auto buckets = EvaluateByPosition(*model, Tokens(), positions);
  ASSERT_EQ(buckets.size(), 1u);
  EXPECT_EQ(buckets[0].end, 30);
}

TEST(LmEval, Errors) {
  const auto learned = EvalModel("latte", "learned");
  const auto refused = [&](const ReadOptions& read) {
    return ErrorMessage([&] { EvaluateText(*learned, read); });
  };
  EXPECT_NE(refused({8, 0, 65}).find("max_length=64"), std::string::npos);
  EXPECT_NE(refused({8, 0, 0}).find("length must be"), std::string::npos);
  EXPECT_NE(refused({0, 0, 8}).find("batch must be"), std::string::npos);
  EXPECT_NE(ErrorMessage([&] {
              ReadBlocks(Tokens(1), {8, 8});
            }).find("the text has 1 tokens"),
            std::string::npos);
  ByPositionOptions positions;
  EXPECT_EQ(EvaluateByPosition(*learned, Tokens(), positions).back().end,
            64);  // as far as they reach
  positions.max_positions = 70;
  EXPECT_NE(ErrorMessage([&] {
              EvaluateByPosition(*learned, Tokens(), positions);
            }).find("learned positions"),
            std::string::npos);
}

// The keys of the decoder's group come before the model's.
TEST(LmEval, PositionsEndWhereThoseOfTheStackDo) {
  const auto refused = [](LanguageModel& model, int64_t length) {
    return ErrorMessage([&] { EvaluateText(model, {8, 0, length}); });
  };
  const auto last = [](LanguageModel& model) {
    return EvaluateByPosition(model, Tokens(), {}).back().end;
  };
  StackOptions decoder;
  decoder.positions = PositionKind::kLearned;
  const auto own = EvalModel("latte", "none", decoder);
  EXPECT_NE(refused(*own, 65).find("max_length=64"), std::string::npos);
  EXPECT_EQ(last(*own), 64);
  decoder.max_length = 80;
  const auto longer = EvalModel("latte", "learned", decoder);
  EXPECT_EQ(refused(*longer, 80), "no error");
  EXPECT_NE(refused(*longer, 81).find("max_length=80"), std::string::npos);
  EXPECT_EQ(last(*longer), 80);
  decoder.positions = PositionKind::kNone;
  const auto none = EvalModel("latte", "learned", decoder);
  EXPECT_EQ(refused(*none, 100), "no error");
  EXPECT_EQ(last(*none), last(*EvalModel("latte")));
  // A mechanism with weights for each position ends there too, in one layer or a group of heads.
  EXPECT_EQ(last(*EvalModel("linformer")), 64);
  decoder.attention_options = {{"linformer", {{"length", 50}}}};
  EXPECT_EQ(last(*EvalModel("latte:1+linformer:1", "none", decoder)), 50);
}

// WikiText's three files are its three splits, word by word; other texts by name.
TEST(LmTask, SplitsOfTheirOwnInWords) {
  const TestFolder folder;
  std::string train;
  for (int i = 0; i < 40; ++i) train += " the cat sat on the mat \n";
  const std::string valid = " the cat sat \n", test = " on the zebra \n \n";
  WriteFileAtomically(folder / "wiki.train.tokens", train);
  WriteFileAtomically(folder / "wiki.valid.tokens", valid);
  WriteFileAtomically(folder / "wiki.test.tokens", test);
  EXPECT_EQ(TaskOfData(folder.path()).name, "lm");
  LmTask::Options options;
  options.text = folder.path();
  options.tokenizer = TokenizerKind::kWords, options.length = 8;
  const auto ids = [](const LmTask& task, Split split) {
    const TokenText text = *task.Text(split);
    std::vector<int64_t> all(size_t(text.tokens));
    text.read(0, text.tokens, all.data());
    return all;
  };
  // the 4, then by their bytes cat, mat, on, sat; </s> 2, <unk> 3.
  const std::vector<int64_t> want_valid = {4, 5, 8, 2}, want_test = {7, 4, 3, 2, 2};
  LmTask wiki(options, folder / "cache");
  wiki.Prepare();
  EXPECT_EQ(wiki.Text(Split::kTrain)->tokens, 40 * 7);
  EXPECT_EQ(ids(wiki, Split::kValid), want_valid);
  EXPECT_EQ(ids(wiki, Split::kTest), want_test);
  EXPECT_NE(wiki.DataSummary()["notes"].dump().find("wiki.valid.tokens"), std::string::npos);
  options.text = folder / "wiki.train.tokens";
  options.valid = folder / "wiki.valid.tokens", options.test = folder / "wiki.test.tokens";
  LmTask named(options, folder / "cache");
  named.Prepare();
  EXPECT_EQ(ids(named, Split::kTest), want_test);
  EXPECT_EQ(named.DataSummary()["xxh64"], wiki.DataSummary()["xxh64"]);
  options.valid.clear();
  EXPECT_NE(ErrorMessage([&] { LmTask(options, "").Prepare(); }).find("valid"), std::string::npos);
  options.test.clear();  // 90, 5 and 5 % again
  LmTask one(options, folder / "cache");
  one.Prepare();
  EXPECT_LT(one.Text(Split::kTrain)->tokens, 40 * 7);
  options.context = 8;
  EXPECT_NE(ErrorMessage([&] { LmTask(options, ""); }).find("context=8 must be below length=8"),
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
