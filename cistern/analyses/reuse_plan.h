#pragma once
// Which attention scores a Reuse model (attention/mechanisms/reuse.h; P001) could take over from
// the layer before, judged by how alike the heads of a trained softmax model are.
#include <string>
#include <vector>

#include "cistern/models/config.h"

namespace cistern {

struct ReuseRecommendation {
  // Of the mechanism: {"placement", "heads", "layers"}, and "scale" where softmax has another than
  // its default; null: none fits.
  Json options;
  int64_t copied = 0;  // heads of all layers that are copied
  double least = 0;    // similarity of the least alike of the heads that would be copied
  double flops_share = 1, parameters_share = 1;  // of the stack, against softmax
  std::vector<std::string> settings;             // KEY=VALUE for train --set
};

// The softmax layers have the same options. best[l][h][l']: how alike head h of layer l and the
// head of l' that is most like it are. Of all placements, numbers of heads K and of layers P that
// the model can have (its tied layers copy the same): the one that copies most heads, of those
// where in each copying layer K heads are at least `threshold` like the layers whose scores they
// would take over, each like one; among equals the one with the largest least similarity. These
// layers are the one before and, where heads that it hands on are copies themselves, those that
// they come from. FLOPs of a stack by projections, scores, values and feed-forward for rows of
// `length` tokens, scores copied as probabilities (keep=scores); parameters without norms and
// biases, once of tied layers. O(L^2 H) candidates' work.
ReuseRecommendation RecommendReuse(const std::vector<std::vector<std::vector<double>>>& best,
                                   const ModelConfig& config, double threshold, double length);

}  // namespace cistern
