#pragma once
// Dilated window attention (P003 App. A.4; spec 2.14): exact softmax attention to the tokens t,
// t-g, .., t-(n-1)g.
#include "cistern/attention/mechanisms/window.h"

namespace cistern {

class DilatedMechanism : public WindowMechanism {
 public:
  struct Options {
    int64_t window = 128;  // n, tokens that a token sees, itself among them
    int64_t dilation = 2;  // g
    EmptySlots empty_slots = EmptySlots::kMasked;
  };
  static Fields Describe(Options& options);
  DilatedMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);
};

}  // namespace cistern
