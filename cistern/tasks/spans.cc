#include "cistern/tasks/spans.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cistern/base/error.h"

namespace cistern {

SpanCounts CountSpans(int64_t length, const SpanShares& shares) {
  CISTERN_CHECK(length >= 1, "[span corruption] a row of ", length, " tokens");
  const int64_t hidden = std::clamp<int64_t>(std::llround(double(length) * shares.hidden), 1,
                                             std::max<int64_t>(1, length - 1));
  // Each span has a token before it, but in a row of one.
  const int64_t most = std::max<int64_t>(1, std::min(hidden, length - hidden));
  return {hidden, std::clamp<int64_t>(std::llround(double(hidden) / shares.mean_length), 1, most)};
}

std::vector<int64_t> RandomParts(int64_t sum, int64_t count, Random& random) {
  // Borders between the units: count - 1 of sum - 1, the first of a shuffle.
  std::vector<int64_t> borders(size_t(sum) - 1);
  std::iota(borders.begin(), borders.end(), int64_t{1});
  for (int64_t i = 0; i + 1 < count; ++i)
    std::swap(borders[size_t(i)], borders[size_t(i + random.Below(sum - 1 - i))]);
  borders.resize(size_t(count) - 1);
  std::sort(borders.begin(), borders.end());
  borders.push_back(sum);
  std::vector<int64_t> parts;
  int64_t before = 0;
  for (const int64_t border : borders) {
    parts.push_back(border - before);
    before = border;
  }
  return parts;
}

CorruptedRow CorruptSpans(std::span<const int64_t> row, const SpanCounts& counts,
                          int32_t first_sentinel, int32_t end, Random& random) {
  const int64_t shown = int64_t(row.size()) - counts.hidden;
  const std::vector<int64_t> hidden = RandomParts(counts.hidden, counts.spans, random);
  const std::vector<int64_t> between =
      shown == 0 ? std::vector<int64_t>(1, 0) : RandomParts(shown, counts.spans, random);
  CorruptedRow out;
  size_t at = 0;
  const auto take = [&](int64_t count, std::vector<int32_t>* to) {
    for (int64_t i = 0; i < count; ++i) to->push_back(int32_t(row[at++]));
  };
  for (size_t i = 0; i < hidden.size(); ++i) {
    take(between[i], &out.source);
    out.source.push_back(first_sentinel + int32_t(i));
    out.target.push_back(first_sentinel + int32_t(i));
    take(hidden[i], &out.target);
  }
  out.source.push_back(end), out.target.push_back(end);
  return out;
}

}  // namespace cistern
