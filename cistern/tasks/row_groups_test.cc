#include "cistern/tasks/row_groups.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>

#include "cistern/base/testing_threads.h"
#include "cistern/models/classifier.h"
#include "cistern/ops/testing.h"
#include "cistern/tasks/class_measure.h"

namespace cistern {
namespace {

using testing::Threads;

TEST(RowGroups, WhereRowsMeetOrSeePaddingOrDrawTheyStayTogether) {
  const auto classifier = [](const std::string& mechanism, const Json& options,
                             const std::function<void(ModelConfig&)>& change = {}) {
    ModelConfig c;
    c.vocab_size = 9, c.dim = 8, c.layers = 2, c.heads = 2;
    c.kind = "encoder_classifier", c.classes = 3, c.attention = {mechanism};
    c.attention_options = Json{{mechanism, options}};
    if (change) change(c);
    return MakeModel(c, 1);
  };
  const Json none = Json::object();
  for (const char* name : {"softmax", "latte", "conv_luna", "nystrom", "linformer"})
    EXPECT_TRUE(RowsStandAlone(*classifier(name, none))) << name;
  EXPECT_FALSE(RowsStandAlone(*classifier("nystrom", {{"start", "batch"}})));
  EXPECT_FALSE(RowsStandAlone(*classifier("conv_luna", {{"mask", "none"}})));
  EXPECT_FALSE(RowsStandAlone(*classifier("performer", none)));
  for (const PaddingKind padding : {PaddingKind::kSeen, PaddingKind::kZeros, PaddingKind::kReads}) {
    EXPECT_FALSE(
        RowsStandAlone(*classifier("softmax", none, [&](ModelConfig& c) { c.padding = padding; })));
  }
  for (const PoolingKind pooling : {PoolingKind::kMeanAll, PoolingKind::kMeanZeros}) {
    EXPECT_FALSE(
        RowsStandAlone(*classifier("softmax", none, [&](ModelConfig& c) { c.pooling = pooling; })));
  }
}

// Rows of these lengths, of which only the lengths matter.
Batch OfLengths(const std::vector<int64_t>& lengths) {
  Batch batch;
  batch.rows = int64_t(lengths.size());
  batch.Add("lengths", at::tensor(lengths, at::kLong));
  batch.padded = {{"ids", "lengths"}};
  return batch;
}

TEST(RowGroups, GroupsHaveAboutAsManyTokens) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 32; ++i) lengths.push_back(2000 - i * i % 97 - i * 45);
  std::sort(lengths.rbegin(), lengths.rend());
  const double real = double(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}));
  for (const int64_t parts : {1, 2, 3}) {
    const Threads threads(static_cast<int>(parts));
    const std::vector<RowGroup> groups = GroupsByLength(OfLengths(lengths), parts);
    EXPECT_EQ(groups.size(), size_t(parts) * size_t(std::lround(real / double(parts) / 4096)));
    int64_t end = 0;
    double padded = 0;
    for (const RowGroup& g : groups) {
      EXPECT_EQ(g.begin, end);
      EXPECT_GT(g.end, g.begin);
      EXPECT_EQ(g.tokens, double(g.end - g.begin) * double(lengths[size_t(g.begin)]));
      EXPECT_LT(g.tokens, 6200);
      end = g.end, padded += g.tokens;
    }
    EXPECT_EQ(end, 32);
    EXPECT_LT(padded, 1.1 * real);  // 1.5 as one batch
  }
  {  // one part that all threads share
    const Threads threads(12);
    EXPECT_EQ(GroupsByLength(OfLengths(lengths), 1).size(), size_t(std::lround(real / 12288)));
  }
  // A few tokens are one group of each part; rows are never cut; rows may be empty.
  EXPECT_EQ(GroupsByLength(OfLengths({20, 19, 12, 8}), 2).size(), 2);
  EXPECT_EQ(GroupsByLength(OfLengths({20, 19}), 1).size(), 1);
  EXPECT_EQ(GroupsByLength(OfLengths({50000}), 2).size(), 1);
  const auto empty = GroupsByLength(OfLengths({0, 0, 0}), 2);
  ASSERT_FALSE(empty.empty());
  EXPECT_EQ(empty.back().end, 3);
}

// Long rows do not hold up those behind them: no group has many tokens of padding.
TEST(RowGroups, AGroupOfSeveralRowsHasAtMost6144Tokens) {
  const Threads threads(1);
  std::vector<int64_t> lengths = {2000};
  lengths.resize(11, 200);
  const std::vector<RowGroup> groups = GroupsByLength(OfLengths(lengths), 1);
  int64_t end = 0;
  for (const RowGroup& g : groups) {
    EXPECT_EQ(g.begin, end);
    EXPECT_TRUE(g.end == g.begin + 1 || g.tokens <= 6144) << g.begin << " " << g.tokens;
    end = g.end;
  }
  EXPECT_EQ(end, 11);
  EXPECT_EQ(groups.size(), 2);
}

TEST(RowGroups, RowsOfOneLengthCountTheirPadding) {
  const Threads threads(2);
  Batch batch;
  batch.rows = 20, batch.tokens = 20 * 2000;
  EXPECT_EQ(GroupsOfRows(batch, 2).size(), 10);  // of images, say, which have no ids
  batch.tokens = 100;
  EXPECT_EQ(GroupsOfRows(batch, 2).size(), 2);
  batch.Add("ids", at::zeros({20, 2000}, at::kLong));
  const std::vector<RowGroup> groups = GroupsOfRows(batch, 2);
  ASSERT_EQ(groups.size(), 10);
  for (size_t g = 0; g < groups.size(); ++g) EXPECT_EQ(groups[g].end, int64_t(2 * g + 2));
  batch.rows = 3, batch.tensors.Set("ids", at::zeros({3, 9000}, at::kLong));
  EXPECT_EQ(GroupsOfRows(batch, 2).size(), 3);
}

// What it is given, of each row: its length, and the sum of its ids.
class Recorder : public Classifier {
 public:
  explicit Recorder(const ModelConfig& config) : Classifier(config) {
    register_parameter("unused", at::zeros({1}));  // says where the model is
  }
  std::string SeesPadding() const override { return ""; }
  at::Tensor Logits(const NamedTensors& inputs) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      widths.push_back(inputs["ids"].size(1));
      rows += inputs["ids"].size(0);
    }
    return at::stack({inputs["lengths"], inputs["ids"].sum(1)}, 1).to(at::kFloat);
  }
  std::vector<int64_t> widths;
  int64_t rows = 0;

 private:
  std::mutex mutex_;
};

// Each row's logits stand in its place again.
TEST(RowGroups, AClassifierInEvaluationTakesThemWithoutPadding) {
  ModelConfig c;
  c.kind = "encoder_classifier", c.vocab_size = 9, c.classes = 2;
  Recorder model(c);
  const std::vector<int64_t> lengths = {100, 3000, 20, 2900, 1000, 900, 2800, 3, 0, 950};
  Batch batch = OfLengths(lengths);
  const at::Tensor ids = at::arange(10 * 3000).reshape({10, 3000}).remainder(7),
                   real = at::arange(3000).unsqueeze(0) < batch["lengths"].unsqueeze(1);
  batch.Add("ids", ids * real);
  const at::Tensor whole = model.Logits(batch.tensors);
  for (const auto& [train, gradients] :
       {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
    const Threads threads(1);
    const at::AutoGradMode mode(gradients);
    model.train(train), model.widths.clear(), model.rows = 0;
    EXPECT_TRUE(ClassifierLogits(model, batch).equal(whole));
    EXPECT_EQ(model.rows, 10);
    if (train || gradients) {  // other threads would form none
      EXPECT_EQ(model.widths, std::vector<int64_t>{3000});
    } else {
      EXPECT_EQ(model.widths, (std::vector<int64_t>{3000, 2900, 1000, 1}));
    }
  }
  model.eval();
  const at::NoGradGuard no_grad;
  for (const int threads : {2, 3, 16}) {  // also more than there are groups
    const Threads scope(threads);
    EXPECT_TRUE(ClassifierLogits(model, batch).equal(whole)) << threads;
  }
  batch.padded.clear();
  model.widths.clear();
  EXPECT_TRUE(ClassifierLogits(model, batch).equal(whole));
  EXPECT_EQ(model.widths, std::vector<int64_t>{3000});
}

}  // namespace
}  // namespace cistern
