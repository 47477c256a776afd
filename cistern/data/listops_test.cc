#include "cistern/data/listops.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <set>

#include "cistern/base/error.h"
#include "cistern/base/parallel.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/file_lock.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

using Row = std::vector<uint8_t>;

Row Tokens(const std::string& text) {  // "[MIN 3 4 ]" by way of the reader
  const std::string path =
      (std::filesystem::path(testing::TempDir()) / StrCat("cistern_listops_", getpid(), ".tsv"))
          .string();
  WriteFileAtomically(path, "Source\tTarget\n" + text + "\t0\n");
  const ListOpsSet set = ReadListOps(path, {.max_length = 0, .check = false});
  return {set.tokens.begin(), set.tokens.end()};
}

std::string ReadError(const std::string& contents) {
  const std::string path =
      (std::filesystem::path(testing::TempDir()) / StrCat("cistern_listops_bad_", getpid(), ".tsv"))
          .string();
  WriteFileAtomically(path, contents);
  try {
    ReadListOps(path);
  } catch (const Error& e) {
    return std::string(e.what()).substr(path.size());
  }
  return "read";
}

TEST(ListOps, Evaluates) {
  const auto value = [](const std::string& text) { return EvaluateListOps(Tokens(text)); };
  EXPECT_EQ(value("7"), 7);
  EXPECT_EQ(value("[MIN 3 4 ]"), 3);
  EXPECT_EQ(value("[MAX 3 4 [SM 9 9 ] ]"), 8);
  EXPECT_EQ(value("[MED 1 4 ]"), 2) << "2.5 is cut";
  EXPECT_EQ(value("[MED 9 0 5 ]"), 5);
  EXPECT_EQ(value("[SM 5 5 5 ]"), 5);
  EXPECT_EQ(value("[MIN [MAX 2 8 ] [MED 3 3 9 9 ] 7 X"), 6);
  for (const char* bad : {"[MIN ]", "[MIN 3", "3 4", "]", "[MIN 3 ] ]", "[MIN 3 ? ]"})
    EXPECT_EQ(value(bad), -1) << bad;
  EXPECT_EQ(EvaluateListOps({}), -1);
}

TEST(ListOps, WritesTheBinaryForm) {
  EXPECT_EQ(ListOpsText(Tokens("[MIN 3 4 ]")), "( ( ( [MIN 3 ) 4 ) ] )");
  EXPECT_EQ(ListOpsText(Tokens("[SM [MAX 1 2 ] 5 ]")),
            "( ( ( [SM ( ( ( [MAX 1 ) 2 ) ] ) ) 5 ) ] )");
  EXPECT_EQ(ListOpsText(Tokens("4")), "4");
  EXPECT_THROW(ListOpsText(Tokens("[MIN 3")), Error);
}

TEST(ListOps, IsDeterministicAndDistinctAndLabelled) {
  const ListOpsOptions options{.counts = {300, 20, 20}, .min_length = 20, .max_length = 60};
  const ListOpsSplits a = GenerateListOps(options, 5);
  const int threads = NumThreads();
  SetNumThreads(1);
  const ListOpsSplits b = GenerateListOps(options, 5);
  SetNumThreads(threads);
  EXPECT_EQ(a.train.tokens, b.train.tokens);
  EXPECT_EQ(a.test.labels, b.test.labels);
  EXPECT_EQ(a.candidates, b.candidates);
  EXPECT_NE(a.train.tokens, GenerateListOps(options, 6).train.tokens);
  std::set<Row> distinct;
  for (const ListOpsSet* set : {&a.train, &a.valid, &a.test}) {
    for (int64_t i = 0; i < set->size(); ++i) {
      const auto row = set->Row(i);
      EXPECT_GT(row.size(), 20u);
      EXPECT_LT(row.size(), 60u);
      EXPECT_EQ(EvaluateListOps(row), set->labels[i]);
      distinct.insert(Row(row.begin(), row.end()));
    }
  }
  EXPECT_EQ(distinct.size(), 340u);
  EXPECT_EQ(a.train.size(), 300);
  EXPECT_EQ(a.test.size(), 20);
}

TEST(ListOps, RefusesWhatCannotBeMet) {
  EXPECT_THROW(GenerateListOps({.counts = {1, 0, 0}, .min_length = 10, .max_length = 11}, 0),
               UsageError);
  EXPECT_THROW(GenerateListOps({.max_args = 1}, 0), UsageError);
  EXPECT_THROW(GenerateListOps({.max_depth = 0}, 0), UsageError);
  EXPECT_THROW(GenerateListOps({.counts = {11, 0, 0}, .min_length = 0, .max_length = 2}, 0),
               UsageError)
      << "there are ten digits";
  EXPECT_EQ(
      GenerateListOps({.counts = {10, 0, 0}, .min_length = 0, .max_length = 2}, 0).train.size(),
      10);
}

TEST(ListOps, HasThePublishedStatistics) {
  // Of 96,000 examples, and of a direct transcription of the original into Python: acceptance 8.2
  // %, mean length 1032, median 953, labels 0 and 9 .169 each, the others .071 to .090. Tolerances
  // are about 4 standard errors at 3,000 examples.
  const ListOpsSplits splits = GenerateListOps({.counts = {3000, 0, 0}}, 1);
  const ListOpsSet& set = splits.train;
  EXPECT_NEAR(3000.0 / double(splits.candidates), .082, .006);
  std::vector<int64_t> lengths;
  std::array<double, 10> share{};
  for (int64_t i = 0; i < set.size(); ++i) {
    lengths.push_back(int64_t(set.Row(i).size()));
    share[set.labels[i]] += 1.0 / 3000;
  }
  EXPECT_NEAR(double(set.tokens.size()) / 3000, 1032, 30);
  std::nth_element(lengths.begin(), lengths.begin() + 1500, lengths.end());
  EXPECT_NEAR(double(lengths[1500]), 953, 45);
  EXPECT_NEAR(share[0], .169, .028);
  EXPECT_NEAR(share[9], .169, .028);
  for (int d = 1; d < 9; ++d) EXPECT_NEAR(share[d], .082, .027) << d;
  const ListOpsBaselines baselines = MeasureListOpsBaselines(set, set);
  EXPECT_NEAR(baselines.majority, .170, .03);
  EXPECT_NEAR(baselines.root_operator, .362, .035);
  EXPECT_NEAR(baselines.root_operator_loss, 1.71, .1);
}

TEST(ListOpsFile, ReadsWhatItWrote) {
  const std::string folder =
      (std::filesystem::path(testing::TempDir()) / StrCat("cistern_listops_", getpid())).string();
  const ListOpsSplits splits =
      GenerateListOps({.counts = {50, 5, 5}, .min_length = 20, .max_length = 60}, 5);
  WriteListOps(splits, folder);
  const ListOpsSplits read = ReadListOpsFolder(folder);
  EXPECT_EQ(read.train.tokens, splits.train.tokens);
  EXPECT_EQ(read.train.offsets, splits.train.offsets);
  EXPECT_EQ(read.train.labels, splits.train.labels);
  EXPECT_EQ(read.valid.tokens, splits.valid.tokens);
  EXPECT_EQ(read.test.labels, splits.test.labels);
  EXPECT_EQ(ReadListOps(folder + "/basic_test.tsv", {.max_length = 7}).tokens.size(), 35u);
  std::filesystem::remove_all(folder);
  EXPECT_THROW(ReadListOpsFolder(folder), Error);
}

// As on a disk that is full, or where another process writes.
TEST(ListOpsFile, AllFilesAreWrittenOrNone) {
  const TestFolder folder;
  const std::string out = folder / "new";
  const ListOpsSplits splits =
      GenerateListOps({.counts = {1, 1, 50}, .min_length = 20, .max_length = 60}, 5);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit limit = {4000, before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::string said = ErrorMessage([&] { WriteListOps(splits, out); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(said.find("basic_test.tsv: File too large"), std::string::npos) << said;
  EXPECT_EQ(folder.Count(), 0);
  EnsureDirectory(out);
  const FileLock lock(out + "/lock", "it");
  EXPECT_NE(ErrorMessage([&] { WriteListOps(splits, out); }).find("is in use by process"),
            std::string::npos);
}

TEST(ListOpsFile, BrokenFilesAreNamedWithTheLine) {
  const std::string head = "Source\tTarget\n", good = "( ( ( [MIN 3 ) 4 ) ] )\t3\n";
  EXPECT_EQ(ReadError(head + good), "read");
  EXPECT_EQ(ReadError("Source\tTarget\r\n( ( ( [MIN 3 ) 4 ) ] )\t3\r\n"), "read");
  EXPECT_EQ(ReadError(""), " holds no examples");
  EXPECT_EQ(ReadError(head), " holds no examples");
  EXPECT_EQ(ReadError(good), " line 1: expected the header \"Source<tab>Target\"");
  EXPECT_EQ(ReadError(head + good + "3\n"), " line 3: expected an expression, a tab and a label");
  EXPECT_EQ(ReadError(head + "3\t12\n"), " line 2: the label is not a digit: '12'");
  EXPECT_EQ(ReadError(head + "\t1\n"), " line 2: the expression is empty");
  EXPECT_EQ(ReadError(head + "[MIN 3\t1\n"), " line 2: the expression is not well-formed");
  EXPECT_EQ(ReadError(head + "[MEAN 3 ]\t1\n"), " line 2: unknown word '[MEAN'");
  EXPECT_EQ(ReadError(head + "3\t4\n"), " line 2: the label is 4, but the expression's value is 3");
  EXPECT_EQ(Tokens("[FIRST 3 ]"), (Row{kListOpsUnknown, 4, kListOpsClose}));
}

}  // namespace
}  // namespace cistern
