// main of all tests. A program that holds the tests of several files (CisternTests.cmake) runs
// those of one when it is called by that file's name: ops_norm_test those of
// cistern/ops/norm_test.cc.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#ifdef CISTERN_TEST_TORCH
#include <ATen/ATen.h>
#endif

namespace {

// The name of the program for the tests of a file.
std::string ProgramOf(std::string file) {
  constexpr char kSources[] = "cistern/";
  const size_t sources = file.rfind(kSources);
  if (sources == std::string::npos) return "";
  file.erase(0, sources + sizeof kSources - 1);
  const std::string name = file.substr(file.rfind('/') + 1);
  return file.substr(0, file.find('/')) + "_" + name.substr(0, name.rfind('.'));
}

// The names of the tests of other files, with colons between them; empty where no file has that
// name.
std::string TestsOfOthers(const std::string& program) {
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  std::string others;
  bool own = false;
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const testing::TestInfo& test = *suite.GetTestInfo(j);
      if (ProgramOf(test.file()) == program) {
        own = true;
      } else {
        others += (others.empty() ? "" : ":") + (std::string(suite.name()) + "." + test.name());
      }
    }
  }
  return own ? others : "";
}

// Takes back what main has added to the filter, once that has been used, so that it is not printed.
class Filter : public testing::EmptyTestEventListener {
 public:
  explicit Filter(std::string given) : given_(std::move(given)) {}
  void OnTestProgramStart(const testing::UnitTest&) override { GTEST_FLAG_SET(filter, given_); }

 private:
  std::string given_;
};

#ifdef CISTERN_TEST_TORCH
// torch's own seed is another in each process: every test begins with the same one, alone or among
// others. CISTERN_TEST_SEED=N: with another.
class Seed : public testing::EmptyTestEventListener {
 public:
  void OnTestSuiteStart(const testing::TestSuite&) override { Set(); }
  void OnTestStart(const testing::TestInfo&) override { Set(); }

 private:
  static void Set() {
    const char* said = std::getenv("CISTERN_TEST_SEED");
    at::manual_seed(said ? std::strtoull(said, nullptr, 10) : 1);
  }
};
#endif

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
#ifdef CISTERN_TEST_TORCH
  listeners.Append(new Seed);  // which owns it, and the next one
#endif
  const std::string path = argv[0], given = GTEST_FLAG_GET(filter),
                    others = TestsOfOthers(path.substr(path.rfind('/') + 1));
  if (!others.empty()) {
    GTEST_FLAG_SET(filter, given + (given.find('-') == given.npos ? "-" : ":") + others);
    listeners.Append(new Filter(given));
  }
  return RUN_ALL_TESTS();
}
