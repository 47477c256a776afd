#include "cistern/tasks/score.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cistern/base/error.h"
#include "cistern/base/random.h"

namespace cistern {
namespace {

// Numbers of very different sizes, whose sum in doubles depends on the order.
std::vector<double> Numbers(uint64_t seed) {
  Random random(seed);
  std::vector<double> x;
  for (int i = 0; i < 400; ++i)
    x.push_back((random.Uniform() - 0.5) * std::pow(10.0, double(random.Below(40)) - 20));
  return x;
}

double Sum(const std::vector<double>& x) {
  ExactSum sum;
  for (const double v : x) sum.Add(v);
  return sum.Value();
}

TEST(ExactSum, KnownSums) {
  EXPECT_EQ(Sum({}), 0);
  EXPECT_EQ(Sum({1e100, 1, -1e100}), 1);
  EXPECT_EQ(Sum(std::vector<double>(10, 0.1)), 1.0);  // in doubles: 0.9999999999999999
  EXPECT_EQ(Sum({1e16, 1, 1e-16}), 1e16 + 2);         // half a unit, and what lies below decides
  EXPECT_EQ(Sum({1e16, 1, -1e-16}), 1e16);
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(Sum({1, inf, 2}), inf);
  EXPECT_TRUE(std::isnan(Sum({inf, -inf})));
  EXPECT_TRUE(std::isnan(Sum({1, std::nan(""), 2})));
}

TEST(ExactSum, NoOrderAndNoGroupingChangesABit) {
  for (uint64_t seed = 1; seed < 20; ++seed) {
    std::vector<double> x = Numbers(seed);
    const double expected = Sum(x);
    double plain = 0;
    for (const double v : x) plain += v;
    EXPECT_NEAR(plain, expected, 1e-3 * std::abs(expected) + 1e6);
    std::sort(x.begin(), x.end());
    EXPECT_EQ(Sum(x), expected);
    std::reverse(x.begin(), x.end());
    EXPECT_EQ(Sum(x), expected);
    ExactSum left, right;
    for (size_t i = 0; i < x.size(); ++i) (i % 3 == 0 ? left : right).Add(x[i]);
    left.Add(right);
    EXPECT_EQ(left.Value(), expected);
  }
}

TEST(Score, MergesAndGoesThroughAFile) {
  const std::vector<double> x = Numbers(3);
  Score whole, a, b;
  for (size_t i = 0; i < x.size(); ++i) {
    for (Score* s : {&whole, i < 100 ? &a : &b}) {
      s->Add("nats", x[i]);
      s->Add("confusion", int64_t(i % 7), 1);
    }
  }
  a.Merge(Score::Read(Json::parse(b.Write().dump())));
  EXPECT_EQ(a["nats"], whole["nats"]);
  for (int64_t i = 0; i < 7; ++i) EXPECT_EQ(a.At("confusion", i), whole.At("confusion", i));
  EXPECT_EQ(a["never"], 0);
  EXPECT_FALSE(a.Has("never"));
  Score broken;
  broken.Add("nats", std::nan(""));
  EXPECT_TRUE(std::isnan(Score::Read(Json::parse(broken.Write().dump()))["nats"]));
  EXPECT_THROW(Score::Read(Json::parse(R"({"nats": {"x": [1]}})")), Error);
  EXPECT_THROW(Score::Read(Json::parse(R"({"nats": 3})")), Error);
}

}  // namespace
}  // namespace cistern
