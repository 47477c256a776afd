#include "cistern/tasks/order.h"

#include <gtest/gtest.h>

#include <set>

namespace cistern {
namespace {

TEST(ShuffledOrder, EveryEpochIsAPermutationOfItsOwn) {
  const ShuffledOrder order(50);
  std::vector<int64_t> first, second;
  for (int64_t i = 0; i < 50; ++i) first.push_back(order.At(7, i));
  for (int64_t i = 50; i < 100; ++i) second.push_back(order.At(7, i));
  EXPECT_EQ(std::set<int64_t>(first.begin(), first.end()).size(), 50u);
  EXPECT_EQ(std::set<int64_t>(second.begin(), second.end()).size(), 50u);
  EXPECT_NE(first, second);
}

TEST(ShuffledOrder, IsAFunctionOfSeedAndIndex) {
  const ShuffledOrder a(31), b(31);
  for (int64_t i = 90; i >= 0; i -= 7) EXPECT_EQ(a.At(3, i), b.At(3, i));  // any order of asking
  int same = 0;
  for (int64_t i = 0; i < 31; ++i) same += a.At(3, i) == a.At(4, i);
  EXPECT_LT(same, 10);
}

}  // namespace
}  // namespace cistern
