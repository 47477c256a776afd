#include "cistern/tasks/listops_task.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

TEST(ListOps, RowsArePaddedToTheLengthWhereItIsAsked) {
  const TestFolder folder;
  ListOpsTask::Options options;
  options.train_examples = 12, options.valid_examples = 3, options.test_examples = 2;
  ListOpsTask longest(options, folder.path());
  longest.Prepare();
  options.pad_to = PadTo::kLength;
  ListOpsTask task(options, folder.path());
  task.Prepare();
  const Batch want = longest.TrainBatch(1, 0, 2), got = task.TrainBatch(1, 0, 2);
  ASSERT_EQ(got["ids"].sizes(), at::IntArrayRef({2, 2000}));
  const int64_t width = want["ids"].size(1);
  EXPECT_EQ(width, want["lengths"].max().item<int64_t>());
  EXPECT_LT(width, 2000);
  EXPECT_TRUE(at::equal(got["ids"].narrow(1, 0, width), want["ids"]));
  EXPECT_TRUE((got["ids"].narrow(1, width, 2000 - width) == kListOpsPad).all().item<bool>());
  EXPECT_TRUE(at::equal(got["lengths"], want["lengths"]));
  EXPECT_EQ(got.tokens, want.tokens);
  const auto batch = task.Read(Split::kValid, {})->Next();
  ASSERT_TRUE(batch);
  EXPECT_EQ((*batch)["ids"].size(1), 2000);
}

TEST(ListOps, LabelsMayBeMissingWhereTheyAreNotMeasured) {
  const TestFolder folder;
  ListOpsTask::Options options;
  options.train_examples = 12, options.valid_examples = 3, options.test_examples = 2;
  ListOpsTask task(options, folder.path());
  const std::string path = folder / "a.tsv";
  WriteFileAtomically(path, "Source\tTarget\n[MIN 3 4 ]\t3\n7\t7\n");
  const Batch want = *task.ReadFile(path, true, {})->Next();
  WriteFileAtomically(path, "Source\n[MIN 3 4 ]\n7\n");
  EXPECT_TRUE(at::equal((*task.ReadFile(path, false, {})->Next())["ids"], want["ids"]));
  EXPECT_NE(ErrorMessage([&] { task.ReadFile(path, true, {}); }).find("Source<tab>Target"),
            std::string::npos);
}

TEST(ListOps, OptionsOfGeneratedExamplesNeedThem) {
  ListOpsTask::Options options;
  options.data = "folder";
  const auto message = [&] { return ErrorMessage([&] { ListOpsTask(options, ""); }); };
  EXPECT_EQ(message(), "no error");
  options.test_examples = 2;
  EXPECT_NE(message().find("omit data"), std::string::npos) << message();
}

}  // namespace
}  // namespace cistern
