#pragma once
// Which tokens a masked language model is asked for, and what it sees in their place (RoBERTa, Liu
// et al. 2019; spec 3.6).
#include <cstdint>
#include <vector>

#include "cistern/base/random.h"

namespace cistern {

struct MaskShares {
  double chosen = 0.15;  // of the tokens of a row: to be predicted, at least one
  double hidden = 0.8;   // of the chosen: hidden by the mask
  double random = 0.1;   // of the chosen: replaced by a random token; the rest stays
};

// Of the tokens ids[p], p in `places`: sets targets[p] of those that are chosen, and replaces them
// by `vocab` (the mask) or by a token below it. `places` is shuffled; none: nothing happens.
void MaskTokens(const MaskShares& shares, int64_t vocab, Random& random,
                std::vector<int64_t>& places, int64_t* ids, int64_t* targets);

}  // namespace cistern
