#include "cistern/bench/timer.h"

#include <gtest/gtest.h>

#include <string>

namespace cistern::bench {
namespace {

TEST(Timer, QuartilesAreThoseOfTheSortedSamples) {
  // 1..9: the ranks 1 + 8/4, 1 + 8/2, 1 + 24/4.
  const Spread odd = SpreadOf({9, 1, 8, 2, 7, 3, 6, 4, 5});
  EXPECT_DOUBLE_EQ(odd.low, 3);
  EXPECT_DOUBLE_EQ(odd.median, 5);
  EXPECT_DOUBLE_EQ(odd.high, 7);
  EXPECT_EQ(odd.runs, 9);
  EXPECT_DOUBLE_EQ(odd.Relative(), 0.8);
  const Spread even = SpreadOf({4, 1, 3, 2});  // ranks 1.75, 2.5, 3.25
  EXPECT_DOUBLE_EQ(even.low, 1.75);
  EXPECT_DOUBLE_EQ(even.median, 2.5);
  EXPECT_DOUBLE_EQ(even.high, 3.25);
  EXPECT_DOUBLE_EQ(SpreadOf({7}).high, 7);
  EXPECT_THROW(SpreadOf({}), Error);
}

TEST(Timer, AlternatesBackAndForthAfterTwoRunsOfEach) {
  std::string order;
  const auto contestant = [&](char name) {
    return Contestant{[&order, name] { order += name; },
                      [&order, name] { order += char(name - 32); }};
  };
  TimerSettings settings;
  settings.seconds = 0, settings.runs = 3, settings.shortest = 0;
  const auto spreads = TimeAlternating({contestant('a'), contestant('b')}, settings);
  EXPECT_EQ(order,
            "AaAaBbBb"
            "AaBb"
            "BbAa"
            "AaBb");
  ASSERT_EQ(spreads.size(), 2u);
  for (const Spread& s : spreads) {
    EXPECT_EQ(s.runs, 3);
    EXPECT_GE(s.median, s.low);
    EXPECT_GE(s.high, s.median);
  }
}

TEST(Timer, ShortWorkIsRepeatedWithinASample) {
  int64_t runs = 0, samples = 0;
  TimerSettings settings;
  settings.seconds = 0, settings.runs = 4, settings.shortest = 1e-4;
  TimeAlternating({{[&] { ++runs; }, [&] { ++samples; }}}, settings);
  EXPECT_EQ(samples, 6);
  EXPECT_GT(runs, 2 + 4 * 2);
}

TEST(Timer, StopsWhenItIsTold) {
  int64_t runs = 0;
  TimerSettings settings;
  settings.shortest = 0;
  const auto spreads =
      TimeAlternating({{[&] { ++runs; }, nullptr}}, settings, [&] { return runs >= 4; });
  EXPECT_EQ(runs, 4);
  EXPECT_EQ(spreads[0].runs, 2);
  EXPECT_EQ(TimeAlternating({{[] {}, nullptr}}, settings, [] { return true; })[0].runs, 0);
}

TEST(Timer, JsonKeepsASpreadAndRefusesWhatIsNone) {
  const Spread s = ReadSpread(SpreadJson({2, 1, 4, 7}));
  EXPECT_EQ(s.median, 2);
  EXPECT_EQ(s.low, 1);
  EXPECT_EQ(s.high, 4);
  EXPECT_EQ(s.runs, 7);
  EXPECT_THROW(ReadSpread(SpreadJson({2, 3, 4, 7})), Error);
  EXPECT_THROW(ReadSpread(SpreadJson({0, 0, 0, 1})), Error);
  EXPECT_THROW(ReadSpread({{"median", 1}}), Error);
  EXPECT_THROW(ReadSpread(3), Error);
}

}  // namespace
}  // namespace cistern::bench
