// Brackets of made-up times; ladders of real ones, without a look at speeds.
#include "cistern/bench/efficiency.h"

#include <gtest/gtest.h>

#include "cistern/kernels/isa.h"

namespace cistern::bench {
namespace {

// Own times beside those of the other, which takes 10 at every length.
std::vector<Meeting> Times(const std::vector<double>& own, double spread = 0) {
  std::vector<Meeting> out;
  int64_t length = 64;
  for (const double t : own) {
    out.push_back({length, t - spread, t + spread, 9.5, 10.5});
    length *= 2;
  }
  return out;
}

TEST(Efficiency, BracketsOfTimes) {
  EXPECT_EQ(BracketOf(Times({20, 12, 8, 4})).Text(), "128 to 256");
  EXPECT_EQ(BracketOf(Times({8, 4, 2})).Text(), "64 or less");
  EXPECT_EQ(BracketOf(Times({20, 15, 11})).Text(), "above 256");
  EXPECT_EQ(BracketOf(Times({20, 12, 10, 4})).Text(), "256 to 512");    // level is not ahead
  EXPECT_EQ(BracketOf(Times({20, 12, 8, 4}, 2)).Text(), "256 to 512");  // 8 +- 2 is level
  EXPECT_EQ(BracketOf(Times({20, 8, 12, 4})).Text(), "256 to 512 (not steadily)");
  EXPECT_EQ(BracketOf(Times({20, 8, 12})).Text(), "above 256");
  EXPECT_THROW(BracketOf({}), Error);
}

EfficiencySettings Quick() {
  EfficiencySettings settings;
  settings.against = &FindMechanism("softmax");
  settings.shortest = 16, settings.longest = 64, settings.every = true;
  settings.measure.timer.seconds = 0, settings.measure.timer.runs = 1;
  settings.measure.timer.shortest = 0;
  return settings;
}

TEST(Efficiency, EveryLengthMeetsTheOtherMechanism) {
  Sweep sweep;
  sweep.mechanisms = {{&FindMechanism("softmax"), Json::object()},
                      {&FindMechanism("nystrom"), Json::object()},
                      {&FindMechanism("latte"), Json{{"latents", 8}}}};
  sweep.ways = {Way::kCausal, Way::kDecode};
  sweep.heads = {2}, sweep.widths = {8}, sweep.threads = {1}, sweep.isas = {ActiveIsa()};
  Peaks peaks;
  Record record;
  const auto rows = MeasureEfficiency(sweep, Quick(), peaks, &record);
  // Causal in two passes, decode in one; softmax does not meet itself.
  ASSERT_EQ(rows.size(), 6u);
  for (const EfficiencyRow& row : rows) {
    if (row.mechanism == "nystrom") {
      EXPECT_NE(row.skipped.find("no causal"), std::string::npos) << row.skipped;
      continue;
    }
    EXPECT_EQ(row.skipped, "");
    ASSERT_EQ(row.time.size(), 3u);
    EXPECT_EQ(row.time[2].length, 64);
    for (const Meeting& m : row.time) {
      EXPECT_GT(m.low, 0);
      EXPECT_GT(m.other_low, 0);
    }
  }
  // Decoding: 2 heads of 8 channels; a cache of 2 x 8 floats a token and head against a state that
  // decodes 4 latents (kernels/slot_decoding.h), 1,856 bytes a head: smaller from the length on at
  // which 64 T > 1856.
  const EfficiencyRow& decode = rows[5];
  ASSERT_EQ(decode.bytes.size(), 3u);
  EXPECT_EQ(decode.bytes[0].low, decode.bytes[2].low);
  EXPECT_NEAR(decode.bytes[2].other_low - decode.bytes[1].other_low, 32 * 2 * 16 * 4, 1);
  EXPECT_EQ(BracketOf(decode.bytes).from, 32);
  const Json json = EfficiencyJson(rows);
  EXPECT_EQ(json[5]["memory"]["from"], 32);
  EXPECT_EQ(json[5]["time"]["points"].size(), 3u);
  EXPECT_EQ(EfficiencyTable(rows).rows.size(), 6u);
  // 3 lengths; nystrom is asked once in each of the three.
  EXPECT_EQ(record.rows.size(), size_t(3 * (3 + 2 + 2)));
}

TEST(Efficiency, TakesOneOfEveryOtherList) {
  Sweep sweep;
  sweep.mechanisms = {{&FindMechanism("latte"), Json::object()}};
  sweep.threads = {1, 2}, sweep.isas = {ActiveIsa()};
  Peaks peaks;
  Record record;
  EXPECT_THROW(MeasureEfficiency(sweep, Quick(), peaks, &record), UsageError);
}

}  // namespace
}  // namespace cistern::bench
