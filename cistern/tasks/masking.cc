#include "cistern/tasks/masking.h"

#include <algorithm>
#include <utility>

namespace cistern {

void MaskTokens(const MaskShares& shares, int64_t vocab, Random& random,
                std::vector<int64_t>& places, int64_t* ids, int64_t* targets) {
  const int64_t all = int64_t(places.size());
  if (all == 0) return;
  const int64_t count =
      std::clamp<int64_t>(int64_t(shares.chosen * double(all) + random.Uniform()), 1, all);
  for (int64_t i = 0; i < count; ++i) {
    std::swap(places[size_t(i)], places[size_t(i + random.Below(all - i))]);
    const int64_t t = places[size_t(i)];
    targets[t] = ids[t];
    const double how = random.Uniform();
    if (how < shares.hidden) {
      ids[t] = vocab;
    } else if (how < shares.hidden + shares.random) {
      ids[t] = random.Below(vocab);
    }
  }
}

}  // namespace cistern
