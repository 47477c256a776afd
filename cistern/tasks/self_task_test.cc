// The inputs of a task as a task: what is asked for, and that it is a function of (seed, step).
#include "cistern/tasks/self_task.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cistern/tasks/row_batch.h"

namespace cistern {
namespace {

constexpr int64_t kVocab = 50, kLongest = 40;

// Row i of a batch: tokens 1, 2, ... of a length that grows with i.
class Counting : public Task {
 public:
  void SaveAssets(const std::string&) const override {}
  void LoadAssets(const std::string&) override {}
  void Prepare() override {}
  Json DataSummary() const override { return Json::object(); }
  void Complete(ModelConfig&) const override {}
  int64_t tokens_per_row() const override { return kLongest; }
  Batch TrainBatch(uint64_t, int64_t step, int64_t rows) const override {
    std::vector<std::vector<int32_t>> ids;
    for (int64_t r = 0; r < rows; ++r) {
      ids.emplace_back();
      for (int64_t t = 0; t < 1 + (step * rows + r) * 7 % kLongest; ++t)
        ids.back().push_back(int32_t(t + 1));
    }
    Batch batch;
    AddIds<int32_t>({ids.begin(), ids.end()}, {}, &batch);
    AddNumbers("targets", std::vector<int64_t>(size_t(rows), 0), &batch);
    return batch;
  }
  at::Tensor Loss(Model&, const Batch&, double) const override { return {}; }
  std::unique_ptr<BatchReader> Read(Split, const ReadOptions&) const override { return nullptr; }
  Score Measure(Model&, const Batch&) const override { return {}; }
  Json Metrics(const Score&) const override { return Json::object(); }
  const Metric& metric() const override {
    static const Metric none;
    return none;
  }
};

TEST(SelfTask, CausalTargetsAreTheNextTokens) {
  const Counting task;
  const SelfTask self(task, SelfObjective::kCausal, 0.15, kVocab);
  const Batch batch = self.TrainBatch(3, 2, 5), under = task.TrainBatch(3, 2, 5);
  EXPECT_TRUE(at::equal(batch["ids"], under["ids"]));
  for (int64_t r = 0; r < 5; ++r) {
    const int64_t length = under["lengths"][r].item<int64_t>();
    for (int64_t t = 0; t < batch["ids"].size(1); ++t)
      EXPECT_EQ(batch["targets"][r][t].item<int64_t>(), t + 1 < length ? t + 2 : -100);
  }
  EXPECT_EQ(self.Terms(batch), double((under["lengths"] - 1).sum().item<int64_t>()));
}

TEST(SelfTask, MaskedTokensAreTheShareAndAreAskedFor) {
  const Counting task;
  const SelfTask self(task, SelfObjective::kMasked, 0.3, kVocab);
  double asked = 0, tokens = 0, hidden = 0, kept = 0;
  for (int64_t step = 0; step < 40; ++step) {
    const Batch batch = self.TrainBatch(7, step, 8), under = task.TrainBatch(7, step, 8);
    EXPECT_TRUE(at::equal(batch["ids"], self.TrainBatch(7, step, 8)["ids"]));
    const at::Tensor chosen = batch["targets"].ne(-100);
    // What is not asked for is as it was, and what is asked for was there; padding is neither.
    EXPECT_TRUE(
        at::equal(batch["ids"].masked_fill(chosen, 0), under["ids"].masked_fill(chosen, 0)));
    EXPECT_TRUE(
        at::equal(batch["targets"].masked_select(chosen), under["ids"].masked_select(chosen)));
    for (int64_t r = 0; r < 8; ++r) {
      const int64_t length = under["lengths"][r].item<int64_t>(),
                    here = chosen[r].sum().item<int64_t>();
      EXPECT_GE(here, 1);
      EXPECT_EQ(chosen[r].narrow(0, 0, length).sum().item<int64_t>(), here);
      EXPECT_LE(std::abs(double(here) - 0.3 * double(length)), 1);
    }
    asked += self.Terms(batch);
    tokens += double(under["lengths"].sum().item<int64_t>());
    hidden += double(batch["ids"].eq(kVocab).sum().item<int64_t>());
    kept += double((batch["ids"].eq(under["ids"]) & chosen).sum().item<int64_t>());
  }
  EXPECT_NEAR(asked / tokens, 0.3, 0.02);
  EXPECT_NEAR(hidden / asked, 0.8, 0.04);
  EXPECT_NEAR(kept / asked, 0.1, 0.03);
  EXPECT_FALSE(at::equal(self.TrainBatch(7, 1, 8)["ids"], self.TrainBatch(8, 1, 8)["ids"]));
}

}  // namespace
}  // namespace cistern
