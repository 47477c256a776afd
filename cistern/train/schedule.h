#pragma once
// Learning-rate schedules with linear warm-up (spec 1.4).
#include <cstdint>

#include "cistern/io/fields.h"

namespace cistern {

enum class ScheduleKind { kCosine, kLinear, kRsqrt, kConstant };
const EnumNames<ScheduleKind>& ScheduleKinds();

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::kCosine;
  double lr = 1e-3;   // the peak; for rsqrt the base, as Long Range Arena has it (not normalised)
  double min_lr = 0;  // where cosine and linear end
  int64_t warmup = 0, steps = 0;
};

// The same over a budget of time, as a smooth function of the share of it that is spent: nothing
// waits for an estimate of the number of steps, and nothing jumps when there is one.
struct TimedScheduleOptions {
  ScheduleKind kind = ScheduleKind::kCosine;
  double lr = 1e-3, min_lr = 0;
  double warmup = 0.05;  // steps when >= 1; below 1 a share of the budget, but kSafeWarmup steps
};

// A warm-up this long keeps the default rates from overshooting, however fast the steps are.
inline constexpr int64_t kSafeWarmup = 50;

// The rate of update `step`, counted from 0; the first update of a warm-up has lr/warmup.
//   cosine, linear: warm-up, then down to min_lr at the last step
//   rsqrt: lr * min(1, s/w) / sqrt(max(s, w)) with s = step + 1, w = max(warmup, 1)
double LearningRate(const ScheduleOptions& options, int64_t step);
// Of update `step` when `share` of the budget (0 to 1) is spent.
double LearningRate(const TimedScheduleOptions& options, int64_t step, double share);

}  // namespace cistern
