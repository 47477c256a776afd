#include "cistern/tasks/order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace cistern {
namespace {

TEST(ShuffledOrder, EveryEpochIsAPermutationOfItsOwn) {
  const ShuffledOrder order(50);
  std::vector<int64_t> first, second;
  for (int64_t i = 0; i < 50; ++i) first.push_back(order.At(7, i, 4));
  for (int64_t i = 50; i < 100; ++i) second.push_back(order.At(7, i, 4));
  EXPECT_EQ(std::set<int64_t>(first.begin(), first.end()).size(), 50u);
  EXPECT_EQ(std::set<int64_t>(second.begin(), second.end()).size(), 50u);
  EXPECT_NE(first, second);
}

TEST(ShuffledOrder, IsAFunctionOfSeedAndIndex) {
  const ShuffledOrder a(31), b(31);
  for (int64_t i = 90; i >= 0; i -= 7)
    EXPECT_EQ(a.At(3, i, 4), b.At(3, i, 4));  // any order of asking
  int same = 0;
  for (int64_t i = 0; i < 31; ++i) same += a.At(3, i, 4) == a.At(4, i, 4);
  EXPECT_LT(same, 10);
}

TEST(ShuffledOrder, GroupsByLength) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 1003; ++i) lengths.push_back(500 + i * 7919 % 1500);
  const ShuffledOrder grouped(lengths), plain(int64_t(lengths.size()));
  // Tokens of the examples and of the batches they are padded to, over three epochs.
  const auto padded = [&](const ShuffledOrder& order, int64_t rows, int64_t batches) {
    int64_t real = 0, all = 0;
    for (int64_t b = 0; b < batches; ++b) {
      int64_t longest = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t length = lengths[size_t(order.At(5, b * rows + r, rows))];
        real += length;
        longest = std::max(longest, length);
      }
      all += longest * rows;
    }
    return double(all) / double(real);
  };
  EXPECT_LT(padded(grouped, 16, 3 * 1003 / 16), 1.05);
  EXPECT_GT(padded(plain, 16, 3 * 1003 / 16), 1.4);
  for (const int64_t rows : {1, 16, 64}) {  // the last of them makes a pool larger than an epoch
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      std::set<int64_t> seen;
      for (int64_t i = 0; i < 1003; ++i) seen.insert(grouped.At(5, epoch * 1003 + i, rows));
      EXPECT_EQ(seen.size(), 1003u) << rows << " rows, epoch " << epoch;
    }
  }
  int ascending = 0;  // batches are shuffled again: long ones come among short ones
  for (int64_t b = 0; b + 1 < 50; ++b)
    ascending += lengths[size_t(grouped.At(5, b * 16, 16))] <
                 lengths[size_t(grouped.At(5, b * 16 + 16, 16))];
  EXPECT_GT(ascending, 10);
  EXPECT_LT(ascending, 40);
}

}  // namespace
}  // namespace cistern
