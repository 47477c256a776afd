#include "cistern/train/schedule.h"

#include <algorithm>
#include <cmath>

#include "cistern/base/error.h"

namespace cistern {

const EnumNames<ScheduleKind>& ScheduleKinds() {
  static const EnumNames<ScheduleKind> names = {{ScheduleKind::kCosine, "cosine"},
                                                {ScheduleKind::kLinear, "linear"},
                                                {ScheduleKind::kRsqrt, "rsqrt"},
                                                {ScheduleKind::kConstant, "constant"},
                                                {ScheduleKind::kPolynomial, "polynomial"},
                                                {ScheduleKind::kInverseSqrt, "inverse_sqrt"},
                                                {ScheduleKind::kRsqrtFlat, "rsqrt_flat"},
                                                {ScheduleKind::kT2t, "t2t"},
                                                {ScheduleKind::kCosineRestarts, "cosine_restarts"}};
  return names;
}

bool HasEnd(ScheduleKind kind) {
  return kind == ScheduleKind::kCosine || kind == ScheduleKind::kLinear ||
         kind == ScheduleKind::kPolynomial;
}

bool PeaksAtLr(ScheduleKind kind) {
  return kind != ScheduleKind::kRsqrt && kind != ScheduleKind::kRsqrtFlat &&
         kind != ScheduleKind::kT2t;
}

namespace {

// Without a warm-up of another form: rsqrt and its kind, s and w in updates.
double Rsqrt(ScheduleKind kind, double lr, double width, double s, double w) {
  const double base = kind == ScheduleKind::kT2t ? lr / std::sqrt(width) : lr;
  if (kind == ScheduleKind::kRsqrtFlat) return base / std::sqrt(std::max(s, w));
  return base * std::min(1.0, s / w) / std::sqrt(std::max(s, w));
}

// From 1 to 0 while `done` goes from 0 to 1.
double Shape(ScheduleKind kind, double power, double done) {
  if (kind == ScheduleKind::kLinear) return 1.0 - done;
  if (kind == ScheduleKind::kPolynomial) return std::pow(1.0 - done, power);
  return 0.5 * (1.0 + std::cos(M_PI * done));
}

double Restarted(const ScheduleOptions& o, double updates) {
  double period = o.period, factor = 1;
  if (o.growth == 1) {
    const double whole = std::floor(updates / period);
    factor = std::pow(o.shrink, whole);
    updates -= whole * period;
  }
  for (; updates >= period; period *= o.growth) {
    updates -= period;
    factor *= o.shrink;
  }
  return factor *
         (o.min_lr + (o.lr - o.min_lr) * Shape(ScheduleKind::kCosine, 1, updates / period));
}

}  // namespace

double LearningRate(const ScheduleOptions& o, int64_t step) {
  if (o.every > 0) step -= step % o.every;
  const double s = double(step + o.first), w = double(std::max<int64_t>(o.warmup, 1));
  if (!PeaksAtLr(o.kind)) return Rsqrt(o.kind, o.lr, o.width, s, w);
  if (step < o.warmup) return o.warmup_init + (o.lr - o.warmup_init) * s / w;
  if (o.kind == ScheduleKind::kConstant) return o.lr;
  if (o.kind == ScheduleKind::kInverseSqrt) return o.lr * std::sqrt(w / std::max(s, w));
  if (o.kind == ScheduleKind::kCosineRestarts) return Restarted(o, double(step - o.warmup));
  const double left = double(std::max<int64_t>(o.steps - o.warmup, 1));
  const double done = std::clamp(double(step - o.warmup) / left, 0.0, 1.0);
  return o.min_lr + (o.lr - o.min_lr) * Shape(o.kind, o.power, done);
}

double LearningRate(const TimedScheduleOptions& o, int64_t step, double share) {
  CISTERN_CHECK(o.kind != ScheduleKind::kCosineRestarts,
                "[schedule] periods of updates over a budget of time");
  const double s = double(step + o.first);
  const bool in_steps = o.warmup >= 1;
  const double w = in_steps ? o.warmup : o.warmup > 0 ? double(kSafeWarmup) : 1;
  if (!PeaksAtLr(o.kind)) return Rsqrt(o.kind, o.lr, o.width, s, w);
  // The first update comes before any time is spent.
  double up = o.warmup > 0 ? std::min(1.0, s / w) : 1;
  if (!in_steps && o.warmup > 0 && step > 0 && o.kind != ScheduleKind::kInverseSqrt)
    up = std::min(up, share / o.warmup);
  double target = o.lr;
  if (o.kind == ScheduleKind::kInverseSqrt) target *= std::sqrt(w / std::max(s, w));
  if (HasEnd(o.kind)) {
    const double begun = in_steps ? 0 : o.warmup;
    const double done = std::clamp((share - begun) / (1 - begun), 0.0, 1.0);
    target = o.min_lr + (o.lr - o.min_lr) * Shape(o.kind, o.power, done);
  }
  return up < 1 ? o.warmup_init + up * (target - o.warmup_init) : target;
}

}  // namespace cistern
