#pragma once
// The Set-Transformer-like model that P000 inspects beside Luna (P000 sec. 2; spec 2.10), after the
// induced points of Lee et al. 2019: Luna whose every block gets the same learned memory; what was
// packed is read by the tokens of that block and then dropped. Packing and unpacking share the maps
// of queries and keys alone.
#include "cistern/attention/mechanisms/luna.h"

namespace cistern {

class SetTransformerMechanism : public LunaMechanism {
 public:
  static Fields Describe(Options& options);
  SetTransformerMechanism(const MechanismInfo& info, const Options& options,
                          const AttentionDims& dims);
};

}  // namespace cistern
