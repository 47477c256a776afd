#pragma once
// How tokens are told where they stand (nn/positions.h computes it).
#include <vector>

#include "cistern/io/fields.h"

namespace cistern {

// kAuto is of a stack of layers alone (LayerStack resolves it): rotary where all its mechanisms
// turn queries and keys, else none.
enum class PositionKind {
  kNone,
  kLearned,
  kSinusoidal,
  kSinusoidalHalves,
  kRotary,
  kRelative,
  kAuto
};

inline const EnumNames<PositionKind>& PositionKinds() {
  static const EnumNames<PositionKind> names = {
      {PositionKind::kNone, "none"},
      {PositionKind::kLearned, "learned"},
      {PositionKind::kSinusoidal, "sinusoidal"},
      {PositionKind::kSinusoidalHalves, "sinusoidal_halves"},
      {PositionKind::kRotary, "rotary"},
      {PositionKind::kRelative, "relative"},
      {PositionKind::kAuto, "auto"}};
  return names;
}

// Those that need nothing of the scores, and of them those that do not turn queries and keys.
// Relative ones (relative_positions.h) are a bias of the scores, for mechanisms that form them.
inline std::vector<PositionKind> AllPositions() {
  return {PositionKind::kNone, PositionKind::kLearned, PositionKind::kSinusoidal,
          PositionKind::kSinusoidalHalves, PositionKind::kRotary};
}
inline std::vector<PositionKind> AddedPositions() {
  return {PositionKind::kNone, PositionKind::kLearned, PositionKind::kSinusoidal,
          PositionKind::kSinusoidalHalves};
}

}  // namespace cistern
