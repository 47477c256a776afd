#pragma once
// How tokens are told where they stand (nn/positions.h computes it).
#include <vector>

#include "cistern/io/fields.h"

namespace cistern {

enum class PositionKind { kNone, kLearned, kSinusoidal, kRotary };

inline const EnumNames<PositionKind>& PositionKinds() {
  static const EnumNames<PositionKind> names = {{PositionKind::kNone, "none"},
                                                {PositionKind::kLearned, "learned"},
                                                {PositionKind::kSinusoidal, "sinusoidal"},
                                                {PositionKind::kRotary, "rotary"}};
  return names;
}

// All of them, and those that do not turn queries and keys.
inline std::vector<PositionKind> AllPositions() {
  return {PositionKind::kNone, PositionKind::kLearned, PositionKind::kSinusoidal,
          PositionKind::kRotary};
}
inline std::vector<PositionKind> AddedPositions() {
  return {PositionKind::kNone, PositionKind::kLearned, PositionKind::kSinusoidal};
}

}  // namespace cistern
