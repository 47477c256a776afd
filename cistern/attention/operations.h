#pragma once
// What the mathematics of a mechanism takes at least, whatever way it is computed: the measure of
// `cistern bench` for how near a kernel is to the machine's limit.
#include <algorithm>
#include <cstdint>

#include "cistern/attention/mechanism.h"

namespace cistern {

// Multiplications and additions of one row, all heads; exponentials, feature maps, normalisers and
// masks are left out: they are small beside them, or differ from way to way. `backward` comes on
// top of `forward` where gradients of all inputs are wanted and nothing of the size of tokens times
// memory is kept.
struct LeastOperations {
  double forward = 0, backward = 0;
};

// Mechanisms that say it derive from this beside Mechanism.
class CountsOperations {
 public:
  virtual ~CountsOperations() = default;
  // Causal: `tokens` after `before` earlier ones. Bidirectional: all see all (before is 0). Cross:
  // `tokens` are written, as many queries read.
  virtual LeastOperations Operations(Form form, int64_t tokens, int64_t before) const = 0;
  // Whether this form makes the features of its tokens where it reads them, so that no tensor holds
  // those of all (the estimate of training's memory).
  virtual bool FormsFeatures(Form) const { return false; }
};

// Of a memory of `numbers` numbers that each token is added to and each query reads: 2 a number
// each. Backward: the memory's gradient, the gradients of the write weights, of what is written and
// of the read weights, 2 each; causal: the memory itself once more.
inline LeastOperations MemoryOperations(Form form, int64_t tokens, double numbers) {
  const double forward = 4 * double(tokens) * numbers;
  return {forward, (form == Form::kCausal ? 2.5 : 2) * forward};
}

// Of queries that meet keys, two products of `width` a pair. Backward: the scores once more, then
// four products.
inline LeastOperations PairOperations(double pairs, double width) {
  return {4 * pairs * width, 10 * pairs * width};
}

// Pairs of a query and a key that it sees, one head: causal or all, no further back than `window`
// tokens, itself among them (0: no limit).
inline double SeenPairs(Form form, int64_t tokens, int64_t before, int64_t window = 0) {
  const double T = double(tokens), b = double(before), w = double(window);
  if (form == Form::kCross) return T * (window > 0 ? std::min(T, w) : T);
  if (form == Form::kBidirectional) {
    if (window == 0 || window >= tokens) return T * T;
    return T * (2 * w - 1) - w * (w - 1);  // w - 1 on either side, less what lies outside
  }
  if (window == 0) return T * b + T * (T + 1) / 2;
  // Token t (from 0) sees min(before + t + 1, window).
  const double rising = std::clamp(w - b, 0.0, T);  // tokens that see all before them
  return rising * b + rising * (rising + 1) / 2 + (T - rising) * w;
}

}  // namespace cistern
