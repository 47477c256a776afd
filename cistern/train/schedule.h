#pragma once
// Learning-rate schedules (spec 1.4, 4.3, 4.5, 4.7, 4.8): pure functions of the number of the
// update, and of the share of a budget of time where that has a meaning.
#include <cstdint>

#include "cistern/io/fields.h"

namespace cistern {

enum class ScheduleKind {
  kCosine,
  kLinear,
  kRsqrt,
  kConstant,
  kPolynomial,
  kInverseSqrt,
  kRsqrtFlat,
  kT2t,
  kCosineRestarts
};
const EnumNames<ScheduleKind>& ScheduleKinds();
// It goes down to min_lr at a certain update, or at the end of a budget.
bool HasEnd(ScheduleKind kind);
// Its rate at the end of the warm-up is lr: it can begin the warm-up elsewhere than at 0.
bool PeaksAtLr(ScheduleKind kind);

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::kCosine;
  double lr = 1e-3;   // the peak; for rsqrt, rsqrt_flat and t2t a base (not normalised)
  double min_lr = 0;  // where cosine, linear and polynomial end; where a period of restarts does
  int64_t warmup = 0, steps = 0;
  int64_t first = 1;  // number of the first update: 1, or 0 as torch's LambdaLR and optax count
  int64_t every = 0;  // updates for which the rate is held (an epoch); 0: each has its own
  double warmup_init = 0;  // the rate that the warm-up begins at, of update number 0
  double power = 1;        // polynomial
  double width = 1;        // t2t: D
  double period = 0, growth = 1, shrink = 1;  // cosine_restarts
};

// The same over a budget of time, as a smooth function of the share of it that is spent: nothing
// waits for an estimate of the number of steps, and nothing jumps when there is one.
struct TimedScheduleOptions {
  ScheduleKind kind = ScheduleKind::kCosine;  // not kCosineRestarts, whose periods are updates
  double lr = 1e-3, min_lr = 0;
  // Steps when >= 1; below 1 a share of the budget, but kSafeWarmup steps at least; 0: none.
  double warmup = 0.05;
  int64_t first = 1;
  double warmup_init = 0, power = 1, width = 1;
};

// A warm-up this long keeps the default rates from overshooting, however fast the steps are.
inline constexpr int64_t kSafeWarmup = 50;

// The rate of update `step`, counted from 0. With s = step + first, w = warmup:
//   warm-up     warmup_init + (lr - warmup_init) s / w while step < w, of all but the rsqrts
//   cosine, linear, polynomial: down to min_lr at update `steps`, by half a cosine, a line, or
//               (1 - share)^power
//   inverse_sqrt: lr sqrt(w / s) (fairseq)
//   rsqrt       lr min(1, s/w) / sqrt(max(s, w)), w = max(warmup, 1) (Long Range Arena, P000)
//   rsqrt_flat  lr / sqrt(max(s, w)): without a warm-up (T5)
//   t2t         rsqrt times D^-1/2: Tensor2Tensor's with lr = 2, w = 8000
//   cosine_restarts: half a cosine a period; each period is `growth` times as long as the one
//               before, and its rates, min_lr included, `shrink` times as high (fairseq's cosine)
double LearningRate(const ScheduleOptions& options, int64_t step);
// Of update `step` when `share` of the budget (0 to 1) is spent. Schedules without an end depend on
// the step alone, with a warm-up of kSafeWarmup where it is a share.
double LearningRate(const TimedScheduleOptions& options, int64_t step, double share);

}  // namespace cistern
