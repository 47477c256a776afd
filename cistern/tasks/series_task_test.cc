#include "cistern/tasks/series_task.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

class SeriesTaskTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string train = "@dimensions 2\n@classLabel true a b\n@data\n";
    for (int i = 0; i < 10; ++i)
      train += StrCat(i, ",?,", i + 2, ":", 10 * i, ",", 10 * i, ",?:", i % 2 ? "b" : "a", "\n");
    WriteFileAtomically(folder_ / "X_TRAIN.ts", train);
    WriteFileAtomically(folder_ / "X_TEST.ts",
                        "@dimensions 2\n@classLabel true a b\n@data\n?,1:2,?:b\n5:6:a\n");
    options_.data = folder_.path();
  }
  TestFolder folder_;
  SeriesTask::Options options_;
};

TEST_F(SeriesTaskTest, MissingValuesAreTheLastOneAndTheMeanBeforeTheFirst) {
  options_.scale = false;
  SeriesTask task(options_, "");
  task.Prepare();
  const Batch test = *task.Read(Split::kTest, {})->Next();
  EXPECT_EQ(test.rows, 2);
  EXPECT_EQ(test.tokens, 3);
  EXPECT_TRUE(at::equal(test["lengths"], at::tensor({2, 1}, at::kLong)));
  EXPECT_TRUE(at::equal(test["targets"], at::tensor({1, 0}, at::kLong)));
  const at::Tensor values = test["values"];
  EXPECT_EQ(values[0][1][0].item<float>(), 1);
  EXPECT_EQ(values[0][0][1].item<float>(), 2);
  EXPECT_EQ(values[0][1][1].item<float>(), 2);  // carried on
  EXPECT_EQ(values[1][1][0].item<float>(), 0);  // padding
  // Before the first value of channel 1: its mean in the training rows.
  double sum = 0, n = 0;
  const auto train = task.Read(Split::kTrain, {.rows = 100})->Next();
  EXPECT_EQ(train->rows, 8);
  for (int64_t r = 0; r < train->rows; ++r) {
    const at::Tensor row = (*train)["values"][r];
    EXPECT_EQ(row[1][0].item<float>(), row[0][0].item<float>());
    EXPECT_EQ(row[2][1].item<float>(), row[1][1].item<float>());
    sum += row[0][0].item<double>() + row[2][0].item<double>(), n += 2;
  }
  EXPECT_NEAR(values[0][0][0].item<double>(), sum / n, 1e-5);
}

TEST_F(SeriesTaskTest, ScaleIsThatOfTheTrainingRowsAndIsKept) {
  SeriesTask task(options_, "");
  task.Prepare();
  const Batch train = *task.Read(Split::kTrain, {.rows = 100})->Next();
  const at::Tensor first = train["values"].select(2, 1).slice(1, 0, 2).to(at::kDouble);
  EXPECT_NEAR(first.mean().item<double>(), 0, 1e-6);
  EXPECT_NEAR(first.square().mean().item<double>(), 1, 1e-5);
  ModelConfig config;
  config.kind = "encoder_classifier";
  task.Complete(config);
  EXPECT_EQ(config.classes, 2);
  EXPECT_EQ(config.Own()["channels"], 2);
  const TestFolder model;
  task.SaveAssets(model.path());
  SeriesTask again(options_, "");
  again.LoadAssets(model.path());
  const auto read = [&](const SeriesTask& t) {
    return (*t.ReadFile(folder_ / "X_TEST.ts", true, {})->Next())["values"];
  };
  EXPECT_TRUE(at::equal(read(task), read(again)));
  EXPECT_TRUE(at::equal(task.TrainBatch(3, 4, 2)["values"], task.TrainBatch(3, 4, 2)["values"]));
}

TEST_F(SeriesTaskTest, RefusesOtherChannelsAndClasses) {
  SeriesTask task(options_, "");
  task.Prepare();
  const auto message = [&](const std::string& text) {
    WriteFileAtomically(folder_ / "other.ts", text);
    try {
      task.ReadFile(folder_ / "other.ts", true, {});
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("read");
  };
  EXPECT_NE(message("@classLabel true a b\n@data\n1:a\n").find("expected series of 2 channels"),
            std::string::npos);
  EXPECT_NE(message("@classLabel true a c\n@data\n1:2:c\n").find("line 3"), std::string::npos);
  options_.data = folder_ / "X_TRAIN.ts";
  EXPECT_THROW(SeriesTask(options_, "").Prepare(), UsageError);
}

}  // namespace
}  // namespace cistern
