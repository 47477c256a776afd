// Hidden spans of a row: their numbers, T5's lengths, and that a row comes back from its two
// halves.
#include "cistern/tasks/spans.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>

namespace cistern {
namespace {

constexpr int32_t kEnd = 1000, kSentinel = 1001;

TEST(Spans, LengthsAreThoseOfT5) {
  // 568 tokens are 512 for the encoder and 114 for the decoder (P001 A.2).
  const SpanCounts counts = CountSpans(568, {0.15, 3});
  EXPECT_EQ(counts.hidden, 85);
  EXPECT_EQ(counts.spans, 28);
  EXPECT_EQ(counts.SourceLength(568), 512);
  EXPECT_EQ(counts.TargetLength(), 114);
}

TEST(Spans, SmallAndExtremeRows) {
  const auto counts = [](int64_t length, double hidden, double mean) {
    const SpanCounts c = CountSpans(length, {hidden, mean});
    return std::pair<int64_t, int64_t>(c.hidden, c.spans);
  };
  using P = std::pair<int64_t, int64_t>;
  EXPECT_EQ(counts(1, 0.15, 3), P(1, 1));
  EXPECT_EQ(counts(2, 0.15, 3), P(1, 1));
  EXPECT_EQ(counts(10, 0.15, 3), P(2, 1));
  EXPECT_EQ(counts(10, 0.9, 1), P(9, 1));  // a token before each span
  EXPECT_EQ(counts(10, 0.5, 1), P(5, 5));
  EXPECT_EQ(counts(100, 0.001, 3), P(1, 1));
}

TEST(Spans, PartsAreAllListsAlike) {
  std::map<std::vector<int64_t>, int> seen;
  Random random(3);
  for (int i = 0; i < 6000; ++i) {
    const std::vector<int64_t> parts = RandomParts(5, 3, random);
    EXPECT_EQ(std::accumulate(parts.begin(), parts.end(), int64_t{0}), 5);
    ++seen[parts];
  }
  EXPECT_EQ(seen.size(), 6u);  // 4 choose 2
  for (const auto& [parts, times] : seen) {
    EXPECT_GE(parts[0] * parts[1] * parts[2], 1);
    EXPECT_NEAR(times, 1000, 150);
  }
  EXPECT_EQ(RandomParts(4, 1, random), std::vector<int64_t>{4});
  EXPECT_EQ(RandomParts(3, 3, random), (std::vector<int64_t>{1, 1, 1}));
}

TEST(Spans, ARowComesBackFromSourceAndTarget) {
  for (const int64_t length : {1, 2, 3, 7, 64, 568}) {
    for (uint64_t seed = 1; seed < 20; ++seed) {
      std::vector<int64_t> row(static_cast<size_t>(length));
      std::iota(row.begin(), row.end(), 0);
      const SpanCounts counts = CountSpans(length, {0.15, 3});
      Random random(seed);
      const CorruptedRow c = CorruptSpans(row, counts, kSentinel, kEnd, random);
      EXPECT_EQ(int64_t(c.source.size()), counts.SourceLength(length));
      EXPECT_EQ(int64_t(c.target.size()), counts.TargetLength());
      EXPECT_EQ(c.source.back(), kEnd);
      EXPECT_EQ(c.target.back(), kEnd);
      EXPECT_EQ(c.target[0], kSentinel);
      std::vector<int64_t> back;
      int32_t next = kSentinel;
      size_t at = 0;
      for (size_t i = 0; i + 1 < c.source.size(); ++i) {
        if (c.source[i] < kEnd) {
          back.push_back(c.source[i]);
          continue;
        }
        EXPECT_EQ(c.source[i], next);
        EXPECT_EQ(c.target[at++], next++);
        const size_t before = back.size();
        while (c.target[at] < kEnd) back.push_back(c.target[at++]);
        EXPECT_GT(back.size(), before);  // no span is empty
      }
      EXPECT_EQ(back, row);
      EXPECT_EQ(at + 1, c.target.size());
    }
  }
}

}  // namespace
}  // namespace cistern
