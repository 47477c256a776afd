#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/parallel.h"
#include "cistern/data/listops.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

ListOpsOptions FewExamples() {
  ListOpsOptions options;
  options.counts = {8, 2, 2};
  options.min_length = 5, options.max_length = 60;
  return options;
}

TEST(ListOpsCache, AppearsWholeAndIsHealed) {
  const TestFolder folder;
  const std::string cache = folder / "listops";
  std::vector<std::string> notes;
  const auto open = [&] { return OpenListOps(FewExamples(), 3, cache, {}, &notes); };
  const ListOpsSplits made = open();
  EXPECT_EQ(made.train.size(), 8);
  const std::string file = cache + "/basic_train.tsv", good = ReadFile(file);
  EXPECT_EQ(open().train.tokens, made.train.tokens);
  EXPECT_TRUE(notes.empty());
  // A label, a digit, the end; a file that is gone.
  for (const int kind : {0, 1, 2, 3}) {
    std::string damaged = good;
    if (kind == 0) damaged[good.size() - 2] ^= 1;
    if (kind == 1) damaged[damaged.find_first_of("0123456789")] ^= 1;
    if (kind == 2) damaged.resize(good.size() / 2);
    WriteFileAtomically(file, damaged);
    if (kind == 3) std::filesystem::remove(cache + "/basic_test.tsv");
    notes.clear();
    EXPECT_EQ(open().train.labels, made.train.labels);
    ASSERT_EQ(notes.size(), 1u) << kind;
    EXPECT_EQ(ReadFile(file), good);
  }
  EXPECT_EQ(folder.Count(), 1);
}

// As a process that was killed left it: part of the files under another name.
TEST(ListOpsCache, SeveralProcessesMayMakeIt) {
  const TestFolder folder;
  const std::string cache = folder / "listops";
  const pid_t dead = fork();
  if (dead == 0) _exit(0);
  waitpid(dead, nullptr, 0);
  EnsureDirectory(StrCat(cache, ".tmp-", dead, "-0"));
  std::vector<pid_t> children;
  for (int i = 0; i < 8; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      SetNumThreads(1);  // libgomp's threads do not live on in a child
      int code = 1;
      try {
        std::vector<std::string> notes;
        const ListOpsSplits splits = OpenListOps(FewExamples(), 3, cache, {}, &notes);
        code = notes.empty() && splits.test.size() == 2 ? 0 : 2;
      } catch (const Error& e) {
        std::fprintf(stderr, "%s\n", e.what());
      }
      _exit(code);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(folder.Count(), 1);
}

}  // namespace
}  // namespace cistern
