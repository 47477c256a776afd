#pragma once
// Drift: a mechanism decodes millions of tokens in float, and the same tokens in double, in the
// plain loops of the reference; how far have the float outputs moved away?
#include <functional>
#include <string>
#include <vector>

#include "cistern/attention/mechanism.h"

namespace cistern::verify {

inline constexpr double kLongTolerance = 1e-4;  // relative RMS

struct LongSettings {
  int64_t tokens = 10'000'000;
  int64_t piece = 4096;  // tokens between the comparisons are extended by so many at a time; 1:
                         // token by token throughout
  int64_t steps =
      256;  // the last tokens before each comparison are extended one at a time, and as one piece
  uint64_t seed = 1;
};

struct LongResult {
  struct Point {
    int64_t tokens;
    double error;  // of the last `steps` outputs, in a piece or token by token: the larger
  };
  std::string mechanism;
  Json options;
  std::vector<Point> points;  // at 1,000, 10,000, ... and at the end
  double seconds = 0;
  bool failed() const;
};

// Whether it applies: a causal form, and a state that does not grow with the text.
bool DecodesForEver(const MechanismInfo& info);

// One row, one head; of head groups those that they share out. Inputs are projections of the same
// normal numbers around a mean, as a layer makes them. `done` hears how many tokens are behind it
// and stops the run by returning false.
LongResult RunLong(const MechanismInfo& info, const Json& options, const LongSettings& settings,
                   const std::function<bool(int64_t)>& done = nullptr);

}  // namespace cistern::verify
