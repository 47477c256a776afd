#include "cistern/base/parallel_items.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <thread>

namespace cistern {
namespace {

class ParallelItems : public ::testing::Test {
 protected:
  void SetUp() override { SetNumThreads(2); }
  void TearDown() override { SetNumThreads(before_); }
  const int before_ = NumThreads();
};

TEST_F(ParallelItems, EachOnceAndSeveralThreadsTakePart) {
  std::vector<int> times(9);
  std::vector<std::thread::id> threads(9);
  ParallelForItems(9, [&](int64_t i) {
    ++times[size_t(i)];
    threads[size_t(i)] = std::this_thread::get_id();
    ParallelFor(5, 1, [&](int64_t begin, int64_t end) {  // in place
      EXPECT_TRUE(begin == 0 && end == 5);
    });
  });
  EXPECT_EQ(times, std::vector<int>(9, 1));
  EXPECT_NE(threads.front(), threads.back());
  ParallelForItems(0, [](int64_t) { FAIL(); });
}

TEST_F(ParallelItems, TheErrorOfTheFirstItemThatFails) {
  for (const int threads : {1, 2}) {
    SetNumThreads(threads);
    try {
      ParallelForItems(8, [](int64_t i) {
        if (i == 2 || i == 7) throw std::runtime_error(std::to_string(i));
      });
      FAIL();
    } catch (const std::runtime_error& e) {
      EXPECT_STREQ(e.what(), "2");
    }
  }
}

}  // namespace
}  // namespace cistern
