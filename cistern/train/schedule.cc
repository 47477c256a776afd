#include "cistern/train/schedule.h"

#include <algorithm>
#include <cmath>

namespace cistern {

const EnumNames<ScheduleKind>& ScheduleKinds() {
  static const EnumNames<ScheduleKind> names = {{ScheduleKind::kCosine, "cosine"},
                                                {ScheduleKind::kLinear, "linear"},
                                                {ScheduleKind::kRsqrt, "rsqrt"},
                                                {ScheduleKind::kConstant, "constant"}};
  return names;
}

double LearningRate(const ScheduleOptions& o, int64_t step) {
  const double s = double(step + 1), w = double(std::max<int64_t>(o.warmup, 1));
  if (o.kind == ScheduleKind::kRsqrt)
    return o.lr * std::min(1.0, s / w) / std::sqrt(std::max(s, w));
  if (step < o.warmup) return o.lr * s / w;
  if (o.kind == ScheduleKind::kConstant) return o.lr;
  const double left = double(std::max<int64_t>(o.steps - o.warmup, 1));
  const double done = std::clamp(double(step - o.warmup) / left, 0.0, 1.0);
  const double shape =
      o.kind == ScheduleKind::kLinear ? 1.0 - done : 0.5 * (1.0 + std::cos(M_PI * done));
  return o.min_lr + (o.lr - o.min_lr) * shape;
}

double LearningRate(const TimedScheduleOptions& o, int64_t step, double share) {
  const double s = double(step + 1);
  const bool in_steps = o.warmup >= 1;
  if (o.kind == ScheduleKind::kRsqrt) {
    const double w = in_steps ? o.warmup : double(kSafeWarmup);
    return o.lr * std::min(1.0, s / w) / std::sqrt(std::max(s, w));
  }
  // The first update comes before any time is spent.
  double up = std::min(1.0, s / (in_steps ? o.warmup : double(kSafeWarmup)));
  if (!in_steps && o.warmup > 0 && step > 0) up = std::min(up, share / o.warmup);
  if (o.kind == ScheduleKind::kConstant) return o.lr * up;
  const double begun = in_steps ? 0 : o.warmup;
  const double done = std::clamp((share - begun) / (1 - begun), 0.0, 1.0);
  const double shape =
      o.kind == ScheduleKind::kLinear ? 1.0 - done : 0.5 * (1.0 + std::cos(M_PI * done));
  return up * (o.min_lr + (o.lr - o.min_lr) * shape);
}

}  // namespace cistern
