#include "cistern/train/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace cistern {
namespace {

TEST(Schedule, RsqrtIsLongRangeArenas) {  // spec 1.4: base .005, warm-up 1000 peaks at 1.6e-4; base
                                          // .05 at 1.6e-3
  ScheduleOptions o{ScheduleKind::kRsqrt, 0.005, 0, 1000, 50000};
  EXPECT_NEAR(LearningRate(o, 999), 0.005 / std::sqrt(1000.0), 1e-12);
  EXPECT_NEAR(LearningRate(o, 499), 0.5 * 0.005 / std::sqrt(1000.0), 1e-12);
  EXPECT_NEAR(LearningRate(o, 3999), 0.005 / std::sqrt(4000.0), 1e-12);
}

// The peaks that spec 1.4 prints, and P000's LambdaLR, whose first update has the rate 0.
TEST(Schedule, RsqrtPeaksAreThosePrinted) {
  struct Printed {
    double base;
    int64_t warmup;
    double peak;
  };
  for (const Printed& p :
       {Printed{.005, 1000, 1.6e-4}, Printed{.005, 8000, 5.6e-5}, Printed{.015, 8000, 1.7e-4},
        Printed{.01, 700, 3.8e-4}, Printed{.05, 1000, 1.6e-3}}) {
    for (const int64_t first : {int64_t{0}, int64_t{1}}) {
      ScheduleOptions o{ScheduleKind::kRsqrt, p.base, 0, p.warmup, 0};
      o.first = first;
      double peak = 0;
      int64_t at = 0;
      for (int64_t step = 0; step < 3 * p.warmup; ++step) {
        if (LearningRate(o, step) > peak) peak = LearningRate(o, at = step);
      }
      EXPECT_NEAR(peak, p.peak, .05 * p.peak * .5) << p.base;  // printed with two digits
      EXPECT_EQ(at + first, p.warmup);
      EXPECT_EQ(LearningRate(o, 0),
                double(first) / double(p.warmup) * p.base / std::sqrt(double(p.warmup)));
    }
  }
}

TEST(Schedule, NoWarmupIsNoneOverABudgetOfTime) {
  for (const auto& [kind, name] : ScheduleKinds()) {
    if (kind == ScheduleKind::kCosineRestarts) continue;
    for (const int64_t first : {int64_t{0}, int64_t{1}}) {
      TimedScheduleOptions timed{kind, 1e-3, 0, /*warmup=*/0, first};
      ScheduleOptions counted{kind, 1e-3, 0, /*warmup=*/0, /*steps=*/1000, first};
      timed.width = counted.width = 4;
      for (const int64_t step : {0, 1, 10, 500})
        EXPECT_NEAR(LearningRate(timed, step, double(step) / 1000), LearningRate(counted, step),
                    1e-15)
            << name << " " << step << " " << first;
    }
  }
}

// The update whose number from 0 is n.
double FromZero(ScheduleOptions o, int64_t n) {
  o.first = 0;
  return LearningRate(o, n);
}

// Spec 1.1: 2 D^-.5 min(step/8000, 1) / sqrt(max(step, 8000)).
TEST(Schedule, TensorToTensors) {
  for (const double D : {512.0, 1024.0}) {
    ScheduleOptions o{ScheduleKind::kT2t, 2, 0, 8000, 0};
    o.width = D;
    for (const int64_t n : {0, 1, 4000, 8000, 8001, 32'000, 100'000}) {
      const double step = double(n), expected = 2 * std::pow(D, -.5) * std::min(step / 8000, 1.0) /
                                                std::sqrt(std::max(step, 8000.0));
      EXPECT_NEAR(FromZero(o, n), expected, 1e-15) << n;
    }
  }
}

// T5: 1/sqrt(max(n, k)), k = 10,000: 0.01 until then.
TEST(Schedule, RsqrtWithoutAWarmupIsFlatFirst) {
  const ScheduleOptions o{ScheduleKind::kRsqrtFlat, 1, 0, 10'000, 0};
  EXPECT_NEAR(FromZero(o, 0), .01, 1e-15);
  EXPECT_NEAR(FromZero(o, 10'000), .01, 1e-15);
  EXPECT_NEAR(FromZero(o, 40'000), .005, 1e-15);
}

// fairseq's inverse_sqrt from a rate of 1e-7: a line to lr over w updates, then lr sqrt(w / n).
TEST(Schedule, InverseSqrtIsFairseqs) {
  ScheduleOptions o{ScheduleKind::kInverseSqrt, 7e-4, 0, 4000, 0};
  o.warmup_init = 1e-7;
  const double slope = (7e-4 - 1e-7) / 4000;
  EXPECT_NEAR(FromZero(o, 0), 1e-7, 1e-18);
  EXPECT_NEAR(FromZero(o, 1000), 1e-7 + 1000 * slope, 1e-15);
  EXPECT_NEAR(FromZero(o, 4000), 7e-4, 1e-15);
  EXPECT_NEAR(FromZero(o, 16'000), 3.5e-4, 1e-15);
  // Without a warm-up it falls from lr.
  o.warmup = 0, o.warmup_init = 0;
  EXPECT_NEAR(FromZero(o, 0), 7e-4, 1e-15);
  EXPECT_NEAR(FromZero(o, 100), 7e-5, 1e-15);
}

TEST(Schedule, CosineAndLinearEndAtTheFloor) {
  for (const char* kind : {"cosine", "linear"}) {
    ScheduleOptions o{ValueOf(kind, ScheduleKinds()), 1.0, 0.1, 10, 110};
    EXPECT_NEAR(LearningRate(o, 0), 0.1, 1e-12) << kind;
    EXPECT_NEAR(LearningRate(o, 9), 1.0, 1e-12) << kind;
    EXPECT_NEAR(LearningRate(o, 60), 0.55, 1e-9) << kind;
    EXPECT_NEAR(LearningRate(o, 110), 0.1, 1e-12) << kind;
    EXPECT_NEAR(LearningRate(o, 1000), 0.1, 1e-12) << kind;
  }
}

// fairseq's polynomial_decay: (lr - end) (1 - (n - w) / (total - w))^power + end.
TEST(Schedule, PolynomialIsFairseqs) {
  for (const double power : {1.0, 2.0, .5}) {
    ScheduleOptions o{ScheduleKind::kPolynomial, 1e-3, 1e-5, 60, 1060};
    o.power = power;
    for (const int64_t n : {60, 61, 310, 560, 1059, 1060, 2000}) {
      const double left = std::max(0.0, 1 - (double(n) - 60) / 1000);
      EXPECT_NEAR(FromZero(o, n), (1e-3 - 1e-5) * std::pow(left, power) + 1e-5, 1e-15) << n;
    }
    EXPECT_NEAR(FromZero(o, 30), 5e-4, 1e-15);
  }
}

// Spec 4.7: stepped per epoch of 195 updates, 50 epochs to zero, 41 of them run.
TEST(Schedule, CosineSteppedPerEpoch) {
  ScheduleOptions o{ScheduleKind::kCosine, 5e-4, 0, 0, 50 * 195};
  o.every = 195;
  for (int64_t n = 0; n < 41 * 195; ++n) {
    const double epoch = double(n / 195);
    ASSERT_NEAR(FromZero(o, n), 5e-4 * (1 + std::cos(M_PI * epoch / 50)) / 2, 1e-15) << n;
  }
  EXPECT_EQ(FromZero(o, 0), 5e-4);
  EXPECT_EQ(FromZero(o, 194), 5e-4);
  EXPECT_LT(FromZero(o, 195), 5e-4);
}

// Spec 4.3: the schedule has the length of 600,000 micro-steps with 1,800 of warm-up, and advances
// once an update: it ends at .50, .75 and .86 of the rate.
TEST(Schedule, WithinMultiStepsTheRateNeverReachesZero) {
  const ScheduleOptions o{ScheduleKind::kCosine, 6e-4, 0, 1800, 600'000};
  EXPECT_NEAR(FromZero(o, 300'000) / 6e-4, .50, .005);
  EXPECT_NEAR(FromZero(o, 200'000) / 6e-4, .75, .005);
  EXPECT_NEAR(FromZero(o, 150'000) / 6e-4, .86, .005);
  EXPECT_EQ(FromZero(o, 0), 0);
  EXPECT_NEAR(FromZero(o, 900), 3e-4, 1e-15);
  EXPECT_NEAR(FromZero(o, 1800), 6e-4, 1e-15);
}

// Spec 4.8: lr 1 after 16k updates from 1e-7, periods of 270k and 540k and ..., rates and floor .75
// of those before; 286k updates end with the first period.
TEST(Schedule, CosineWithWarmRestartsAndShrink) {
  ScheduleOptions o{ScheduleKind::kCosineRestarts, 1.0, 1e-4, 16'000, 286'000};
  o.warmup_init = 1e-7, o.period = 270'000, o.growth = 2, o.shrink = .75;
  EXPECT_NEAR(FromZero(o, 0), 1e-7, 1e-18);
  EXPECT_NEAR(FromZero(o, 8000), (1e-7 + 1) / 2, 1e-12);
  EXPECT_NEAR(FromZero(o, 16'000), 1, 1e-12);
  EXPECT_NEAR(FromZero(o, 16'000 + 135'000), (1 + 1e-4) / 2, 1e-12);
  EXPECT_NEAR(FromZero(o, 285'999), 1e-4, 1e-9);
  // By the closed form: period i begins (2^i - 1) 270k after the warm-up.
  for (const int64_t n : {286'000, 286'001, 500'000, 825'999, 826'000, 1'000'000, 3'000'000}) {
    const double after = double(n) - 16'000, i = std::floor(std::log2(after / 270'000 + 1)),
                 length = std::pow(2, i) * 270'000,
                 share = (after - (std::pow(2, i) - 1) * 270'000) / length, high = std::pow(.75, i),
                 low = 1e-4 * high;
    EXPECT_NEAR(FromZero(o, n), low + (high - low) * (1 + std::cos(M_PI * share)) / 2, 1e-12) << n;
  }
  // Periods of one length.
  o.growth = 1, o.warmup = 0;
  for (const int64_t n : {0, 269'999, 270'000, 1'000'000}) {
    const double i = std::floor(double(n) / 270'000), share = double(n) / 270'000 - i,
                 high = std::pow(.75, i), low = 1e-4 * high;
    EXPECT_NEAR(FromZero(o, n), low + (high - low) * (1 + std::cos(M_PI * share)) / 2, 1e-12) << n;
  }
}

// At a steady speed a budget of time has the rates of as many steps; whatever the speed, no two
// neighbouring updates differ by more than the warm-up's slope.
TEST(Schedule, ABudgetOfTimeIsThatOfItsSteps) {
  for (const char* kind : {"cosine", "linear", "constant", "polynomial"}) {
    const int64_t steps = 2000;
    ScheduleOptions o{ValueOf(kind, ScheduleKinds()), 1.0, 0.1, steps / 20, steps};
    TimedScheduleOptions timed{ValueOf(kind, ScheduleKinds()), 1.0, 0.1, 0.05};
    for (const double init : {0.0, 0.2}) {
      o.power = timed.power = 2, o.warmup_init = timed.warmup_init = init;
      for (int64_t s = 0; s < steps; ++s) {
        EXPECT_NEAR(LearningRate(timed, s, double(s) / double(steps)), LearningRate(o, s), 0.012)
            << kind << " " << s;
      }
    }
  }
}

// Those without an end depend on the step alone.
TEST(Schedule, ABudgetOfTimeLeavesSchedulesWithoutAnEnd) {
  for (const char* kind : {"rsqrt", "rsqrt_flat", "t2t", "inverse_sqrt"}) {
    const ScheduleOptions o{ValueOf(kind, ScheduleKinds()), 1.0, 0, 30, 0, 0, 0, 0, 1, 64};
    const TimedScheduleOptions timed{ValueOf(kind, ScheduleKinds()), 1.0, 0, 30, 0, 0, 1, 64};
    for (int64_t s = 0; s < 200; ++s)
      EXPECT_NEAR(LearningRate(timed, s, double(s) / 200), LearningRate(o, s), 1e-15) << kind << s;
  }
}

TEST(Schedule, ABudgetOfTimeNeverJumps) {
  // Steps of very uneven length, the first ones slow.
  const TimedScheduleOptions o{ScheduleKind::kCosine, 1.0, 0, 0.05};
  double share = 0, before = LearningRate(o, 0, 0);
  EXPECT_NEAR(before, 1.0 / double(kSafeWarmup), 1e-12);
  for (int64_t s = 1; share < 1; ++s) {
    share = std::min(1.0, share + (s < 5 ? 0.02 : s % 100 == 0 ? 0.01 : 0.0005));
    const double rate = LearningRate(o, s, share);
    EXPECT_LE(rate - before, 1.0 / double(kSafeWarmup) + 1e-9) << s;
    EXPECT_LE(before - rate, 0.02) << s;
    before = rate;
  }
  EXPECT_NEAR(before, 0, 1e-3);
}

}  // namespace
}  // namespace cistern
