#pragma once
// RFA with a gate (Peng et al. 2021, sec. 3.3; spec 2.5): a learned decay g_t = sigmoid(w_g . x_t +
// b_g), one number a head, favours what is recent: S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) (x) v_t,
// z_t likewise. Features, state and options are those of RFA's paper variant.
#include "cistern/attention/mechanisms/rfa.h"

namespace cistern {

class RfaGateMechanism : public RfaMechanism {
 public:
  static Fields Describe(Options& options);
  RfaGateMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);
};

}  // namespace cistern
