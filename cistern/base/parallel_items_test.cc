#include "cistern/base/parallel_items.h"

#include "cistern/base/parallel_region.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
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

TEST_F(ParallelItems, EachOnceWithinItsThread) {
  std::vector<int> times(9);
  ParallelForItems(9, [&](int64_t i) {
    ++times[size_t(i)];
    EXPECT_EQ(ThreadsHere(), 1);
    ParallelFor(5, 1, [&](int64_t begin, int64_t end) {  // in place
      EXPECT_TRUE(begin == 0 && end == 5);
    });
  });
  EXPECT_EQ(times, std::vector<int>(9, 1));
  EXPECT_EQ(ThreadsHere(), 2);
  ParallelForItems(0, [](int64_t) { FAIL(); });
}

// Item 0 ends only once all others have ended, which other threads have to take.
TEST_F(ParallelItems, SeveralAtOnceAndWhoIsFreeTakesTheNext) {
#ifdef CISTERN_SERIAL
  GTEST_SKIP() << "built without threads";
#endif
  std::atomic<int> ended = 0;
  ParallelForItems(9, [&](int64_t i) {
    const auto began = std::chrono::steady_clock::now();
    while (i == 0 && ended < 8 &&
           std::chrono::steady_clock::now() - began < std::chrono::seconds(20))
      std::this_thread::yield();
    if (i == 0) {
      EXPECT_EQ(ended, 8);
    }
    ++ended;
  });
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
