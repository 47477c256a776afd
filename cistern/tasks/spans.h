#pragma once
// Span corruption (T5, Raffel et al. 2020; P001 A.2): some spans of a row are hidden behind a
// sentinel each, and the target says what they were.
//
//   row      a b c d e f g h          sentinels s0, s1
//   source   a b s0 e f s1 end        hidden: c d, g h
//   target   s0 c d s1 g h end
#include <cstdint>
#include <span>
#include <vector>

#include "cistern/base/random.h"

namespace cistern {

struct SpanShares {
  double hidden = 0.15;    // of the tokens of a row
  double mean_length = 3;  // of a span
};

// Of a row of `length` tokens, at least 1: at least one token is hidden and, but for a row of one,
// one is not.
struct SpanCounts {
  int64_t hidden, spans;
  int64_t SourceLength(int64_t length) const { return length - hidden + spans + 1; }
  int64_t TargetLength() const { return hidden + spans + 1; }
};
SpanCounts CountSpans(int64_t length, const SpanShares& shares);

// `count` positive numbers whose sum is `sum`, all such lists alike; 1 <= count <= sum.
std::vector<int64_t> RandomParts(int64_t sum, int64_t count, Random& random);

struct CorruptedRow {
  std::vector<int32_t> source, target;  // both end with `end`
};
// Spans that are hidden and spans that are not take turns, as in T5; the last one is hidden.
// Sentinels are first_sentinel, first_sentinel + 1, ...
CorruptedRow CorruptSpans(std::span<const int64_t> row, const SpanCounts& counts,
                          int32_t first_sentinel, int32_t end, Random& random);

}  // namespace cistern
