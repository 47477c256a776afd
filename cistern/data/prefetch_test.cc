#include "cistern/data/prefetch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>

#include "cistern/base/error.h"

namespace cistern {
namespace {

using std::chrono::milliseconds;

TEST(Prefetcher, GivesEverythingInOrderThenTheEnd) {
  for (const size_t capacity : {0, 1, 3, 1000}) {
    int next = 0;
    Prefetcher<int> prefetcher(
        [&]() -> std::optional<int> { return next < 500 ? std::optional(next++) : std::nullopt; },
        capacity);
    for (int i = 0; i < 500; ++i) ASSERT_EQ(prefetcher.Next(), i);
    EXPECT_EQ(prefetcher.Next(), std::nullopt);
    EXPECT_EQ(prefetcher.Next(), std::nullopt);
  }
}

TEST(Prefetcher, StaysWithinItsCapacity) {
  std::atomic<int> made = 0;
  Prefetcher<int> prefetcher([&]() -> std::optional<int> { return made++; }, 4);
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_LE(made, 4);
  EXPECT_EQ(prefetcher.Next(), 0);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_LE(made, 5);
}

TEST(Prefetcher, ThrowsWhatTheProducerThrewInItsPlace) {
  int next = 0;
  Prefetcher<int> prefetcher(
      [&]() -> std::optional<int> {
        if (next == 2) Fail("broken at ", next);
        return next++;
      },
      8);
  EXPECT_EQ(prefetcher.Next(), 0);
  EXPECT_EQ(prefetcher.Next(), 1);
  EXPECT_THROW(prefetcher.Next(), Error);
  EXPECT_THROW(prefetcher.Next(), Error);
}

TEST(Prefetcher, EndsWhenDestroyedEarly) {
  for (int i = 0; i < 50; ++i) {
    Prefetcher<int> prefetcher([]() -> std::optional<int> { return 1; }, 2);
    if (i % 2) prefetcher.Next();
  }
}

TEST(Prefetcher, MovesItsResults) {
  int next = 0;
  Prefetcher<std::unique_ptr<int>> prefetcher(
      [&]() -> std::optional<std::unique_ptr<int>> { return std::make_unique<int>(next++); }, 2);
  EXPECT_EQ(**prefetcher.Next(), 0);
  EXPECT_EQ(**prefetcher.Next(), 1);
}

}  // namespace
}  // namespace cistern
