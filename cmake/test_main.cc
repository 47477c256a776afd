// main of the tests that draw random numbers by torch, whose own seed is another in each process:
// every test begins with the same one, alone or among others. CISTERN_TEST_SEED=N: with another.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>

namespace {

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

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  testing::UnitTest::GetInstance()->listeners().Append(new Seed);  // which owns it
  return RUN_ALL_TESTS();
}
