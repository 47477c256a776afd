#include "cistern/train/schedule.h"

#include <algorithm>
#include <cmath>

namespace cistern {

std::vector<std::string> ScheduleKinds() { return {"cosine", "linear", "rsqrt", "constant"}; }

double LearningRate(const ScheduleOptions& o, int64_t step) {
  const double s = double(step + 1), w = double(std::max<int64_t>(o.warmup, 1));
  if (o.kind == "rsqrt") return o.lr * std::min(1.0, s / w) / std::sqrt(std::max(s, w));
  if (step < o.warmup) return o.lr * s / w;
  if (o.kind == "constant") return o.lr;
  const double left = double(std::max<int64_t>(o.steps - o.warmup, 1));
  const double done = std::clamp(double(step - o.warmup) / left, 0.0, 1.0);
  const double shape = o.kind == "linear" ? 1.0 - done : 0.5 * (1.0 + std::cos(M_PI * done));
  return o.min_lr + (o.lr - o.min_lr) * shape;
}

}  // namespace cistern
