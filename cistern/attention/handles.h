#pragma once
// What a layer leaves to the next so that its heads may take over the attention scores (Reuse,
// P001; spec 2.16).
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

namespace cistern {

// The scores of h heads: what they are made of, queries and keys as they meet (turned by rotary
// positions), or the probabilities, before dropout. The mask is not part of it: it is the same in
// every layer.
struct HeadScores {
  at::Tensor q,
      k;         // [B,h,T,d], [B,h,S,d]; k may be a view of a cache, to be used before that grows
  at::Tensor p;  // [B,h,T,S]; undefined where q and k are defined
  at::Tensor bias = {};  // [1 or B,h,T,S], added to the scores (relative positions); or undefined
  double scale = 0;      // of q k^T; 0: 1/sqrt(d)
  int64_t heads() const { return (p.defined() ? p : q).size(1); }
};

// The heads of a layer in their order, in groups.
using Handles = std::vector<HeadScores>;

// `count` heads of a group from `begin` on: views.
inline HeadScores HeadsOf(const HeadScores& s, int64_t begin, int64_t count) {
  const auto narrow = [&](const at::Tensor& x) {
    return x.defined() ? x.narrow(1, begin, count) : x;
  };
  return {narrow(s.q), narrow(s.k), narrow(s.p), narrow(s.bias), s.scale};
}

// The first `heads` of them: views.
inline Handles FirstHeads(const Handles& all, int64_t heads) {
  Handles first;
  for (const HeadScores& s : all) {
    const int64_t count = std::min(heads, s.heads());
    if (count == 0) break;
    first.push_back(HeadsOf(s, 0, count));
    heads -= count;
  }
  return first;
}

}  // namespace cistern
