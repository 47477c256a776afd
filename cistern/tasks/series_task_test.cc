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
    options_.input.data = folder_.path();
  }
  TestFolder folder_;
  SeriesTask::Options options_;
};

TEST_F(SeriesTaskTest, MissingValuesAreTheLastOneAndTheMeanBeforeTheFirst) {
  options_.input.scale = false;
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
  EXPECT_EQ(test.Rows(1, 2).WithoutPadding()["values"].size(1), 1);
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
  EXPECT_NE(message("@classLabel true a c\n@data\n1:2:c\n").find("other.ts:3"), std::string::npos);
}

TEST_F(SeriesTaskTest, UnknownClassesAreBadRows) {
  WriteFileAtomically(folder_ / "X_TEST.ts",
                      "@dimensions 2\n@classLabel true a b c\n@data\n1:2:c\n5:6:a\n7:8:c\n3:4:b\n");
  std::string said = ErrorMessage([&] { SeriesTask(options_, "").Prepare(); });
  EXPECT_NE(said.find("X_TEST.ts:4"), std::string::npos) << said;
  options_.input.skip_bad_rows = true;
  SeriesTask task(options_, "");
  task.Prepare();
  EXPECT_EQ(task.DataSummary()["test"], 2);
  EXPECT_NE(task.DataSummary()["notes"].dump().find("2 series of "), std::string::npos);
  const auto reader = task.ReadFile(folder_ / "X_TEST.ts", true, {});
  const Batch known = *reader->Next(), split = *task.Read(Split::kTest, {})->Next();
  EXPECT_EQ(reader->skipped(), 2);
  for (const Batch* const batch : {&known, &split}) {
    EXPECT_TRUE(at::equal((*batch)["targets"], at::tensor({0, 1}, at::kLong)));
    EXPECT_TRUE(at::equal((*batch)["lines"], at::tensor({5, 7}, at::kLong)));
  }
  EXPECT_EQ(task.ReadFile(folder_ / "X_TEST.ts", false, {})->Next()->rows, 4);
  WriteFileAtomically(folder_ / "none.ts", "@dimensions 2\n@classLabel true a c\n@data\n1:2:c\n");
  said = ErrorMessage([&] { task.ReadFile(folder_ / "none.ts", true, {}); });
  EXPECT_NE(said.find("1 skipped"), std::string::npos) << said;
}

// The divisor would be the longest series of the batch.
TEST_F(SeriesTaskTest, PoolingOverPaddingIsRefused) {
  SeriesTask task(options_, "");
  task.Prepare();
  for (const PoolingKind pooling : {PoolingKind::kMeanAll, PoolingKind::kMeanZeros}) {
    ModelConfig config;
    config.kind = "encoder_classifier", config.pooling = pooling;
    const std::string said = ErrorMessage([&] { task.Complete(config); });
    EXPECT_NE(said.find("model.pooling=mean"), std::string::npos) << said;
  }
}

// Where all series are of one length there is none; those of another file are read apart.
TEST_F(SeriesTaskTest, PoolingOverTheWholeLengthOfSeriesOfOneLength) {
  WriteFileAtomically(folder_ / "X_TEST.ts",
                      "@dimensions 2\n@classLabel true a b\n@data\n1,2,3:4,5,6:a\n7,8,9:1,2,3:b\n");
  WriteFileAtomically(folder_ / "other.ts",
                      "@dimensions 2\n@classLabel true a b\n@data\n1:2:a\n1,2,3:4,5,6:b\n");
  SeriesTask task(options_, "");
  task.Prepare();
  ModelConfig config;
  config.kind = "encoder_classifier", config.pooling = PoolingKind::kMeanAll;
  config.dim = 8, config.layers = 1, config.heads = 2, config.init_std = 0.5;
  task.Complete(config);
  const auto model = MakeModel(config, 3);
  model->eval();
  const auto read = [&](int64_t rows) {
    const auto reader = task.ReadFile(folder_ / "other.ts", true, {.rows = rows});
    std::vector<Json> said;
    Score score;
    while (const auto batch = reader->Next()) {
      for (Json& row : task.Predict(*model, *batch)) said.push_back(std::move(row));
      score.Merge(task.Measure(*model, *batch));
    }
    return std::pair(said, task.Metrics(score));
  };
  const auto together = read(2), apart = read(1);
  EXPECT_EQ(together.first, apart.first);
  EXPECT_EQ(together.second, apart.second);
}

// Masked steps leave gaps, which relative positions do not know.
TEST_F(SeriesTaskTest, RelativePositionsBesideMaskedStepsAreRefused) {
  for (const MissingValues missing : {MissingValues::kLast, MissingValues::kMask}) {
    options_.input.missing = missing;
    SeriesTask task(options_, "");
    task.Prepare();
    ModelConfig config;
    config.kind = "encoder_classifier", config.attention = {"softmax"};
    config.positions = PositionKind::kRelative;
    const std::string said = ErrorMessage([&] { task.Complete(config); });
    EXPECT_EQ(said == "no error", missing == MissingValues::kLast) << said;
  }
}

// 20 series of two channels in a table, a row a step; the label is 100 + 10 i.
std::string StepsTable() {
  std::string text = "series,label,x,y\n";
  for (int i = 0; i < 20; ++i) {
    for (int t = 0; t < 3 + i % 2; ++t)
      text += StrCat("s", i, ",", 100 + 10 * i, ",", i + t, ",", i * t, "\n");
  }
  return text;
}

TEST_F(SeriesTaskTest, RegressionIsInTheLabelsUnit) {
  WriteFileAtomically(folder_ / "r.csv", StepsTable());
  options_.input.data = folder_ / "r.csv";
  options_.regression = true;
  SeriesTask task(options_, "");
  task.Prepare();
  EXPECT_EQ(task.train_rows(), 12);
  EXPECT_EQ(task.metric().name, "rmse");
  ModelConfig config;
  config.kind = "encoder_classifier", config.dim = 8, config.layers = 1, config.heads = 2;
  config.attention = {"softmax"}, config.positions = PositionKind::kNone;
  task.Complete(config);
  EXPECT_EQ(config.classes, 1);
  const auto model = MakeModel(config, 1);
  // Of the training rows, each once: the targets have mean 0 and deviation 1.
  const Batch train = *task.Read(Split::kTrain, {.rows = 100})->Next();
  EXPECT_EQ(train.rows, 12);
  EXPECT_NEAR(train["targets"].mean().item<double>(), 0, 1e-12);
  EXPECT_NEAR(train["targets"].square().mean().item<double>(), 1, 1e-12);
  // What predict says of each row, against the labels as the file has them.
  const Batch file = *task.ReadFile(folder_ / "r.csv", false, {.rows = 100})->Next();
  EXPECT_FALSE(file.tensors.Has("targets"));
  const std::vector<Json> rows = task.Predict(*model, file);
  ASSERT_EQ(rows.size(), 20u);
  EXPECT_EQ(rows[1]["line"], 5);
  double squares = 0, absolute = 0, spread = 0, mean_squares = 0, train_mean = 0;
  for (int64_t r = 0; r < 12; ++r) {
    const int64_t line = train["lines"][r].item<int64_t>();
    for (size_t i = 0; i < 20; ++i)
      if (rows[i]["line"] == line) train_mean += (100 + 10.0 * double(i)) / 12;
  }
  for (size_t i = 0; i < 20; ++i) {
    const double label = 100 + 10.0 * double(i), error = rows[i]["value"].get<double>() - label;
    squares += error * error / 20;
    absolute += std::abs(error) / 20;
    spread += (label - 195) * (label - 195) / 20;
    mean_squares += (label - train_mean) * (label - train_mean) / 20;
  }
  const Batch all = *task.ReadFile(folder_ / "r.csv", true, {.rows = 100})->Next();
  const Json metrics = task.Metrics(task.Measure(*model, all));
  EXPECT_NEAR(metrics["rmse"].get<double>(), std::sqrt(squares), 1e-3);
  EXPECT_NEAR(metrics["mae"].get<double>(), absolute, 1e-3);
  EXPECT_NEAR(metrics["r2"].get<double>(), 1 - squares / spread, 1e-5);
  EXPECT_NEAR(metrics["mean_rmse"].get<double>(), std::sqrt(mean_squares), 1e-6);
  // Kept with the model.
  const TestFolder folder;
  task.SaveAssets(folder.path());
  SeriesTask again(options_, "");
  again.LoadAssets(folder.path());
  EXPECT_EQ(again.Predict(*model, file)[7], rows[7]);
}

// A file to predict has no label, by whose name training knew that a line of numbers is a header.
TEST_F(SeriesTaskTest, HeaderOfNumbersIsKnownWithoutLabels) {
  std::string labelled = "label,0,1,2\n", rows;
  for (int i = 0; i < 10; ++i) {
    const std::string row = StrCat(i, ",", i + 0.5, ",2\n");
    labelled += (i % 2 ? "a," : "b,") + row, rows += row;
  }
  WriteFileAtomically(folder_ / "train.csv", labelled);
  options_.input.data = folder_ / "train.csv";
  SeriesTask trained(options_, "");
  trained.Prepare();
  const TestFolder folder;
  trained.SaveAssets(folder.path());
  const auto read = [&](const std::string& text) {
    SeriesTask task(options_, "");
    task.LoadAssets(folder.path());
    WriteFileAtomically(folder_ / "new.csv", text);
    return task.ReadFile(folder_ / "new.csv", false, {.rows = 100})->Next()->rows;
  };
  EXPECT_EQ(read(labelled), 10);
  EXPECT_EQ(read("0,1,2\n" + rows), 10);
  EXPECT_EQ(read("0,1,2,3\n5,6,7,8\n"), 1);  // longer series, and shorter ones
  EXPECT_EQ(read("0,1\n5,6\n"), 1);
  EXPECT_EQ(read(rows), 10);  // no header
  EXPECT_EQ(read("0,2,1\n5,6,7\n"), 2);
  options_.input.header = TableOptions::Header::kYes;
  EXPECT_EQ(read("0,2,1\n5,6,7\n"), 1);
}

// As a table without names has it: one fewer where there are no labels.
TEST_F(SeriesTaskTest, NumberedLabelsMayBeMissing) {
  std::string labelled, rows;
  for (int i = 0; i < 10; ++i) {
    const std::string row = StrCat(i, "\t", i + 0.5, "\t2\n");
    labelled += (i % 2 ? "1\t" : "2\t") + row, rows += row;
  }
  WriteFileAtomically(folder_ / "train.tsv", labelled);
  options_.input.data = folder_ / "train.tsv", options_.input.label_column = "1";
  SeriesTask task(options_, "");
  task.Prepare();
  task.SaveAssets(folder_.path());
  SeriesTask again(options_, "");
  again.LoadAssets(folder_.path());
  const auto values = [&](const std::string& text) {
    WriteFileAtomically(folder_ / "new.tsv", text);
    return (*again.ReadFile(folder_ / "new.tsv", false, {.rows = 100})->Next())["values"];
  };
  EXPECT_EQ(values(rows).size(1), 3);
  EXPECT_TRUE(at::equal(values(rows), values(labelled)));
  EXPECT_NE(ErrorMessage([&] { values("1\t2\n"); }).find("2 columns, and the training"),
            std::string::npos);
}

// The test table's columns are read in the order of the training table's.
TEST_F(SeriesTaskTest, ColumnsOfTheTestTableAreFoundByName) {
  std::string train = "label,t0,t1,t2\n";
  for (int i = 0; i < 10; ++i) train += StrCat(i % 2 ? "a," : "b,", i, ",", 10 + i, ",30\n");
  WriteFileAtomically(folder_ / "train.csv", train);
  WriteFileAtomically(folder_ / "test.csv", "t2,label,t1,t0\n3,a,2,1\n");
  options_.input.data = folder_ / "train.csv", options_.input.test = folder_ / "test.csv";
  options_.input.scale = false;
  SeriesTask task(options_, "");
  task.Prepare();
  EXPECT_TRUE(at::equal((*task.Read(Split::kTest, {})->Next())["values"].view({3}),
                        at::tensor({1.0f, 2.0f, 3.0f})));
  options_.test_share = 0.3;
  EXPECT_NE(ErrorMessage([&] {
              SeriesTask(options_, "").Prepare();
            }).find("task.series.test_share has no effect with test="),
            std::string::npos);
}

TEST_F(SeriesTaskTest, HeaderIsAnOptionOfUse) {
  for (const char* kind : {"series", "forecast", "classify"}) {
    TaskOptions options;
    options.kind = kind;
    options.SetOfUse("task.header=yes");
    EXPECT_EQ(options.Write()[kind]["header"], "yes");
  }
}

// In training; what was learned may be used on a table.
TEST_F(SeriesTaskTest, KeysOfTablesAreRefusedWithOtherFiles) {
  const auto said = [&](auto change) {
    SeriesTask::Options o = options_;
    change(o.input);
    return ErrorMessage([&] { SeriesTask(o, "").Prepare(); });
  };
  const auto refused = [&](const std::string& key, auto change) {
    const std::string message = said(change);
    EXPECT_NE(message.find("task.series." + key + " has no effect with"), std::string::npos)
        << message;
    EXPECT_NE(message.find("X_TRAIN.ts, which is no table; leave it out"), std::string::npos)
        << message;
  };
  refused("layout", [](auto& o) { o.layout = SeriesFormat::Layout::kSteps; });
  refused("label_column", [](auto& o) { o.label_column = "y"; });
  refused("series_column", [](auto& o) { o.series_column = "id"; });
  refused("ignore", [](auto& o) { o.ignore = {"a"}; });
  refused("header", [](auto& o) { o.header = TableOptions::Header::kYes; });
  EXPECT_EQ(said([](auto&) {}), "no error");
  SeriesTask task(options_, "");
  task.Prepare();
  task.SaveAssets(folder_.path());
  options_.input.header = TableOptions::Header::kYes;
  SeriesTask again(options_, "");
  again.LoadAssets(folder_.path());
  again.Prepare();
  EXPECT_EQ(again.DataSummary(), task.DataSummary());
}

TEST_F(SeriesTaskTest, NumbersAsClassesAreRefused) {
  std::string text = "a,b,label\n";
  for (int i = 0; i < 20; ++i) text += StrCat(i, ",", i + 1, ",", 0.5 * i, "\n");
  WriteFileAtomically(folder_ / "n.csv", text);
  options_.input.data = folder_ / "n.csv";
  EXPECT_NE(ErrorMessage([&] {
              SeriesTask task(options_, "");
              task.Prepare();
            }).find("task.series.regression=true"),
            std::string::npos);
}

// A class of which every series is drawn for validation or test.
TEST_F(SeriesTaskTest, SplitsThatLeaveAClassWithoutTrainingSayWhatHelps) {
  std::string text = "a,b,label\n";
  for (int i = 0; i < 20; ++i) text += StrCat(i, ",", i + 1, ",", i < 2 ? "rare" : "common", "\n");
  WriteFileAtomically(folder_ / "rare.csv", text);
  options_.input.data = folder_ / "rare.csv";
  std::string said;
  for (options_.split_seed = 1; said.empty() && options_.split_seed < 100; ++options_.split_seed) {
    try {
      SeriesTask(options_, "").Prepare();
    } catch (const UsageError& e) {
      said = e.what();
    }
  }
  EXPECT_NE(said.find("no series of the class 'rare' to train on; take another"), std::string::npos)
      << said;
}

TEST_F(SeriesTaskTest, MissingValuesAsTheOptionSays) {
  WriteFileAtomically(folder_ / "m.csv",
                      "series,label,x,y\n1,a,1,\n1,a,,\n1,a,3,5\n2,b,7,9\n2,b,8,7\n");
  options_.input.scale = false;
  options_.input.data = folder_ / "u.csv";
  std::string rows = "series,label,x,y\n";
  for (int i = 0; i < 10; ++i) {
    const char* const label = i % 2 ? "a" : "b";
    rows += StrCat(i, ",", label, ",2,4\n", i, ",", label, ",2,\n");
  }
  WriteFileAtomically(folder_ / "u.csv", rows);
  const auto read = [&](MissingValues how, bool indicator) {
    options_.input.missing = how;
    options_.input.indicator = indicator;
    auto task = std::make_unique<SeriesTask>(options_, "");
    task->Prepare();
    EXPECT_NE(task->DataSummary().dump().find("10 missing values"), std::string::npos);
    ModelConfig config;
    config.kind = "encoder_classifier";
    task->Complete(config);
    EXPECT_EQ(config.Own()["channels"], indicator ? 4 : 2);
    return *task->ReadFile(folder_ / "m.csv", true, {})->Next();
  };
  const auto row = [](const at::Tensor& x) {
    const at::Tensor flat = x.contiguous().reshape({-1});
    return std::vector<float>(flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel());
  };
  using Row = std::vector<float>;
  // The training means are 2 and 4.
  Batch batch = read(MissingValues::kLast, false);
  EXPECT_EQ(row(batch["values"][0]), (Row{1, 4, 1, 4, 3, 5}));
  EXPECT_FALSE(batch.tensors.Has("valid"));
  EXPECT_EQ(row(read(MissingValues::kMean, false)["values"][0]), (Row{1, 4, 2, 4, 3, 5}));
  batch = read(MissingValues::kLast, true);
  EXPECT_EQ(row(batch["values"][0]), (Row{1, 4, 0, 1, 1, 4, 1, 1, 3, 5, 0, 0}));
  batch = read(MissingValues::kMask, true);
  EXPECT_EQ(row(batch["values"][0]), (Row{1, 4, 0, 1, 2, 4, 1, 1, 3, 5, 0, 0}));
  EXPECT_TRUE(at::equal(batch["valid"][0], at::tensor({1, 0, 1}).to(at::kBool)));
  EXPECT_TRUE(at::equal(batch["positions"][1], at::tensor({0, 1, 2}, at::kLong)));
}

// Of whichever part and step, before training.
TEST_F(SeriesTaskTest, MissingValuesAreRefused) {
  options_.input.missing = MissingValues::kRefuse;
  const auto said = [&] {
    SeriesTask task(options_, "");
    return ErrorMessage([&] { task.Prepare(); });
  };
  EXPECT_NE(said().find("X_TRAIN.ts: the series at 4 has no value at step 2 of channel"),
            std::string::npos)
      << said();
  std::string rows = "@dimensions 1\n@classLabel true a b\n@data\n";
  for (int i = 0; i < 10; ++i) rows += StrCat(i, ",", i + 1, ":", i % 2 ? "b" : "a", "\n");
  WriteFileAtomically(folder_ / "X_TRAIN.ts", rows);
  WriteFileAtomically(folder_ / "X_TEST.ts", rows + "1,2,?:a\n");
  EXPECT_NE(said().find("X_TEST.ts: the series at 14 has no value at step 3 of channel"),
            std::string::npos)
      << said();
  WriteFileAtomically(folder_ / "X_TEST.ts", rows);
  EXPECT_EQ(said(), "no error");
}

// Test series may be longer than those of training.
TEST_F(SeriesTaskTest, LearnedPositionsReachTheTest) {
  WriteFileAtomically(folder_ / "X_TEST.ts",
                      "@dimensions 2\n@classLabel true a b\n@data\n1:2:a\n1,2,3,4,5:1,2,3,4,5:b\n");
  SeriesTask task(options_, "");
  task.Prepare();
  ModelConfig config;
  config.kind = "encoder_classifier", config.attention = {"softmax"}, config.max_length = 2;
  task.Complete(config);
  EXPECT_EQ(config.max_length, 3);
  config.positions = PositionKind::kLearned;
  task.Complete(config);
  EXPECT_EQ(config.max_length, 5);
  config.encoder.max_length = 4;
  const std::string said = ErrorMessage([&] { task.Complete(config); });
  EXPECT_NE(said.find("X_TEST.ts:5 has 5 tokens, and the positions of the model end at 4"),
            std::string::npos)
      << said;
}

// Whatever their number, which decides how their mean is rounded.
TEST(NumberMeasure, EqualLabelsHaveNoSpread) {
  const NumberScale scale = NumberScale::Of({1, 4.7, 2.9}, "labels");
  for (int64_t rows = 1; rows < 30; ++rows) {
    const at::Tensor targets = at::full({rows}, scale.Scaled(5.3), at::kDouble);
    const Json figures =
        NumberFigures(MeasureNumbers(at::zeros({rows, 1}, at::kDouble), targets, scale));
    EXPECT_TRUE(std::isnan(figures["r2"].get<double>())) << rows << figures["r2"];
  }
}

}  // namespace
}  // namespace cistern
