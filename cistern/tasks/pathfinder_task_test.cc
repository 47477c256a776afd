// Pathfinder as a task: generated, packed and published images give the same rows.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/classifier.h"
#include "cistern/tasks/evaluate.h"
#include "cistern/tasks/pathfinder_task.h"

namespace cistern {
namespace {

PathfinderTask::Options Small() {
  PathfinderTask::Options o;
  o.generate.size = 32, o.generate.contour = 6, o.examples = 40;
  return o;
}

// Every row: its pixels by its line.
std::map<int64_t, std::pair<at::Tensor, int64_t>> RowsOf(const PathfinderTask& task) {
  std::map<int64_t, std::pair<at::Tensor, int64_t>> rows;
  for (const Split split : {Split::kTrain, Split::kValid, Split::kTest}) {
    const auto reader = task.Read(split, {7});
    while (const auto batch = reader->Next()) {
      for (int64_t r = 0; r < batch->rows; ++r) {
        EXPECT_TRUE(rows.try_emplace((*batch)["lines"][r].item<int64_t>(), (*batch)["ids"][r],
                                     (*batch)["targets"][r].item<int64_t>())
                        .second);
      }
    }
  }
  return rows;
}

TEST(PathfinderTask, GeneratedPackedAndPublishedImagesAreTheSame) {
  const TestFolder folder;
  const PathfinderTask::Options o = Small();
  PathfinderTask generated(o, folder.path());
  generated.Prepare();
  const auto rows = RowsOf(generated);
  ASSERT_EQ(rows.size(), 40u);
  EXPECT_EQ(generated.DataSummary()["train"], 32);
  EXPECT_EQ(generated.train_rows(), 32);
  EXPECT_EQ(generated.DataSummary()["test"], 4);
  for (const auto& [line, row] : rows) {
    const PathfinderScene scene = MakePathfinderScene(o.generate, 1, line - 1);
    const std::vector<uint8_t> image = DrawPathfinder(o.generate, scene);
    for (int64_t i = 0; i < 1024; ++i)
      ASSERT_EQ(row.first[i].item<int64_t>(), image[size_t(i)]) << line;
    EXPECT_EQ(row.second, scene.label);
  }
  WritePathfinderFolder(o.generate, 1, 40, folder / "pf");
  PathfinderTask::Options other;
  other.data = folder / "pf";
  PathfinderTask published(other, folder.path());
  published.Prepare();
  EXPECT_EQ(published.DataSummary()["xxh64"], generated.DataSummary()["xxh64"]);
  EXPECT_EQ(&TaskOfData(folder / "pf"), &FindTask("pathfinder"));
  const auto again = RowsOf(published);
  for (const auto& [line, row] : rows) EXPECT_TRUE(at::equal(row.first, again.at(line).first));
  // What is damaged in the cache is made anew.
  const std::string cached = folder / "pathfinder-32-6-40-seed1.pathfinder";
  ASSERT_TRUE(std::filesystem::exists(cached));
  std::filesystem::resize_file(cached, 5000);
  PathfinderTask repaired(o, folder.path());
  repaired.Prepare();
  EXPECT_EQ(repaired.DataSummary()["xxh64"], generated.DataSummary()["xxh64"]);
  EXPECT_NE(repaired.DataSummary()["notes"].dump().find("anew"), std::string::npos);
}

// What a published experiment says of the images that it generates does not keep it from reading
// images: their size has to be the one it says, their number is their own.
TEST(PathfinderTask, SettingsOfGeneratedImagesAndData) {
  const TestFolder folder;
  PathfinderTask::Options o;
  o.generate.size = 64, o.data = folder / "pf64";
  WritePathfinderFolder(o.generate, 1, 12, o.data);
  const auto summary = [&] {
    PathfinderTask task(o, folder.path());
    task.Prepare();
    EXPECT_EQ(task.tokens_per_row(), 64 * 64);
    return task.DataSummary();
  };
  EXPECT_EQ(summary()["notes"], Json::array());
  o.examples = 200'000;
  const Json said = summary();
  EXPECT_EQ(said["train"], 10);
  EXPECT_EQ(said["notes"], Json::array({"task.examples=200000 is of generated images; all 12 of " +
                                        o.data + " are taken"}));
  o.generate.size = 0;  // the default
  summary();
  for (const int64_t size : {32, 128}) {
    o.generate.size = size;
    const std::string refused = ErrorMessage([&] { summary(); });
    const std::string expected = StrCat(o.data, ": images of 64 x 64 pixels; expected ", size,
                                        " x ", size, ", as task.pathfinder.size=", size, " says");
    EXPECT_EQ(refused, expected);
  }
  // Generated images have 32.
  o.data.clear();
  o.generate.size = 0, o.examples = 10;
  PathfinderTask generated(o, folder.path());
  EXPECT_EQ(generated.tokens_per_row(), 32 * 32);
  generated.Prepare();
  EXPECT_EQ(generated.DataSummary()["side"], 32);
}

TEST(PathfinderTask, IsTrainedMeasuredAndPredicted) {
  const TestFolder folder;
  PathfinderTask::Options o = Small();
  o.pixels.kind = PixelInput::Kind::kValues;
  PathfinderTask task(o, folder.path());
  task.Prepare();
  const Batch batch = task.TrainBatch(1, 0, 4);
  EXPECT_EQ(batch["values"].sizes(), (std::vector<int64_t>{4, 1024, 1}));
  EXPECT_EQ(batch["values"].min().item<float>(), -1);  // (x/255 - .5) / .5
  EXPECT_EQ(batch["values"].max().item<float>(), 1);
  ModelConfig config;
  config.kind = "encoder_classifier", config.dim = 8, config.layers = 1, config.heads = 2;
  task.Complete(config);
  const auto model = MakeModel(config, 3);
  task.Loss(*model, batch, 0).backward();
  const Json m = task.Metrics(Evaluate(task, *model, Split::kTest).score);
  EXPECT_EQ(m["examples"], 4);
  task.SaveAssets(folder.path());
  PathfinderTask loaded(o, folder.path());
  loaded.LoadAssets(folder.path());
  const std::string packed = folder / "pathfinder-32-6-40-seed1.pathfinder";
  const auto said = loaded.Predict(*model, *loaded.ReadFile(packed, false, {5})->Next());
  ASSERT_EQ(said.size(), 5u);
  EXPECT_EQ(said[4]["line"], 5);
}

// The published folders have some. Lines are those of the metadata.
TEST(PathfinderTask, EmptyImagesArePassedOverAndCounted) {
  const TestFolder folder;
  PathfinderTask::Options o;
  o.data = folder / "pf";
  WritePathfinderFolder({.contour = 6}, 1, 12, o.data);
  std::filesystem::resize_file(o.data + "/imgs/0/sample_2.png", 0);
  PathfinderTask task(o, folder.path());
  task.Prepare();
  const auto rows = RowsOf(task);
  EXPECT_EQ(rows.size(), 11u);
  EXPECT_FALSE(rows.contains(3));
  EXPECT_TRUE(rows.contains(12));
  const auto reader = task.ReadFile(o.data, true, {.rows = 20});
  EXPECT_EQ((*reader->Next())["lines"][2].item<int64_t>(), 4);
  EXPECT_EQ(reader->skipped(), 1);
}

TEST(PathfinderTask, OptionsThatDoNotFitAreRefused) {
  const auto message = [](auto change) {
    PathfinderTask::Options o = Small();
    change(o);
    return ErrorMessage([&] { PathfinderTask(o, ""); });
  };
  const auto expect = [](const std::string& said, const char* phrase) {
    EXPECT_NE(said.find(phrase), std::string::npos) << said;
  };
  expect(message([](auto& o) { o.generate.size = 100; }), "32, 64, 128 or 256");
  expect(message([](auto& o) { o.generate.contour = 7; }), "6, 9 or 14");
  expect(message([](auto& o) { o.data = "x"; }), "omit data");  // contour=6
  expect(message([](auto& o) {
           o.pixels.kind = PixelInput::Kind::kValues, o.pixels.scale = PixelInput::Scale::kUcu;
         }),
         "three colours");
  expect(message([](auto& o) { o.valid_share = o.test_share = 0.6; }), "nothing to train on");
}

}  // namespace
}  // namespace cistern
