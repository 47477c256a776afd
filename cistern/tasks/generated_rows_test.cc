#include "cistern/tasks/generated_rows.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "cistern/models/language_model.h"
#include "cistern/ops/testing.h"
#include "cistern/tasks/copy_task.h"
#include "cistern/tasks/evaluate.h"
#include "cistern/tasks/recall_task.h"

namespace cistern {
namespace {

using testing::ExpectContains;
using testing::Thrown;

std::vector<int64_t> Row(const at::Tensor& x, int64_t row) {
  const at::Tensor r = x[row].contiguous();
  return {r.const_data_ptr<int64_t>(), r.const_data_ptr<int64_t>() + r.numel()};
}

TEST(CopyTask, RowsSayWhatIsToBeGivenAgain) {
  CopyTask::Options options;
  options.sizes = {3, 5}, options.distance = 4, options.symbols = 7;
  const CopyTask task(options, "");
  std::set<int64_t> lengths;
  for (int64_t step = 0; step < 20; ++step) {
    const Batch batch = task.TrainBatch(1, step, 4);
    const int64_t length = batch["ids"].size(1), n = (length - 4) / 2;
    lengths.insert(n);
    EXPECT_FALSE(batch.tensors.Has("lengths"));
    for (int64_t r = 0; r < 4; ++r) {
      const auto ids = Row(batch["ids"], r), targets = Row(batch["targets"], r);
      for (int64_t t = 0; t < length; ++t) {
        const int64_t id = ids[size_t(t)];
        if (t < n) {
          EXPECT_LT(id, 7);
        }
        if (t >= n && t < n + 4) {
          EXPECT_EQ(id, 7);  // blank
        }
        if (t == n + 4) {
          EXPECT_EQ(id, 8);  // go
        }
        EXPECT_EQ(targets[size_t(t)], t < n + 4 ? -100 : ids[size_t(t - n - 4)]);
        if (t > n + 4) {
          EXPECT_EQ(id, ids[size_t(t - n - 5)]);
        }
      }
    }
  }
  EXPECT_EQ(lengths, (std::set<int64_t>{3, 5}));
  ModelConfig config;
  config.max_length = 8;
  task.Complete(config);
  EXPECT_EQ(config.vocab_size, 9);
  EXPECT_EQ(config.max_length, 14);
}

TEST(RecallTask, AnswersAreTheValuesOfTheirKeys) {
  RecallTask::Options options;
  options.sizes = {6}, options.distance = 3, options.keys = 9, options.values = 5;
  for (const int64_t queries : {0, 2}) {
    options.queries = queries;
    const RecallTask task(options, "");
    const Batch batch = task.TrainBatch(1, 0, 8);
    const int64_t asked = queries > 0 ? queries : 6;
    for (int64_t r = 0; r < 8; ++r) {
      const auto ids = Row(batch["ids"], r), targets = Row(batch["targets"], r);
      ASSERT_EQ(int64_t(ids.size()), 12 + 3 + 2 * asked - 1);
      std::map<int64_t, int64_t> value;
      for (size_t i = 0; i < 6; ++i) value[ids[2 * i]] = ids[2 * i + 1];
      EXPECT_EQ(value.size(), 6u);
      std::set<int64_t> keys;
      for (size_t t = 0; t < ids.size(); ++t) {
        if (targets[t] == -100) continue;
        EXPECT_GE(t, 15u);
        EXPECT_LT(ids[t], 9);
        EXPECT_TRUE(keys.insert(ids[t]).second);
        EXPECT_EQ(targets[t], value.at(ids[t]));
        EXPECT_GE(targets[t], 9);
        EXPECT_LT(targets[t], 14);
        if (t + 1 < ids.size()) {
          EXPECT_EQ(ids[t + 1], targets[t]);
        }
      }
      EXPECT_EQ(int64_t(keys.size()), asked);
    }
  }
  options.sizes = {10};
  ExpectContains(Thrown([&] { RecallTask(options, ""); }), {"10 pairs", "keys=9", "keys=10"});
}

TEST(GeneratedRows, PureFunctionsAndSplitsOfTheirOwn) {
  const CopyTask task({}, "");
  EXPECT_TRUE(at::equal(task.TrainBatch(3, 7, 5)["ids"], task.TrainBatch(3, 7, 5)["ids"]));
  const auto valid = task.Read(Split::kValid, {}), test = task.Read(Split::kTest, {}),
             again = task.Read(Split::kTest, {});
  const Batch a = *valid->Next(), b = *test->Next(), c = *again->Next();
  EXPECT_FALSE(at::equal(a["ids"], b["ids"]));
  EXPECT_TRUE(at::equal(b["ids"], c["ids"]));
  // As many rows of each size, whatever the batches are cut to.
  std::map<int64_t, int64_t> counts;
  ReadOptions seven;
  seven.rows = 7;
  const auto reader = task.Read(Split::kTest, seven);
  for (std::optional<Batch> batch = reader->Next(); batch; batch = reader->Next()) {
    for (const int64_t n : Row((*batch)["sizes"].unsqueeze(0), 0)) ++counts[n];
    const bool mixed =
        (*batch)["sizes"].min().item<int64_t>() < (*batch)["sizes"].max().item<int64_t>();
    EXPECT_EQ(mixed, batch->tensors.Has("lengths"));
  }
  EXPECT_EQ(counts, (std::map<int64_t, int64_t>{{4, 256}, {8, 256}, {16, 256}, {32, 256}}));
}

// A model that remembers the first `kept` tokens and nothing else, of rows without a distance.
class Remembers : public LanguageModel {
 public:
  Remembers(const ModelConfig& config, int64_t kept) : LanguageModel(config), kept_(kept) {}
  ModelState EmptyState(int64_t) const override { return {}; }
  at::Tensor Hidden(const at::Tensor& ids, ModelState&, const ops::Mask&) override {
    const int64_t n = ids.size(1) / 2;
    at::Tensor out = at::zeros({ids.size(0), ids.size(1), 9}, at::kDouble);
    for (int64_t r = 0; r < ids.size(0); ++r) {
      for (int64_t i = 0; i < n; ++i) {
        const bool known = i < kept_;
        out[r][n + i][known ? ids[r][i].item<int64_t>() : 8] = 20;  // 8 is no answer
      }
    }
    return out;
  }
  at::Tensor Logits(const at::Tensor& hidden) const override { return hidden; }
  at::Tensor Loss(const at::Tensor& hidden, const at::Tensor& targets, double) const override {
    return NextTokenLoss(hidden, targets);
  }

 private:
  int64_t kept_;
};

// A memory of n tokens holds n, however many it is asked for.
TEST(GeneratedRows, AMemoryOfNTokensHoldsN) {
  CopyTask::Options options;
  options.sizes = {4, 8, 16}, options.symbols = 7, options.test_examples = 12;
  const CopyTask task(options, "");
  ModelConfig config;
  task.Complete(config);
  ReadOptions four;
  four.rows = 4;  // one size a batch
  for (const int64_t kept : {4, 6, 16}) {
    Remembers model(config, kept);
    const auto reader = task.Read(Split::kTest, four);
    Score score;
    for (std::optional<Batch> batch = reader->Next(); batch; batch = reader->Next())
      score.Merge(task.Measure(model, *batch));
    const Json metrics = task.Metrics(score);
    double mean = 0;
    for (size_t i = 0; i < 3; ++i) {
      const double size = double(options.sizes[i]), want = 100 * std::min(1.0, double(kept) / size);
      EXPECT_NEAR(metrics["capacity"]["points"][i][1].get<double>(), want, 1e-9);
      mean += want / 3;
    }
    EXPECT_NEAR(metrics["accuracy"].get<double>(), mean, 1e-9);
    // n (a - c) / (1 - c), with a = kept / n of the largest size that is not all right.
    const double n = kept == 16 ? 16 : 8, c = 1.0 / 7, a = std::min(1.0, double(kept) / n);
    EXPECT_NEAR(metrics["held"].get<double>(), std::max(kept >= 4 ? 4.0 : 0, n * (a - c) / (1 - c)),
                1e-9);
    EXPECT_NEAR(metrics["rows"].get<double>(),
                kept == 4   ? 100.0 / 3
                : kept == 6 ? 100.0 / 3
                            : 100,
                1e-9);
  }
}

}  // namespace
}  // namespace cistern
