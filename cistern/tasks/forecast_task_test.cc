#include "cistern/tasks/forecast_task.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"
#include "cistern/tasks/evaluate.h"

namespace cistern {
namespace {

// Two series of 60 and 30 steps of the channels x, y; y is not known at every seventh step.
class ForecastTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string text = "series,date,x,y\n";
    for (int s = 0; s < 2; ++s) {
      for (int t = 0; t < (s ? 30 : 60); ++t) {
        truth_[s].push_back({X(s, t), t % 7 == 3 ? NAN : Y(t)});
        text +=
            StrCat(s, ",day ", t, ",", X(s, t), ",", t % 7 == 3 ? "?" : std::to_string(Y(t)), "\n");
      }
    }
    WriteFileAtomically(folder_ / "f.csv", text);
    options_.input.data = folder_ / "f.csv";
    options_.length = 8;
  }
  static double X(int s, int t) { return 100 + 10 * s + std::floor(20 * std::sin(t)); }
  static double Y(int t) { return t; }
  static ModelConfig Config(const ForecastTask& task) {
    ModelConfig c;
    c.kind = "forecaster", c.dim = 8, c.layers = 1, c.heads = 2, c.attention = {"latte"};
    c.attention_options = Json{{"latte", {{"latents", 4}}}};
    task.Complete(c);
    return c;
  }
  // What repeating the last known value is wrong by, in the test, in the file's own numbers.
  struct LastErrors {
    double rmse[2], mae[2];
    int values = 0;
  };
  LastErrors LastOfFile() const {
    double last[2] = {}, absolute[2] = {};
    int count[2] = {};
    for (int s = 0; s < 2; ++s) {
      const auto& series = truth_[s];
      const auto value = [&](int t, int c) {
        return c == 0 ? series[size_t(t)].first : series[size_t(t)].second;
      };
      for (int t = s ? 24 : 48; t < (s ? 30 : 60); ++t) {
        for (int c = 0; c < 2; ++c) {
          if (std::isnan(value(t, c))) continue;
          int before = t - 1;
          while (std::isnan(value(before, c))) --before;
          const double error = value(before, c) - value(t, c);
          last[c] += error * error, absolute[c] += std::abs(error), ++count[c];
        }
      }
    }
    return {{std::sqrt(last[0] / count[0]), std::sqrt(last[1] / count[1])},
            {absolute[0] / count[0], absolute[1] / count[1]},
            count[0] + count[1]};
  }
  TestFolder folder_;
  ForecastTask::Options options_;
  std::vector<std::pair<double, double>> truth_[2];
};

// Every step of a part is measured once, and no training window reaches into another part.
TEST_F(ForecastTest, PartsEachSeriesByTime) {
  ForecastTask task(options_, "");
  task.Prepare();
  for (const int64_t context : {0, 4, 7}) {
    std::map<Split, int64_t> values;
    for (const Split split : {Split::kTrain, Split::kValid, Split::kTest}) {
      const auto reader = task.Read(split, {.rows = 5, .context = context});
      while (const auto batch = reader->Next()) {
        EXPECT_LE((*batch)["values"].size(1), 8);
        values[split] += (*batch)["targets"].isnan().logical_not().sum().item<int64_t>();
      }
    }
    // Steps 1..41 and 1..20 | 42..47, 21..23 | 48..59, 24..29, without every seventh of y.
    const auto known = [](int begin, int end) {
      int64_t n = 0;
      for (int t = begin; t < end; ++t) n += t % 7 == 3 ? 1 : 2;
      return n;
    };
    EXPECT_EQ(values[Split::kTrain], known(1, 42) + known(1, 21)) << context;
    EXPECT_EQ(values[Split::kValid], known(42, 48) + known(21, 24)) << context;
    EXPECT_EQ(values[Split::kTest], known(48, 60) + known(24, 30)) << context;
  }
  // The training rows' scale: x and y of steps 0..41 and 0..20 alone.
  double sum = 0, squares = 0;
  for (int s = 0; s < 2; ++s) {
    for (int t = 0; t < (s ? 21 : 42); ++t) sum += X(s, t), squares += X(s, t) * X(s, t);
  }
  const double mean = sum / 63, deviation = std::sqrt(squares / 63 - mean * mean);
  std::map<int64_t, int> begins;
  for (int64_t step = 0; step < 200; ++step) {
    const Batch batch = task.TrainBatch(1, step, 4);
    const at::Tensor x = batch["values"].select(2, 0).to(at::kDouble) * deviation + mean,
                     next = batch["targets"].select(2, 0).to(at::kDouble) * deviation + mean;
    for (int64_t r = 0; r < 4; ++r) {
      EXPECT_EQ(batch["lengths"][r].item<int64_t>(), 8);
      const int s = batch["lines"][r].item<int64_t>() == 2 ? 0 : 1;
      int at = -1;  // where the window begins
      for (int t = 0; t + 9 <= (s ? 21 : 42); ++t) {
        bool same = true;
        for (int i = 0; i < 8; ++i)
          same = same && std::abs(x[r][i].item<double>() - X(s, t + i)) < 1e-3 &&
                 std::abs(next[r][i].item<double>() - X(s, t + i + 1)) < 1e-3;
        if (same) at = t;
      }
      ASSERT_GE(at, 0) << "a window that is no part of the training steps";
      ++begins[100 * s + at];
    }
  }
  EXPECT_EQ(begins.size(), size_t(42 - 8 + 21 - 8));  // each of them
  EXPECT_TRUE(at::equal(task.TrainBatch(1, 5, 3)["values"], task.TrainBatch(1, 5, 3)["values"]));
}

// Without a context windows begin at steps 47, 52 and 57; y is missing at 52.
TEST_F(ForecastTest, AWindowMayBeginWhereAValueIsMissing) {
  options_.length = 5;
  ForecastTask task(options_, "");
  task.Prepare();
  const auto model = MakeModel(Config(task), 1);
  const Json metrics =
      task.Metrics(Evaluate(task, *model, Split::kTest, {.read = {.context = 0}}).score);
  EXPECT_NEAR(metrics["channels"]["y"]["last_rmse"].get<double>(), LastOfFile().rmse[1], 1e-4);
  const auto reader = task.Read(Split::kTest, {.rows = 9, .context = 0});
  const Batch batch = *reader->Next();
  const at::Tensor y = batch["values"].select(2, 1);
  // Rows that have nothing to predict count nothing beside others (Task::Terms).
  EXPECT_EQ(task.Terms(batch),
            double(batch["targets"].isnan().logical_not().sum().item<int64_t>()));
  Batch none = batch;
  none.Add("targets", at::full_like(batch["targets"], std::nan("")));
  EXPECT_EQ(task.Terms(none), 0);
  // What is missing at 52 is read as the value at 51, which the window before ends with.
  EXPECT_EQ(y[1][0].item<float>(), y[0][4].item<float>());
}

TEST_F(ForecastTest, MetricsAndBaselinesAreThoseOfTheFile) {
  options_.input.indicator = true;
  ForecastTask task(options_, "");
  task.Prepare();
  const auto model = MakeModel(Config(task), 1);
  const Json metrics = task.Metrics(Evaluate(task, *model, Split::kTest).score);
  const LastErrors of_file = LastOfFile();
  EXPECT_EQ(metrics["values"], of_file.values);
  const Json &x = metrics["channels"]["x"], &y = metrics["channels"]["y"];
  EXPECT_NEAR(x["last_rmse"].get<double>(), of_file.rmse[0], 1e-4);
  EXPECT_NEAR(x["last_mae"].get<double>(), of_file.mae[0], 1e-4);
  EXPECT_NEAR(y["last_rmse"].get<double>(), of_file.rmse[1], 1e-4);
  double sum = 0, n = 0, squares = 0, errors = 0;
  for (int s = 0; s < 2; ++s)
    for (int t = 0; t < (s ? 21 : 42); ++t)
      if (t % 7 != 3) sum += Y(t), ++n;
  for (int s = 0; s < 2; ++s)
    for (int t = s ? 24 : 48; t < (s ? 30 : 60); ++t)
      if (t % 7 != 3) squares += (Y(t) - sum / n) * (Y(t) - sum / n), ++errors;
  EXPECT_NEAR(y["mean_rmse"].get<double>(), std::sqrt(squares / errors), 1e-3);
  // Any model's errors, from what it predicts of the file cut behind each step.
  double model_squares = 0, values = 0;
  for (int t = 48; t < 60; ++t) {
    std::string cut = "series,x,y\n";
    const int begin = t - 8;  // rows of the model's length have no other context
    for (int i = begin; i < t; ++i)
      cut += StrCat("0,", X(0, i), ",", i % 7 == 3 ? "" : std::to_string(Y(i)), "\n");
    WriteFileAtomically(folder_ / "cut.csv", cut);
    const auto rows = task.Predict(*model, *task.ReadFile(folder_ / "cut.csv", false, {})->Next());
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_EQ(rows[0]["steps"], 8);
    const double error = rows[0]["forecast"]["x"].get<double>() - X(0, t);
    model_squares += error * error, ++values;
  }
  std::string only = "series,x,y\n";
  for (int t = 0; t < 60; ++t)
    only += StrCat("0,", X(0, t), ",", t % 7 == 3 ? "" : std::to_string(Y(t)), "\n");
  WriteFileAtomically(folder_ / "only.csv", only);
  const auto reader = task.ReadFile(folder_ / "only.csv", true, {.rows = 1, .context = 7});
  Score score;
  for (int t = 1; const auto batch = reader->Next(); ++t) {
    if (t >= 48) score.Merge(task.Measure(*model, *batch));
  }
  EXPECT_NEAR(task.Metrics(score)["channels"]["x"]["rmse"].get<double>(),
              std::sqrt(model_squares / values), 1e-3);
  // A model that is loaded says the same.
  const TestFolder folder;
  task.SaveAssets(folder.path());
  ForecastTask again(options_, "");
  again.LoadAssets(folder.path());
  const auto predict = [&](const ForecastTask& t) {
    return t.Predict(*model, *t.ReadFile(folder_ / "f.csv", false, {})->Next());
  };
  EXPECT_EQ(predict(task), predict(again));
  EXPECT_EQ(predict(again).size(), 2u);
}

// float32 holds such values in steps of 64.
TEST_F(ForecastTest, SmallStepsBesideALargeMean) {
  std::string text = "x\n";
  for (int t = 0; t < 60; ++t) text += StrCat(1000000000 + t % 2, "\n");
  WriteFileAtomically(folder_ / "far.csv", text);
  options_.input.data = folder_ / "far.csv";
  ForecastTask task(options_, "");
  task.Prepare();
  const auto model = MakeModel(Config(task), 1);
  const Json metrics = task.Metrics(Evaluate(task, *model, Split::kTest).score);
  EXPECT_NEAR(metrics["channels"]["x"]["last_rmse"].get<double>(), 1, 1e-5);
  EXPECT_NEAR(metrics["channels"]["x"]["mean_rmse"].get<double>(), 0.5, 1e-3);
}

TEST_F(ForecastTest, Refusals) {
  const auto message = [&](const std::string& text) {
    WriteFileAtomically(folder_ / "bad.csv", text);
    options_.input.data = folder_ / "bad.csv";
    return ErrorMessage([&] {
      ForecastTask task(options_, "");
      task.Prepare();
    });
  };
  EXPECT_NE(message("x\n1\n2\n").find("longer series"), std::string::npos);
  EXPECT_NE(message("x,word\n1,a\n").find("task.ignore"), std::string::npos);
  options_.context = 8;
  EXPECT_NE(ErrorMessage([&] { ForecastTask task(options_, ""); }).find("nothing of length=8"),
            std::string::npos);
}

}  // namespace
}  // namespace cistern
