// Drift, over as many tokens as a test has time for.
#include "cistern/verify/long_run.h"

#include <gtest/gtest.h>

#include "cistern/ops/testing.h"

namespace cistern::verify {
namespace {

TEST(LongRun, TenThousandTokens) {
  LongSettings settings;
  settings.tokens = 10'000, settings.steps = 64;
  int64_t runs = 0;
  for (const MechanismInfo* info : Mechanisms()) {
    if (!DecodesForEver(*info)) continue;
    ++runs;
    const LongResult result = RunLong(*info, info->cases[0], settings);
    ASSERT_EQ(result.points.size(), 2u) << info->name;
    EXPECT_EQ(result.points[1].tokens, 10'000);
    for (const auto& point : result.points)
      EXPECT_LT(point.error, kLongTolerance / 5) << info->name << " after " << point.tokens;
    EXPECT_FALSE(result.failed());
  }
  EXPECT_GT(runs, 10);
}

TEST(LongRun, PiecesAndSingleTokensSeeTheSameTokens) {
  LongSettings pieces, single;
  pieces.tokens = single.tokens = 1500;
  single.piece = 1;
  const MechanismInfo& info = FindMechanism("latte");
  const LongResult a = RunLong(info, info.cases[0], pieces),
                   b = RunLong(info, info.cases[0], single);
  ASSERT_EQ(b.points.size(), 2u);
  EXPECT_LT(b.points[1].error, 1e-5);
  EXPECT_NE(a.points[1].error, b.points[1].error);  // rounded in another order
}

// They cannot have one head alone.
TEST(LongRun, HeadGroups) {
  LongSettings settings;
  settings.tokens = 1500, settings.steps = 64;
  const MechanismInfo& info = FindMechanism("window:2+latte:1");
  const LongResult result = RunLong(info, info.cases[0], settings);
  ASSERT_EQ(result.points.size(), 2u);
  for (const auto& point : result.points) EXPECT_LT(point.error, kLongTolerance / 5);
}

TEST(LongRun, DriftFailsAndTheRunStopsWhenTold) {
  EXPECT_TRUE((LongResult{"x", {}, {{1000, 1e-6}, {2000, 2e-4}}, 0}).failed());
  EXPECT_TRUE((LongResult{"x", {}, {{1000, std::nan("")}}, 0}).failed());
  EXPECT_TRUE((LongResult{"x", {}, {}, 0}).failed());
  EXPECT_FALSE((LongResult{"x", {}, {{1000, 1e-6}}, 0}).failed());
  LongSettings settings;
  settings.tokens = 100'000;
  const MechanismInfo& info = FindMechanism("linear");
  const LongResult result =
      RunLong(info, info.cases[0], settings, [](int64_t tokens) { return tokens < 5000; });
  EXPECT_EQ(result.points.size(), 1u);
  EXPECT_FALSE(DecodesForEver(FindMechanism("softmax")));
  EXPECT_FALSE(DecodesForEver(FindMechanism("nystrom")));
}

}  // namespace
}  // namespace cistern::verify
