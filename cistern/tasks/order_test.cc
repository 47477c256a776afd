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

// What no whole batch has room for is of any length: an epoch may drop it (train.order).
TEST(ShuffledOrder, TheRestOfAnEpochIsOfAnyLength) {
  std::vector<int64_t> lengths(40);
  for (size_t i = 0; i < lengths.size(); ++i) lengths[i] = int64_t(i);
  const ShuffledOrder order(lengths);
  int64_t longest = 0;
  std::set<int64_t> left_out;
  for (int64_t epoch = 0; epoch < 20; ++epoch) {
    for (int64_t i = 32; i < 40; ++i) {
      const int64_t row = order.At(5, epoch * 40 + i, 16);
      left_out.insert(row), longest += row >= 32;
    }
  }
  EXPECT_GT(left_out.size(), 30u);
  EXPECT_LT(longest, 20 * 8 / 2);
}

TEST(TokenBatches, HaveAsManyTokens) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 1003; ++i) lengths.push_back(3 + i * 7919 % 60);
  lengths.push_back(900);  // more than a batch
  const TokenBatches batches(lengths, 500), again(lengths, 500);
  const int64_t of_an_epoch = batches.of_an_epoch();
  int64_t small = 0, ascending = 0;
  std::vector<std::vector<int64_t>> epochs[2];
  std::vector<int64_t> widths[2];
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    std::set<int64_t> seen;
    int64_t real = 0, all = 0, last = 0;
    for (int64_t b = 0; b < of_an_epoch; ++b) {
      const std::vector<int64_t> rows = batches.At(5, epoch * of_an_epoch + b);
      ASSERT_FALSE(rows.empty());
      int64_t longest = 0;
      for (const int64_t r : rows) {
        longest = std::max(longest, lengths[size_t(r)]);
        real += lengths[size_t(r)];
        EXPECT_TRUE(seen.insert(r).second) << r;
      }
      const int64_t tokens = longest * int64_t(rows.size());
      EXPECT_TRUE(tokens <= 500 || rows.size() == 1) << tokens;
      small += (int64_t(rows.size()) + 1) * (longest + 1) <= 500, all += tokens;
      ascending += longest > last, last = longest;
      epochs[epoch].push_back(rows);
      widths[epoch].push_back(longest);
    }
    EXPECT_EQ(seen.size(), lengths.size());
    EXPECT_LT(double(all), 1.03 * double(real));
  }
  EXPECT_LE(small, 2);  // in each epoch the batch before the long one
  EXPECT_GT(ascending, of_an_epoch / 2);
  EXPECT_LT(ascending, 3 * of_an_epoch / 2);
  // Epochs differ in what batches hold and in their order; asked for in any order they are the
  // same.
  EXPECT_NE(widths[0], widths[1]);
  EXPECT_NE(std::set(epochs[0].begin(), epochs[0].end()),
            std::set(epochs[1].begin(), epochs[1].end()));
  for (int64_t b = 2 * of_an_epoch - 1; b >= 0; b -= 3)
    EXPECT_EQ(again.At(5, b), epochs[b / of_an_epoch][size_t(b % of_an_epoch)]);
  EXPECT_NE(batches.At(6, 0), epochs[0][0]);
}

}  // namespace
}  // namespace cistern
