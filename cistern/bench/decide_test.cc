#include "cistern/bench/decide.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cistern/ops/testing.h"

namespace cistern {
namespace {

using testing::ExpectContains;

std::string All(const std::vector<std::string>& lines) {
  std::string out;
  for (const std::string& line : lines) out += line + "\n";
  return out;
}

TEST(ParetoFront, WhatNothingBeatsInEverything) {
  // a: best quality, slow. b: fast, worse. c: beaten by b in both. d: as b. e: no speed known.
  const std::vector<Criterion> criteria = {
      {"quality", "bits", true, {1.0, 2.0, 2.5, 2.0, 0.5}},
      {"speed", "tokens/s", false, {10, 100, 90, 100, std::nan("")}}};
  EXPECT_EQ(ParetoFront(criteria), (std::vector<bool>{true, true, false, true, false}));
  // The best of one criterion alone.
  EXPECT_EQ(ParetoFront({criteria[1]}), (std::vector<bool>{false, true, false, true, false}));
  EXPECT_TRUE(ParetoFront({}).empty());
}

TEST(Decide, NearTheBestBoundedAndFast) {
  const std::vector<Candidate> candidates = {
      {"softmax", false}, {"latte", true}, {"abc_mlp", true}, {"slow", true}, {"poor", true}};
  std::vector<Criterion> criteria = {
      {"quality", "bits per byte", true, {1.50, 1.515, 1.51, 1.505, 1.9}},
      {"speed", "tokens/s", false, {900, 1000, 980, 100, 950}},
      {"state", "bytes", true, {4e6, 64e3, 8e3, 9e3, 128e3}}};
  const Decision d = Decide(candidates, criteria, 0.02, 4000);
  // latte is fastest; abc_mlp is as fast within 5 % and has the smaller state.
  EXPECT_EQ(d.recommended, "abc_mlp");
  EXPECT_EQ(d.front, (std::vector<bool>{true, true, true, true, false}));
  ExpectContains(All(d.reasons), {"abc_mlp reaches 1.51 bits per byte", "softmax, 1.5",
                                  "below 0.02", "at any length", "softmax has ",
                                  "after 4,000 tokens", "latte", "Not on the Pareto front: poor."});
  // Where the best is far ahead, it is taken, whatever it costs.
  criteria[0].values[0] = 1.0;
  const Decision ahead = Decide(candidates, criteria, 0.02, 4000);
  EXPECT_EQ(ahead.recommended, "softmax");
  ExpectContains(All(ahead.reasons), {"best quality of all", "grows with the text"});
}

// Of classes, say, no state is measured: nothing is said of its size.
TEST(Decide, WithoutAStateThatWasMeasured) {
  const auto decide = [](double softmax, double latte) {
    return Decide({{"softmax", false}, {"latte", true}},
                  {{"quality", "accuracy, %", false, {softmax, latte}},
                   {"speed", "tokens/s", false, {1000, 900}}},
                  0);
  };
  const Decision ahead = decide(90, 70), near = decide(90, 89.5);
  EXPECT_EQ(ahead.recommended, "softmax");
  EXPECT_EQ(near.recommended, "latte");
  for (const Decision& d : {ahead, near})
    EXPECT_EQ(All(d.reasons).find("with the text"), std::string::npos) << All(d.reasons);
  ExpectContains(All(ahead.reasons), {"None whose state is bounded comes near"});
  ExpectContains(All(near.reasons), {"Its state is bounded", "too near to tell apart"});
}

// What lacks a value is off the front, though no other one beats it.
TEST(Decide, NothingIsSaidOfWhatWasNotMeasured) {
  const double none = std::nan("");
  const Decision d = Decide({{"latte", true}, {"linformer", true}, {"poor", true}},
                            {{"quality", "accuracy, %", false, {90, 91, 80}},
                             {"speed", "tokens/s", false, {1000, 2000, 900}},
                             {"decoding", "ms", true, {0.1, none, 0.2}}},
                            0.5);
  EXPECT_EQ(d.front, (std::vector<bool>{true, false, false}));
  ExpectContains(All(d.reasons), {"Not on the Pareto front: poor."});
}

TEST(Decide, RunsThatFailedAndNothingAtAll) {
  const double none = std::nan("");
  const std::vector<Candidate> two = {{"a", true}, {"b", true}};
  const Decision d = Decide(
      two,
      {{"quality", "accuracy, %", false, {none, 80}}, {"speed", "tokens/s", false, {none, 10}}}, 0);
  EXPECT_EQ(d.recommended, "b");
  EXPECT_EQ(d.front, (std::vector<bool>{false, true}));
  EXPECT_EQ(All(d.reasons).find("Pareto"), std::string::npos);
  EXPECT_TRUE(Decide(two, {{"quality", "x", false, {none, none}}}, 0).recommended.empty());
  EXPECT_TRUE(Decide(two, {}, 0).recommended.empty());
}

}  // namespace
}  // namespace cistern
