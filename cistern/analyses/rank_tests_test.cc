#include "cistern/analyses/rank_tests.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace cistern {
namespace {

// Spec 5: df = 2, so p = exp(-chi2/2); n = 5 blocks of k = 3 in the same order give chi2 = 10,
// p = .0067, exactly 6 of 6^5 orders: 1/1296.
TEST(RankTests, FriedmanOfFiveRunsAndThreeMethods) {
  const Samples blocks(5, {1, 2, 3});
  const TestResult t = Friedman(blocks);
  EXPECT_NEAR(t.statistic, 10, 1e-12);
  EXPECT_NEAR(t.p, std::exp(-5), 1e-12);
  EXPECT_NEAR(t.exact, 1.0 / 1296, 1e-12);
  EXPECT_NEAR(t.effect, 1, 1e-12);
  EXPECT_NEAR(t.floor, std::exp(-5), 1e-12);
  EXPECT_NEAR(t.exact_floor, 1.0 / 1296, 1e-12);
  // Of 8 cells the first step of Holm needs .05/8: never by the approximation, but exactly.
  EXPECT_GT(t.floor, 0.05 / 8);
  EXPECT_LT(t.exact_floor, 0.05 / 8);
}

// Friedman's tables (Hollander and Wolfe, table A.22): k = 3, n = 4: P(chi2 >= 6.5) = .042,
// P(chi2 >= 8) = .0046; n = 3: P(chi2 >= 6) = .028. Exact: 24 of 24^... = 6/216, 6/1296.
TEST(RankTests, FriedmanTables) {
  EXPECT_NEAR(Friedman(Samples(3, {1, 2, 3})).exact, 6.0 / 216, 1e-12);
  EXPECT_NEAR(Friedman(Samples(4, {1, 2, 3})).exact, 6.0 / 1296, 1e-12);
  // Rank sums 4+... of {1,2,3} x 3 and {1,3,2}: (4, 9, 11): chi2 = 12/(4*3*4) * 218 - 48 = 6.5.
  const TestResult t = Friedman({{1, 2, 3}, {1, 2, 3}, {1, 2, 3}, {1, 3, 2}});
  EXPECT_NEAR(t.statistic, 6.5, 1e-12);
  EXPECT_NEAR(t.exact, 0.0417, 5e-5);
}

// By all 6^3 orders of three blocks, ties among them, in plain loops.
TEST(RankTests, FriedmanWithTiesByEveryOrder) {
  const Samples ranks = {{1.5, 1.5, 3}, {1, 2, 3}, {2, 2, 2}, {1, 2.5, 2.5}};
  const Samples values = {{5, 5, 9}, {0, 1, 2}, {4, 4, 4}, {-1, 7, 7}};
  const auto statistic = [](const Samples& rows) {
    double sums[3] = {}, result = 0;
    for (const auto& row : rows) {
      for (int j = 0; j < 3; ++j) sums[j] += row[size_t(j)];
    }
    for (const double r : sums) result += r * r;
    // t^3 - t: 6 for a pair, 24 for three; two pairs and a three in n k (k^2-1) = 96.
    return (12 / (4.0 * 3 * 4) * result - 3 * 4.0 * 4) / (1 - 36.0 / 96);
  };
  const double observed = statistic(ranks);
  const TestResult t = Friedman(values);
  EXPECT_NEAR(t.statistic, observed, 1e-12);
  const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  int tail = 0;
  for (int code = 0; code < 1296; ++code) {
    Samples permuted;
    int left = code;
    for (const auto& row : ranks) {
      const int* order = orders[left % 6];
      left /= 6;
      permuted.push_back({row[size_t(order[0])], row[size_t(order[1])], row[size_t(order[2])]});
    }
    tail += statistic(permuted) >= observed - 1e-9 ? 1 : 0;
  }
  EXPECT_NEAR(t.exact, tail / 1296.0, 1e-12);
}

// 720 orders of a block: the sums of ranks count whichever treatment has them, and where there are
// too many all the same, that is known before they are counted.
TEST(RankTests, FriedmanOfManyTreatments) {
  const TestResult t = Friedman(Samples(4, {1, 2, 3, 4, 5, 6}));
  EXPECT_NEAR(t.exact * 720 * 720 * 720, 1, 1e-9);
  EXPECT_EQ(Friedman(Samples(12, {1, 2, 3, 4, 5, 6, 7, 8})).exact, -1);
  EXPECT_EQ(Friedman(Samples(2, std::vector<double>(30, 1))).exact, 1);
  std::vector<double> many(30);
  for (size_t i = 0; i < many.size(); ++i) many[i] = double(i);
  EXPECT_EQ(Friedman(Samples(2, many)).exact, -1);
}

TEST(RankTests, AllTies) {
  const TestResult f = Friedman(Samples(4, {2, 2, 2})), k = KruskalWallis(Samples(3, {1, 1}));
  EXPECT_EQ(f.statistic, 0);
  EXPECT_EQ(f.p, 1);
  EXPECT_EQ(f.exact, 1);
  EXPECT_EQ(k.statistic, 0);
  EXPECT_EQ(k.exact, 1);
  // Other data of this size would give H = 5 (1 - 3 x 6 / 210).
  EXPECT_NEAR(k.floor, std::exp(-2.5 * (1 - 18 / 210.0)), 1e-12);
}

// Groups 1-3, 4-6, 7-9: R = 6, 15, 24: H = 12/90 (12 + 75 + 192) - 30 = 7.2; Kruskal and Wallis'
// table for 3,3,3: P(H >= 7.2) = .004 = 6 of 9!/(3!^3) = 1680.
TEST(RankTests, KruskalWallisTables) {
  const TestResult t = KruskalWallis({{1, 2, 3}, {4, 5, 6}, {7, 8, 9}});
  EXPECT_NEAR(t.statistic, 7.2, 1e-12);
  EXPECT_NEAR(t.p, std::exp(-3.6), 1e-12);
  EXPECT_NEAR(t.exact, 6.0 / 1680, 1e-12);
  EXPECT_NEAR(t.floor, std::exp(-3.6), 1e-12);
  EXPECT_NEAR(t.exact_floor, 6.0 / 1680, 1e-12);
  EXPECT_NEAR(t.effect, 0.9, 1e-12);
}

// Unequal groups with ties, by every way to deal the ranks out.
TEST(RankTests, KruskalWallisByEveryOrder) {
  const Samples groups = {{3, 1}, {1, 4, 5}, {9}};
  // Sorted 1 1 3 4 5 9: midranks 1.5 1.5 3 4 5 6; ties 6 of 6^3 - 6 = 210.
  const auto statistic = [](const std::vector<double>& r) {
    const double a = r[0] + r[1], b = r[2] + r[3] + r[4], c = r[5];
    return (12 / 42.0 * (a * a / 2 + b * b / 3 + c * c) - 21) / (1 - 6 / 210.0);
  };
  std::vector<double> ranks = {3, 1.5, 1.5, 4, 5, 6};
  const double observed = statistic(ranks);
  const TestResult t = KruskalWallis(groups);
  EXPECT_NEAR(t.statistic, observed, 1e-12);
  std::vector<int> places = {0, 1, 2, 3, 4, 5};
  int tail = 0, all = 0;
  do {
    std::vector<double> dealt;
    for (const int p : places) dealt.push_back(ranks[size_t(p)]);
    tail += statistic(dealt) >= observed - 1e-9 ? 1 : 0;
    ++all;
  } while (std::next_permutation(places.begin(), places.end()));
  EXPECT_NEAR(t.exact, double(tail) / all, 1e-12);
}

// Groups that do not overlap give the largest H, however many they are, in whichever order.
TEST(RankTests, LeastPOfKruskalWallis) {
  Samples nine(9, {0});
  nine[4] = {0, 1};
  EXPECT_NEAR(KruskalWallis(nine).floor, ChiSquareTail(9 * (1 - 6 / 990.0), 8), 1e-12);
  for (const Samples& unequal :
       {Samples{{1}, {2, 3}, {4, 5, 6, 7}}, Samples{{3}, {1, 2}, {4, 5, 6, 7}},
        Samples{{5}, {6, 7}, {1, 2, 3, 4}}}) {
    const TestResult t = KruskalWallis(unequal);
    EXPECT_NEAR(t.statistic, 6 * (1 - 66 / 336.0), 1e-12);
    EXPECT_NEAR(t.floor, t.p, 1e-12);
    EXPECT_NEAR(t.exact_floor, t.exact, 1e-12);
  }
  // Values that are equal within their groups: H = N - 1, more than without ties.
  const TestResult tied = KruskalWallis({{0, 0, 0}, {1, 1, 1}});
  EXPECT_NEAR(tied.statistic, 5, 1e-12);
  EXPECT_LE(tied.floor, tied.p);
}

// Of ties alone: in any order one group has the 1, and H is the same; other values give 2 x 36/720.
TEST(RankTests, TiesHaveAFloorOfTheirOwn) {
  const TestResult t = KruskalWallis({{0, 0, 0}, {0, 0, 1}});
  EXPECT_NEAR(t.exact_floor, 0.1, 1e-12);
  EXPECT_NEAR(t.own_floor, 1, 1e-12);
  const TestResult equal = KruskalWallis({{0, 0, 0}, {0, 0, 0}});
  EXPECT_NEAR(equal.exact_floor, 0.1, 1e-12);
  EXPECT_EQ(equal.own_floor, 1);
  // Of unequal groups ties may also give less.
  const TestResult less = KruskalWallis({{1}, {0, 0, 0}});
  EXPECT_NEAR(less.own_floor, 0.25, 1e-12);
  EXPECT_NEAR(less.exact_floor, 0.25, 1e-12);
}

TEST(RankTests, ChiSquareTables) {
  EXPECT_NEAR(ChiSquareTail(3.841459, 1), 0.05, 1e-6);
  EXPECT_NEAR(ChiSquareTail(5.991465, 2), 0.05, 1e-6);
  EXPECT_NEAR(ChiSquareTail(18.307038, 10), 0.05, 1e-6);
  EXPECT_EQ(ChiSquareTail(0, 3), 1);
}

TEST(RankTests, HolmKeepsOrder) {
  const std::vector<double> p = {0.04, 0.01, 0.03, 0.5};
  const std::vector<double> want = {0.09, 0.04, 0.09, 0.5};
  const std::vector<double> got = Holm(p);
  for (size_t i = 0; i < p.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-12);
  EXPECT_EQ(Holm({0.9, 0.8})[0], 1);
}

TEST(RankTests, EffectsAndIntervals) {
  EXPECT_EQ(CliffDelta({2, 3}, {1, 1}), 1);
  EXPECT_EQ(CliffDelta({1, 2}, {1, 2}), 0);
  EXPECT_NEAR(CliffDelta({1, 3}, {2, 2, 0}), (1 - 2 + 3) / 6.0, 1e-12);
  const Interval same = BootstrapMean({4, 4, 4}, 0.95, 1000, 1);
  EXPECT_EQ(same.low, 4);
  EXPECT_EQ(same.high, 4);
  std::vector<double> values;
  for (int i = 0; i < 400; ++i) values.push_back(i % 2);
  // Mean 1/2 with deviation 1/40: 1.96 of them on either side.
  const Interval wide = BootstrapMean(values, 0.95, 20'000, 3);
  EXPECT_NEAR(wide.low, 0.5 - 1.96 / 40, 0.004);
  EXPECT_NEAR(wide.high, 0.5 + 1.96 / 40, 0.004);
  const Interval again = BootstrapMean(values, 0.95, 20'000, 3);
  EXPECT_EQ(again.low, wide.low);
}

}  // namespace
}  // namespace cistern
